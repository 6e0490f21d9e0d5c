"""Public reports about speculative decoding, each as a test; the number names the case in the project's list.

"Exact" means token for token what the target alone generates.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import transformers.pipelines.base as pipelines_base
from models import PAD, VOCAB, WINDOW, batch, build, decoder_layers, dflash, hook_count, prompt, target
from parity import GREEDY, SAMPLED, assert_same, compare, counting, eos_tokens, run, tokenizer
from rigged import BLOCK, RiggedSession, rigged, rows_of
from test_distribution import chi_square, draw, joint, p_value
from test_generate_surface import Grammar, Puts, Recording, cache_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import (
    AutoModelForCausalLM,
    Cache,
    CompileConfig,
    DynamicCache,
    PreTrainedTokenizerFast,
    QuantizedCache,
    StaticCache,
)
from transformers.cache_utils import QuantizedLayer

from hf_treespec import UnsupportedRequestError
from hf_treespec.compat import CACHE_KEYWORD
from hf_treespec.decoding import contexts
from hf_treespec.drafters import checks
from hf_treespec.drafters.base import DraftState, TargetModules
from hf_treespec.trees import DraftLattice

NEW = 24


def model() -> Any:
    return target("qwen3", "sdpa")


def fresh_prompt(distinct: int, length: int = 9) -> tuple[dict[str, torch.Tensor], list[int]]:
    """A prompt whose plain continuation does not repeat its `distinct`-th token earlier, and that continuation."""
    for seed in itertools.count():
        inputs = prompt(length, seed=seed)
        tokens = run(model(), inputs, **GREEDY, max_new_tokens=NEW).sequences[0, length:].tolist()
        if tokens[distinct] not in tokens[:distinct]:
            return inputs, tokens
    raise AssertionError


# C1: wrong tokens


def test_c01_eos_in_the_middle_of_an_accepted_block() -> None:
    """C01: eos at draft slot 3 of 15 ends the row there; nothing after it is streamed, scored or returned."""
    inputs, tokens = fresh_prompt(3)
    recording = Recording("streamer", Puts)
    options = {"eos_token_id": tokens[3], "return_dict_in_generate": True, "output_scores": True, **GREEDY}
    drafter = rigged([], "perfect", block_size=16)
    _, assisted, view = compare(
        model(),
        inputs,
        drafter=drafter,
        decoding={"shape": "chain", "budget": 16},
        eos=[tokens[3]],
        per_run=recording,
        **options,
    )
    assert assisted.sequences[0, 9:].tolist() == tokens[:4]
    assert len(assisted.output.scores) == 4
    assert recording.made[1].log == recording.made[0].log
    assert view.last_report.rounds == 1
    assert view.last_report.tokens == 4


def test_c02_eos_as_the_very_first_token() -> None:
    """C02: the prefill's own token may be eos: one new token and no draft."""
    inputs, tokens = fresh_prompt(0)
    _, assisted, view = compare(model(), inputs, kind="perfect", eos=[tokens[0]], eos_token_id=tokens[0], **GREEDY)
    assert assisted.sequences.shape[1] == 10
    assert view.rig.proposals == []
    assert view.last_report.target_forwards == 1


@pytest.mark.parametrize("family", ["rigged", "dflash"])
@pytest.mark.parametrize("ends", [False, True])
def test_c03_the_mask_token_is_a_legal_token(family: str, ends: bool) -> None:
    """C03: a target may emit the drafter's mask token: it is kept, and ends a row only where it is an end token."""
    inputs, tokens = fresh_prompt(6)
    mask = tokens[6]
    if family == "rigged":
        drafter = rigged([inputs["input_ids"][0].tolist() + tokens], "half", mask_token_id=mask)
    else:
        drafter = dflash("qwen3", "sdpa")
    view = drafter.with_options(budget=8)
    view.config = type(view.config)(**{**view.config.to_dict(), "mask_token_id": mask})
    extra = {"eos_token_id": [mask]} if ends else {}
    assisted = run(model(), inputs, assistant_model=view, max_new_tokens=NEW, **GREEDY, **extra)
    assert assisted.sequences[0, 9:].tolist() == (tokens[:7] if ends else tokens)


@pytest.mark.parametrize("new", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1])
def test_c05_never_more_than_asked_for(new: int) -> None:
    """C05: drafts that overrun the length limit neither add tokens nor leave NaN scores."""
    view = dflash("qwen3", "sdpa").with_options(budget=16)
    options = {"max_new_tokens": None, "max_length": 9 + new, "return_dict_in_generate": True, "output_scores": True}
    for drafter in (view, None):
        plain = run(model(), prompt(), seed=1, **SAMPLED, **options)
        rows = rows_of(plain.sequences, prompt())
        drafter = drafter or rigged(rows, "perfect").with_options(shape="chain", budget=BLOCK)
        with counting(model()) as forwards:
            assisted = run(model(), prompt(), seed=1, assistant_model=drafter, **SAMPLED, **options)
        assert_same(plain, assisted, model(), prompt(), {**SAMPLED, **options}, seed=1)
        assert len(assisted.output.scores) == new
        assert not torch.stack(assisted.output.scores).isnan().any()
        if drafter is not view:
            assert all(rows <= new - 1 for rows in forwards[1:]), "more rows are verified than tokens are wanted"


