"""Mask rows in a stock target: what they compute, what they leave alone, and that nothing of them stays."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from flexdraft_models import BLOCK, Guide, dense_draft, dense_group, guided, tiny_flexdraft
from models import LAYERS, PAD, VOCAB, WINDOW, batch, build, decoder_layers, hook_count, prompt, target
from parity import GREEDY, Inputs, run
from rigged import rows_of
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, PreTrainedModel

import hf_treespec  # noqa: F401  (teaches generate() about drafters)
from hf_treespec.drafters.flexdraft import FlexDraftDrafter
from hf_treespec.drafters.flexdraft.layout import attention_of, decoder_of, projections_of
from hf_treespec.drafters.flexdraft.mask_rows import MaskRows

FAMILIES = ("qwen3", "qwen3_sliding", "llama", "mistral", "gemma3", "phi3", "qwen3_moe", "gpt_oss")
ROWS = (5, 13, 9)


def model_of(family: str) -> PreTrainedModel:
    return target(family, "eager" if family == "gpt_oss" else "sdpa")


def close(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, of values of a few units relative to the largest."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1))


def decode(
    model: PreTrainedModel, inputs: Inputs, drafter: Any, modes: tuple[str, ...] = (), **decoding: Any
) -> tuple[Guide, Any, list[list[int]]]:
    """A guided run: its logbook, what it returned, and what each row of the plain run holds."""
    plain = run(model, inputs, max_new_tokens=14, **GREEDY)
    rows = rows_of(plain.sequences, inputs)
    guide = Guide(rows=rows, modes=modes)
    view = guided(drafter, guide, **decoding)
    whole = run(model, inputs, max_new_tokens=14, assistant_model=view, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(plain.sequences, whole.sequences)
    return guide, whole.output, rows


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("variant", ["joint", "twice"])
def test_groups_equal_a_dense_forward_under_explicit_masks(family: str, variant: str) -> None:
    model = model_of(family)
    drafter = tiny_flexdraft(model)
    guide, _, rows = decode(model, batch(ROWS, seed=6), drafter, flex_mode="parallel", flex_variant=variant)
    assert len(guide.groups) >= 3
    for starts, tree, hidden in guide.groups[1:2]:
        for row, start in enumerate(starts):
            for node in range(tree.sizes[row]):
                # Nodes beyond the end of a row are never accepted, whatever position they are given.
                if start + int(tree.depths[row, node]) >= len(rows[row]) - 1:
                    continue
                path, at = [], node
                while at >= 0:
                    path.append(int(tree.tokens[row, at]))
                    at = int(tree.parents[row, at])
                expected, _ = dense_group(model, drafter, rows[row][:start] + path[::-1])
                assert close(hidden[row, BLOCK * node : BLOCK * (node + 1)], expected) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_drafts_equal_a_dense_forward_under_explicit_masks(family: str, mode: str) -> None:
    model = model_of(family)
    drafter = tiny_flexdraft(model)
    guide, _, rows = decode(model, batch(ROWS, seed=6), drafter, flex_mode=mode)
    assert [brought for _, _, brought in guide.drafts[1:]].count(mode == "parallel") == len(guide.drafts) - 1
    for starts, logits, _ in guide.drafts[:3]:
        for row, start in enumerate(starts):
            if start < len(rows[row]) - 1:
                expected = dense_draft(model, drafter, rows[row][: start + 1])[: logits.shape[1]]
                assert close(logits[row], expected) < 1e-5


def build_config(name: str) -> PreTrainedModel:
    """Further kinds of attention: latent, with complex rotations, fused beside the MLP, and with scaled logits."""
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    fields: dict[str, dict[str, Any]] = {
        "DeepseekV3Config": {**latent, "first_k_dense_replace": LAYERS},
        "DeepseekV2Config": {**latent, "first_k_dense_replace": LAYERS},
        "GPTNeoXConfig": {},
        "Cohere2Config": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    }
    common = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.25, "pad_token_id": PAD}
    torch.manual_seed(0)
    config = getattr(transformers, name)(**common, **fields[name])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = PAD, None
    return model


@pytest.mark.parametrize("name", ["DeepseekV2Config", "DeepseekV3Config", "GPTNeoXConfig", "Cohere2Config"])
@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_further_kinds_of_attention(name: str, mode: str) -> None:
    model = build_config(name)
    drafter = tiny_flexdraft(model)
    guide, _, rows = decode(model, batch(ROWS, seed=6), drafter, flex_mode=mode)
    for starts, logits, _ in guide.drafts[:2]:
        for row, start in enumerate(starts):
            expected = dense_draft(model, drafter, rows[row][: start + 1])[: logits.shape[1]]
            assert close(logits[row], expected) < 1e-5


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
@pytest.mark.parametrize("name", ["gpt_oss", "DeepseekV3Config"])
def test_layers_that_are_offloaded(name: str, mode: str, tmp_path: Path) -> None:
    """Attentions with tensors of their own (sinks), and projections that also run over what is cached."""
    from accelerate import dispatch_model

    model = build_config(name) if name.endswith("Config") else build(name, "eager")
    drafter, dense = tiny_flexdraft(model), copy.deepcopy(model)
    places = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
    places |= {f"model.layers.{index}": "disk" for index in range(LAYERS)}
    model = dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path)
    guide, _, rows = decode(model, prompt(12), drafter, flex_mode=mode)
    for (start,), logits, _ in guide.drafts[:2]:
        expected = dense_draft(dense, drafter, rows[0][: start + 1])[: logits.shape[1]]
        assert close(logits[0], expected) < 1e-5
    assert {parameter.device.type for parameter in decoder_of(model)[1].parameters()} == {"meta"}


@pytest.mark.parametrize("block_size", [2, 4])
def test_as_many_rows_as_heads(block_size: int) -> None:
    """Gemma 3's norms see `[B, heads, rows, D]`: a block of as many rows as there are heads is still told apart."""
    model = model_of("gemma3")
    drafter = tiny_flexdraft(model, block_size=block_size)
    for mode in ("parallel", "sequential"):
        guide, _, rows = decode(model, prompt(12), drafter, flex_mode=mode)
        for (start,), logits, _ in guide.drafts[:6]:
            expected = dense_draft(model, drafter, rows[0][: start + 1])[: logits.shape[1]]
            assert close(logits[0], expected) < 1e-5


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
@pytest.mark.parametrize("name", ["qwen3", "DeepseekV3Config"])
def test_hooks_of_others_on_layers_and_projections_see_the_text_alone(name: str, mode: str) -> None:
    """They run in the target's forwards only, and on the rows verified there."""
    model = build_config(name) if name.endswith("Config") else build(name)
    layer = decoder_of(model)[1][-1]
    seen: dict[str, list[int]] = {}

    def note(name: str, args: Any) -> None:
        seen.setdefault(name, []).append(args[0].numel())

    for place, module in {"layer": layer, **projections_of(attention_of(layer))}.items():
        module.register_forward_pre_hook(lambda _, args, place=place: note(f"before {place}", args))
        module.register_forward_hook(lambda _, args, output, place=place: note(f"after {place}", (output,)))
    inputs = prompt(12)
    rows = rows_of(run(model, inputs, max_new_tokens=14, **GREEDY).sequences, inputs)
    seen.clear()
    view = guided(tiny_flexdraft(model), Guide(rows=rows), flex_mode=mode)
    run(model, inputs, max_new_tokens=14, assistant_model=view, **GREEDY)
    starts = [start for (start,), _, _ in view.guide.drafts]
    assert len(starts) > 2
    # The first forward is that of the 12 rows of the prompt.
    rows_seen = {place: [12 * size // sizes[0] for size in sizes] for place, sizes in seen.items()}
    verified = rows_seen["before layer"]
    cached = [12, *(start + fresh for start, fresh in zip(starts, verified[1:], strict=True))]
    for place, counts in rows_seen.items():
        assert counts == (cached if "kv_b" in place else verified), place


@contextmanager
def head_outputs(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """The logits of every forward of the target."""
    kept: list[torch.Tensor] = []
    handle = model.register_forward_hook(lambda module, args, output: kept.append(output.logits.clone()))
    try:
        yield kept
    finally:
        handle.remove()


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "phi3", "qwen3_moe"])
@pytest.mark.parametrize("variant", ["joint", "twice"])
def test_verified_rows_are_left_alone(family: str, variant: str) -> None:
    """Sequential drafting verifies with no mask row about: what parallel drafting is to be compared with."""
    model = model_of(family)
    drafter, inputs = tiny_flexdraft(model), batch(ROWS, seed=6)
    with head_outputs(model) as alone:
        _, plain, _ = decode(model, inputs, drafter, flex_mode="sequential", shape="chain")
    with head_outputs(model) as accompanied:
        _, output, _ = decode(model, inputs, drafter, flex_mode="parallel", shape="chain", flex_variant=variant)
    assert len(alone) == len(accompanied)
    for one, other in zip(alone, accompanied, strict=True):
        assert one.shape == other.shape
        if variant == "twice":
            assert torch.equal(one, other)
        assert close(other, one) < 2e-5
        assert torch.equal(one.argmax(-1), other.argmax(-1))
    pairs = list(zip(plain.past_key_values.layers, output.past_key_values.layers, strict=True))
    for one, other in pairs:
        assert one.keys.shape == other.keys.shape
        assert one.get_seq_length() == other.get_seq_length()
        for stored, expected in ((other.keys, one.keys), (other.values, one.values)):
            assert torch.equal(stored, expected) if variant == "twice" else close(stored, expected) < 2e-5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["k_proj", "v_proj", "o_proj"])
