"""Where models are loaded from: folders and Hub ids."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    get_token,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import sha

#: What the HTTP library under huggingface_hub raises, whichever that is: httpx, or its successor.
HTTPError: type[Exception] = HfHubHTTPError.__mro__[1]
_SHA256, _GIT = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{40}")


class ModelFiles:
    """Files of one model, in a folder or on the Hub.

    All come from one commit, that of the first file found: the Hub is asked once what a branch stands for, and once a
    commit's files are in the cache it is asked nothing more.

    Args:
        source: Folder or Hub id; see `find_source`.
        subfolder: Where in it the files are.
        revision: Branch, tag or commit of the repository.
        cache_dir: Folder of the cache; huggingface_hub's own when None.
        token: Who asks: a token, False = nobody; None = who is logged in.
        local_files_only: Whether to take files from the cache only.
        force_download: Whether to download what is in the cache already.
    """

    def __init__(
        self,
        source: str,
        *,
        subfolder: str | None = None,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
    ) -> None:
        self.source, self.subfolder, self.revision = source, subfolder or "", revision
        self.cache_dir = cache_dir or constants.HF_HUB_CACHE
        self.token, self.local_files_only, self.force_download = token, local_files_only, force_download
        self.commit: str | None = None
        self._reached = local_files_only
        #: Where the files lie; of a repository once one of them has been found.
        self.folder: Path | None = Path(source) / self.subfolder if Path(source).is_dir() else None

    def find(self, *names: str) -> Path | None:
        """Path of the first of several files that the model has, after downloading it if need be.

        One that is in the cache already goes before the others, so that the Hub is not asked for those in vain.

        Returns:
            None where the model has none of them.

        Raises:
            HfHubHTTPError: The Hub refuses; a subclass says why, the message what to do.
            LocalEntryNotFoundError: It is not in the cache, and the Hub cannot or may not be asked.
            OSError: What was downloaded is not the file that the repository names.
        """
        if self.folder is not None and self.commit is None:
            return next((file for name in names if (file := self.folder / name).is_file()), None)
        known = {name: None if self.force_download else self._cached(name) for name in names}
        if self.commit is not None:
            for found in known.values():
                if isinstance(found, Path):
                    return found
        for name in names:
            if self.commit is None or known[name] is None:
                if known[name] is None:
                    self._reach(name)
                path = self._download(name)
                if path is not None:
                    self._verify(path, name, before=known[name])
                    return path
        return None

    def _cached(self, name: str) -> Path | object | None:
        """Path of a file in the cache; another object where the repository is known to have none; None = unknown."""
        found: Any = try_to_load_from_cache(
            self.source,
            f"{self.subfolder}/{name}" if self.subfolder else name,
            cache_dir=self.cache_dir,
            revision=self.commit or self.revision,
        )
        return Path(found) if isinstance(found, str) else found

    def _reach(self, name: str) -> None:
        """Asks the Hub once, whose client asks for half a minute for a file that is not in the cache."""
        if self._reached or constants.HF_HUB_OFFLINE:
            return
        url = hf_hub_url(self.source, name, subfolder=self.subfolder or None, revision=self.revision)
        try:
            get_hf_file_metadata(url, token=self.token)
        except HfHubHTTPError:
            pass  # an answer, of which the download tells what it means
        except HTTPError as error:
            raise LocalEntryNotFoundError(f"{self._advice(error, name)}\n({error})") from error
        self._reached = True

    def _download(self, name: str) -> Path | None:
        try:
            found = hf_hub_download(
                self.source,
                name,
                subfolder=self.subfolder or None,
                revision=self.commit or self.revision,
                cache_dir=self.cache_dir,
                token=self.token,
                local_files_only=self.local_files_only,
                force_download=self.force_download,
            )
        except (EntryNotFoundError, HfHubHTTPError) as error:
            if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
                return None
            advice = self._advice(error, name)
            error.args = (f"{advice}\n({error})", *error.args[1:])
            raise
        path = Path(found)
        self.folder = path.parent
        self.commit = path.parents[len(Path(self.subfolder).parts)].name
        return path

    def _verify(self, path: Path, name: str, before: Path | object | None) -> None:
        """Compares a new file with its name in the cache, which is its hash; the Hub's client compares lengths."""
        if path == before or not path.is_symlink():
            return
        blob = path.parent / path.readlink()
        if _SHA256.fullmatch(blob.name):
            with blob.open("rb") as content:
                arrived = sha.sha_fileobj(content).hex()
        elif _GIT.fullmatch(blob.name):
            arrived = sha.git_hash(blob.read_bytes())
        else:
            return
        if arrived != blob.name:
            path.unlink()
            blob.unlink()
            raise OSError(
                f"{name} of {self.source} arrived damaged: its hash is {arrived}, the repository's {blob.name}. It "
                "has been removed from the cache; load again."
            )

    def _advice(self, error: Exception, name: str) -> str:
        """What was tried with which values, and what to do."""
        page, revision = f"{constants.ENDPOINT}/{self.source}", self.commit or self.revision or "main"
        known = self.token is not False and bool(self.token if isinstance(self.token, str) else get_token())
        who = "with the token given" if known else "without a token"
        if isinstance(error, GatedRepoError):
            then = "" if known else ", then log in (`hf auth login`) or pass `token=`"
            return f"{self.source} is gated, and was asked for {who}. Accept its licence at {page}{then}."
        if isinstance(error, RepositoryNotFoundError):
            return (
                f"The Hub shows no model {self.source!r} {who}. Check the id (owner/name) and its spelling; if it is "
                "private, log in with an account that may read it (`hf auth login`) or pass `token=`."
            )
        if isinstance(error, RevisionNotFoundError):
            return f"{self.source} has no revision {revision!r}. Its branches, tags and commits: {page}/tree/main."
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
        if isinstance(cause, HfHubHTTPError):
            status = cause.response.status_code
            if status == 401:
                return (
                    f"The Hub does not accept the token that {self.source} was asked for with. Log in again (`hf auth "
                    "login`), correct HF_TOKEN or `token=`, or pass `token=False` for a public model."
                )
            if status == 403:
                return (
                    f"The Hub refuses {name} of {self.source} {who}. Use a token that may read this repository: "
                    f"{constants.ENDPOINT}/settings/tokens."
                )
            return f"{name} of {self.source} could not be had: the Hub answered {status}. Try again later."
        asked = f"{name} of {self.source} (revision {revision!r}) is not in the cache {self.cache_dir}, and "
        if self.local_files_only:
            return asked + "`local_files_only=True` forbids asking the Hub. Load it once without."
        if constants.HF_HUB_OFFLINE:
            return asked + "HF_HUB_OFFLINE forbids asking the Hub. Load it once without."
        return asked + (
            f"the Hub at {constants.ENDPOINT} cannot be reached. Check the connection and HF_ENDPOINT; without the "
            "Hub, give a folder, or the cache that has a copy (HF_HOME, with HF_HUB_OFFLINE=1)."
        )


def find_source(name: str | Path) -> str:
    """A model's folder, `~` expanded, or its Hub id as it is.

    A name that can only be a path is told from a Hub id here, since the Hub would call it a malformed id.

    Raises:
        FileNotFoundError: It is a path, and there is nothing.
        NotADirectoryError: It is a file.
    """
    source = os.path.expanduser(name)  # noqa: PTH111  (pathlib raises where there is no such user)
    is_path = isinstance(name, Path) or str(name).startswith((".", "~", os.sep)) or source.count(os.sep) > 1
    if is_path and not Path(source).exists():
        raise FileNotFoundError(f"There is no folder {str(name)!r}. Give one that exists, or a Hub id `owner/name`.")
    if Path(source).is_file():
        raise NotADirectoryError(f"A model is a folder, and {str(name)!r} is a file. Give the folder that it is in.")
    return source


def is_hub_id(name: str) -> bool:
    """Whether a model's name is a Hub id `owner/name` rather than a folder."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()
