"""Each way in which a pair loses acceptance silently is told at attach; a right pair is left alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import transformers
from dflash_models import BLOCK, MASK, VOCAB, tiny_drafter, tiny_target
from models import FAMILIES, dflash, prompt, target, treeflash
from test_dflash_checkpoints import zlab_folder
from torch import nn
from transformers import AutoModelForCausalLM
from treeflash_models import tiny_treeflash

from hf_treespec.drafters import AutoDrafter, TargetModules, checks
from hf_treespec.drafters.dflash import DFlashConfig, DFlashDrafter
from hf_treespec.drafters.rope import read_rope


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    messages: list[str] = []
    monkeypatch.setattr(checks.logger, "warning", messages.append)
    return messages


def rope(**fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, **fields}}


def attention(family: str) -> str:
    return "sdpa" if "sdpa" in FAMILIES[family].attentions else "eager"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_pair_fits_without_a_warning(family: str, warnings: list[str]):
    network = target(family, attention(family))
    hooks = models.hook_count(network)
    for drafter in (dflash(family, attention(family)), treeflash(family, attention(family))):
        findings = list(checks.examine(drafter, network))
        assert {finding.status for finding in findings} == {checks.Status.fits, checks.Status.unchecked}
        assert [finding.rule for finding in findings if finding.status is checks.Status.unchecked] == ["trained for"]
        drafter.check_target(network)
    assert not warnings
    assert models.hook_count(network) == hooks


def test_a_drafter_is_no_target():
    drafter = tiny_drafter(tiny_target())
    with pytest.raises(ValueError, match=r"DFlashDrafter is a drafter itself\. Give the causal LM"):
        drafter.check_target(drafter)


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        ([0, 0, VOCAB], rf"to tokens such as {VOCAB + 2}; .* from 0 to {VOCAB - 1}"),
        ([-1, 0, 0], "to tokens such as -1"),
        ([1, 0, 0], "to a token twice"),
    ],
)
def test_a_reduced_vocabulary_is_of_the_targets_tokens(d2t: list[int], message: str):
    network = tiny_target()
    drafter = tiny_drafter(network, own_head=True, draft_vocab_size=3)
    assert next(iter(checks.draft_vocabulary(drafter, network))).status is checks.Status.fits
    drafter.d2t.copy_(torch.tensor(d2t))
    with pytest.raises(ValueError, match=message):
        drafter.check_target(network)


SLOW: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another base": ({}, rope(rope_theta=1e6), r"the drafter's rope_theta is 1,000,000, the target's 10,000"),
    "a lost base": (rope(rope_theta=1e6), rope(), r"the drafter's rope_theta is 10,000, the target's 1,000,000"),
    "lost scaling": (
        rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=128),
        rope(),
        r"base 10,000, the target with base 10,000, yarn × 4; .* restore them",
    ),
    "partial rotation": ({}, rope(partial_rotary_factor=0.5), r"partial_rotary_factor 0.5, and 8 of 8 channels"),
    "ids out of order": ({}, {"target_layer_ids": [3, 1]}, r"target_layer_ids \[3, 1\] do not rise"),
    "ids that count the embedding": (
        {"num_hidden_layers": 12},
        {"target_layer_ids": [2, 6, 10]},
        r"\[2, 6, 10\] lie one above the published spread; .* would be \[1, 5, 9\]",
    ),
    "ids lowered twice": (
        {"num_hidden_layers": 12},
        {"target_layer_ids": [0, 4, 8]},
        r"\[0, 4, 8\] lie one below the published spread",
    ),
    "an unused window": ({}, {"sliding_window": 8}, r"sliding_window is 8, and no layer in layer_types is sliding"),
    "a resized vocabulary": ({}, {"vocab_size": VOCAB + 1}, r"vocabulary size is 61, the drafter's vocab_size is 62"),
    "another end": (
        {"eos_token_id": 4},
        {"eos_token_id": 5},
        r"eos_token_id \[4\] in the target, \[5\] in the drafter",
    ),
    "a mask with another use": ({"pad_token_id": MASK}, {}, r"mask_token_id 60 is the pad token too"),
}


@pytest.mark.parametrize("killer", SLOW)
def test_what_is_slow_is_one_warning(killer: str, warnings: list[str]):
    target_fields, drafter_fields, message = SLOW[killer]
    network = tiny_target(**target_fields)
    drafter = tiny_drafter(network, **drafter_fields)
    for _ in range(2):
        drafter.with_options(budget=4).check_target(network)
    assert len(warnings) == 1
    assert re.search(message, warnings[0]), warnings[0]


def test_generate_warns_once_and_draws_as_plain_does(warnings: list[str]):
    network = tiny_target()
    drafter = tiny_drafter(network, **rope(rope_theta=1e6))
    inputs = {name: tensor % VOCAB for name, tensor in prompt(6).items()}
    options = {"max_new_tokens": 6, "do_sample": True}
    outputs = []
    for assistant in ({}, {"assistant_model": drafter}, {"assistant_model": drafter}):
        torch.manual_seed(3)
        outputs.append(network.generate(**inputs, **options, **assistant))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert len([message for message in warnings if "rope_theta" in message]) == 1


def test_a_pair_is_looked_at_anew_once_it_has_changed(monkeypatch: pytest.MonkeyPatch):
    network = tiny_target()
    drafter = tiny_drafter(network)
    examined: list[int] = []
    rules = (lambda *pair: examined.append(1) or [],)
    monkeypatch.setattr(DFlashDrafter, "rules", rules)
    for _ in range(3):
        drafter.check_target(network)
    assert len(examined) == 1
    network.resize_token_embeddings(VOCAB + 3)
    drafter.check_target(network)
    drafter.check_target(tiny_target())
    assert len(examined) == 3


@pytest.mark.parametrize(
    ("scale", "status"), [(1.0, checks.Status.slow), (None, checks.Status.fits)], ids=["alone", "in an unused tail"]
)
def test_a_mask_row_that_was_never_trained(scale: float | None, status: checks.Status):
    network = tiny_target()
    drafter = tiny_drafter(network, mask_token_id=30)
    with torch.no_grad():
        network.get_input_embeddings().weight[30 : 31 if scale else None] = 0.0
    (finding,) = checks.mask_token(drafter, network)
    assert finding.status is status
    if scale:
        assert "norm 0 where others have" in str(finding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [tiny_drafter, tiny_treeflash], ids=["dflash", "treeflash"])
def test_a_cast_leaves_rotary_frequencies_in_float32(make: Callable[..., Any], dtype: torch.dtype):
    network = tiny_target()
    drafter = make(network)
    exact = {name: buffer.clone() for name, buffer in drafter.rotary_emb.named_buffers()}
    drafter.to(dtype)
    assert drafter.dtype == dtype
    for name, buffer in drafter.rotary_emb.named_buffers():
        assert torch.equal(buffer, exact[name])
    assert [finding.status for finding in checks.rotary_embedding(drafter, network)] == [checks.Status.fits]


def test_rotary_frequencies_follow_the_drafter_to_a_device():
    drafter = tiny_drafter(tiny_target())
    assert drafter.to("meta", torch.bfloat16).rotary_emb.inv_freq.is_meta
    assert drafter.rotary_emb.inv_freq.dtype == torch.float32
    assert not drafter.to_empty(device="cpu").rotary_emb.inv_freq.is_meta


def test_rounded_frequencies_are_told():
    network = tiny_target()
    drafter = tiny_drafter(network)
    drafter.rotary_emb.inv_freq.data = drafter.rotary_emb.inv_freq.to(torch.bfloat16)
    (finding,) = checks.rotary_embedding(drafter, network)
    assert "frequencies are off by up to 0." in str(finding)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 64},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
    ids=["old form", "new form"],
)
def test_both_forms_of_rope_give_the_same_frequencies(tmp_path: Path, fields: dict[str, Any]):
    drafter = tiny_drafter(tiny_target())
    given = {"max_position_embeddings": 64, "rope_theta": ..., **fields}
    loaded = DFlashDrafter.from_pretrained(zlab_folder(tmp_path / "zlab", drafter, **given))
    wanted = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64}
    assert read_rope(loaded.config.to_dict()) == wanted
    assert not torch.equal(loaded.rotary_emb.inv_freq, drafter.rotary_emb.inv_freq)


def test_a_missing_base_is_refused(tmp_path: Path):
    folder = zlab_folder(tmp_path / "zlab", tiny_drafter(tiny_target()), rope_theta=...)
    with pytest.raises(ValueError, match="states no rope_theta"):
        AutoDrafter.from_pretrained(folder)


def test_a_window_without_layer_types_is_honoured(tmp_path: Path):
    given = {"layer_types": ..., "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    loaded = AutoDrafter.from_pretrained(zlab_folder(tmp_path / "zlab", tiny_drafter(tiny_target()), **given))
    assert [loaded.config.layer_window(layer) for layer in range(2)] == [None, 9]


def test_a_new_drafter_gets_its_targets_frequencies():
    scaled = rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    scaled["rope_parameters"]["original_max_position_embeddings"] = 64
    network = tiny_target(**scaled)
    drafter = tiny_drafter(network)
    torch.testing.assert_close(drafter.rotary_emb.inv_freq, network.model.rotary_emb.inv_freq)
    gemma = target("gemma3").config
    fields = {"num_hidden_layers": 1, "block_size": 4, "mask_token_id": 3, "target_layer_ids": [1]}
    assert DFlashConfig.for_target(gemma, **fields).rope_parameters["rope_theta"] == 1e6


def overflowing(folder: Path) -> Path:
    """A bfloat16 checkpoint whose activations leave float16's range."""
    drafter = tiny_drafter(tiny_target())
    for layer in drafter.layers:
        layer.mlp.down_proj.weight.data *= 1e6
    drafter.to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_c31_a_drafter_that_float16_does_not_hold_is_refused(tmp_path: Path):
    folder = overflowing(tmp_path)
    with pytest.raises(ValueError, match=r"overflows in float16: its weight layers\.0.*bfloat16 or torch\.float32"):
        AutoDrafter.from_pretrained(folder, dtype=torch.float16)
    drafter = AutoDrafter.from_pretrained(folder)
    assert drafter.dtype == torch.bfloat16
    drafter.check_target(tiny_target())
    with pytest.raises(ValueError, match="overflows in float16"):
        drafter.half().check_target(tiny_target())