def test_c06_sampling_through_a_drafter_is_the_targets_distribution() -> None:
    """C06: one-step draws at temperature 1 pass a chi-square test against the exact odds; wrong ones fail."""
    samples, _ = draw(8_192, shape="chain", budget=4)
    second = torch.bincount(samples[:, 1], minlength=8)
    expected = joint().sum([0, 2, 3])
    assert chi_square(second, expected * len(samples)) > 1e-3
    # What a residual without renormalisation would draw: the likeliest token is taken first, or drawn again.
    best = int(expected.argmax())
    wrong = expected * (1 - expected[best])
    wrong[best] += expected[best]
    assert chi_square((wrong * len(samples)).round(), expected * len(samples)) < 1e-6


class ThreeSiblings(RiggedSession):
    """Three children under the root, named by the script, at odds far from the target's."""

    def _take(self, call: str, state: DraftState) -> None:
        pass

    def lattice(self, state: DraftState) -> DraftLattice:
        tokens = torch.tensor([7, 0, 3]).expand(len(self.held), 1, -1)
        log_probs = torch.tensor([0.9, 0.09, 0.01]).log().expand(len(self.held), 1, -1)
        return DraftLattice.marginal(tokens.contiguous(), log_probs.contiguous())


def test_c07_siblings_keep_the_marginal(monkeypatch: pytest.MonkeyPatch) -> None:
    """C07: deterministic siblings at the root, drafted far from the target's odds: what is emitted is the target's."""
    import test_distribution

    monkeypatch.setattr(test_distribution, "FixedSession", ThreeSiblings)
    samples, _ = draw(8_192, budget=4)
    second = torch.bincount(samples[:, 1], minlength=8)
    assert chi_square(second, joint().sum([0, 2, 3]) * len(samples)) > 1e-3
    assert p_value(samples) > 1e-3


@pytest.mark.parametrize("mode", ["branching", "chain"])
def test_c08_c16_what_the_draft_believes_does_not_matter(mode: str) -> None:
    """C08, C16: the draft's probabilities decide what is verified, never what is accepted."""
    plain = run(model(), prompt(), seed=5, **SAMPLED, max_new_tokens=NEW)
    rows = rows_of(plain.sequences, prompt())
    shape = {"shape": "chain", "budget": BLOCK} if mode == "chain" else {"budget": 12}

    class Doubtful(RiggedSession):
        def lattice(self, state: DraftState) -> DraftLattice:
            lattice = super().lattice(state)
            flat = torch.full_like(lattice.log_probs, -float(torch.tensor(lattice.log_probs.shape[-1]).log()))
            return DraftLattice(lattice.tokens, flat, lattice.next_slot)

    for session_class in (RiggedSession, Doubtful):
        drafter = rigged(rows, "half", seed=1, session_class=session_class).with_options(**shape)
        assisted = run(model(), prompt(), seed=5, assistant_model=drafter, **SAMPLED, max_new_tokens=NEW)
        assert_same(plain, assisted, model(), prompt(), {**SAMPLED, "max_new_tokens": NEW}, seed=5)


def test_c09_sampling_is_not_silently_greedy() -> None:
    """C09: ten seeds give different continuations, each the plain one; every sampler option counts."""
    options = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.01, "max_new_tokens": 10}
    seen = set()
    for seed in range(10):
        plain, _, _ = compare(model(), prompt(), seed=seed, **options)
        seen.add(tuple(plain.sequences[0].tolist()))
    assert len(seen) >= 8


