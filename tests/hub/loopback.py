"""A Hugging Face Hub on 127.0.0.1: repositories in memory behind the part of the HTTP protocol that clients use.

Clients reach it as they reach the real one, through `HF_ENDPOINT`, so that downloads, caches and uploads take their
production path. What it does as the Hub does: commits and revisions, weights as LFS objects behind a redirect to
storage, ranges, ETags, private and gated repositories, error codes. What it lacks: Xet, pull requests, paging.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from huggingface_hub import ModelCard

#: Files stored as LFS objects, as the default `.gitattributes` of the Hub has it.
LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".ckpt")


class HubError(Exception):
    """An answer other than success."""

    def __init__(self, status: int, code: str | None, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


def repo_not_found() -> HubError:
    return HubError(404, "RepoNotFound", "Repository not found")


@dataclass(frozen=True)
class Request:
    """One request as the server saw it: what was asked, what was answered, bytes of body sent."""

    method: str
    path: str
    status: int
    range: str | None
    user: str | None
    sent: int


@dataclass
class Fault:
    """Something that goes wrong with the next `times` requests whose path holds `path`.

    Attributes:
        method: The requests meant; None = all.
        cut_after: The connection breaks after so many bytes of the body.
        corrupt: The body's last byte is another one.
        shorten: The body lacks so many bytes, and its length says so.
        status: Answered instead of what was asked for.
        delay: Seconds before the answer.
    """

    path: str
    times: int = 1
    method: str | None = "GET"
    cut_after: int | None = None
    corrupt: bool = False
    shorten: int = 0
    status: int | None = None
    delay: float = 0.0


@dataclass
class Repository:
    """Commits and the branches and tags that name them.

    Attributes:
        commits: Files of each commit, by its id.
        private: Only its owner sees it.
        gated: Everybody sees it, only `granted` users and its owner read its files.
    """

    owner: str
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    granted: set[str] = field(default_factory=set)

    def commit(self, files: Mapping[str, bytes], *, branch: str = "main", deleted: tuple[str, ...] = ()) -> str:
        """Adds a commit on a branch, a new one going off from main; returns its id.

        A name in `deleted` that ends with `/` is a folder.
        """
        parent = self.refs.get(branch, self.refs.get("main", ""))
        tree = dict(self.commits.get(parent, {}))
        for name in deleted:
            for path in [path for path in tree if path == name or (name.endswith("/") and path.startswith(name))]:
                del tree[path]
        tree.update(files)
        digest = hashlib.sha1(f"{parent} {branch} {len(self.commits)}".encode())
        for path, content in sorted(tree.items()):
            digest.update(f"{path} {oid(content)}".encode())
        self.commits[digest.hexdigest()] = tree
        self.refs[branch] = digest.hexdigest()
        return digest.hexdigest()

    def resolve(self, revision: str) -> str:
        """Commit id of a branch, tag or commit."""
        commit = self.refs.get(revision) or self.tags.get(revision) or revision
        if commit not in self.commits:
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    @property
    def files(self) -> dict[str, bytes]:
        """Files of the main branch."""
        return self.commits[self.refs["main"]]


def oid(content: bytes) -> str:
    """Git's id of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_lfs(path: str) -> bool:
    return path.endswith(LFS_SUFFIXES)


def file_entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": oid(content)}
    if is_lfs(path):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
    return entry


