"""Saving, loading and recognising DFlash 2 drafters, and the outputs of the published code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash2_models import CANDIDATES, tiny_dflash2
from dflash_models import fused_features, state, tiny_drafter, tiny_target
from golden_dflash2 import ANCHOR, BLOCK, CASES, CONTEXT, GOLDEN, TEMPERATURE, VOCAB, borrowed, weights
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, PreTrainedModel
from treeflash_models import tiny_treeflash

from hf_treespec.drafters import AutoDrafter, DraftState, find_family
from hf_treespec.drafters.dflash import DFlashDrafter
from hf_treespec.drafters.dflash2 import DFlash2Config, DFlash2Drafter, DFlash2Session
from hf_treespec.drafters.treeflash import TreeFlashDrafter
from hf_treespec.trees import DraftLattice

TARGET = tiny_target()
OUTPUTS = json.loads(GOLDEN.read_text())
#: `config.json` of z-lab/Qwen3.8-27B-DFlash2, the fields that matter here.
QWEN = {
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "dflash_config": {
        "block_size": 8,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "mask_token_id": 248070,
        "selector_rank": 256,
        "selector_top_k": 16,
        "target_layer_ids": [5, 19, 33, 47, 61],
    },
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": ["sliding_attention"] * 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 64,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "sliding_window": 2048,
    "use_sliding_window": True,
    "vocab_size": 248320,
}


def published_folder(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def lattice_of(drafter: DFlashDrafter) -> torch.Tensor:
    tokens = torch.arange(12)[None]
    session = drafter.start(TARGET, 1, 64)
    return session.propose(state(tokens, fused_features(session, TARGET, tokens), 0, 9)).log_probs


def golden_session(folder: Path, name: str) -> tuple[DFlash2Session, DraftState, PreTrainedModel]:
    """A published checkpoint of a case, loaded and started, the state its outputs were made from, and the target."""
    config = CASES[name]
    drafter = AutoDrafter.from_pretrained(published_folder(folder, config, weights(config)))
    assert type(drafter) is DFlash2Drafter
    embedding, head, features = borrowed(config)
    target = tiny_target(vocab_size=VOCAB, hidden_size=config["hidden_size"])
    target.get_input_embeddings().weight.data = embedding
    target.get_output_embeddings().weight.data = head
    drafter.check_target(target)
    session = drafter.start(target, 1, 64)
    parts = features.chunk(len(session.feature_layers), dim=-1)
    asked = DraftState(
        anchors=torch.tensor([ANCHOR]),
        positions=torch.tensor([CONTEXT]),
        features=sum(session.fuse(index, part) for index, part in enumerate(parts)),
        feature_positions=torch.arange(CONTEXT)[None],
        feature_valid=None,
        depth=BLOCK - 1,
        width=VOCAB,
    )
    return session, asked, target


def children(lattice: DraftLattice, depth: int, slot: int) -> dict[int, tuple[float, int]]:
    """Log-probability and next slot of each child of a slot."""
    parts = (part[0, depth, slot].tolist() for part in (lattice.tokens, lattice.log_probs, lattice.next_slot))
    return {token: (log_prob, following) for token, log_prob, following in zip(*parts, strict=True)}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_states_are_those_of_the_published_code(tmp_path: Path, name: str):
    session, asked, _target = golden_session(tmp_path, name)
    wanted = torch.tensor(OUTPUTS[name]["states"])
    torch.testing.assert_close(session.draft(asked)[0], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_greedy_path_is_that_of_the_published_code(tmp_path: Path, name: str):
    session, asked, _target = golden_session(tmp_path, name)
    lattice, slot, path = session.propose(asked), 0, []
    for depth in range(lattice.depth):
        path.append(int(lattice.tokens[0, depth, slot, 0]))
        slot = int(lattice.next_slot[0, depth, slot, 0])
    assert path == OUTPUTS[name]["greedy"]


@pytest.mark.parametrize("name", CASES)
def test_distributions_are_those_of_the_published_code(tmp_path: Path, name: str):
    """Along a sampled path, hence for other parents than the best ones."""
    session, asked, _target = golden_session(tmp_path, name)
    session.temperature = TEMPERATURE
    lattice, slot, wanted = session.propose(asked), 0, OUTPUTS[name]
    for depth, token in enumerate(wanted["path"]):
        found = children(lattice, depth, slot)
        probabilities = dict(zip(wanted["candidates"][depth], wanted["probabilities"][depth], strict=True))
        assert found.keys() == probabilities.keys()
        ours = torch.tensor([found[candidate][0] for candidate in probabilities]).exp()
        torch.testing.assert_close(ours, torch.tensor([*probabilities.values()]), atol=1e-5, rtol=1e-5)
        slot = found[token][1]


def test_tensor_names_are_those_of_published_checkpoints():
    """Each name and shape, against the formula of the recorded outputs."""
    config = CASES["three taps, causal where sliding"]
    shapes = {name: tensor.shape for name, tensor in weights(config).items()}
    assert {f"layers.1.{part}_conv.base_kernel" for part in ("attention", "mlp")} <= shapes.keys()
    fields = dict(zip(("conv_kernel_size", "conv_group_size", "selector_rank"), (3, 4, 6), strict=True))
    drafter = tiny_dflash2(
        tiny_target(vocab_size=VOCAB, hidden_size=16, num_attention_heads=4, head_dim=4, intermediate_size=24),
        mask_token_id=0,
        **fields,
    )
    assert {name: tensor.shape for name, tensor in drafter.state_dict().items()} == shapes


def test_round_trip_is_bit_equal(tmp_path: Path):
    drafter = tiny_dflash2(TARGET, conv_kernel_size=3, output_multiplier=0.5, is_causal=[True, False])
    drafter.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(drafter.state_dict())
    for load in (DFlash2Drafter.from_pretrained, AutoDrafter.from_pretrained, AutoModel.from_pretrained):
        loaded = load(tmp_path)
        assert type(loaded) is DFlash2Drafter
        kept = drafter.state_dict()
        assert all(torch.equal(tensor, kept[name]) for name, tensor in loaded.state_dict().items())
        assert torch.equal(lattice_of(loaded), lattice_of(drafter))
    ours, theirs = AutoConfig.from_pretrained(tmp_path).to_dict(), drafter.config.to_dict()
    assert {key for key in ours if ours[key] != theirs.get(key)} <= {"dtype", "architectures", "_name_or_path"}


def test_a_published_folder_loads_bit_equal_and_is_saved_with_the_same_names(tmp_path: Path):
    config = CASES["scaled"]
    tensors = weights(config)
    drafter = DFlash2Drafter.from_pretrained(published_folder(tmp_path / "published", config, tensors))
    drafter.save_pretrained(tmp_path / "ours")
    saved = load_file(tmp_path / "ours" / "model.safetensors")
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in tensors.items())
    again = DFlash2Drafter.from_pretrained(tmp_path / "ours")
    assert (again.config.output_multiplier, again.config.final_logit_softcapping) == (0.4, 3.0)


def test_a_published_configuration_is_read(tmp_path: Path):
    config = DFlash2Config.from_pretrained(write_config(tmp_path, QWEN))
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (8, 248070, [5, 19, 33, 47, 61])
    assert (config.conv_kernel_size, config.conv_group_size) == (2, 16)
    assert (config.selector_rank, config.selector_top_k) == (256, 16)
    assert [(config.layer_window(layer), config.layer_is_causal(layer)) for layer in range(5)] == [(2048, False)] * 5
    assert config.rope_parameters["rope_theta"] == 10_000_000
    scales = (config.input_embedding_scale, config.output_multiplier, config.final_logit_softcapping)
    assert scales == (1.0, 1.0, 0.0), "what it leaves out has the published meaning, not the target's"


def test_causality_left_out_is_that_of_the_layers(tmp_path: Path):
    layers = ["sliding_attention"] * 4 + ["full_attention"]
    stated = {key: value for key, value in QWEN.items() if key != "is_causal"} | {"layer_types": layers}
    config = DFlash2Config.from_pretrained(write_config(tmp_path, stated))
    assert [config.layer_is_causal(layer) for layer in range(5)] == [True] * 4 + [False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"selector_rank": None}, r"lacks \['selector_rank'\]"),
        ({"conv_kernel_size": None, "conv_group_size": None}, r"lacks \['conv_kernel_size', 'conv_group_size'\]"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"attention_sink_bias": True}, r"holds \['attention_sink_bias'\], which this package does not know"),
    ],
)
def test_a_configuration_that_says_too_little_or_too_much_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
):
    method = {name: value for name, value in {**QWEN["dflash_config"], **change}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        DFlash2Config.from_pretrained(write_config(tmp_path, {**QWEN, "dflash_config": method}))


@pytest.mark.parametrize(
    "name",
    [
        "candidate_selector.predecessor_codebook",
        "candidate_selector.hidden_projection.weight",
        "layers.1.mlp_conv.base_kernel",
        "layers.0.attention_conv.kernel_projection.weight",
        "hidden_norm.weight",
    ],
)
def test_a_missing_tensor_is_loud(tmp_path: Path, name: str):
    tiny_dflash2(TARGET).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for load in (DFlash2Drafter.from_pretrained, AutoDrafter.from_pretrained):
        with pytest.raises(ValueError, match=f"missing: {name}"):
            load(tmp_path)


def test_missing_tensors_are_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The identity of a fresh convolution must not stand in for one that a checkpoint lacks."""
    tiny_dflash2(TARGET).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lacking = ("layers.0.mlp_conv.base_kernel", "candidate_selector.successor_codebook")
    for name in lacking:
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    seen: list[DFlash2Drafter] = []
    loader = DFlash2Drafter.__mro__[3]
    parent = loader.from_pretrained.__func__

    def remember(cls: type, *args: Any, **kwargs: Any) -> Any:
        result = parent(cls, *args, **kwargs)
        seen.append(result[0])
        return result

    monkeypatch.setattr(loader, "from_pretrained", classmethod(remember))
    with pytest.raises(ValueError, match="missing"):
        DFlash2Drafter.from_pretrained(tmp_path)
    parameters = dict(seen[0].named_parameters())
    assert {name for name, parameter in parameters.items() if parameter.isnan().any()} == set(lacking)
    assert all(parameters[name].isnan().all() for name in lacking)


