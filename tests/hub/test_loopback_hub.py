"""The loopback Hub does what the real one does, as far as huggingface_hub can tell."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest
from huggingface_hub import HfApi, ModelCard, hf_hub_download, login, snapshot_download
from huggingface_hub.errors import (
    BadRequestError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from loopback import Fault, LoopbackHub

WEIGHTS = bytes(range(256)) * 40


@pytest.fixture
def api(hub: LoopbackHub) -> HfApi:
    hub.create("acme/model", {"config.json": b"{}", "model.safetensors": WEIGHTS, "sub/notes.txt": b"notes"})
    return HfApi()


def test_files_and_their_names(api: HfApi, tmp_path: Path):
    assert set(api.list_repo_files("acme/model")) == {"config.json", "model.safetensors", "sub/notes.txt"}
    assert {entry.path for entry in api.list_repo_tree("acme/model")} == {"config.json", "model.safetensors", "sub"}
    assert api.get_paths_info("acme/model", ["model.safetensors"])[0].lfs.size == len(WEIGHTS)
    assert Path(hf_hub_download("acme/model", "model.safetensors")).read_bytes() == WEIGHTS
    folder = Path(snapshot_download("acme/model", local_dir=tmp_path / "copy"))
    assert (folder / "sub" / "notes.txt").read_bytes() == b"notes"


def test_revisions(hub: LoopbackHub, api: HfApi):
    first = api.model_info("acme/model").sha
    second = hub.repositories["acme/model"].commit({"config.json": b"[]"})
    assert api.model_info("acme/model").sha == second
    assert Path(hf_hub_download("acme/model", "config.json", revision=first)).read_bytes() == b"{}"
    assert Path(hf_hub_download("acme/model", "config.json")).read_bytes() == b"[]"
    api.create_branch("acme/model", branch="old", revision=first, token="hf_acme")
    api.create_tag("acme/model", tag="v1", revision=first, token="hf_acme")
    assert {ref.name for ref in api.list_repo_refs("acme/model").branches} == {"main", "old"}
    for revision in ("old", "v1"):
        assert Path(hf_hub_download("acme/model", "config.json", revision=revision)).read_bytes() == b"{}"
    with pytest.raises(RevisionNotFoundError):
        api.model_info("acme/model", revision="absent")


@pytest.mark.parametrize(
    ("repository", "token", "error"),
    [
        ("acme/absent", None, RepositoryNotFoundError),
        ("acme/absent", "hf_guest", RepositoryNotFoundError),
        ("acme/private", None, RepositoryNotFoundError),
        ("acme/private", "hf_guest", RepositoryNotFoundError),
        ("acme/gated", None, GatedRepoError),
        ("acme/gated", "hf_guest", GatedRepoError),
        ("acme/private", "hf_acme", None),
        ("acme/gated", "hf_acme", None),
        ("acme/model", "hf_nobody", HfHubHTTPError),
    ],
)
def test_who_may_read(hub: LoopbackHub, api: HfApi, repository: str, token: str | None, error: type | None):
    hub.create("acme/private", {"config.json": b"{}"}, private=True)
    hub.create("acme/gated", {"config.json": b"{}"}, gated=True)
    if error is None:
        assert hf_hub_download(repository, "config.json", token=token)
        return
    with pytest.raises(error):
        hf_hub_download(repository, "config.json", token=token)
    if repository == "acme/gated":
        assert api.model_info(repository, token=token).gated == "auto"


def test_an_absent_file(api: HfApi):
    with pytest.raises(EntryNotFoundError):
        hf_hub_download("acme/model", "absent.json")


def test_upload(hub: LoopbackHub, api: HfApi, tmp_path: Path):
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "model.safetensors").write_bytes(WEIGHTS[:1000])
    (tmp_path / "up" / "config.json").write_text("{}")
    login("hf_acme", add_to_git_credential=False)
    assert api.whoami()["name"] == "acme"
    api.create_repo("acme/new", private=True)
    api.create_repo("acme/new", exist_ok=True)
    commit = api.upload_folder(repo_id="acme/new", folder_path=tmp_path / "up")
    assert hub.repositories["acme/new"].private
    assert hub.repositories["acme/new"].refs["main"] == commit.oid
    assert hub.repositories["acme/new"].files == {"model.safetensors": WEIGHTS[:1000], "config.json": b"{}"}
    assert hub.asked("PUT", "/storage/")
    api.upload_file(repo_id="acme/new", path_or_fileobj=b"other", path_in_repo="a/b.txt")
    api.delete_file(repo_id="acme/new", path_in_repo="config.json")
    api.delete_folder(repo_id="acme/new", path_in_repo="a")
    assert set(hub.repositories["acme/new"].files) == {"model.safetensors"}
    api.delete_repo("acme/new")
    assert not api.repo_exists("acme/new")


def test_a_card(hub: LoopbackHub, api: HfApi):
    login("hf_acme", add_to_git_credential=False)
    ModelCard("---\nlicense: apache-2.0\n---\n# A card").push_to_hub("acme/model")
    assert ModelCard.load("acme/model").data.license == "apache-2.0"


def test_strangers_may_not_write(api: HfApi):
    with pytest.raises(HfHubHTTPError, match="no write access"):
        api.upload_file(repo_id="acme/model", path_or_fileobj=b"x", path_in_repo="x", token="hf_guest")
    with pytest.raises(HfHubHTTPError, match="rights to create"):
        api.create_repo("acme/other", token="hf_guest")


def test_an_upload_that_arrives_damaged_is_refused(hub: LoopbackHub):
    request = urllib.request.Request(f"{hub.storage}/{'0' * 64}/acme/model", b"something else", method="PUT")
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request)
    assert not hub.objects


def test_faults(hub: LoopbackHub, api: HfApi):
    hub.faults.append(Fault("config.json", status=503, method="HEAD", times=99))
    with pytest.raises(HfHubHTTPError, match="503"):
        api.get_hf_file_metadata(url=f"{hub.endpoint}/acme/model/resolve/main/config.json")
    hub.faults[:] = [Fault("/api/models", status=400)]
    with pytest.raises(BadRequestError):
        api.model_info("acme/model")
