"""Pairs by name, and the embedded pair from its folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pairs import build_pair, save_pair

from hf_treespec import embedded
from hf_treespec.evaluation.loading import load_pair
from hf_treespec.sources import find_source


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder laid out as the package's own: weights in float16, the drafter under its family's name."""
    folder = tmp_path_factory.mktemp("embedded")
    target, drafter, tokenizer = build_pair()
    save_pair((target.half(), drafter.half(), tokenizer), folder)
    (folder / "drafter").rename(folder / "dflash")
    return folder


@pytest.mark.parametrize(
    ("dtype", "target_dtype", "drafter_dtype"),
    [
        (None, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16, torch.float32),  # float16 could overflow in the drafter
    ],
)
def test_dtypes(tmp_path: Path, dtype, target_dtype, drafter_dtype):
    target, drafter, _ = load_pair(*save_pair(build_pair(), tmp_path), dtype=dtype, device="cpu")
    assert target.dtype == target_dtype
    assert drafter.dtype == drafter_dtype
    assert not target.training
    assert not drafter.training


@pytest.mark.parametrize("drafter", ["embedded", "embedded:dflash"])
def test_embedded_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch, drafter: str):
    monkeypatch.setattr(embedded, "_FOLDER", folder)
    loaded = load_pair("embedded", drafter, device="cpu")
    for model, built in zip(loaded[:2], build_pair()[:2], strict=True):
        assert model.dtype == torch.float32
        for name, tensor in built.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor.half().float()), name
    assert embedded.load(torch.bfloat16)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("named", ["target", "drafter"])
def test_embedded_models_go_with_others_too(folder: Path, monkeypatch: pytest.MonkeyPatch, named: str):
    monkeypatch.setattr(embedded, "_FOLDER", folder)
    names = {"target": str(folder / "target"), "drafter": str(folder / "dflash"), named: "embedded"}
    target, drafter, _ = load_pair(**names, device="cpu")
    drafter.check_target(target)


def test_an_embedded_model_that_there_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedded, "_FOLDER", folder)
    with pytest.raises(FileNotFoundError, match="no embedded model `treflash`; there are dflash, target"):
        load_pair("embedded", "embedded:treflash")


@pytest.mark.parametrize("name", ["./no/such/folder", "~/no-such-folder", "/no-such-folder", "no/such/folder"])
def test_a_path_that_leads_nowhere_is_no_hub_id(name: str, folder: Path):
    for pair in ((name, str(folder / "dflash")), (str(folder / "target"), name)):
        with pytest.raises(FileNotFoundError, match=f"There is no folder '{name}'"):
            load_pair(*pair)
    with pytest.raises(FileNotFoundError):
        find_source(Path("folder"))


def test_a_source_is_a_folder_or_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "drafter").mkdir()
    assert find_source("~/drafter") == find_source(tmp_path / "drafter") == str(tmp_path / "drafter")
    assert find_source("owner/name") == "owner/name"
    assert find_source("gpt2") == "gpt2"


def test_a_missing_family_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedded, "_FOLDER", folder)
    (folder / "flexdraft").mkdir()
    with pytest.raises(FileNotFoundError, match="`flexdraft` is not in this installation"):
        load_pair("embedded", "embedded:flexdraft")
    (folder / "flexdraft").rmdir()


def test_a_drafter_is_no_target(folder: Path):
    drafter = str(folder / "dflash")
    with pytest.raises(ValueError, match=r"is a drafter \(DFlashDrafter\)\. Give the causal LM"):
        load_pair(drafter, drafter)
