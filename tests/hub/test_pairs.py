"""Published pairs: the files that list them, and finding the drafter of a target."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import validate_repo_id
from loopback import LoopbackHub
from pairs import build_pair

from hf_treespec import AutoDrafter
from hf_treespec.drafters import pairs as published
from hf_treespec.drafters.pairs import DIALECTS, Pair, find_pair, published_pairs
from hf_treespec.resources import resource_folder

FOLDER = Path(__file__).parents[2] / "hub_configs"
FILES = sorted(FOLDER.glob("*.json"))


def is_fraction(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value >= 0.0)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_follows_the_schema(path: Path):
    fields = json.loads(path.read_text())
    assert list(fields) == list(Pair.__dataclass_fields__)
    assert path.stem == fields["drafter"].replace("/", "--")
    assert fields["targets"]
    for repository in (fields["drafter"], *fields["targets"]):
        validate_repo_id(repository)
        assert repository.count("/") == 1
    assert fields["dialect"] in DIALECTS
    assert fields["block_size"] is None or 2 <= fields["block_size"] <= 64
    assert fields["thinking"] in (None, True, False)
    assert fields["license"] is None or fields["license"] == fields["license"].lower()
    assert isinstance(fields["default"], bool)
    assert fields["source"]
    for group in fields["published"]:
        assert list(group) == ["source", "setting", "results"]
        assert group["source"]
        assert group["setting"]
        for result in group["results"]:
            assert list(result) == ["benchmark", "temperature", "acceptance_length", "speedup"]
            assert is_fraction(result["temperature"])
            assert is_fraction(result["speedup"])
            tau = result["acceptance_length"]
            assert tau is not None or result["speedup"] is not None
            assert is_fraction(tau)
            # A block of b rows commits b tokens at best, one more where the anchor's row predicts too.
            assert tau is None or group["setting"].endswith("trees") or tau <= (fields["block_size"] or 16) + 1


def test_every_target_has_one_default():
    defaults = Counter(target for pair in published_pairs() if pair.default for target in pair.targets)
    assert defaults == Counter({target for pair in published_pairs() for target in pair.targets})
    kinds = Counter((target, pair.dialect) for pair in published_pairs() for target in pair.targets)
    assert max(kinds.values()) == 1  # so that a dialect says which


def test_the_files_are_found_from_the_package():
    assert {file.name for file in resource_folder("hub_configs").iterdir()} == {file.name for file in FOLDER.iterdir()}
    assert len(published_pairs()) == len(FILES)
    with pytest.raises(FileNotFoundError, match="This installation has no nothing"):
        resource_folder("nothing")


@pytest.mark.parametrize(
    ("target", "dialect", "drafter"),
    [
        ("Qwen/Qwen3-8B", None, "z-lab/Qwen3-8B-DFlash-b16"),
        ("qwen/qwen3-8b", None, "z-lab/Qwen3-8B-DFlash-b16"),
        ("Qwen/Qwen3-8B", "treeflash", "peerrh/treeflash-qwen3-8b"),
        ("Qwen/Qwen3-8B", "jetspec", "JetSpec/jetspec-qwen3-8b"),
        ("Qwen/Qwen3-14B", None, "deepseek-ai/dflash_qwen3_14b_block7"),
        ("/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-4B/snapshots/0123", None, "z-lab/Qwen3-4B-DFlash-b16"),
    ],
)
def test_a_target_by_its_id(target: str, dialect: str | None, drafter: str):
    assert find_pair(target, dialect).drafter == drafter


def model(**attributes: Any) -> Any:
    return SimpleNamespace(config=SimpleNamespace(_name_or_path=""), **attributes)


def test_a_loaded_target_by_its_names():
    assert find_pair(model(name_or_path="Qwen/Qwen3-8B")).drafter == "z-lab/Qwen3-8B-DFlash-b16"
    named = SimpleNamespace(config=SimpleNamespace(_name_or_path="openai/gpt-oss-20b"))
    assert find_pair(named).drafter == "z-lab/gpt-oss-20b-DFlash"
    adapted = model(peft_config={"default": SimpleNamespace(base_model_name_or_path="Qwen/Qwen3-4B")})
    assert find_pair(adapted).drafter == "z-lab/Qwen3-4B-DFlash-b16"


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("hf_treespec"), "propagate", True)
    return caplog


@pytest.mark.parametrize(("relation", "warns"), [("quantized", False), ("finetune", True)])
def test_a_target_by_the_base_of_its_card(
    hub: LoopbackHub, warnings: pytest.LogCaptureFixture, relation: str, warns: bool
):
    card = f"---\nbase_model: Qwen/Qwen3-8B\nbase_model_relation: {relation}\n---\n"
    hub.create("acme/Qwen3-8B-made-over", {"README.md": card.encode()})
    assert find_pair("acme/Qwen3-8B-made-over").drafter == "z-lab/Qwen3-8B-DFlash-b16"
    assert ("was tuned from that: fewer of its tokens may be accepted" in warnings.text) == warns


def test_an_unknown_target(hub: LoopbackHub):
    with pytest.raises(ValueError, match=r"for Qwen/Qwen3-8B-Base\. Near matches: Qwen/Qwen3-8B") as raised:
        find_pair("Qwen/Qwen3-8B-Base")
    assert "`hf-treespec train dflash --target Qwen/Qwen3-8B-Base …`, see docs/training.md" in str(raised.value)
    with pytest.raises(ValueError, match=r"No published drafter is known for xyz/abc\. If it is"):
        find_pair("xyz/abc")
    with pytest.raises(ValueError, match="a model without a name"):
        find_pair(model())


def test_a_card_that_cannot_be_read(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch):
    hub.create("acme/Qwen3-8B-made-over", {"README.md": b"---\nbase_model: Qwen/Qwen3-8B\n---\n"})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="could not be asked for the card of acme/Qwen3-8B-made-over, which may name"):
        find_pair("acme/Qwen3-8B-made-over")


def test_an_unknown_dialect():
    with pytest.raises(ValueError, match="dialect is 'eagle'; it is one of"):
        find_pair("Qwen/Qwen3-8B", "eagle")
    with pytest.raises(ValueError, match="No drafter in the dialect 'muse' is known for Qwen/Qwen3-8B; there are"):
        find_pair("Qwen/Qwen3-8B", "muse")


def test_for_target_loads_the_drafter(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target, drafter, _ = build_pair()
    drafter.save_pretrained(tmp_path / "drafter")
    hub.create_from("acme/drafter", tmp_path / "drafter")
    pair = Pair("acme/drafter", ("acme/target",), "dflash", 5, None, None, True, (), "here")
    monkeypatch.setattr(published, "published_pairs", lambda: (pair,))
    target.config._name_or_path = "acme/target"
    for asked in (target, "ACME/target"):
        loaded = AutoDrafter.for_target(asked, dtype=torch.bfloat16)
        assert loaded.name_or_path == "acme/drafter"
        assert loaded.dtype == torch.bfloat16
    wrong = build_pair()[0]
    wrong.config.hidden_size = 48
    wrong.config._name_or_path = "acme/target"
    with pytest.raises(ValueError, match="48"):
        AutoDrafter.for_target(wrong)