class LoopbackHub:
    """The server's state, and what tests ask of it.

    Attributes:
        endpoint: Its address, for `HF_ENDPOINT`.
        storage: Address of the LFS objects.
        users: User of each token; `hf_reader` may only read.
        repositories: By `owner/name`.
        objects: LFS objects by SHA-256.
        requests: All requests so far, in the order of their answers.
        faults: What still goes wrong; see `Fault`.
    """

    def __init__(self) -> None:
        self.users = {"hf_acme": "acme", "hf_guest": "guest", "hf_reader": "acme"}
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        self._server = _Server(("127.0.0.1", 0), _Handler, self)
        port = self._server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{port}"
        # Another host, as the Hub's is: clients keep their tokens from it.
        self.storage = f"http://localhost:{port}/storage"

    def create(self, repo_id: str, files: Mapping[str, bytes] | None = None, **attributes: Any) -> Repository:
        """Adds a repository, with a first commit of `files`."""
        repository = Repository(owner=repo_id.split("/", maxsplit=1)[0], **attributes)
        repository.commit({} if files is None else files)
        self.repositories[repo_id] = repository
        return repository

    def create_from(self, repo_id: str, *folders: Path, **attributes: Any) -> Repository:
        """Adds a repository with all the files in `folders`."""
        paths = [(folder, path) for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for folder, path in paths}
        return self.create(repo_id, files, **attributes)

    def asked(self, method: str | None = None, path: str = "") -> list[Request]:
        """Requests of a method (None = any) whose path holds `path`."""
        return [seen for seen in list(self.requests) if method in (None, seen.method) and path in seen.path]

    def fault_for(self, method: str, path: str) -> Fault | None:
        """Takes the next fault that a request runs into."""
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.path in path and fault.method in (None, method):
                    fault.times -= 1
                    return fault
        return None

    def find(self, repo_id: str, user: str | None, *, write: bool = False) -> Repository:
        """The repository, if the user may see it or, with `write`, change it."""
        repository = self.repositories.get(repo_id)
        if repository is None or (repository.private and user != repository.owner):
            # The Hub does not tell strangers whether a repository exists.
            raise repo_not_found() if user else HubError(401, "RepoNotFound", "Invalid username or password.")
        if write and user != repository.owner:
            raise HubError(403, None, f"Forbidden: you have no write access to {repo_id}")
        return repository

    @contextmanager
    def running(self) -> Iterator[LoopbackHub]:
        """Serves until the block ends."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # clients keep idle connections open

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], hub: LoopbackHub) -> None:
        super().__init__(address, handler)
        self.hub = hub

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no news; anything else is a fault of this file."""
        if not isinstance(sys.exception(), (BrokenPipeError, ConnectionResetError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, *args: Any) -> None:
        """Says nothing: requests are in the hub's own log."""

    @property
    def hub(self) -> LoopbackHub:
        return self.server.hub

    def handle_request(self) -> None:
        self.user: str | None = None
        self.fault: Fault | None = None
        parts = urlsplit(self.path)
        path, query = unquote(parts.path), parse_qs(parts.query)
        body = self._read_body()
        try:
            self.user = self._authenticate()
            self.fault = self.hub.fault_for(self.command, path)
            if self.fault is not None:
                time.sleep(self.fault.delay)
                if self.fault.status is not None:
                    raise HubError(self.fault.status, None, "Something went wrong here")
            with self.hub.lock:
                answer = self._route(path, query, body)
        except HubError as error:
            head = {"X-Error-Message": error.message}
            if error.code is not None:
                head["X-Error-Code"] = error.code
            self._send(error.status, json.dumps({"error": error.message}).encode(), head=head)
            return
        self._send(**answer)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _authenticate(self) -> str | None:
        header = self.headers.get("Authorization")
        if header is None:
            return None
        user = self.hub.users.get(header.removeprefix("Bearer "))
        if user is None:
            raise HubError(401, None, "Invalid credentials in Authorization header")
        return user

    def _send(
        self, status: int, body: bytes = b"", head: Mapping[str, str] | None = None, kind: str = "application/json"
    ) -> None:
        fault = self.fault if status < 300 else None
        if fault is not None and fault.corrupt and body:
            body = body[:-1] + bytes([body[-1] ^ 0xFF])
        if fault is not None and fault.shorten:
            body = body[: -fault.shorten]
        sent = body if self.command != "HEAD" else b""
        cut = fault is not None and fault.cut_after is not None
        if fault is not None and fault.cut_after is not None:
            sent = sent[: fault.cut_after]
        # Logged first, so that a client that has its answer finds the request in the log.
        asked = urlsplit(self.path).path
        self.hub.requests.append(
            Request(self.command, unquote(asked), status, self.headers.get("Range"), self.user, len(sent))
        )
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (head or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(sent)
        if cut:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    @staticmethod
    def _json(value: Any, status: int = 200, **head: str) -> dict[str, Any]:
        return {"status": status, "body": json.dumps(value).encode(), "head": head}

    def _route(self, path: str, query: Mapping[str, list[str]], body: bytes) -> dict[str, Any]:
        for methods, pattern, handle in _ROUTES:
            found = re.fullmatch(pattern, path)
            if found and self.command in methods:
                return handle(self, *found.groups(), query=query, body=body)
        raise HubError(404, None, f"No such route: {self.command} {path}")

    # Accounts and repositories

    def whoami(self, **_: Any) -> dict[str, Any]:
        if self.user is None:
            raise HubError(401, None, "Invalid credentials in Authorization header")
        role = "read" if self.headers["Authorization"].endswith("hf_reader") else "write"
        token = {"role": role, "displayName": "loopback"}
        return self._json({"type": "user", "name": self.user, "orgs": [], "auth": {"accessToken": token}})

    def validate_yaml(self, **_: Any) -> dict[str, Any]:
        return self._json({"errors": [], "warnings": []})

    def create_repo(self, *, body: bytes, **_: Any) -> dict[str, Any]:
        if self.user is None:
            raise HubError(401, None, "Invalid username or password.")
        asked = json.loads(body)
        owner = asked.get("organization") or self.user
        repo_id = f"{owner}/{asked['name']}"
        if owner != self.user:
            raise HubError(403, None, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        url = {"url": f"{self.hub.endpoint}/{repo_id}", "name": repo_id, "id": repo_id}
        if repo_id in self.hub.repositories:
            return self._json(url | {"error": "You already created this model repo"}, 409)
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        self.hub.create(repo_id, private=private)
        return self._json(url)

    def delete_repo(self, *, body: bytes, **_: Any) -> dict[str, Any]:
        asked = json.loads(body)
        repo_id = f"{asked.get('organization') or self.user}/{asked['name']}"
        self.hub.find(repo_id, self.user, write=True)
        del self.hub.repositories[repo_id]
        return self._json({})

    def update_settings(self, repo_id: str, *, body: bytes, **_: Any) -> dict[str, Any]:
        repository, asked = self.hub.find(repo_id, self.user, write=True), json.loads(body)
        if "visibility" in asked or "private" in asked:
            repository.private = bool(asked.get("private")) or asked.get("visibility") == "private"
        if "gated" in asked:
            repository.gated = bool(asked["gated"])
        return self._json({"private": repository.private, "gated": repository.gated})

    def model_info(self, repo_id: str, revision: str | None = None, **_: Any) -> dict[str, Any]:
        repository = self.hub.find(repo_id, self.user)
        commit = repository.resolve(revision or "main")
        files = repository.commits[commit]
        card = ModelCard(files["README.md"].decode()).data.to_dict() if "README.md" in files else {}
        info = {
            "id": repo_id,
            "cardData": card,
            "modelId": repo_id,
            "sha": commit,
            "private": repository.private,
            "gated": "auto" if repository.gated else False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "siblings": [{"rfilename": name, "size": len(content)} for name, content in files.items()],
        }
        return self._json(info)

    def list_refs(self, repo_id: str, **_: Any) -> dict[str, Any]:
        repository = self.hub.find(repo_id, self.user)
        branches = [_ref("heads", name, commit) for name, commit in repository.refs.items()]
        tags = [_ref("tags", name, commit) for name, commit in repository.tags.items()]
        return self._json({"branches": branches, "tags": tags, "converts": []})

    def create_branch(self, repo_id: str, branch: str, *, body: bytes, **_: Any) -> dict[str, Any]:
        repository = self.hub.find(repo_id, self.user, write=True)
        if branch in repository.refs:
            raise HubError(409, None, f"Reference already exists: refs/heads/{branch}")
        repository.refs[branch] = repository.resolve(json.loads(body or b"{}").get("startingPoint") or "main")
        return self._json({})

    def create_tag(self, repo_id: str, revision: str, *, body: bytes, **_: Any) -> dict[str, Any]:
        repository, tag = self.hub.find(repo_id, self.user, write=True), json.loads(body)["tag"]
        if tag in repository.tags:
            raise HubError(409, None, f"Tag already exists: {tag}")
        repository.tags[tag] = repository.resolve(revision)
        return self._json({})

    # Reading

    def list_tree(
        self, repo_id: str, revision: str, folder: str | None = None, *, query: Mapping[str, list[str]], **_: Any
    ) -> dict[str, Any]:
        _, files = self._readable(repo_id, revision)
        prefix = f"{folder.strip('/')}/" if folder else ""
        inside = {path: content for path, content in files.items() if path.startswith(prefix)}
        if prefix and not inside:
            raise HubError(404, "EntryNotFound", f"{folder} does not exist on {revision}")
        if query.get("recursive", ["false"])[0].lower() in ("true", "1"):
            return self._json([file_entry(path, content) for path, content in inside.items()])
        entries = {}
        for path, content in inside.items():
            name, _, rest = path.removeprefix(prefix).partition("/")
            below = {"type": "directory", "path": prefix + name, "size": 0, "oid": oid(name.encode())}
            entries[name] = below if rest else file_entry(path, content)
        return self._json(list(entries.values()))

    def paths_info(self, repo_id: str, revision: str, *, body: bytes, **_: Any) -> dict[str, Any]:
        _, files = self._readable(repo_id, revision)
        paths = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
        return self._json([file_entry(path, files[path]) for path in paths if path in files])

    def resolve(self, repo_id: str, revision: str, path: str, **_: Any) -> dict[str, Any]:
        commit, files = self._readable(repo_id, revision)
        head = {"X-Repo-Commit": commit}
        if path not in files:
            head |= {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            return {"status": 404, "body": b"Entry not found", "kind": "text/plain", "head": head}
        content = files[path]
        if not is_lfs(path):
            return self._content(content, head | {"ETag": f'"{oid(content)}"'})
        sha256 = hashlib.sha256(content).hexdigest()
        self.hub.objects[sha256] = content
        head |= {"X-Linked-ETag": f'"{sha256}"', "X-Linked-Size": str(len(content)), "ETag": f'"{oid(content)}"'}
        # The name goes along so that a fault can be aimed at a file.
        head["Location"] = f"{self.hub.storage}/{sha256}/{repo_id}/{path}"
        return {"status": 302, "body": b"", "head": head}

    def stored(self, sha256: str, _name: str, **_: Any) -> dict[str, Any]:
        return self._content(self.hub.objects[sha256], {"ETag": f'"{sha256}"'})

    def _readable(self, repo_id: str, revision: str) -> tuple[str, dict[str, bytes]]:
        """Commit and files of a revision, if the user may read them."""
        repository = self.hub.find(repo_id, self.user)
        if repository.gated and self.user not in {repository.owner, *repository.granted}:
            raise HubError(
                403 if self.user else 401, "GatedRepo", f"Access to model {repo_id} is restricted. Ask for access."
            )
        commit = repository.resolve(revision)
        return commit, repository.commits[commit]

    def _content(self, content: bytes, head: dict[str, str]) -> dict[str, Any]:
        answer = {"status": 200, "body": content, "kind": "application/octet-stream"}
        head["Accept-Ranges"] = "bytes"
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and self.command == "GET":
            first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
            if first >= len(content):
                return {"status": 416, "head": {"Content-Range": f"bytes */{len(content)}"}}
            head["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            answer |= {"status": 206, "body": content[first : last + 1]}
        return answer | {"head": head}

    # Writing

    def preupload(
        self, repo_id: str, revision: str, *, query: Mapping[str, list[str]], body: bytes, **_: Any
    ) -> dict[str, Any]:
        repository = self._writable(repo_id, query)
        files = repository.commits[repository.resolve(revision)]
        answer = []
        for asked in json.loads(body)["files"]:
            path = asked["path"]
            mode = {"path": path, "uploadMode": "lfs" if is_lfs(path) else "regular", "shouldIgnore": False}
            answer.append(mode | ({"oid": oid(files[path])} if path in files else {}))
        return self._json({"files": answer})

    def _writable(self, repo_id: str, query: Mapping[str, list[str]]) -> Repository:
        """The repository, if the user may write to it, or is somebody and opens a pull request."""
        return self.hub.find(repo_id, self.user, write=not ("create_pr" in query and self.user))

    def lfs_batch(self, repo_id: str, *, body: bytes, **_: Any) -> dict[str, Any]:
        self.hub.find(repo_id, self.user, write=not self.user)
        objects = []
        for asked in json.loads(body)["objects"]:
            answer = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.objects:
                upload = {"href": f"{self.hub.storage}/{asked['oid']}/{repo_id}", "header": {}}
                verify = {"href": f"{self.hub.endpoint}/{repo_id}.git/info/lfs/verify", "header": {}}
                answer["actions"] = {"upload": upload, "verify": verify}
            objects.append(answer)
        return self._json({"transfer": "basic", "objects": objects})

    def store(self, sha256: str, _name: str, *, body: bytes, **_: Any) -> dict[str, Any]:
        if hashlib.sha256(body).hexdigest() != sha256:
            raise HubError(400, None, "The content does not match its SHA-256")
        self.hub.objects[sha256] = body
        return self._json({})

    def lfs_verify(self, repo_id: str, *, body: bytes, **_: Any) -> dict[str, Any]:
        asked = json.loads(body)
        self._uploaded(asked["oid"], asked["size"])
        return self._json({})

    def commit(
        self, repo_id: str, revision: str, *, query: Mapping[str, list[str]], body: bytes, **_: Any
    ) -> dict[str, Any]:
        repository = self._writable(repo_id, query)
        files: dict[str, bytes] = {}
        deleted: list[str] = []
        for line in body.decode().splitlines():
            operation = json.loads(line)
            key, value = operation["key"], operation["value"]
            if key == "header" and value.get("parentCommit", repository.refs.get(revision)) != repository.refs.get(
                revision
            ):
                raise HubError(412, None, "A commit has happened since. Please refresh and try again.")
            if key == "file":
                content = value["content"]
                files[value["path"]] = base64.b64decode(content) if "encoding" in value else content.encode()
            elif key == "lfsFile":
                files[value["path"]] = self._uploaded(value["oid"], value.get("size"))
            elif key in ("deletedFile", "deletedFolder"):
                deleted.append(value["path"].rstrip("/") + ("/" if key == "deletedFolder" else ""))
        repository.resolve(revision)
        answer = {"success": True, "hookOutput": ""}
        if "create_pr" in query:
            number = 1 + sum(name.startswith("refs/pr/") for name in repository.refs)
            revision = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.hub.endpoint}/{repo_id}/discussions/{number}"
        commit = repository.commit(files, branch=revision, deleted=tuple(deleted))
        url = f"{self.hub.endpoint}/{repo_id}/commit/{commit}"
        return self._json(answer | {"commitOid": commit, "commitUrl": url})

    def _uploaded(self, sha256: str, size: int | None) -> bytes:
        content = self.hub.objects.get(sha256)
        if content is None or size not in (None, len(content)):
            raise HubError(400, None, f"LFS object {sha256} has not been uploaded")
        return content


def _ref(kind: str, name: str, commit: str) -> dict[str, str]:
    return {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": commit}


_ID = r"([^/]+/[^/]+)"
_MODEL = f"/api/models/{_ID}"
#: Methods, pattern of the path, and what answers; the first that fits.
_ROUTES = (
    (("GET",), "/api/whoami-v2", _Handler.whoami),
    (("POST",), "/api/validate-yaml", _Handler.validate_yaml),
    (("POST",), "/api/repos/create", _Handler.create_repo),
    (("DELETE",), "/api/repos/delete", _Handler.delete_repo),
    (("PUT",), f"{_MODEL}/settings", _Handler.update_settings),
    (("GET",), _MODEL, _Handler.model_info),
    (("GET",), f"{_MODEL}/revision/(.+)", _Handler.model_info),
    (("GET",), f"{_MODEL}/refs", _Handler.list_refs),
    (("POST",), f"{_MODEL}/branch/(.+)", _Handler.create_branch),
    (("POST",), f"{_MODEL}/tag/(.+)", _Handler.create_tag),
    (("GET",), f"{_MODEL}/tree/([^/]+)(/.*)?", _Handler.list_tree),
    (("POST",), f"{_MODEL}/paths-info/(.+)", _Handler.paths_info),
    (("POST",), f"{_MODEL}/preupload/(.+)", _Handler.preupload),
    (("POST",), f"{_MODEL}/commit/(.+)", _Handler.commit),
    (("POST",), f"/{_ID}\\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (("POST",), f"/{_ID}\\.git/info/lfs/verify", _Handler.lfs_verify),
    (("GET", "HEAD"), rf"/{_ID}/resolve/(refs/pr/\d+|[^/]+)/(.+)", _Handler.resolve),
    (("GET", "HEAD"), "/storage/([0-9a-f]{64})/(.+)", _Handler.stored),
    (("PUT",), "/storage/([0-9a-f]{64})/(.+)", _Handler.store),
)