def test_mask_rows_that_overflow_reach_no_verified_row(name: str, value: float) -> None:
    """A weight of 0 does not hide what is no number."""
    model = target("qwen3", "eager")
    drafter, calls = tiny_flexdraft(model), itertools.count(1)

    def overflow(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return torch.full_like(output, value) if next(calls) == 3 else None

    drafter.layers[0].self_attn.get_submodule(name).register_forward_hook(overflow)
    decode(model, prompt(12, seed=3), drafter, flex_mode="parallel")
    assert next(calls) > 4


def test_projections_are_hooked_only_while_rows_pass() -> None:
    model, inputs = target("qwen3", "sdpa"), prompt(12)
    drafter = tiny_flexdraft(model)
    tuning = drafter.tuning(model).attach()
    idle, node = hook_count(model), torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        tuning.board(MaskRows(drafter.mask_embedding, node, node + 1, node, torch.arange(12)[None]))
        assert hook_count(model) > idle
        tuning.board(None)
        model(**inputs)
        assert hook_count(model) == idle
    tuning.detach()


def test_plain_rounds_keep_the_hook_where_rows_would_enter() -> None:
    """The call of every layer is noted once; after that a layer that nothing passes has no hook of ours."""
    model, counts = target("qwen3", "sdpa"), []

    class Counting(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            counts.append(sum(map(hook_count, decoder_layers(model)[-2:])))
            return scores

    view = guided(tiny_flexdraft(model), Guide(), budget=1)
    options: dict[str, Any] = {"logits_processor": LogitsProcessorList([Counting()]), **GREEDY}
    run(model, prompt(12), max_new_tokens=8, assistant_model=view, **options)
    # Of both layers' entries and ways out the first entry stays.
    assert counts[1:] == [counts[0] - 3] * 7


def test_idle_hooks_change_no_bit() -> None:
    model = target("qwen3", "sdpa")
    inputs = prompt(12)
    with torch.no_grad():
        expected = model(**inputs).logits
        tuning = tiny_flexdraft(model).tuning(model).attach()
        assert hook_count(model) > 0
        assert torch.equal(model(**inputs).logits, expected)
    tuning.detach()
    assert hook_count(model) == 0


def state_of(model: PreTrainedModel) -> list[Any]:
    """Every module as an object, with its forward, its children, its parameters and its hooks."""
    return [
        (
            name,
            id(module),
            module.forward.__func__,
            list(map(id, module.children())),
            list(map(id, module.parameters(recurse=False))),
            sorted(set(module.__dict__) - {"_previous_max_cache_length"}),
            [len(hooks) for key, hooks in sorted(module.__dict__.items()) if key.endswith("hooks")],
        )
        for name, module in model.named_modules()
    ]


class _Failing(LogitsProcessor):
    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.calls -= 1
        if self.calls < 0:
            raise RuntimeError("told to fail")
        return scores


@pytest.mark.parametrize("variant", ["joint", "twice"])
@pytest.mark.parametrize("place", ["nowhere", "draft", "processor", "verification"])
def test_the_target_comes_back_object_for_object(place: str, variant: str) -> None:
    model = build("qwen3")
    drafter, inputs, before = tiny_flexdraft(model), prompt(12), state_of(build("qwen3"))
    before = state_of(model)
    guide = Guide(fails=2 if place == "draft" else None)
    view = guided(drafter, guide, flex_mode="parallel", flex_variant=variant)
    options: dict[str, Any] = {"max_new_tokens": 12, "assistant_model": view, **GREEDY}
    if place == "processor":
        options["logits_processor"] = LogitsProcessorList([_Failing(3)])
    if place == "verification":
        inner = drafter.layers[1].self_attn.o_proj
        handle = inner.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("told to fail")))
        with pytest.raises(RuntimeError, match="told to fail"):
            run(model, inputs, **options)
        handle.remove()
    elif place == "nowhere":
        run(model, inputs, **options)
    else:
        with pytest.raises(RuntimeError, match="told to fail"):
            run(model, inputs, **options)
    assert state_of(model) == before
    after = run(model, inputs, max_new_tokens=12, **GREEDY).sequences
    assert torch.equal(after, run(build("qwen3"), inputs, max_new_tokens=12, **GREEDY).sequences)


