"""Saving, loading, recognising and starting TreeFlash drafters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_models import BLOCK, MASK, VOCAB, fused_features, state, tiny_drafter, tiny_target
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel
from treeflash_models import tiny_treeflash

from hf_treespec.drafters import AutoDrafter, find_family
from hf_treespec.drafters.dflash import DFlashDrafter, DFlashSession
from hf_treespec.drafters.treeflash import TreeFlashConfig, TreeFlashDrafter, TreeFlashSession

TARGET = tiny_target()
HEAD_TENSORS = {f"ar_approximation.{name}" for name in ("ug.weight", "ug.bias", "d.weight", "norm.weight")}


def published_folder(folder: Path, drafter: TreeFlashDrafter, treeflash: dict[str, Any]) -> Path:
    """Writes a drafter as it is published: z-lab's DFlash configuration with a `treeflash_config`."""
    config = drafter.config
    same = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "num_target_layers",
        "block_size",
    )
    fields = {name: getattr(config, name) for name in same} | {
        "architectures": ["TreeFlashDraftModel"],
        "model_type": "qwen3",
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": config.target_layer_ids},
        "treeflash_config": treeflash,
        "rope_theta": config.rope_parameters["rope_theta"],
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(drafter.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def lattice_of(drafter: DFlashDrafter) -> torch.Tensor:
    tokens = torch.arange(12)[None]
    session = drafter.start(TARGET, 1, 64)
    return session.propose(state(tokens, fused_features(session, TARGET, tokens), 0, 9)).log_probs


def test_tensor_names_are_those_of_published_checkpoints():
    names = set(tiny_treeflash(TARGET).state_dict())
    backbone = {f"model.{name}" for name in tiny_drafter(TARGET).state_dict()}
    assert names == backbone | HEAD_TENSORS
    assert {"model.fc.weight", "model.hidden_norm.weight", "model.norm.weight"} <= names


def test_shapes_and_size_of_the_head():
    """5HI + 2I + H parameters, the number of the paper."""
    head = tiny_treeflash(TARGET).ar_approximation
    width, inner = 48, 64
    assert head.ug.weight.shape == (2 * inner, 2 * width)
    assert head.d.weight.shape == (width, inner)
    assert sum(p.numel() for p in head.parameters()) == 5 * width * inner + 2 * inner + width


def test_round_trip_is_bit_equal(tmp_path: Path):
    drafter = tiny_treeflash(TARGET, num_parents=3, head="candidates", head_candidates=9, dead_end_discount=0.5)
    drafter.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(drafter.state_dict())
    for load in (TreeFlashDrafter.from_pretrained, AutoDrafter.from_pretrained, AutoModel.from_pretrained):
        loaded = load(tmp_path)
        assert type(loaded) is TreeFlashDrafter
        kept = drafter.state_dict()
        assert all(torch.equal(tensor, kept[name]) for name, tensor in loaded.state_dict().items())
        assert torch.equal(lattice_of(loaded), lattice_of(drafter))
    ours, theirs = AutoConfig.from_pretrained(tmp_path).to_dict(), drafter.config.to_dict()
    assert {key for key in ours if ours[key] != theirs.get(key)} <= {"dtype", "architectures", "_name_or_path"}


def test_a_published_folder_loads(tmp_path: Path):
    drafter = tiny_treeflash(TARGET)
    options = {"ar_approximation": "swiglu", "candidate_tokens": 16, "m_initial_token_embds": 4}
    folder = published_folder(tmp_path / "published", drafter, options)
    for load in (TreeFlashDrafter.from_pretrained, AutoDrafter.from_pretrained):
        loaded = load(folder)
        assert type(loaded) is TreeFlashDrafter
        assert (loaded.config.block_size, loaded.config.mask_token_id) == (BLOCK, MASK)
        assert loaded.config.num_parents == 4
        assert torch.equal(lattice_of(loaded), lattice_of(drafter))


def test_a_null_head_is_dflash(tmp_path: Path):
    drafter = tiny_treeflash(TARGET, ar_approximation=None)
    assert drafter.ar_approximation is None
    assert not HEAD_TENSORS & set(drafter.state_dict())
    folder = published_folder(tmp_path / "published", drafter, {"ar_approximation": None})
    loaded = AutoDrafter.from_pretrained(folder)
    assert type(loaded) is TreeFlashDrafter
    assert type(loaded.start(TARGET, 1, 64)) is DFlashSession
    assert torch.equal(lattice_of(loaded), lattice_of(tiny_drafter(TARGET)))
    hidden = torch.randn(3, 1, 48)
    assert torch.equal(loaded.correct(torch.randn(3, 5, 48), hidden), hidden.expand(3, 5, 48))


@pytest.mark.parametrize(
    "name", ["ar_approximation.d.weight", "ar_approximation.ug.bias", "model.layers.1.mlp.up_proj.weight"]
)
def test_a_missing_tensor_is_loud(tmp_path: Path, name: str):
    tiny_treeflash(TARGET).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for load in (TreeFlashDrafter.from_pretrained, AutoDrafter.from_pretrained):
        with pytest.raises(ValueError, match=f"missing: {name}"):
            load(tmp_path)


def test_a_missing_tensor_is_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The zeros of an untrained head must not stand in for one that a checkpoint lacks."""
    tiny_treeflash(TARGET).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["ar_approximation.d.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    seen: list[TreeFlashDrafter] = []
    parent = TreeFlashDrafter.__mro__[3].from_pretrained.__func__

    def remember(cls: type, *args: Any, **kwargs: Any) -> Any:
        result = parent(cls, *args, **kwargs)
        seen.append(result[0])
        return result

    monkeypatch.setattr(TreeFlashDrafter.__mro__[3], "from_pretrained", classmethod(remember))
    with pytest.raises(ValueError, match="missing"):
        TreeFlashDrafter.from_pretrained(tmp_path)
    assert seen[0].ar_approximation.d.weight.isnan().all()


def test_a_dflash_checkpoint_is_no_treeflash_one(tmp_path: Path):
    tiny_drafter(TARGET).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="ar_approximation"):
        TreeFlashDrafter.from_pretrained(tmp_path)
    assert type(AutoDrafter.from_pretrained(tmp_path)) is DFlashDrafter


def test_a_fresh_head_corrects_nothing():
    drafter = TreeFlashDrafter(tiny_treeflash(TARGET).config)
    assert not drafter.ar_approximation.d.weight.any()
    assert float(drafter.ar_approximation.ug.weight.detach().std()) == pytest.approx(0.3, rel=0.1)
    assert (drafter.ar_approximation.norm.weight == 1).all()


@pytest.mark.parametrize("share", [False, True])
def test_from_dflash(share: bool):
    dflash = tiny_drafter(TARGET, is_causal=True).to(torch.bfloat16)
    drafter = TreeFlashDrafter.from_dflash(dflash, share=share, num_parents=7)
    assert drafter.config.num_parents == 7
    assert drafter.config.is_causal
    assert not drafter.training
    assert {p.dtype for p in drafter.parameters()} == {torch.bfloat16}
    assert not any(p.is_meta for p in drafter.parameters())
    assert not drafter.ar_approximation.d.weight.any()
    kept = dflash.state_dict()
    for name, tensor in drafter.model.state_dict().items():
        assert torch.equal(tensor, kept[name])
        assert (tensor.data_ptr() == kept[name].data_ptr()) == share
    assert drafter.weights is not dflash.weights
    assert isinstance(drafter.start(TARGET, 1, 64), TreeFlashSession)
    view = drafter.with_options(budget=4)
    assert view.weights is drafter.weights
    assert TreeFlashDrafter.from_dflash(dflash.train()).ar_approximation.training


def test_recognises():
    published = {"model_type": "qwen3", "dflash_config": {}, "treeflash_config": {}}
    names = frozenset(tiny_treeflash(TARGET).state_dict())
    assert find_family({"model_type": "treespec_treeflash"}) is TreeFlashDrafter
    assert find_family(published) is TreeFlashDrafter
    assert find_family(published, names) is TreeFlashDrafter
    assert find_family(published, names - HEAD_TENSORS) is TreeFlashDrafter
    assert not TreeFlashDrafter.recognises(published, names | {"lm_head.weight"})
    assert not TreeFlashDrafter.recognises({"model_type": "qwen3", "dflash_config": {}}, names)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ar_approximation": "gru"}, "ar_approximation is 'gru'"),
        ({"num_parents": 0}, "num_parents is 0; it is a positive whole number, or None"),
        ({"head": "half"}, "head is 'half'"),
        ({"head_candidates": 8}, "below num_parents"),
        ({"dead_end_discount": 1.5}, "above 0 and at most 1"),
        ({"dead_end_discount": 0.0}, "above 0 and at most 1"),
        ({"block_size": 1}, "block_size"),
    ],
)
def test_contradicting_configurations(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        TreeFlashConfig(**fields)