def test_c09_a_sampler_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """C09: what a drafter cannot sample as the target does raises; nothing else is sampled in its place."""
    network = build("qwen3", "sdpa")
    monkeypatch.setattr(type(network), "_sample", lambda self, *args, **kwargs: pytest.fail("sampled"), raising=False)
    with counting(network) as forwards, pytest.raises(UnsupportedRequestError, match="loop of its own"):
        run(network, prompt(), assistant_model=rigged([]).with_options(budget=8), max_new_tokens=4, **SAMPLED)
    assert forwards == []


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    ("family", "attention"),
    [("qwen3", "eager"), ("qwen3", "treespec"), ("gemma3", "sdpa"), ("gpt_oss", "treespec"), ("qwen2_5_vl", "sdpa")],
)
def test_c11_every_node_is_computed_as_its_path(family: str, attention: str, rows: int, cache: str) -> None:
    """C11: the logits of every verified node, accepted or not, are those of its path run as plain text."""
    network = target(family, attention)
    inputs = prompt(12, seed=3) if rows == 1 else batch(seed=6)
    options = {"max_new_tokens": 12, **GREEDY, **({} if cache == "dynamic" else {"cache_implementation": cache})}
    oracle = rows_of(run(network, inputs, **options).sequences, inputs)
    drafter = rigged(oracle, "half", slots=3, seed=1).with_options(budget=12)
    verified: list[tuple[Any, list[list[int]], torch.Tensor]] = []

    def note(module: Any, args: Any, output: Any) -> None:
        (session,) = drafter.rig.sessions
        if session.tree is not None and output.logits.shape[1] == len(session.tree) > 1:
            starts = drafter.rig.calls[-1]["positions"]
            prefixes = [tokens[:start] for tokens, start in zip(oracle, starts, strict=True)]
            verified.append((session.tree, prefixes, output.logits.clone()))

    handle = network.register_forward_hook(note)
    try:
        run(network, inputs, assistant_model=drafter, **options)
    finally:
        handle.remove()
    assert any(len(set(tree.depths[0].tolist())) < len(tree) for tree, _, _ in verified), "no tree had siblings"
    worst = 0.0
    for tree, prefixes, logits in verified[:: max(1, len(verified) // 3)]:
        for row, prefix in enumerate(prefixes):
            if len(prefix) >= len(oracle[row]) - 1:
                continue
            for node in range(tree.sizes[row]):
                path, at = [], node
                while at >= 0:
                    path.append(int(tree.tokens[row, at]))
                    at = int(tree.parents[row, at])
                with torch.no_grad():
                    plain = network(input_ids=torch.tensor([prefix + path[::-1]]), use_cache=False).logits[0, -1]
                worst = max(worst, float((plain - logits[row, node]).abs().max()))
    assert worst < 2e-4


def test_c12_half_precision_differs_in_ties_only() -> None:
    """C12: in bfloat16 rounding may decide; where it does, plain decoding's own two best are next to each other."""
    network = build("llama", "sdpa", seed=3).to(torch.bfloat16)
    for seed in range(4):
        inputs = prompt(10, seed=seed)
        plain = run(network, inputs, **GREEDY, max_new_tokens=32, return_dict_in_generate=True, output_scores=True)
        drafter = rigged(rows_of(plain.sequences, inputs), "half", seed=seed)
        drafter.rig.strict = False
        view = drafter.with_options(budget=16)
        assisted = run(network, inputs, **GREEDY, max_new_tokens=32, assistant_model=view)
        differing = (plain.sequences != assisted.sequences)[0].nonzero().flatten()
        if len(differing):
            best = plain.output.scores[int(differing[0]) - 10][0].topk(2).values
            assert float(best[0] - best[1]) < 0.02 * float(best[0].abs()) + 1e-3


def recurrent(name: str) -> Any:
    """Tiny targets whose layers keep recurrent or convolution states."""
    from models import _COMMON

    common = {**_COMMON, "head_dim": 16}
    linear = {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    }
    if name == "qwen3_next":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        config = transformers.Qwen3NextConfig(**common, **linear, **experts, shared_expert_intermediate_size=32)
    elif name == "qwen3_5":
        config = transformers.Qwen3_5TextConfig(**common, **linear)
    elif name == "lfm2":
        common.pop("head_dim")
        config = transformers.Lfm2Config(**common, layer_types=["conv", "full_attention"] * 2)
    else:
        config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, state_size=4)
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    network.generation_config.pad_token_id = PAD
    network.generation_config.eos_token_id = None
    return network.eval()


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "lfm2", "mamba"])
def test_c13_c14_recurrent_states_are_exact_or_refused(name: str) -> None:
    """C13, C14: states that cannot follow a branch are refused as such, before prefill; or decoded plainly."""
    network = recurrent(name)
    plain = run(network, prompt(), max_new_tokens=12, **GREEDY)
    rows = rows_of(plain.sequences, prompt())
    with counting(network) as forwards:
        view = rigged(rows).with_options(budget=8)
        refusal: ValueError | None = None
        try:
            assisted = run(network, prompt(), max_new_tokens=12, assistant_model=view, **GREEDY)
        except ValueError as error:
            refusal = error
    if refusal is None:
        assert torch.equal(plain.sequences, assisted.sequences)
    else:
        assert forwards == []
        assert any(word in str(refusal) for word in ("recurrent", "convolution", "state", "position_ids")), refusal
    assert hook_count(network) == 0
    view = rigged(rows).with_options(budget=8, on_unsupported="plain")
    again = run(network, prompt(), max_new_tokens=12, assistant_model=view, **GREEDY)
    assert torch.equal(again.sequences, plain.sequences)