def test_a_fresh_drafter_drafts_as_dflash_does():
    plain = tiny_drafter(TARGET)
    fields = {name: value for name, value in plain.config.to_dict().items() if name != "model_type"}
    drafter = DFlash2Drafter(DFlash2Config(**fields, selector_top_k=CANDIDATES)).eval()
    own = drafter.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert own
    assert all("_conv." in name or name.startswith("candidate_selector.") for name in own)
    assert float(drafter.candidate_selector.predecessor_codebook.detach().std()) == pytest.approx(0.3, rel=0.1)
    tokens = torch.arange(12)[None]
    ours, theirs = drafter.start(TARGET, 1, 64), plain.start(TARGET, 1, 64)
    asked = state(tokens, fused_features(ours, TARGET, tokens), 0, 9, width=CANDIDATES)
    lattice, wanted = ours.propose(asked), theirs.propose(asked)
    assert torch.equal(lattice.tokens, wanted.tokens.expand_as(lattice.tokens))
    best = wanted.log_probs.log_softmax(-1).expand_as(lattice.log_probs)
    torch.testing.assert_close(lattice.log_probs[:, 1:], best[:, 1:])


def test_recognises():
    names = frozenset(tiny_dflash2(TARGET).state_dict())
    assert find_family({"model_type": "treespec_dflash2"}) is DFlash2Drafter
    assert find_family(QWEN) is DFlash2Drafter
    assert find_family(QWEN, names) is DFlash2Drafter
    assert not DFlash2Drafter.recognises(QWEN, names | {"lm_head.weight"})
    assert not DFlash2Drafter.recognises(QWEN, names - {"candidate_selector.successor_codebook"})


