"""What is refused before prefill, and what only looks as if it had to be."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import transformers.pipelines.base as pipelines_base
from models import VOCAB, batch, build, dflash, prompt, target
from parity import GREEDY, SAMPLED, run
from peft import LoraConfig, get_peft_model
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

import hf_treespec
from hf_treespec import TreeSpecConfig
from hf_treespec.decoding import UnsupportedRequestError, integration
from hf_treespec.decoding.support import decoding_config
from hf_treespec.drafters.flexdraft import FlexDraftOptions


def rope(kind: str) -> dict[str, Any]:
    fields = {"rope_type": kind, "rope_theta": 10000.0, "original_max_position_embeddings": 20}
    if kind == "longrope":
        fields |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0}
    return fields | ({"factor": 2.0} if kind == "dynamic" else {})


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_follow_the_forward_are_refused_where_they_change(kind: str) -> None:
    model = build("llama", rope_parameters=rope(kind), head_dim=16, max_position_embeddings=20)
    drafter = dflash("llama")
    forwards: list[int] = []
    handle = model.register_forward_pre_hook(lambda *args: forwards.append(1))
    with pytest.raises(UnsupportedRequestError, match="may reach 29 positions, and they change after 20"):
        run(model, prompt(9), assistant_model=drafter, **GREEDY, max_new_tokens=20)
    assert not forwards
    handle.remove()
    plain = run(model, prompt(9), **GREEDY, max_new_tokens=11)
    assisted = run(model, prompt(9), assistant_model=drafter, **GREEDY, max_new_tokens=11)
    assert torch.equal(plain.sequences, assisted.sequences)
    plain = run(model, prompt(9), **GREEDY, max_new_tokens=20)
    view = drafter.with_options(on_unsupported="plain")
    assert torch.equal(
        plain.sequences, run(model, prompt(9), assistant_model=view, **GREEDY, max_new_tokens=20).sequences
    )


@pytest.mark.parametrize("rows", [1, 4])
def test_the_shortest_maximum_counts_and_one_token_is_the_least(rows: int) -> None:
    model, inputs = target("qwen3"), prompt() if rows == 1 else batch()
    length = inputs["input_ids"].shape[1]
    for limit in (length - 4, length + 6):
        options = {**GREEDY, "max_new_tokens": 20}
        plain, assisted = (
            run(model, inputs, stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(limit)]), **options, **extra)
            for extra in ({}, {"assistant_model": dflash("qwen3")})
        )
        assert torch.equal(plain.sequences, assisted.sequences)


def test_scores_that_are_no_numbers_raise_as_in_plain_decoding() -> None:
    class Broken(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores * float("nan")

    options = {**SAMPLED, "max_new_tokens": 4, "logits_processor": LogitsProcessorList([Broken()])}
    for extra in ({}, {"assistant_model": dflash("qwen3")}):
        with pytest.raises(RuntimeError, match="inf"):
            run(target("qwen3"), prompt(), **options, **extra)


def test_results_are_contiguous_and_long_limits_cost_nothing() -> None:
    options = {**GREEDY, "max_length": 10**12, "eos_token_id": list(range(2, 97)), "pad_token_id": 0}
    out = run(target("qwen3"), batch(), assistant_model=dflash("qwen3"), **options).sequences
    assert out.is_contiguous()


def test_an_unset_number_of_assistant_tokens_limits_nothing() -> None:
    model = target("qwen3")
    config, _ = model._prepare_generation_config(None, max_new_tokens=4)
    assert decoding_config(dflash("qwen3"), config).depth is None
    config.num_assistant_tokens = 3
    assert decoding_config(dflash("qwen3"), config).depth == 3
    config.treespec = {"budget": 4}
    assert decoding_config(dflash("qwen3"), config) == TreeSpecConfig(budget=4, depth=3)
    config.treespec = 4
    with pytest.raises(TypeError, match="takes a TreeSpecConfig or a dict of its options, got int"):
        decoding_config(dflash("qwen3"), config)


def test_options_of_a_call_are_laid_over_the_drafters() -> None:
    drafter = dflash("qwen3").with_options(budget=9, shape="chain")
    config = GenerationConfig(max_new_tokens=4)
    config.treespec = {"budget": 4}
    assert decoding_config(drafter, config) == TreeSpecConfig(budget=4, shape="chain")
    config.treespec = TreeSpecConfig(budget=4)
    assert decoding_config(drafter, config) == TreeSpecConfig(budget=4)
    config.treespec = FlexDraftOptions(budget=4)
    with pytest.raises(TypeError, match=r"Unknown option.*flex_mode"):
        decoding_config(drafter, config)


def test_options_are_a_keyword_of_generate() -> None:
    drafter = dflash("qwen3").with_options()
    run(target("qwen3"), prompt(), assistant_model=drafter, treespec={"budget": 3}, do_sample=False, max_new_tokens=8)
    assert set(drafter.last_report.nodes_history) <= {1, 2, 3}
    hf_treespec.uninstall()
    try:
        assert not hasattr(GenerationConfig(), "treespec")
    finally:
        hf_treespec.install()


def test_a_pipeline_names_a_folder_that_there_is_not() -> None:
    with pytest.raises(FileNotFoundError, match="There is no folder '/no/such/drafter'"):
        pipelines_base.load_assistant_model(target("qwen3"), "/no/such/drafter", None)


@pytest.mark.parametrize("options", [{"depth": 2.5}, {"max_budget": "8"}, {"draft_window": 0}, {"depth": True}])
def test_numbers_of_things_are_integers(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"`{name}` must be None or an integer of at least 1, got {value!r}"):
        TreeSpecConfig(**options)


@pytest.mark.parametrize("temperature", [0, "1", None, float("nan")])
def test_a_temperature_is_a_number_above_zero(temperature: Any) -> None:
    with pytest.raises(ValueError, match="`drafter_temperature` must be a number above 0"):
        TreeSpecConfig(drafter_temperature=temperature)


def test_options_are_printed_and_saved_with_a_generation_config(tmp_path: Path) -> None:
    options = TreeSpecConfig(budget=6, shape="chain", on_unsupported="plain")
    config = GenerationConfig(treespec=options, max_new_tokens=12)
    assert '"budget": 6' in repr(config)
    config.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert repr(loaded) == repr(config)
    assert decoding_config(dflash("qwen3"), loaded) == options
    loaded.save_pretrained(tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path) == loaded
    drafter = dflash("qwen3").with_options()
    run(target("qwen3"), prompt(), assistant_model=drafter, generation_config=loaded, do_sample=False)
    assert set(drafter.last_report.nodes_history) <= set(range(1, 7))
    loaded.treespec["size"] = 3
    with pytest.raises(TypeError, match="size"):
        decoding_config(dflash("qwen3"), loaded)


def refused(model: Any, message: str, error: type[Exception] = UnsupportedRequestError, **options: Any) -> None:
    """Sees to it that a call is refused, without a forward of the target."""
    forwards: list[int] = []
    handle = model.register_forward_pre_hook(lambda *args: forwards.append(1))
    with pytest.raises(error, match=message):
        run(model, prompt(), **{"assistant_model": dflash("qwen3"), **GREEDY, **options})
    handle.remove()
    assert not forwards


@pytest.mark.parametrize("number", [0, -1, 2.5])
def test_a_number_of_assistant_tokens_that_is_none_is_refused(number: Any) -> None:
    message = f"`num_assistant_tokens` is how many tokens to draft ahead, a positive whole number, got {number}"
    refused(target("qwen3"), message, ValueError, num_assistant_tokens=number)


@pytest.mark.parametrize(
    "option", [{"prompt_lookup_num_tokens": 4}, {"prompt_lookup_num_tokens": 0}, {"assistant_early_exit": 0}]
)
def test_other_ways_to_speculate_are_refused(option: dict[str, Any]) -> None:
    ((name, value),) = option.items()
    refused(target("qwen3"), rf"\({name}={value} with `assistant_model`\)\. Pass one of the two", **option)


@pytest.mark.parametrize("on_unsupported", ["raise", "plain"])
def test_dola_is_refused(on_unsupported: str) -> None:
    options = {"dola_layers": "low", "max_new_tokens": 4, "treespec": {"on_unsupported": on_unsupported}}
    refused(target("qwen3"), r"DoLa contrasts .*\(dola_layers='low'\)\. Pass one of the two", ValueError, **options)


def test_contrastive_search_is_refused() -> None:
    message = r"Contrastive search .* \(penalty_alpha=0.6 with top_k=4\)\. Drop `penalty_alpha` or `assistant_model`"
    refused(target("qwen3"), message, penalty_alpha=0.6, top_k=4, trust_remote_code=True)


def test_a_penalty_that_plain_sampling_leaves_out_excludes_nothing() -> None:
    options = {**SAMPLED, "penalty_alpha": 0.6, "top_k": 4, "max_new_tokens": 6}
    plain = run(target("qwen3"), prompt(), **options)
    assert torch.equal(
        plain.sequences, run(target("qwen3"), prompt(), assistant_model=dflash("qwen3"), **options).sequences
    )


SIZES = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 4}
RECURRENT = {
    "mamba": lambda: transformers.MambaForCausalLM(transformers.MambaConfig(**SIZES, state_size=4)),
    "rwkv": lambda: transformers.RwkvForCausalLM(transformers.RwkvConfig(**SIZES, attention_hidden_size=48)),
    "recurrent gemma": lambda: transformers.RecurrentGemmaForCausalLM(
        transformers.RecurrentGemmaConfig(**SIZES, num_attention_heads=4, intermediate_size=96, lru_width=48)
    ),
}


@pytest.mark.parametrize("family", RECURRENT)
def test_a_recurrent_target_is_refused_for_its_state(family: str) -> None:
    refused(RECURRENT[family]().eval(), "recurrent.* state.* cannot be rolled back to a branch of the tree")


@pytest.mark.filterwarnings("error:Using the model-agnostic default")
def test_a_target_without_a_stack_of_layers_is_refused_before_anything_is_said() -> None:
    sizes = transformers.GPT2Config(vocab_size=VOCAB, n_embd=48, n_layer=2, n_head=4)
    model = transformers.GPT2LMHeadModel(sizes).eval()
    with pytest.raises(UserWarning, match="default `max_length`"):
        run(model, prompt(), **GREEDY)
    refused(model, r"GPT2LMHeadModel has no `get_decoder\(\)\.layers`")


def test_a_drafter_in_a_wrapper_is_refused() -> None:
    adapted = get_peft_model(copy.deepcopy(dflash("qwen3")), LoraConfig(target_modules=["q_proj"], r=2))
    message = "this is a PeftModel around a DFlashDrafter. .* what `merge_and_unload\\(\\)` returns"
    refused(target("qwen3"), message, TypeError, assistant_model=adapted)
    with pytest.raises(TypeError, match=message):
        pipelines_base.load_assistant_model(target("qwen3"), adapted, None)
    merged = adapted.merge_and_unload()
    plain, assisted = (
        run(target("qwen3"), prompt(), **GREEDY, max_new_tokens=6, **extra)
        for extra in ({}, {"assistant_model": merged})
    )
    assert torch.equal(plain.sequences, assisted.sequences)


def test_uninstall_leaves_wrappers_of_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = integration._WRAPPED[0][:2]
    ours = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: ours(*args, **kwargs))
    with pytest.raises(RuntimeError, match="wrapped by another library"):
        hf_treespec.uninstall()
    monkeypatch.undo()
    hf_treespec.uninstall()
    assert getattr(owner, name) is not ours
    hf_treespec.install()
    hf_treespec.install()