def gemma(name: str) -> Any:
    from models import _ALTERNATING, _COMMON

    common = {**_COMMON, "head_dim": 16, "sliding_window": WINDOW, "layer_types": _ALTERNATING}
    common["final_logit_softcapping"] = 5.0
    by_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2}
    torch.manual_seed(2)
    if name == "gemma2":
        config = transformers.Gemma2Config(**common, query_pre_attn_scalar=16, attn_logit_softcapping=3.0)
    elif name == "gemma3":
        config = transformers.Gemma3TextConfig(**common, query_pre_attn_scalar=16)
    elif name == "gemma3n":
        config = transformers.Gemma3nTextConfig(**common, **by_layer)
    else:
        config = transformers.Gemma4TextConfig(**common, **by_layer, global_head_dim=32)
    attention = "eager" if name == "gemma2" else "sdpa"
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gemma4"])
@pytest.mark.parametrize("length", [1, 3, 12])
def test_c15_scaled_embeddings_softcaps_and_mixed_windows(name: str, length: int) -> None:
    """C15: a target with scaled embeddings, soft caps and mixed windows is exact, from the shortest prompt on."""
    network = gemma(name)
    network.generation_config.pad_token_id = PAD
    for mode in (GREEDY, SAMPLED):
        compare(network, prompt(length, seed=2), seed=length, **mode)


def test_c15_layers_that_pass_on_several_streams_are_refused() -> None:
    """C15: a target without one hidden state a position is refused as such, before prefill; or decoded plainly."""
    network = gemma("gemma3n")
    network.generation_config.pad_token_id = PAD
    view = rigged([]).with_options(budget=8)
    with counting(network) as forwards, pytest.raises(UnsupportedRequestError, match="altup_num_inputs=4"):
        run(network, prompt(), assistant_model=view, max_new_tokens=4, **GREEDY)
    assert forwards == []
    plain = view.with_options(on_unsupported="plain")
    assert run(network, prompt(), assistant_model=plain, max_new_tokens=4, **GREEDY).sequences.shape[1] == 13


# C2: caches and windows


@pytest.mark.parametrize("attention", ["eager", "sdpa", "treespec"])
@pytest.mark.parametrize("shape", [{"shape": "chain", "budget": BLOCK}, {"budget": 24}], ids=["chain", "tree"])
@pytest.mark.parametrize("family", ["mistral", "qwen3_sliding", "gemma3"])
def test_c17_across_the_window(family: str, shape: dict[str, Any], attention: str) -> None:
    """C17: a window of 8, 48 tokens from a prompt within it: exact across the boundary."""
    for kind in ("half", "perfect"):
        compare(target(family, attention), prompt(4, seed=1), kind=kind, max_new_tokens=48, decoding=shape, **GREEDY)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_c19_static_caches(family: str) -> None:
    """C19: a static cache has room for whole trees, wherever the call ends."""
    network = target(family, "sdpa")
    for rows, budget in itertools.product((1, 4), (16, 64)):
        inputs = prompt(6, seed=1) if rows == 1 else batch(seed=1)
        options = {"cache_implementation": "static", "max_new_tokens": 20, **GREEDY}
        plain, _, _ = compare(network, inputs, decoding={"budget": budget}, **options)
        # A later plain call finds nothing changed.
        assert torch.equal(run(network, inputs, **options).sequences, plain.sequences)


