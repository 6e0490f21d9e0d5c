"""Loading drafters from the Hub: what is asked of it, what goes wrong, and what is said then."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from loopback import Fault, LoopbackHub, Repository
from pairs import build_pair
from safetensors.torch import save

from hf_treespec import AutoDrafter
from hf_treespec.drafters.auto import drafting_device
from hf_treespec.drafters.base import BlockDrafter
from hf_treespec.drafters.checks import Status
from hf_treespec.drafters.dflash import DFlashDrafter
from hf_treespec.evaluation.inspection import inspect_drafter
from hf_treespec.sources import ModelFiles

REPOSITORY = "acme/drafter"
WEIGHTS = "model.safetensors"
TARGET, DRAFTER, _ = build_pair()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    DRAFTER.save_pretrained(folder)
    return folder


@pytest.fixture
def repository(hub: LoopbackHub, folder: Path) -> Repository:
    return hub.create_from(REPOSITORY, folder)


def load(*args: Any, **kwargs: Any) -> BlockDrafter:
    return AutoDrafter.from_pretrained(REPOSITORY, *args, **kwargs)


def assert_equal(loaded: BlockDrafter, drafter: BlockDrafter = DRAFTER) -> None:
    kept = drafter.state_dict()
    assert loaded.state_dict().keys() == kept.keys()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in loaded.state_dict().items())


def other_weights() -> bytes:
    """Weights of the same shapes, all zeros."""
    return save({name: torch.zeros_like(tensor) for name, tensor in DRAFTER.state_dict().items()}, {"format": "pt"})


# What is asked


def test_a_drafter_loads_by_its_id(hub: LoopbackHub, repository: Repository):
    loaded = load()
    assert_equal(loaded)
    assert loaded.name_or_path == loaded.config.name_or_path == REPOSITORY
    assert len(hub.asked("GET", WEIGHTS)) == 1
    assert all(request.user is None for request in hub.requests)


def test_a_token_goes_to_the_hub_but_not_to_its_storage(hub: LoopbackHub, repository: Repository):
    load(token="hf_guest")
    assert {request.user for request in hub.asked(path="/resolve/")} == {"guest"}
    assert [request.user for request in hub.asked("GET", "/storage/")] == [None]


def test_a_second_load_asks_what_main_is(hub: LoopbackHub, repository: Repository):
    load()
    hub.requests.clear()
    load()
    assert [(seen.method, seen.path) for seen in hub.requests] == [("HEAD", f"/{REPOSITORY}/resolve/main/config.json")]


@pytest.mark.parametrize("way", ["commit", "local_files_only", "offline"])
def test_a_second_load_touches_no_network(
    hub: LoopbackHub, repository: Repository, monkeypatch: pytest.MonkeyPatch, way: str
):
    commit = repository.refs["main"]
    options: dict[str, Any] = {"commit": {"revision": commit}, "local_files_only": {"local_files_only": True}}.get(
        way, {}
    )
    load(**({"revision": commit} if way == "commit" else {}))
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", way == "offline")
    assert_equal(load(**options))
    assert not hub.requests


def test_a_moved_branch_is_followed(repository: Repository):
    load()
    repository.commit({WEIGHTS: other_weights()})
    assert not any(tensor.any() for tensor in load().state_dict().values())


def test_force_download_fetches_again(hub: LoopbackHub, repository: Repository):
    load()
    hub.requests.clear()
    assert_equal(load(force_download=True))
    assert len(hub.asked("GET", "/storage/")) == 1


def test_revisions(repository: Repository):
    first = repository.refs["main"]
    repository.tags["v1"] = first
    second = repository.commit({WEIGHTS: other_weights()}, branch="tuned")
    for revision in (first, "v1", "main", None):
        assert_equal(load(revision=revision))
    for revision in ("tuned", second):
        assert not load(revision=revision).fc.weight.any()


def test_all_files_come_from_one_commit(repository: Repository, folder: Path):
    files = ModelFiles(REPOSITORY)
    files.find("config.json")
    repository.commit({WEIGHTS: other_weights(), "late.json": b"{}"})
    assert files.find(WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    assert files.find("late.json") is None


def test_a_subfolder(hub: LoopbackHub, folder: Path):
    files = {f"drafts/small/{path.name}": path.read_bytes() for path in folder.iterdir()}
    hub.create(REPOSITORY, {"config.json": b"{}", **files})
    assert_equal(load(subfolder="drafts/small"))
    hub.requests.clear()
    assert_equal(load(subfolder="drafts/small", local_files_only=True))
    assert not hub.requests


def test_a_cache_of_ones_own(repository: Repository, tmp_path: Path, cache: Path):
    load(cache_dir=tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere" / "models--acme--drafter").is_dir()
    assert not cache.exists()


@pytest.fixture
def sharded(hub: LoopbackHub, tmp_path: Path) -> Repository:
    DRAFTER.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    repository = hub.create_from(REPOSITORY, tmp_path / "sharded")
    assert sum(name.endswith(".safetensors") for name in repository.files) > 2
    return repository


def test_shards(hub: LoopbackHub, sharded: Repository):
    assert_equal(load())
    hub.requests.clear()
    assert_equal(load(revision=sharded.refs["main"]))
    assert not hub.requests


def test_a_snapshot_loads_offline(sharded: Repository, monkeypatch: pytest.MonkeyPatch):
    """It knows nothing of files that the repository has not, such as weights in one piece."""
    snapshot_download(REPOSITORY)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert_equal(load())


def test_zlab_checkpoints_load_and_their_code_is_left_alone(hub: LoopbackHub, folder: Path):
    """The dialect that `AutoModel` takes for a Qwen3 model, whose missing weights it draws at random."""
    ours = DRAFTER.config.to_dict()
    config = {name: value for name, value in ours.items() if name not in ("target_hidden_size", "model_type")} | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "dflash_config": {name: ours[name] for name in ("mask_token_id", "target_layer_ids")},
    }
    weights = (folder / WEIGHTS).read_bytes()
    code = b"raise RuntimeError('this has been run')"
    hub.create(REPOSITORY, {"config.json": json.dumps(config).encode(), WEIGHTS: weights, "dflash.py": code})
    loaded = load()
    assert type(loaded) is DFlashDrafter
    assert_equal(loaded)
    assert not hub.asked(path=".py")


def test_remote_code_is_refused(repository: Repository):
    with pytest.raises(ValueError, match="trust_remote_code=True was passed, but AutoDrafter runs no code"):
        load(trust_remote_code=True)
    assert load(trust_remote_code=False)


def test_arguments_of_other_functions_are_refused(repository: Repository):
    with pytest.raises(TypeError, match=r"drafter\.with_options\(budget=8\)"):
        load(budget=8)
    assert load(draft_window=64).config.draft_window == 64, "a field of the configuration too"
    with pytest.raises(TypeError, match="use `device_map`"):
        load(device="cpu")
    with pytest.raises(TypeError, match=r"`target` is a loaded model.*got 'some/target'"):
        load(target="some/target")


def test_weights_of_what_is_no_drafter_are_not_fetched(hub: LoopbackHub, tmp_path: Path):
    TARGET.save_pretrained(tmp_path / "target")
    hub.create_from("acme/target", tmp_path / "target")
    with pytest.raises(ValueError, match="acme/target is no drafter this package knows: model_type 'qwen3'"):
        AutoDrafter.from_pretrained("acme/target")
    assert not hub.asked(path=WEIGHTS)


# Where it goes


def test_a_dtype_is_asked_for_or_the_checkpoints_own(hub: LoopbackHub, tmp_path: Path):
    build_pair()[1].to(torch.bfloat16).save_pretrained(tmp_path / "half")
    hub.create_from(REPOSITORY, tmp_path / "half")
    assert load().dtype == load(TARGET).dtype == torch.bfloat16
    assert load(dtype=torch.float32).dtype == torch.float32


def test_a_target_is_checked_at_once(repository: Repository):
    assert_equal(load(TARGET))
    assert_equal(load(target=TARGET, device_map="cpu"))
    with pytest.raises(ValueError, match="hidden"):
        load(models.build("qwen3", vocab_size=300, hidden_size=32))


def test_a_drafter_goes_to_the_device_of_its_targets_head():
    target = build_pair()[0]
    assert drafting_device(target) == torch.device("cpu")
    target.get_output_embeddings().to("meta")
    assert drafting_device(target) == torch.device("meta")
    # Weights that are offloaded lie on "meta" between forwards; the hook knows where they are computed with.
    target.get_output_embeddings()._hf_hook = type("Hook", (), {"execution_device": "cpu"})()
    assert drafting_device(target) == torch.device("cpu")


# What goes wrong


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Parts that arrive are kept when the connection breaks: 10 MB at a time, here 1 kB. And no second is waited."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    return 1000


def test_a_cut_download_goes_on_where_it_broke(
    hub: LoopbackHub, repository: Repository, folder: Path, small_chunks: int
):
    size = (folder / WEIGHTS).stat().st_size
    hub.faults.append(Fault("/storage/", cut_after=size - 4500))
    assert_equal(load())
    first, second = hub.asked("GET", "/storage/")
    kept = (size - 4500) // small_chunks * small_chunks
    assert (first.range, first.status, first.sent) == (None, 200, size - 4500)
    assert (second.range, second.status, second.sent) == (f"bytes={kept}-", 206, size - kept)


def test_a_download_that_never_ends_leaves_nothing_behind(
    hub: LoopbackHub, repository: Repository, cache: Path, small_chunks: int
):
    hub.faults.append(Fault("/storage/", cut_after=0, times=99))
    with pytest.raises(HTTPError):
        load()
    assert not [*cache.rglob(WEIGHTS), *cache.rglob("*.incomplete")]
    hub.faults.clear()
    assert_equal(load())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("/storage/", corrupt=True), "model.safetensors of acme/drafter arrived damaged: its hash is"),
        (Fault("config.json", corrupt=True), "config.json of acme/drafter arrived damaged: its hash is"),
        (Fault("/storage/", shorten=100), "should be of size"),
    ],
    ids=["wrong checksum", "wrong checksum of a small file", "wrong size"],
)
def test_a_damaged_download_is_not_kept(hub: LoopbackHub, repository: Repository, fault: Fault, message: str):
    hub.faults.append(fault)
    with pytest.raises(OSError, match=message):
        load()
    assert_equal(load())


REFUSALS = {
    "absent": (
        {"repo": "acme/absent"},
        RepositoryNotFoundError,
        r"no model 'acme/absent' without a token. Check the id .*`hf auth login`",
    ),
    "absent, with a token": (
        {"repo": "acme/absent", "token": "hf_guest"},
        RepositoryNotFoundError,
        "no model 'acme/absent' with the token given",
    ),
    "private": (
        {"repo": "acme/private"},
        RepositoryNotFoundError,
        r"no model 'acme/private' without a token.*pass `token=`",
    ),
    "gated": (
        {"repo": "acme/gated"},
        GatedRepoError,
        r"asked for without a token. Accept its licence at http\S+/acme/gated, then log in",
    ),
    "gated, with a token": (
        {"repo": "acme/gated", "token": "hf_guest"},
        GatedRepoError,
        r"was asked for with the token given. Accept its licence at http\S+/acme/gated\.",
    ),
    "wrong token": ({"token": "hf_old"}, HfHubHTTPError, "does not accept the token .* Log in again"),
    "no such revision": ({"revision": "v9"}, RevisionNotFoundError, "acme/drafter has no revision 'v9'"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_say_what_to_do(hub: LoopbackHub, repository: Repository, case: str):
    hub.create("acme/private", {"config.json": b"{}"}, private=True)
    hub.create("acme/gated", {"config.json": b"{}"}, gated=True)
    options, error, message = REFUSALS[case]
    options = dict(options)
    with pytest.raises(error, match=message):
        AutoDrafter.from_pretrained(options.pop("repo", REPOSITORY), **options)


def test_who_is_let_in_gets_it(hub: LoopbackHub, repository: Repository):
    repository.gated, repository.granted = True, {"guest"}
    assert_equal(load(token="hf_guest"))


@pytest.mark.parametrize(("status", "message"), [(403, "refuses config.json of acme/drafter"), (503, "answered 503")])
def test_a_hub_that_fails(
    hub: LoopbackHub, repository: Repository, monkeypatch: pytest.MonkeyPatch, status: int, message: str
):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.faults.append(Fault("/resolve/", method=None, status=status, times=99))
    with pytest.raises(OSError, match=message):
        load()
    hub.faults.clear()
    load()
    hub.faults.append(Fault("/resolve/", method=None, status=status, times=99))
    assert_equal(load())  # from the cache


@pytest.mark.parametrize("way", ["offline", "local_files_only"])
def test_without_the_hub_and_without_a_cache(
    hub: LoopbackHub, repository: Repository, monkeypatch: pytest.MonkeyPatch, way: str
):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", way == "offline")
    reason = {
        "offline": "HF_HUB_OFFLINE forbids asking",
        "local_files_only": "`local_files_only=True` forbids asking",
    }[way]
    with pytest.raises(LocalEntryNotFoundError, match=rf"config.json of acme/drafter \(revision 'main'\).*{reason}"):
        load(local_files_only=way == "local_files_only")
    assert not hub.requests


@pytest.fixture
def unreachable(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Takes the Hub away. Whoever then waits to ask once more fails."""

    def no_waiting(seconds: float) -> None:
        pytest.fail(f"waits {seconds} s")

    def take_away() -> None:
        nobody = "http://127.0.0.1:9"
        monkeypatch.setattr(constants, "ENDPOINT", nobody)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", nobody + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", no_waiting)

    return take_away


