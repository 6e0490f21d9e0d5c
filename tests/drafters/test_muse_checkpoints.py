"""Saving, loading and recognising Muse drafters, transformers' and ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from muse_models import muse_of, tiny_assistant, tiny_muse_target
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from hf_treespec.drafters import AutoDrafter, find_family
from hf_treespec.drafters.dflash import DFlashDrafter
from hf_treespec.drafters.muse import MuseConfig, MuseDrafter
from hf_treespec.drafters.treeflash import TreeFlashDrafter

TARGET = tiny_muse_target()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A drafter as transformers saves it."""
    tiny_assistant(TARGET).save_pretrained(tmp_path)
    return tmp_path


def same_tensors(left: Any, right: Any) -> bool:
    one, two = left.state_dict(), right.state_dict()
    return one.keys() == two.keys() and all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def edit(folder: Path, **fields: Any) -> None:
    """Replaces fields of a folder's config.json; `...` takes one out."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def test_a_saved_assistant_loads(folder: Path):
    for load in (AutoDrafter.from_pretrained, MuseDrafter.from_pretrained):
        loaded = load(folder)
        assert type(loaded) is MuseDrafter
        assert same_tensors(loaded, tiny_assistant(TARGET))
        assert loaded.drafted_depths == 4
    assert AutoDrafter.from_pretrained(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_round_trip_is_bit_equal_in_both_classes(folder: Path, tmp_path: Path):
    drafter = AutoDrafter.from_pretrained(folder)
    drafter.save_pretrained(tmp_path / "ours")
    again = AutoDrafter.from_pretrained(tmp_path / "ours")
    assert type(again) is MuseDrafter
    assert same_tensors(again, drafter)
    ours, theirs = again.config.to_dict(), drafter.config.to_dict()
    assert {name for name in ours if ours[name] != theirs[name]} <= {"architectures", "_name_or_path"}
    stock = AutoModel.from_pretrained(tmp_path / "ours")
    assert type(stock) is MuseGlimmerAssistantModel
    assert same_tensors(stock, drafter)


def test_transformers_keeps_its_model_type(folder: Path):
    assert type(AutoConfig.from_pretrained(folder)) is MuseGlimmerAssistantConfig
    assert type(AutoModel.from_pretrained(folder)) is MuseGlimmerAssistantModel


def test_defaults_are_those_of_transformers():
    ours, theirs = MuseConfig().to_dict(), MuseGlimmerAssistantConfig().to_dict()
    assert {name: ours[name] for name in theirs} == theirs


def test_fields_that_a_configuration_leaves_out(folder: Path):
    edit(folder, layer_types=..., rope_parameters=..., rope_theta=9000.0)
    config = AutoDrafter.from_pretrained(folder).config
    assert config.layer_types == ["sliding_attention"] * 2
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 9000.0}
    edit(folder, rope_theta=...)
    assert AutoDrafter.from_pretrained(folder).config.rope_parameters["rope_theta"] == 500_000.0


@pytest.mark.parametrize("architecture", ["MuseGlimmerAssistantModel", "DFlashMuseGlimmerAssistantModel"])
def test_c41_an_architecture_alone_is_enough(folder: Path, architecture: str):
    """C41: known by its architecture, renamed or not, though the model type says another thing."""
    edit(folder, model_type="qwen3", architectures=[architecture])
    loaded = AutoDrafter.from_pretrained(folder)
    assert type(loaded) is MuseDrafter
    assert same_tensors(loaded, tiny_assistant(TARGET))


def test_c41_no_vocabulary_is_made_up(folder: Path):
    """C41: without a vocabulary of its own the drafter takes the target's; the head width is the configuration's."""
    loaded = AutoDrafter.from_pretrained(folder)
    assert loaded.config.vocab_size is None
    assert loaded.config.head_dim == 8
    session = loaded.start(TARGET, 1, 64)
    assert session.modules.vocab_size == 61
    loaded.check_target(TARGET)


def test_recognises():
    config = {"model_type": "muse_glimmer_assistant", "architectures": ["MuseGlimmerAssistantModel"]}
    names = frozenset(tiny_assistant(TARGET).state_dict())
    assert MuseDrafter.recognises(config, names)
    assert find_family(config) is MuseDrafter
    assert not MuseDrafter.recognises(config, frozenset({"fc.weight"}))
    assert not MuseDrafter.recognises({"model_type": "muse_glimmer", "architectures": ["MuseGlimmerModel"]}, names)
    assert not DFlashDrafter.recognises(config, names)
    assert not TreeFlashDrafter.recognises(config, names)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors: tensors.pop("encoder.output_norm_enc.weight"), r"missing: encoder\.output_norm_enc\.weight"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(3, 3)}), r"unexpected: lm_head\.weight"),
        (
            lambda tensors: tensors.update({"encoder.fc.weight": torch.zeros(48, 48)}),
            r"misshaped: encoder\.fc\.weight \[48, 48\] instead of \[48, 96\]",
        ),
    ],
    ids=["missing", "unexpected", "misshaped"],
)
def test_a_damaged_checkpoint_is_loud(folder: Path, damage: Any, message: str):
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(folder)


def test_a_window_shorter_than_a_block_is_refused():
    with pytest.raises(ValueError, match=r"sliding_window \(3\) is below block_size - 1 \(4\)"):
        muse_of(tiny_assistant(TARGET, sliding_window=3))


@pytest.mark.parametrize(
    ("target_fields", "drafter_fields", "message"),
    [
        ({"hidden_size": 54}, {}, "hidden size is 54, the drafter's hidden_size is 48"),
        ({"num_hidden_layers": 3}, {}, r"target_layer_ids \[3\] are no decoder layers"),
        ({"num_hidden_layers": 7}, {"num_target_layers": 6}, "number of layers is 7"),
        ({"vocab_size": 50}, {}, "mask_token_id 60 is no row"),
        ({}, {"vocab_size": 50}, "vocabulary size is 61, the drafter's vocab_size is 50"),
    ],
)
def test_a_target_it_does_not_belong_to(target_fields: dict[str, Any], drafter_fields: dict[str, Any], message: str):
    drafter = muse_of(tiny_assistant(TARGET), **drafter_fields)
    with pytest.raises(ValueError, match=message):
        tiny_muse_target(**target_fields).generate(
            torch.ones(1, 5, dtype=torch.long), assistant_model=drafter, max_new_tokens=4
        )
