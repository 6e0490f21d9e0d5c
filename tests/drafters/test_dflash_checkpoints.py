"""Saving, loading and recognising DFlash checkpoints, ours and z-lab's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_models import BLOCK, MASK, VOCAB, fused_features, state, tiny_drafter, tiny_target
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from hf_treespec.drafters import AutoDrafter, find_family
from hf_treespec.drafters.dflash import DFlashConfig, DFlashDrafter
from hf_treespec.drafters.feature_layers import spread_layer_ids


def zlab_folder(folder: Path, drafter: DFlashDrafter, **overrides: Any) -> Path:
    """Writes a drafter as z-lab publishes it: a Qwen3 configuration with a `dflash_config`."""
    config = drafter.config
    fields: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": config.target_layer_ids},
        "num_target_layers": config.num_target_layers,
        "rope_theta": config.rope_parameters["rope_theta"],
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "dtype": "float32",
    }
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "attention_bias",
        "max_position_embeddings",
        "hidden_act",
    ):
        fields[name] = getattr(config, name)
    fields |= overrides
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))
    save_file(drafter.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def logits_of(drafter: DFlashDrafter) -> torch.Tensor:
    target = tiny_target()
    tokens = torch.arange(12)[None]
    session = drafter.start(target, 1, 64)
    features = fused_features(session, target, tokens)
    return session.modules.logits(session.draft(state(tokens, features, 0, 9)))


def test_round_trip_is_bit_equal(tmp_path: Path):
    drafter = tiny_drafter(tiny_target(), layer_types=["full_attention", "sliding_attention"], sliding_window=9)
    drafter.save_pretrained(tmp_path)
    for load in (DFlashDrafter.from_pretrained, AutoDrafter.from_pretrained, AutoModel.from_pretrained):
        loaded = load(tmp_path)
        assert isinstance(loaded, DFlashDrafter)
        assert loaded.state_dict().keys() == drafter.state_dict().keys()
        kept = drafter.state_dict()
        assert all(torch.equal(tensor, kept[name]) for name, tensor in loaded.state_dict().items())
        assert torch.equal(logits_of(loaded), logits_of(drafter))
    ours, theirs = AutoConfig.from_pretrained(tmp_path).to_dict(), drafter.config.to_dict()
    assert {key for key in ours if ours[key] != theirs.get(key)} <= {"dtype", "architectures", "_name_or_path"}


def test_tensor_names_are_those_of_published_checkpoints():
    names = set(tiny_drafter(tiny_target(), num_hidden_layers=1).state_dict())
    layer = ("input_layernorm", "post_attention_layernorm", *(f"mlp.{p}_proj" for p in ("gate", "up", "down")))
    attention = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    expected = {f"layers.0.{name}.weight" for name in (*layer, *(f"self_attn.{name}" for name in attention))}
    assert names == expected | {"fc.weight", "hidden_norm.weight", "norm.weight"}


SECOND_GENERATION = {
    "block_size": ...,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3], "block_size": BLOCK},
    "rope_theta": ...,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}


@pytest.mark.parametrize("overrides", [{}, SECOND_GENERATION], ids=["first generation", "second generation"])
def test_a_zlab_folder_loads_with_the_same_logits(tmp_path: Path, overrides: dict[str, Any]):
    drafter = tiny_drafter(tiny_target())
    folder = zlab_folder(tmp_path / "zlab", drafter, **overrides)
    for load in (DFlashDrafter.from_pretrained, AutoDrafter.from_pretrained):
        loaded = load(folder)
        assert type(loaded) is DFlashDrafter
        assert loaded.config.block_size == BLOCK
        assert loaded.config.mask_token_id == MASK
        assert loaded.config.target_layer_ids == [1, 3]
        assert torch.equal(logits_of(loaded), logits_of(drafter))


def test_a_causal_head_is_read(tmp_path: Path):
    nested = {"mask_token_id": MASK, "target_layer_ids": [1, 3], "causal_head": True}
    folder = zlab_folder(tmp_path / "zlab", tiny_drafter(tiny_target()), dflash_config=nested)
    loaded = DFlashDrafter.from_pretrained(folder)
    assert loaded.config.is_causal
    assert torch.equal(logits_of(loaded), logits_of(tiny_drafter(tiny_target(), is_causal=True)))


def test_a_zlab_configuration_without_feature_layers_is_refused(tmp_path: Path):
    folder = zlab_folder(tmp_path / "zlab", tiny_drafter(tiny_target()), dflash_config={"mask_token_id": MASK})
    with pytest.raises(ValueError, match="target_layer_ids"):
        DFlashDrafter.from_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors: tensors.pop("layers.1.mlp.up_proj.weight"), r"missing: layers\.1\.mlp\.up_proj\.weight"),
        (lambda tensors: tensors.pop("hidden_norm.weight"), r"missing: hidden_norm\.weight"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(3, 3)}), r"unexpected: lm_head\.weight"),
        (
            lambda tensors: tensors.update({"fc.weight": torch.zeros(48, 48)}),
            r"misshaped: fc\.weight \[48, 48\] instead of \[48, 96\]",
        ),
    ],
    ids=["missing", "missing norm", "unexpected", "misshaped"],
)
def test_a_damaged_checkpoint_is_loud(tmp_path: Path, damage: Any, message: str):
    tiny_drafter(tiny_target()).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for load in (DFlashDrafter.from_pretrained, AutoModel.from_pretrained):
        with pytest.raises(ValueError, match=message):
            load(tmp_path)


def test_a_missing_tensor_is_nan_and_a_fresh_model_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drafter = tiny_drafter(tiny_target())
    drafter.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["layers.0.self_attn.q_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    seen: list[DFlashDrafter] = []
    parent = DFlashDrafter.__mro__[2].from_pretrained.__func__

    def remember(cls: type, *args: Any, **kwargs: Any) -> Any:
        result = parent(cls, *args, **kwargs)
        seen.append(result[0])
        return result

    monkeypatch.setattr(DFlashDrafter.__mro__[2], "from_pretrained", classmethod(remember))
    with pytest.raises(ValueError, match="missing"):
        DFlashDrafter.from_pretrained(tmp_path)
    assert seen[0].layers[0].self_attn.q_proj.weight.isnan().all()
    assert not seen[0].layers[1].self_attn.q_proj.weight.isnan().any()
    assert all(p.isfinite().all() for p in DFlashDrafter(drafter.config).parameters())


def test_recognises():
    ours = {"model_type": "treespec_dflash"}
    zlab = {"model_type": "qwen3", "architectures": ["DFlashDraftModel"], "dflash_config": {}}
    names = frozenset(tiny_drafter(tiny_target()).state_dict())
    assert DFlashDrafter.recognises(ours, names)
    assert DFlashDrafter.recognises(zlab, names)
    assert find_family(zlab) is DFlashDrafter
    assert not DFlashDrafter.recognises({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, names)
    assert not DFlashDrafter.recognises(zlab, names | {"markov_head.markov_w1.weight"})
    assert not DFlashDrafter.recognises({**zlab, "treeflash_config": {}}, names)


def test_auto_refuses_what_no_family_knows(tmp_path: Path):
    tiny_target().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is no drafter this package knows: model_type 'qwen3'"):
        AutoDrafter.from_pretrained(tmp_path)


def test_published_layer_ids():
    """The ids of z-lab's published drafters."""
    assert spread_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert spread_layer_ids(48, 8) == [1, 7, 14, 20, 26, 32, 39, 45]
    assert spread_layer_ids(28, 1) == [14]
    with pytest.raises(ValueError, match="pass target_layer_ids"):
        spread_layer_ids(6, 5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ({"is_causal": [True]}, "1 entries for 2 layers"),
        ({"block_size": 1}, "block_size"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "no multiple"),
    ],
)
def test_contradicting_configurations(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        DFlashConfig(**{"num_hidden_layers": 2, **fields})