@pytest.mark.parametrize(
    ("ask", "repo"),
    [
        (load, REPOSITORY),
        (lambda: load(force_download=True), REPOSITORY),
        (lambda: AutoDrafter.for_target("Qwen/Qwen3-4B"), "z-lab/Qwen3-4B-DFlash-b16"),
        (lambda: inspect_drafter(REPOSITORY), REPOSITORY),
        (lambda: inspect_drafter("embedded", "acme/target"), "acme/target"),
    ],
    ids=["from_pretrained", "anew", "for_target", "inspect", "inspect's target"],
)
def test_an_unreachable_hub_is_told_at_once(unreachable: Callable[[], None], ask: Callable[[], Any], repo: str):
    unreachable()
    with pytest.raises(LocalEntryNotFoundError, match=rf"config.json of {repo} \(revision 'main'\)") as caught:
        ask()
    assert "the Hub at http://127.0.0.1:9 cannot be reached. Check the connection and HF_ENDPOINT" in str(caught.value)
    assert "give a folder, or the cache that has a copy (HF_HOME, with HF_HUB_OFFLINE=1)" in str(caught.value)


def test_a_hub_lost_before_the_weights_is_told_at_once(repository: Repository, unreachable: Callable[[], None]):
    ModelFiles(REPOSITORY).find("config.json")
    unreachable()
    with pytest.raises(LocalEntryNotFoundError, match=r"model.safetensors of acme/drafter .* cannot be reached"):
        load()


