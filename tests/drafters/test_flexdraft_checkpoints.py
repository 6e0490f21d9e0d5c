"""Making, saving, loading and recognising FlexDraft drafters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flexdraft_models import Guide, guided, tiny_flexdraft
from models import LAYERS, VOCAB, build, prompt, target
from parity import GREEDY, run
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, GenerationConfig, PreTrainedModel

from hf_treespec.decoding.support import decoding_config
from hf_treespec.drafters import AutoDrafter, find_family
from hf_treespec.drafters.flexdraft import FlexDraftConfig, FlexDraftDrafter, FlexDraftOptions
from hf_treespec.drafters.flexdraft.layout import attention_of, decoder_of, projections_of
from hf_treespec.evaluation.inspection import inspect_drafter, run_inspect

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
CALIBRATION = {f"anchor_bias_mlp.{layer}.{name}" for layer in (0, 2) for name in ("weight", "bias")}


def released_folder(folder: Path, drafter: FlexDraftDrafter, model: PreTrainedModel, **changes: Any) -> Path:
    """Writes a drafter as it is released: a Qwen3 configuration, and tensors that drafting does not use."""
    text = model.config
    names = (
        "hidden_size",
        "vocab_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    nested = {
        "target_layer_ids": drafter.config.target_layer_ids,
        "enable_anchor_bias_logits": drafter.anchor_bias_mlp is not None,
        "anchor_bias_rank": drafter.config.calibration_rank,
        **changes,
    }
    fields = {name: getattr(text, name) for name in names} | {
        "architectures": ["FlexDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": len(drafter.layers),
        "num_target_layers": LAYERS,
        "block_size": drafter.config.block_size,
        "flexdraft_config": nested,
        "dtype": "float32",
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = dict(drafter.state_dict())
    for layer in range(len(drafter.layers)):
        tensors[f"layers.{layer}.mlp.up_proj.weight"] = torch.zeros(96, 64)
        tensors[f"layers.{layer}.input_layernorm.weight"] = torch.zeros(64)
        tensors[f"layers.{layer}.post_attention_layernorm.weight"] = torch.zeros(64)
    tensors["norm.weight"] = torch.zeros(64)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def assert_same_tensors(one: torch.nn.Module, other: torch.nn.Module) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_tensor_names_are_those_of_released_checkpoints() -> None:
    names = set(tiny_flexdraft(target("qwen3")).state_dict())
    layers = {f"layers.{layer}.self_attn.{name}.weight" for layer in range(2) for name in PROJECTIONS}
    assert names == layers | CALIBRATION | {"mask_embedding"}


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gpt_oss"])
def test_round_trip_is_bit_equal(family: str, tmp_path: Path) -> None:
    model = target(family, "eager")
    drafter = tiny_flexdraft(model)
    drafter.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(drafter.state_dict())
    for load in (FlexDraftDrafter.from_pretrained, AutoDrafter.from_pretrained, AutoModel.from_pretrained):
        loaded = load(tmp_path)
        assert type(loaded) is FlexDraftDrafter
        assert_same_tensors(loaded, drafter)
        assert loaded.config.attention_layouts == drafter.config.attention_layouts
        loaded.check_target(model)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), FlexDraftConfig)


def test_a_released_checkpoint_loads_as_it_is_and_drafts(tmp_path: Path) -> None:
    model = target("qwen3")
    drafter = tiny_flexdraft(model)
    loaded = AutoDrafter.from_pretrained(released_folder(tmp_path, drafter, model))
    assert isinstance(loaded, FlexDraftDrafter)
    assert_same_tensors(loaded, drafter)
    assert loaded.config.split_layer == 2
    options: dict[str, Any] = {"max_new_tokens": 10, **GREEDY}
    plain = run(model, prompt(), **options).sequences
    view = loaded.with_options(budget=4)
    assert torch.equal(plain, run(model, prompt(), assistant_model=view, **options).sequences)
    assert view.last_report.drafted_rounds > 0


def test_the_layers_come_from_the_configuration_alone(tmp_path: Path) -> None:
    drafter = tiny_flexdraft(target("qwen3"))
    folder = released_folder(tmp_path, drafter, target("qwen3"), target_layer_ids=[1, 3])
    with pytest.raises(ValueError, match="last layers without a gap"):
        AutoDrafter.from_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text())
    del fields["flexdraft_config"]["target_layer_ids"]
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="target_layer_ids"):
        AutoDrafter.from_pretrained(folder)


def test_a_release_without_calibration(tmp_path: Path) -> None:
    model = target("qwen3")
    drafter = FlexDraftDrafter.from_target(model, 2, block_size=4, calibration_rank=None)
    folder = released_folder(tmp_path, drafter, model)
    assert AutoDrafter.from_pretrained(folder).anchor_bias_mlp is None


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = released_folder(tmp_path, tiny_flexdraft(target("qwen3")), target("qwen3"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing: layers\.1\.self_attn\.k_proj\.weight"):
        AutoDrafter.from_pretrained(folder)


def test_other_configurations_are_not_recognised() -> None:
    assert find_family({"model_type": "qwen3"}) is not FlexDraftDrafter
    assert find_family({"model_type": "qwen3", "flexdraft_config": {}}) is FlexDraftDrafter
    assert find_family({"model_type": "qwen3", "flexdraft_config": {}}, frozenset({"fc.weight"})) is None


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma3", "gpt_oss"])
def test_a_fresh_drafter_is_the_target_with_an_average_token(family: str) -> None:
    model = target(family, "eager")
    drafter = FlexDraftDrafter.from_target(model, num_layers=3, block_size=5)
    assert drafter.config.target_layer_ids == [1, 2, 3]
    for tuned, layer in zip(drafter.layers, decoder_of(model)[1][1:], strict=True):
        for name, source in projections_of(attention_of(layer)).items():
            for key, tensor in source.named_parameters():
                own = tuned.self_attn.get_submodule(name).get_parameter(key)
                assert torch.equal(own, tensor)
                assert own.data_ptr() != tensor.data_ptr()
    everything = model.get_input_embeddings()(torch.arange(VOCAB))
    assert torch.allclose(drafter.mask_embedding, everything.mean(0), atol=1e-6)
    bonus, hidden = torch.randn(2, 64)
    assert not drafter.anchor_bias_mlp(bonus, hidden).any()


def test_a_fresh_configuration_is_initialised() -> None:
    drafter = FlexDraftDrafter(tiny_flexdraft(target("qwen3")).config)
    assert all(bool(tensor.isfinite().all()) for tensor in drafter.state_dict().values())
    assert torch.equal(drafter.layers[0].self_attn.q_norm.weight, torch.ones(16))
    assert 0 < float(drafter.mask_embedding.detach().std()) < 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 98}, "vocabulary size is 98"),
        ({"num_hidden_layers": 5}, "number of layers is 5"),
        ({"num_key_value_heads": 4}, "k_proj: .*in the drafter"),
        ({"attention_bias": True}, "q_proj: .*bias.*in the target"),
    ],
)
def test_a_wrong_target_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_flexdraft(target("qwen3")).check_target(build("qwen3", **changes))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_layer_ids": [1, 3]}, "last layers without a gap"),
        ({"target_layer_ids": [2, 3], "num_target_layers": 5}, "the last of 5 target layers is 4"),
        ({"block_size": 1}, "block_size is 1"),
        ({"calibration_rank": 0}, "calibration_rank is 0"),
        ({"attention_layouts": [None]}, r"attention_layouts is \[None\]; it is a list of objects"),
        ({"attention_layouts": [{"q_proj": {"weight": [64, "x"]}}]}, "attention_layouts is .* it is a list"),
        ({"target_layer_ids": [1, 2, 3], "attention_layouts": [{}, {}]}, "2 attention_layouts for 3 layers"),
    ],
)
def test_contradictory_configurations_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlexDraftConfig(**fields)


def test_options_belong_to_views() -> None:
    drafter = tiny_flexdraft(target("qwen3"))
    view = guided(drafter, Guide(), flex_mode="sequential")
    assert (view.treespec_config.flex_mode, drafter.treespec_config.flex_mode) == ("sequential", "auto")
    with pytest.raises(ValueError, match="flex_mode"):
        drafter.with_options(flex_mode="both")
    with pytest.raises(ValueError, match="flex_group_score"):
        drafter.with_options(flex_group_score=1.0)
    with pytest.raises(ValueError, match="flex_group_score"):
        drafter.with_options(flex_group_score="0.1")
    with pytest.raises(ValueError, match="flex_groups"):
        drafter.with_options(flex_groups=1.5)


def test_options_come_back_from_a_saved_generation_config(tmp_path: Path) -> None:
    GenerationConfig(treespec=FlexDraftOptions(flex_mode="sequential", budget=4)).save_pretrained(tmp_path)
    found = decoding_config(tiny_flexdraft(target("qwen3")), GenerationConfig.from_pretrained(tmp_path))
    assert found == FlexDraftOptions(flex_mode="sequential", budget=4)


def test_inspection_tells_where_it_drafts_and_whether_it_fits(tmp_path: Path) -> None:
    model = target("qwen3")
    drafter = tiny_flexdraft(model)
    model.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter")
    build("phi3").save_pretrained(tmp_path / "other")
    console = Console(record=True, width=200)
    assert run_inspect(console, str(tmp_path / "drafter"), str(tmp_path / "target"), weights=True)
    shown = console.export_text()
    assert "··●● 2, 3 of 4" in shown
    assert "enter at layer 2 of 4" in shown
    found = inspect_drafter(str(tmp_path / "drafter"), str(tmp_path / "other"))
    assert found.verdict == "does not fit"
    assert [finding.rule for finding in found.findings if finding.status == "wrong"] == ["projections"]