def test_two_drafters_on_one_target_are_kept_apart() -> None:
    """A call inside another one's processor drafts with its own projections; the outer one goes on with its own."""
    model = target("qwen3", "sdpa")
    inputs = prompt(12, seed=3)
    drafters = [tiny_flexdraft(model, seed=3), tiny_flexdraft(model, seed=4, num_layers=1)]
    rows = rows_of(run(model, inputs, max_new_tokens=14, **GREEDY).sequences, inputs)
    alone = [Guide(rows=rows) for _ in drafters]
    for drafter, guide in zip(drafters, alone, strict=True):
        view = guided(drafter, guide, flex_mode="parallel")
        run(model, inputs, max_new_tokens=14, assistant_model=view, **GREEDY)
    outer, inner = Guide(rows=rows), Guide(rows=rows)

    class Nested(LogitsProcessor):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            inner.drafts.clear()
            view = guided(drafters[1], inner, flex_mode="parallel")
            model.generate(**inputs, max_new_tokens=14, assistant_model=view, **GREEDY)
            return scores

    view = guided(drafters[0], outer, flex_mode="parallel")
    options: dict[str, Any] = {"logits_processor": LogitsProcessorList([Nested()]), **GREEDY}
    run(model, inputs, max_new_tokens=14, assistant_model=view, **options)
    for guide, expected in ((outer, alone[0]), (inner, alone[1])):
        assert len(guide.drafts) == len(expected.drafts)
        for one, other in zip(guide.drafts, expected.drafts, strict=True):
            assert torch.equal(one[1], other[1])
    assert hook_count(model) == 0