@pytest.mark.parametrize("off", [False, True])
def test_c19_rounds_of_a_static_cache_are_not_compiled(off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """C19: trees of every size go by, and none waits for a compiler, whether compilation is on or off."""

    def compiled(self: Any, config: Any) -> Any:
        raise AssertionError("a forward was compiled")

    options = {"cache_implementation": "static", "disable_compile": off, "max_new_tokens": NEW, **GREEDY}
    compilation = CompileConfig()
    compilation._compile_all_devices = True
    rows = rows_of(run(model(), prompt(), **options).sequences, prompt())
    monkeypatch.setattr(type(model()), "get_compiled_call", compiled)
    view = rigged(rows).with_options(budget=8)
    assisted = run(model(), prompt(), assistant_model=view, compile_config=compilation, **options)
    assert assisted.sequences[0].tolist() == rows[0]
    if not off:
        with pytest.raises(AssertionError, match="compiled"):
            run(model(), prompt(), compile_config=compilation, **options)


def test_c20_quantised_caches() -> None:
    """C20: a quantised cache works from the start, or is refused before prefill by name."""
    options: dict[str, Any] = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    for rows, mode in itertools.product((1, 4), (GREEDY, SAMPLED)):
        compare(model(), prompt() if rows == 1 else batch(seed=3), seed=3, **mode, **options)
    recording = Recording(CACHE_KEYWORD, lambda: QuantizedCache(backend="fp8", config=model().config))
    compare(model(), prompt(), per_run=recording, **GREEDY)
    assert recording.made[1].get_seq_length() == recording.made[0].get_seq_length()


class Coarse(QuantizedLayer):
    """Residual quantisation without a quantisation library: quantises again whenever the residual rows are full."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        return (tensor * 4).round()

    def _dequantize(self, q_tensor: torch.Tensor) -> torch.Tensor:
        return q_tensor / 4


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("residual", [1, 4, 64])
def test_c20_caches_that_quantise_again(residual: int, rows: int) -> None:
    """C20: where a cache re-quantises decides what is read; it does so at the same tokens as in plain decoding."""

    def make() -> Cache:
        return Cache(layers=[Coarse(residual_length=residual) for _ in range(4)])

    for mode in (GREEDY, SAMPLED):
        recording = Recording(CACHE_KEYWORD, make)
        plain, _, _ = compare(model(), prompt() if rows == 1 else batch(seed=3), per_run=recording, seed=3, **mode)
        assert recording.made[1].get_seq_length() == recording.made[0].get_seq_length()
        if residual == 1 and rows == 1 and mode == GREEDY:
            assert (
                plain.sequences[0, 9:].tolist()
                != run(model(), prompt(), **GREEDY, max_new_tokens=NEW).sequences[0, 9:].tolist()
            )


def test_c20_unknown_caches_are_refused_before_prefill() -> None:
    """C20: a cache with a mind of its own is refused for what it does, not found out after prefill."""

    class Stubborn(DynamicCache):
        def update(self, *args: Any, **kwargs: Any) -> Any:
            return super().update(*args, **kwargs)

    view = rigged([]).with_options(budget=8)
    with counting(model()) as forwards, pytest.raises(ValueError, match="Stubborn"):
        run(model(), prompt(), assistant_model=view, max_new_tokens=8, **GREEDY, **{CACHE_KEYWORD: Stubborn()})
    assert forwards == []
    full = StaticCache(config=model().config, max_cache_len=4)
    with counting(model()) as forwards, pytest.raises(ValueError, match=r"(?i)static"):
        run(model(), batch(), assistant_model=view, max_new_tokens=8, **GREEDY, **{CACHE_KEYWORD: full})
    assert forwards == []


def test_c22_a_conversation_keeps_its_draft_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """C22: turn two of a conversation drafts with what turn one has seen; without it, from the new tokens, exactly."""
    warnings: list[str] = []
    monkeypatch.setattr(contexts.logger, "warning_once", warnings.append)
    drafter = rigged([], "half", seed=1)
    drafter.rig.gap = True
    view = drafter.with_options(budget=8)
    inputs, cache, seen = prompt(7, seed=4), DynamicCache(config=model().config), []
    for turn in range(3):
        plain = run(model(), inputs, **GREEDY, max_new_tokens=10)
        drafter.rig.rows = rows_of(plain.sequences, inputs)
        # The second turn goes on without the drafter, so the third finds a cache its context has not followed.
        helped: dict[str, Any] = {} if turn == 1 else {"assistant_model": view}
        helped |= {CACHE_KEYWORD: cache, "return_dict_in_generate": True}
        output = run(model(), inputs, **GREEDY, max_new_tokens=10, **helped).output
        assert torch.equal(output.sequences, plain.sequences), turn
        cache = cache_of(output)
        seen.append(len(drafter.rig.sessions))
        turn_ids = torch.cat([plain.sequences, torch.tensor([[5, 6 + turn]])], 1)
        inputs = {"input_ids": turn_ids, "attention_mask": torch.ones_like(turn_ids)}
    assert seen == [1, 1, 2]
    assert drafter.rig.sessions[1].first[0] == 7 + 10 + 2 + 10 - 1, "the new context starts where the cache ends"
    (warning,) = warnings
    assert "extended without the drafter" in warning


def test_c22_the_context_survives_as_long_as_it_is_followed() -> None:
    """C22: two assisted turns share one session."""
    drafter = rigged([], "half", seed=1)
    view = drafter.with_options(budget=8)
    inputs, cache = batch((4, 9), seed=4), DynamicCache(config=model().config)
    for turn in range(2):
        plain = run(model(), inputs, **GREEDY, max_new_tokens=10)
        drafter.rig.rows = rows_of(plain.sequences, inputs)
        output = run(
            model(),
            inputs,
            **GREEDY,
            max_new_tokens=10,
            return_dict_in_generate=True,
            assistant_model=view,
            **{CACHE_KEYWORD: cache},
        ).output
        assert torch.equal(output.sequences, plain.sequences), turn
        ids = torch.cat([plain.sequences, torch.tensor([[5, 6], [8, 9]])], 1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 12, dtype=torch.long)], 1)
        inputs = {"input_ids": ids, "attention_mask": mask}
    assert len(drafter.rig.sessions) == 1


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("chunk", [1, 4, 11, 50])
def test_c23_chunked_prefill_feeds_the_drafter_everything(family: str, chunk: int) -> None:
    """C23: with prefill in chunks of 4 and a prompt of 11 the drafter's context is the whole prompt."""
    network, inputs = target(family, "sdpa"), prompt(11, seed=3)
    reports = []
    for options in ({}, {"prefill_chunk_size": chunk}):
        _, _, view = compare(network, inputs, seed=2, max_new_tokens=14, **GREEDY, **options)
        assert view.rig.calls[0]["added"] == [11]
        reports.append(view.last_report.acceptance_length)
    assert reports[0] == reports[1]


def test_c25_hidden_states_belong_to_the_accepted_path() -> None:
    """C25: one entry per token, each the hidden state of the position that predicted it."""
    inputs = prompt(8, seed=6)
    options = {"return_dict_in_generate": True, "output_hidden_states": True}
    _, assisted, _ = compare(model(), inputs, kind="half", max_new_tokens=16, **GREEDY, **options)
    with torch.no_grad():
        whole = model()(input_ids=assisted.sequences[:, :-1], output_hidden_states=True).hidden_states
    assert len(assisted.output.hidden_states) == 16
    for layer, expected in enumerate(whole):
        got = torch.cat([step[layer] for step in assisted.output.hidden_states], 1)
        assert got.shape == expected.shape
        assert torch.allclose(got, expected, atol=5e-4)


# C3: batches, dtypes, adapters


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss", "qwen2_5_vl"])
def test_c28_rows_of_a_batch_are_their_own(family: str) -> None:
    """C28: left-padded prompts of 3, 7 and 12 tokens: each row is its own batch-1 run, ended and padded by itself."""
    network = target(family, "eager")
    inputs = batch((3, 7, 12), seed=2)
    free = run(network, inputs, **GREEDY, max_new_tokens=NEW).sequences
    eos = eos_tokens(free, 12, NEW)
    _, assisted, _ = compare(network, inputs, eos=eos, eos_token_id=eos, pad_token_id=PAD, **GREEDY)
    for row, length in enumerate((3, 7, 12)):
        alone = {name: value[row : row + 1, -length:] for name, value in inputs.items()}
        expected = run(network, alone, eos_token_id=eos, max_new_tokens=NEW, **GREEDY).sequences[0, length:].tolist()
        got = assisted.sequences[row, 12:].tolist()
        assert got[: len(expected)] == expected
        assert set(got[len(expected) :]) <= {PAD}


def test_c29_several_sequences_for_one_prompt() -> None:
    """C29: num_return_sequences runs as a batch."""
    plain, _, view = compare(model(), prompt(), num_return_sequences=3, **SAMPLED)
    assert plain.sequences.shape[0] == 3
    assert len(view.rig.sessions) == 1


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [1, 4])
def test_c31_drafts_that_are_not_finite(poison: float, rows: int, caplog: pytest.LogCaptureFixture) -> None:
    """C31: a drafter that overflows costs speed, not tokens; the user is told once."""
    inputs = prompt() if rows == 1 else batch(seed=1)
    drafter = rigged([], "perfect")
    drafter.rig.poison = poison
    logger = logging.getLogger("hf_treespec")
    logger.addHandler(caplog.handler)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    try:
        _, _, view = compare(model(), inputs, drafter=drafter, **GREEDY)
    finally:
        transformers.logging.set_verbosity(verbosity)
        logger.removeHandler(caplog.handler)
    report = view.last_report
    assert report.nonfinite_drafts >= 1
    assert report.plain_rounds == report.rounds == NEW - 1
    warnings = {
        (record.created, record.getMessage()) for record in caplog.records if record.levelno >= logging.WARNING
    }
    assert len([message for _, message in warnings if "finite" in message]) == 1