def test_c31_activations_that_overflow_inside_are_found():
    drafter = tiny_drafter(tiny_target()).half()
    assert next(checks.finite(drafter)).status is checks.Status.fits
    for layer in drafter.layers:
        layer.self_attn.o_proj.weight.data.fill_(3e4)
    assert all(parameter.isfinite().all() for parameter in drafter.parameters())
    assert "a block over random features" in str(next(checks.finite(drafter)))


class EightBit(nn.Module):
    """A head stored as whole numbers, as bitsandbytes' is: it computes in what it is given."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.scale = float(head.weight.detach().abs().max()) / 127
        self.weight = nn.Parameter((head.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        assert hidden.is_floating_point()
        return nn.functional.linear(hidden, self.weight.to(hidden.dtype) * self.scale)


@pytest.mark.parametrize("head", ["half", "eight bit"])
def test_c32_dtypes_meet_at_the_boundary(head: str):
    network = tiny_target()
    if head == "half":
        network.lm_head.half()
    else:
        network.lm_head = EightBit(network.lm_head)
    drafter = tiny_drafter(network).to(torch.bfloat16)
    modules = TargetModules(network)
    assert modules.embed(torch.tensor([[1, 2]]), torch.bfloat16).dtype == torch.bfloat16
    logits = modules.logits(torch.randn(1, 2, 48, dtype=torch.bfloat16))
    assert logits.dtype == torch.float32
    assert logits.shape == (1, 2, VOCAB)
    assert [f.status for f in checks.logits(drafter, network)] == [checks.Status.fits]


def scaling_family(**overrides: Any) -> Any:
    common = {**models._COMMON, "num_hidden_layers": 2}
    config = transformers.CohereConfig(**common, logit_scale=0.25, **overrides)
    return AutoModelForCausalLM.from_config(config).eval()


def drafter_for(network: Any) -> DFlashDrafter:
    fields = {"num_hidden_layers": 1, "block_size": BLOCK, "mask_token_id": 3, "target_layer_ids": [0]}
    return DFlashDrafter(DFlashConfig.for_target(network.config, **fields)).eval()


def test_a_scale_of_the_logits_that_is_lost_is_measured(monkeypatch: pytest.MonkeyPatch):
    network = scaling_family()
    (finding,) = checks.logits(drafter_for(network), network)
    assert finding.status is checks.Status.fits
    monkeypatch.setattr(TargetModules, "scaled", lambda self, logits: logits)
    (finding,) = checks.logits(drafter_for(network), network)
    assert finding.status is checks.Status.slow
    assert "the target's logits are 0.25 times the drafter's" in str(finding)
    assert "drafter_temperature=4" in str(finding)


SCALED: dict[str, tuple[Any, dict[str, float]]] = {
    "cohere": (transformers.CohereConfig, {"logit_scale": 0.25}),
    "cohere2": (transformers.Cohere2Config, {"logit_scale": 0.25}),
    "cohere2 moe": (transformers.Cohere2MoeConfig, {"logit_scale": 0.25}),
    "granite, which divides": (transformers.GraniteConfig, {"logits_scaling": 4.0}),
    "hyperclovax, which multiplies": (transformers.HyperCLOVAXConfig, {"logits_scaling": 0.25}),
    "mpt, which does not apply it": (transformers.MptConfig, {"logit_scale": 0.25}),
}


@pytest.mark.parametrize("family", SCALED)
def test_drafts_are_scored_with_the_targets_scale_of_logits(family: str):
    kind, scale = SCALED[family]
    config = kind(**{**models._COMMON, "num_hidden_layers": 2}, **scale)
    network = AutoModelForCausalLM.from_config(config).eval()
    inputs = prompt(5)
    with torch.no_grad():
        output = network(**inputs, output_hidden_states=True)
        logits = TargetModules(network).logits(output.hidden_states[-1])
    torch.testing.assert_close(logits, output.logits)
    assert [finding.status for finding in checks.logits(drafter_for(network), network)] == [checks.Status.fits]


@pytest.mark.parametrize("field", ["_softcap", "_embedding_multiplier"])
def test_c38_a_lost_scale_or_cap_is_measured(field: str, monkeypatch: pytest.MonkeyPatch):
    """Granite multiplies behind its embedding, Gemma caps its logits: a drafter that is not told scores otherwise."""
    if field == "_softcap":
        network = AutoModelForCausalLM.from_config(
            transformers.Gemma2Config(**models._COMMON, head_dim=16, final_logit_softcapping=5.0)
        ).eval()
        rule, told, message = checks.logits, None, "are capped or bent"
    else:
        config = transformers.GraniteConfig(**models._COMMON, embedding_multiplier=3.0, logits_scaling=2.0)
        network = AutoModelForCausalLM.from_config(config).eval()
        rule, told, message = checks.embeddings, 1.0, "first layer 3 times that"
    drafter = drafter_for(network)
    assert [finding.status for finding in rule(drafter, network)] == [checks.Status.fits]
    original = TargetModules.__init__

    def forgetful(self: TargetModules, *args: Any) -> None:
        original(self, *args)
        setattr(self, field, told)

    monkeypatch.setattr(TargetModules, "__init__", forgetful)
    (finding,) = rule(drafter, network)
    assert finding.status is checks.Status.slow
    assert message in str(finding)


@pytest.mark.parametrize(
    ("field", "rule", "message"),
    [
        ("input_embedding_scale", checks.embeddings, "rows, × 3, the target's first layer 0.3333 times that"),
        ("output_multiplier", checks.logits, "the target's logits are 0.3333 times the drafter's"),
        ("final_logit_softcapping", checks.logits, "are capped or bent"),
    ],
)
def test_a_scale_that_the_drafter_states_is_held_to_the_targets(field: str, rule: checks.Rule, message: str):
    network = tiny_target()
    (finding,) = rule(tiny_drafter(network, **{field: 3.0}), network)
    assert finding.status is checks.Status.slow
    assert message in str(finding)
    assert f"Correct {field} in the drafter's config.json" in str(finding)


def test_rows_of_an_embedding_with_a_norm_are_given_as_they_are(monkeypatch: pytest.MonkeyPatch):
    """Muse norms its embeddings for itself alone."""
    network = tiny_target()

    def raw(self: TargetModules, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return network.get_input_embeddings().weight[tokens].to(dtype)

    class Normed(nn.Embedding):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return nn.functional.rms_norm(super().forward(tokens), (48,))

    normed = Normed(VOCAB, 48)
    normed.weight = network.get_input_embeddings().weight
    network.set_input_embeddings(normed)
    monkeypatch.setattr(TargetModules, "embed", raw)
    (finding,) = checks.embeddings(tiny_drafter(network), network)
    assert finding.status is checks.Status.fits
    assert "without what the target adds" in str(finding)


@pytest.mark.parametrize(
    ("recorded", "name", "status"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", "fits"),
        ("Qwen/Qwen3-8B", "someone/Qwen3-8B-AWQ", "fits"),
        ("Qwen/Qwen3-8B", "unsloth/Qwen3-8B-bnb-4bit", "fits"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base", "slow"),
        ("Qwen/Qwen3-8B", "someone/a-fine-tune", "slow"),
        ("Qwen/Qwen3-8B", "/models/anything", "not checked"),
        (None, "Qwen/Qwen3-8B", "not checked"),
    ],
)
def test_the_target_it_was_trained_for(recorded: str | None, name: str, status: str):
    network = tiny_target()
    network.config._name_or_path = name
    (finding,) = checks.trained_target(tiny_drafter(network, target_name_or_path=recorded), network)
    assert finding.status == status


@pytest.mark.parametrize(
    ("fields", "length", "window", "told"),
    [
        ({}, 65, None, 1),
        ({}, 64, None, 0),
        ({}, 65, 16, 0),
        ({"draft_window": 8}, 65, None, 0),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, 65, None, 0),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}, 65, None, 1),
    ],
)
def test_c37_a_call_beyond_the_trained_context(
    fields: dict[str, Any], length: int, window: int | None, told: int, warnings: list[str]
):
    drafter = tiny_drafter(tiny_target(), max_position_embeddings=64, **fields)
    for view in (drafter, drafter.with_options(budget=4)):
        checks.check_length(view, length, window)
    assert len(warnings) == told
    assert all("reach 65 positions" in message and "draft_window=64" in message for message in warnings)


def test_findings_are_plain_data():
    finding = checks.Finding("a rule", checks.Status.wrong, "found", "wanted", "Do this.")
    assert str(finding) == "found; wanted. Do this."
    assert json.loads(json.dumps(vars(finding)))["status"] == "wrong"
