"""Assisted decoding with a FlexDraft drafter equals plain decoding, in every mode and across changes of mode."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from drafters.flexdraft_models import Guide, guided, tiny_flexdraft
from models import batch, build, hook_count, prompt, target
from parity import GREEDY, SAMPLED, Inputs, Run, assert_same, run
from rigged import rows_of
from transformers import DynamicCache, PreTrainedModel

from hf_treespec.compat import CACHE_KEYWORD

ROWS = (5, 13, 9)
FAMILIES = ("qwen3", "qwen3_sliding", "gemma3", "phi3", "qwen3_moe", "gpt_oss", "tied")
MODES: dict[str, tuple[str, ...]] = {
    "parallel": ("parallel",),
    "sequential": ("sequential",),
    "both in turn": ("parallel", "sequential", "sequential"),
}


@functools.cache
def model_of(family: str) -> PreTrainedModel:
    if family == "tied":
        return build("qwen3", tie_word_embeddings=True)
    return target(family, "eager" if family == "gpt_oss" else "sdpa")


@functools.cache
def drafter_of(family: str) -> Any:
    return tiny_flexdraft(model_of(family))


@functools.cache
def plain_run(family: str, rows: int, is_sampled: bool, cache: str = "") -> tuple[Inputs, dict[str, Any], Run]:
    inputs = prompt(12, seed=3) if rows == 1 else batch(ROWS, seed=6)
    options = {"max_new_tokens": 18, **(SAMPLED if is_sampled else GREEDY)}
    if cache:
        options["cache_implementation"] = cache
    return inputs, options, run(model_of(family), inputs, seed=3, **options)


def check(family: str, rows: int, is_sampled: bool, modes: tuple[str, ...], cache: str = "", **decoding: Any) -> Guide:
    model = model_of(family)
    inputs, options, plain = plain_run(family, rows, is_sampled, cache)
    guide = Guide(rows=rows_of(plain.sequences, inputs), modes=modes)
    view = guided(drafter_of(family), guide, **decoding)
    assisted = run(model, inputs, seed=3, assistant_model=view, **options)
    assert_same(plain, assisted, model, inputs, options, seed=3)
    assert view.last_report.acceptance_length > 1.5, "next to nothing was accepted"
    assert view.last_report.reason is None
    assert hook_count(model) == 0
    return guide


#: One row sampled and three greedy, and both of either.
PAIRS = ((1, True), (3, False))
CELLS = [
    *itertools.product(FAMILIES, PAIRS, ["parallel", "sequential"], ["tree"]),
    *itertools.product(["qwen3", "gemma3"], PAIRS, MODES, ["chain"]),
    *itertools.product(["qwen3", "gemma3", "phi3"], PAIRS, ["both in turn"], ["tree"]),
    *itertools.product(["qwen3"], [(1, False), (3, True)], MODES, ["tree"]),
]


@pytest.mark.parametrize(("family", "calls", "mode", "shape"), CELLS, ids=str)
def test_modes(family: str, calls: tuple[int, bool], mode: str, shape: str) -> None:
    guide = check(family, *calls, MODES[mode], shape=shape)
    brought = [was_brought for _, _, was_brought in guide.drafts]
    wanted = [MODES[mode][turn % len(MODES[mode])] == "parallel" for turn in range(1, len(brought) + 1)]
    # The first draft of a call has no verification before it.
    assert brought == [False, *wanted[:-1]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 3])
def test_static_caches(mode: str, rows: int) -> None:
    check("qwen3", rows, False, MODES[mode], cache="static")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "options", [{"flex_variant": "twice"}, {"flex_groups": 2}, {"flex_verify_score": 0.2}], ids=str
)
def test_options(rows: int, options: dict[str, Any]) -> None:
    check("qwen3", rows, True, ("parallel",), **options)


def test_the_modes_of_the_options() -> None:
    """`batch` drafts in parallel up to its number of rows, then sequentially; `auto` tries both."""
    model = model_of("qwen3")
    for rows, mode in itertools.product((1, 3), ("auto", "batch")):
        inputs, options, plain = plain_run("qwen3", rows, False)
        view = guided(drafter_of("qwen3"), Guide(), flex_mode=mode)
        assisted = run(model, inputs, seed=3, assistant_model=view, **options)
        assert torch.equal(plain.sequences, assisted.sequences)
        rode = [was_brought for _, _, was_brought in view.guide.drafts[1:]]
        assert any(rode) == (mode == "auto" or rows == 1)
        assert all(rode) == (mode == "batch" and rows == 1)


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
@pytest.mark.parametrize(
    "call",
    [{}, {"prefill_chunk_size": 4}, {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}],
    ids=["as usual", "prefilled in chunks", "quantised cache"],
)
def test_calls(mode: str, call: dict[str, Any]) -> None:
    model, inputs = model_of("qwen3"), batch(ROWS, seed=6)
    options = {"max_new_tokens": 12, **SAMPLED, **call}
    plain = run(model, inputs, seed=3, **options)
    guide = Guide(rows=rows_of(plain.sequences, inputs))
    view = guided(drafter_of("qwen3"), guide, flex_mode=mode)
    assert_same(plain, run(model, inputs, seed=3, assistant_model=view, **options), model, inputs, options, seed=3)
    assert view.last_report.acceptance_length > 1.5


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
@pytest.mark.parametrize("layers", [2, 4], ids=["last layers", "all layers"])
def test_a_cache_that_gets_its_layers_in_the_first_forward(layers: int, mode: str) -> None:
    model, inputs = model_of("qwen3"), prompt(12, seed=3)
    drafter = tiny_flexdraft(model, num_layers=layers)
    options: dict[str, Any] = {"max_new_tokens": 12, **GREEDY}
    plain = run(model, inputs, **options)
    view = guided(drafter, Guide(rows=rows_of(plain.sequences, inputs)), flex_mode=mode)
    assisted = run(model, inputs, assistant_model=view, **{CACHE_KEYWORD: DynamicCache()}, **options)
    assert torch.equal(plain.sequences, assisted.sequences)
    assert view.last_report.acceptance_length > 1.5


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_a_conversation_goes_on_from_its_cache(mode: str) -> None:
    model, inputs = model_of("gemma3"), prompt(12, seed=3)
    whole = run(model, inputs, max_new_tokens=24, **GREEDY).sequences
    guide = Guide(rows=whole.tolist())
    view = guided(drafter_of("gemma3"), guide, flex_mode=mode)
    options: dict[str, Any] = {"assistant_model": view, "return_dict_in_generate": True, **GREEDY}
    first = model.generate(**inputs, max_new_tokens=10, **options)
    onward = {"input_ids": first.sequences, CACHE_KEYWORD: first[CACHE_KEYWORD]}
    second = model.generate(**onward, max_new_tokens=14, **options)
    assert torch.equal(second.sequences, whole)
    assert view.last_report.acceptance_length > 1.5
    assert hook_count(model) == 0


@pytest.mark.parametrize("budget", ["auto", 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_drafter_of_another_dtype_and_measured_budgets(budget: Any, dtype: torch.dtype) -> None:
    model = model_of("qwen3")
    inputs, options, plain = plain_run("qwen3", 1, True)
    guide = Guide(rows=rows_of(plain.sequences, inputs))
    view = guided(tiny_flexdraft(model).to(dtype), guide, flex_mode="parallel", budget=budget)
    assert_same(plain, run(model, inputs, seed=3, assistant_model=view, **options), model, inputs, options, seed=3)


def test_positions_of_several_axes() -> None:
    check("qwen2_5_vl", 3, False, MODES["both in turn"])


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_an_adapter_on_the_target_and_inference_mode(mode: str) -> None:
    """Adapters wrap projections that mask rows have their own of; verified rows keep the adapted ones."""
    from peft import LoraConfig, get_peft_model

    base = build("llama")
    drafter = tiny_flexdraft(base)
    torch.manual_seed(0)
    model: Any = get_peft_model(base, LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    inputs = prompt(12, seed=3)
    plain = run(model.base_model.model, inputs, max_new_tokens=16, **GREEDY)
    view = guided(drafter, Guide(rows=rows_of(plain.sequences, inputs)), flex_mode=mode)
    with torch.inference_mode():
        assisted = run(model.base_model.model, inputs, max_new_tokens=16, assistant_model=view, **GREEDY)
    assert torch.equal(plain.sequences, assisted.sequences)
    assert view.last_report.acceptance_length > 1.5