@pytest.mark.parametrize("pair", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16")])
def test_c31_c32_drafter_and_target_of_different_dtypes(pair: tuple[str, str]) -> None:
    """C31, C32: a drafter in another dtype than its target is cast at the boundary and keeps its own."""
    ours, theirs = (getattr(torch, name) for name in pair)
    network = build("qwen3", "sdpa").to(theirs)
    drafter = type(dflash("qwen3", "sdpa"))(dflash("qwen3", "sdpa").config).to(ours).eval()
    plain = run(network, prompt(), **GREEDY, max_new_tokens=12)
    assisted = run(network, prompt(), **GREEDY, max_new_tokens=12, assistant_model=drafter.with_options(budget=8))
    assert drafter.dtype == ours
    assert network.dtype == theirs
    assert drafter.last_report is None, "a view's report is the view's"
    if theirs == torch.float32:
        assert torch.equal(plain.sequences, assisted.sequences)
    else:
        assert assisted.sequences.shape == plain.sequences.shape


def test_c31_a_pipeline_leaves_the_drafters_dtype_alone(tmp_path: Path) -> None:
    """C31: where transformers casts an assistant to its target's dtype, a drafter keeps what it was saved in."""
    drafter = dflash("qwen3", "sdpa")
    type(drafter)(drafter.config).to(torch.bfloat16).save_pretrained(tmp_path)
    loaded, _ = pipelines_base.load_assistant_model(build("qwen3").half(), str(tmp_path), None)
    assert loaded.dtype == torch.bfloat16
    loaded, _ = pipelines_base.load_assistant_model(build("qwen3").half(), drafter, None)
    assert loaded.dtype == torch.float32


def test_c33_adapters_on_the_target() -> None:
    """C33: with a LoRA adapter the result is that of the adapted target; disabled, that of the bare one."""
    peft = pytest.importorskip("peft")
    base = build("qwen3", "sdpa", seed=6)
    bare = run(base, prompt(), **GREEDY, max_new_tokens=NEW).sequences
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    )
    expected = run(adapted, prompt(), **GREEDY, max_new_tokens=NEW).sequences
    assert not torch.equal(expected, bare)
    for network, rows in ((adapted, expected), (base, expected)):
        view = rigged(rows_of(rows, prompt()), "half").with_options(budget=8)
        assert torch.equal(run(network, prompt(), **GREEDY, max_new_tokens=NEW, assistant_model=view).sequences, rows)
    drafter = dflash("qwen3", "sdpa")
    weights = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    view = drafter.with_options(budget=8)
    assert torch.equal(run(adapted, prompt(), **GREEDY, max_new_tokens=NEW, assistant_model=view).sequences, expected)
    assert drafter.state_dict().keys() == weights.keys(), "an adapter was put on the drafter"
    assert all(torch.equal(tensor, weights[name]) for name, tensor in drafter.state_dict().items())
    with adapted.disable_adapter():
        view = rigged(rows_of(bare, prompt()), "half").with_options(budget=8)
        assisted = run(adapted, prompt(), **GREEDY, max_new_tokens=NEW, assistant_model=view).sequences
    assert torch.equal(assisted, bare)