def test_a_cached_drafter_needs_no_hub(repository: Repository, unreachable: Callable[[], None]):
    load()
    unreachable()
    assert_equal(load())
    found = inspect_drafter(REPOSITORY)
    assert found.family == "DFlashDrafter"
    (card,) = found.findings
    assert (card.rule, card.status) == ("card", Status.unchecked)
    assert card.found.startswith("README.md of acme/drafter")


def test_weights_that_are_not_cached_are_named_offline(repository: Repository, monkeypatch: pytest.MonkeyPatch):
    ModelFiles(REPOSITORY).find("config.json")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(LocalEntryNotFoundError, match=r"model.safetensors of acme/drafter .* is not in the cache"):
        load()


# More than one at a time


def test_threads_load_at_the_same_time(hub: LoopbackHub, repository: Repository):
    hub.faults.append(Fault("/storage/", delay=0.2))
    with ThreadPoolExecutor(4) as pool:
        for loaded in [pool.submit(load) for _ in range(4)]:
            assert_equal(loaded.result())
    assert len(hub.asked("GET", "/storage/")) == 1


def test_processes_load_at_the_same_time(hub: LoopbackHub, repository: Repository):
    hub.faults.append(Fault("/storage/", delay=0.3))
    # Forked, since a fresh process takes seconds to import what this one has.
    with multiprocessing.get_context("fork").Pool(2) as pool:
        sums = pool.map(load_and_sum, range(2), chunksize=1)
    assert sums == [DRAFTER.fc.weight.sum().item()] * 2
    assert len(hub.asked("GET", "/storage/")) == 1


def load_and_sum(_: int) -> float:
    return load().fc.weight.sum().item()


# And back


def test_what_is_uploaded_comes_back_bit_for_bit(hub: LoopbackHub, tmp_path: Path):
    DRAFTER.save_pretrained(tmp_path / "up")
    api = HfApi(token="hf_acme")
    api.create_repo("acme/new")
    api.upload_folder(repo_id="acme/new", folder_path=tmp_path / "up")
    loaded = AutoDrafter.from_pretrained("acme/new", cache_dir=tmp_path / "fresh")
    assert_equal(loaded)
    assert type(loaded) is type(DRAFTER)