def test_other_dialects_are_not_recognised():
    names = frozenset(tiny_drafter(TARGET).state_dict())
    zlab = {"model_type": "qwen3", "architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 1}}
    treeflash = {"model_type": "qwen3", "dflash_config": {}, "treeflash_config": {}}
    dspark = {"model_type": "qwen3", "architectures": ["Qwen3DSparkModel"], "mask_token_id": 1}
    qwen = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    for config in (zlab, treeflash, dspark, qwen, {"model_type": "treespec_dflash"}):
        assert not DFlash2Drafter.recognises(config)
    assert find_family(zlab, names) is DFlashDrafter
    assert find_family(treeflash, frozenset(tiny_treeflash(TARGET).state_dict())) is TreeFlashDrafter


def test_a_dflash_checkpoint_is_no_dflash2_one(tmp_path: Path):
    tiny_drafter(TARGET).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="candidate_selector"):
        DFlash2Drafter.from_pretrained(tmp_path)
    assert type(AutoDrafter.from_pretrained(tmp_path)) is DFlashDrafter


@pytest.mark.parametrize("load", [DFlash2Drafter.from_pretrained, AutoDrafter.from_pretrained])
def test_float16_is_refused_at_loading(tmp_path: Path, load: Any):
    tiny_dflash2(TARGET).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"float16 .* overflows in it .* dtype=torch\.bfloat16 or dtype=torch\.float32"
    ):
        load(tmp_path, dtype=torch.float16)
    assert load(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_float16_is_refused_before_drafting():
    """One that was cast after loading, wholly or in part."""
    tiny_dflash2(TARGET).check_target(TARGET)
    partly = tiny_dflash2(TARGET)
    partly.layers[1].mlp_conv.half()
    for drafter in (tiny_dflash2(TARGET).half(), partly):
        with pytest.raises(ValueError, match="overflows in"):
            drafter.check_target(TARGET)
        with pytest.raises(ValueError, match="overflows in"):
            TARGET.generate(torch.arange(1, 9)[None], assistant_model=drafter, max_new_tokens=2, do_sample=False)


def test_a_drafter_needs_to_know_the_vocabulary():
    with pytest.raises(ValueError, match="vocab_size is None"):
        DFlash2Drafter(DFlash2Config(num_hidden_layers=1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"conv_kernel_size": 0}, "conv_kernel_size is 0"),
        ({"conv_kernel_size": 17}, "at most one for each of the 16 rows"),
        ({"conv_group_size": 48}, r"conv_group_size is 48; it must divide hidden_size \(512\)"),
        ({"sample_from_anchor": True}, r"\['sample_from_anchor'\] of a DFlash 2 drafter are true"),
        ({"own_head": True, "own_embedding": True, "vocab_size": 9}, r"\['own_embedding', 'own_head'\]"),
        ({"selector_rank": 0}, "selector_rank is 0"),
        ({"selector_top_k": 0}, "selector_top_k is 0"),
        ({"input_embedding_scale": 0.0}, "input_embedding_scale is 0.0"),
        ({"output_multiplier": float("nan")}, "output_multiplier is nan"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0"),
        (
            {"layer_types": ["sliding_attention"], "sliding_window": 9, "num_hidden_layers": 1},
            r"sliding_window \(9\) of layer 0, which is not causal, is below block_size \(16\)",
        ),
        ({"block_size": 1}, "block_size"),
    ],
)
def test_contradicting_configurations(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        DFlash2Config(**fields)