def test_c33_prompt_learning_is_refused() -> None:
    """C33: virtual tokens in front of every forward are no part of a verification forward."""
    peft = pytest.importorskip("peft")
    base = build("qwen3", "sdpa", seed=6)
    adapted = peft.get_peft_model(base, peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(UnsupportedRequestError, match="Prompt-learning"):
        run(adapted, prompt(), **GREEDY, max_new_tokens=4, assistant_model=rigged([]).with_options(budget=8))


def test_c34_padded_vocabulary_rows_are_never_drafted() -> None:
    """C34: rows that pad the head to a round number are no tokens."""
    network = build("qwen3", "sdpa", seed=2)
    network.resize_token_embeddings(128)
    network.config.vocab_size = VOCAB
    modules = TargetModules(network)
    assert modules.logits(torch.zeros(2, 64)).shape == (2, VOCAB)


@pytest.fixture
def sharded() -> Iterator[Any]:
    """A target whose embedding and head are sharded over a mesh, here of one rank."""
    network = build("qwen3", "sdpa")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    for module in (network.get_input_embeddings(), network.get_output_embeddings()):
        module.weight = torch.nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
    yield network
    torch.distributed.destroy_process_group()


def test_c34_shards_of_the_vocabulary_are_not_indexed_by_token_ids(sharded: Any) -> None:
    """C34: of a tensor-parallel target only the modules are called, which put the shards together."""
    assert TargetModules(model()).selects
    assert not TargetModules(sharded).selects
    (finding,) = checks.embeddings(dflash("qwen3", "sdpa"), sharded)
    assert finding.status is checks.Status.unchecked


# C4: what a drafter borrows


def borrowed(name: str) -> Any:
    if name == "granite":
        from models import _COMMON

        torch.manual_seed(1)
        config = transformers.GraniteConfig(**_COMMON, embedding_multiplier=3.0, logits_scaling=2.0)
        return AutoModelForCausalLM.from_config(config).eval()
    return gemma(name) if name.startswith("gemma") else target(name, "eager")


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3", "gemma4", "granite", "qwen2_5_vl"])
def test_c38_embeddings_and_head_are_borrowed_as_the_target_uses_them(name: str) -> None:
    """C38: scaled embeddings, logit scaling and soft caps apply to drafts as they do in the target."""
    network = borrowed(name)
    modules = TargetModules(network)
    inputs = prompt(6, seed=1)["input_ids"]
    into: list[torch.Tensor] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        into.append(args[0] if args else kwargs["hidden_states"])

    handle = decoder_layers(network)[0].register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        output = network(input_ids=inputs, output_hidden_states=True)
        handle.remove()
        assert torch.allclose(modules.embed(inputs, torch.float32), into[0], atol=1e-6)
        logits = modules.logits(output.hidden_states[-1])
    assert torch.allclose(logits, output.logits, atol=1e-5)


def reshaped(**fields: Any) -> Any:
    """A random DFlash drafter for the shared target, other fields of its configuration replaced."""
    drafter = dflash("qwen3", "sdpa")
    return type(drafter)(type(drafter.config)(**{**drafter.config.to_dict(), **fields})).eval()


def test_c40_feature_layers_are_what_they_are_called() -> None:
    """C40: the feature of layer i is the output of decoder layer i, the last one before the final norm."""
    layers = (0, 1, 3)
    plain = run(model(), prompt(), **GREEDY, max_new_tokens=12)
    drafter = rigged(rows_of(plain.sequences, prompt()), "half", layers=layers)
    run(model(), prompt(), **GREEDY, max_new_tokens=12, assistant_model=drafter.with_options(budget=8))
    (session,) = drafter.rig.sessions
    features = session.features(0)
    with torch.no_grad():
        hidden = model()(input_ids=plain.sequences[:, : len(features)], output_hidden_states=True).hidden_states
        assert torch.allclose(features[:, :64], hidden[1][0], atol=1e-4)
        assert torch.allclose(features[:, 64:128], hidden[2][0], atol=1e-4)
        assert torch.allclose(model().model.norm(features[:, 128:]), hidden[4][0], atol=1e-3)
    outside = reshaped(target_layer_ids=[0, 4])
    with counting(model()) as forwards, pytest.raises(ValueError, match="target_layer_ids"):
        run(model(), prompt(), assistant_model=outside, max_new_tokens=4, **GREEDY)
    assert forwards == []


def test_c43_every_call_says_what_it_did() -> None:
    """C43: statistics belong to a call: a good and a bad draft of one drafter are told apart."""
    drafter = rigged([])
    lengths = []
    for kind in ("perfect", "wrong"):
        drafter.rig.kind = kind
        chain = {"shape": "chain", "budget": BLOCK}
        _, _, view = compare(model(), prompt(), drafter=drafter, decoding=chain, max_new_tokens=25, **GREEDY)
        report = view.last_report
        lengths.append(report.acceptance_length)
        assert report.acceptance_by_depth == sorted(report.acceptance_by_depth, reverse=True)
        assert report.tokens == 25
        assert json.loads(json.dumps(report.to_dict()))["acceptance_length"] == report.acceptance_length
    assert lengths == [BLOCK, 1.0]
    assert drafter.last_report is None


# C5: generate()


def test_c46_options_of_a_call_are_the_calls() -> None:
    """C46: num_assistant_tokens counts for the call it was given to and leaves no trace."""
    plain = run(model(), prompt(), **GREEDY, max_new_tokens=NEW)
    drafter = rigged(rows_of(plain.sequences, prompt()), "perfect")
    deepest = []
    for extra in ({}, {"num_assistant_tokens": 3}, {}):
        drafter.rig.calls.clear()
        view = drafter.with_options(budget=BLOCK, shape="chain")
        assisted = run(model(), prompt(), assistant_model=view, max_new_tokens=NEW, **GREEDY, **extra)
        assert torch.equal(assisted.sequences, plain.sequences)
        deepest.append(max(call["depth"] for call in drafter.rig.proposals))
    assert deepest == [BLOCK - 1, 3, BLOCK - 1]


def test_c47_stateful_processors_follow_one_path() -> None:
    """C47: a grammar sees each token once, in order, and nothing after the end."""
    inputs, _ = fresh_prompt(8)
    free = run(model(), inputs, **GREEDY, max_new_tokens=NEW, logits_processor=[Grammar()]).sequences[0, 9:].tolist()
    recording = Recording("logits_processor", Grammar)
    plain, _, _ = compare(
        model(), inputs, per_run=recording, kind="half", eos=[free[8]], eos_token_id=free[8], **GREEDY
    )
    assert recording.made[1].calls == recording.made[0].calls
    assert len(recording.made[1].calls) == plain.sequences.shape[1] - 9


def test_c48_a_drafter_of_another_vocabulary() -> None:
    """C48: a drafter for other token ids is refused when it is attached, and told why."""
    other = reshaped(vocab_size=120)
    with counting(model()) as forwards, pytest.raises(ValueError, match=r"(?s)vocab.*120|120.*vocab"):
        run(model(), prompt(), assistant_model=other, max_new_tokens=4, **GREEDY)
    assert forwards == []


def test_c48_a_drafter_has_no_tokenizer_of_its_own() -> None:
    """C48: another tokenizer for the drafter is refused with the reason; the target's own may be named."""
    words = Tokenizer(WordLevel({"<unk>": 0, "word": 1}, unk_token="<unk>"))
    other = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    view = rigged([]).with_options(budget=8, on_unsupported="plain")
    for named in ({"tokenizer": tokenizer()}, {}):
        options = {"assistant_model": view, "assistant_tokenizer": other, "max_new_tokens": 4, **GREEDY}
        with counting(model()) as forwards, pytest.raises(ValueError, match=r"assistant_tokenizer.*token ids"):
            run(model(), prompt(), **named, **options)
        assert forwards == []
    both = {"tokenizer": tokenizer(), "assistant_tokenizer": tokenizer()}
    run(model(), prompt(), assistant_model=view, max_new_tokens=4, **GREEDY, **both)
    # A pipeline hands on what it was given, to be refused by the same rule.
    assert pipelines_base.load_assistant_model(model(), view, other)[1] is other