def test_threads_on_one_target_are_kept_apart() -> None:
    model = target("qwen3", "sdpa")
    inputs = prompt(12, seed=3)
    rows = rows_of(run(model, inputs, max_new_tokens=20, **GREEDY).sequences, inputs)
    guides = [Guide(rows=rows) for _ in range(3)]
    views = [
        guided(tiny_flexdraft(model, seed=seed), guide, flex_mode="parallel")
        for seed, guide in zip((3, 4, 3), guides, strict=True)
    ]
    options: dict[str, Any] = {"max_new_tokens": 20, **GREEDY}
    model.generate(**inputs, assistant_model=views[2], **options)
    threads = [
        threading.Thread(target=model.generate, kwargs={**inputs, "assistant_model": view, **options})
        for view in views[:2]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hook_count(model) == 0
    for one, other in itertools.zip_longest(guides[0].drafts, guides[2].drafts):
        assert torch.equal(one[1], other[1])
    assert len(guides[1].drafts) > 1


@pytest.mark.parametrize("flag", ["output_attentions", "output_router_logits"])
def test_requests_that_would_show_mask_rows_are_refused(flag: str) -> None:
    model = build("qwen3_moe")
    drafter = tiny_flexdraft(model)
    model.config._attn_implementation = "eager"
    setattr(model.config, flag, True)
    with pytest.raises(ValueError, match=flag):
        drafter.check_target(model)


def test_recurrent_layers_are_refused_by_name() -> None:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    fields = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4}
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    config = Qwen3NextConfig(**fields, **heads, **linear, linear_value_head_dim=8, moe_intermediate_size=32)
    model = Qwen3NextForCausalLM(config)
    with pytest.raises(ValueError, match="GatedDeltaNet"):
        FlexDraftDrafter.from_target(model, num_layers=2)


def test_targets_without_rotary_positions_are_refused_by_name() -> None:
    sizes = {"vocab_size": 97, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96, "num_hidden_layers": 2}
    model = transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, num_attention_heads=4))
    with pytest.raises(ValueError, match=r"OPTDecoder has no rotary module.*Use a DFlash drafter"):
        FlexDraftDrafter.from_target(model)
