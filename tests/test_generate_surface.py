"""Everything users pass to `generate()`: with a drafter it gives what it gives without one, or a named error."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import BATCH_LENGTHS, PAD, VOCAB, batch, build, dflash, hook_count, prompt, target
from parity import GREEDY, SAMPLED, Inputs, assert_same, compare, counting, eos_tokens, run, tokenizer
from rigged import BLOCK, rigged, rows_of, same_script
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    QuantizedCache,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
    TextStreamer,
    WatermarkingConfig,
)

import hf_treespec
from hf_treespec.compat import CACHE_KEYWORD
from hf_treespec.decoding import contexts, integration

NEW = 24


@functools.cache
def base(seed: int = 0) -> list[int]:
    """The plain greedy continuation of `prompt(9, seed)`."""
    return run(model(), prompt(9, seed), **GREEDY, max_new_tokens=NEW).sequences[0, 9:].tolist()


def model() -> Any:
    return target("qwen3", "sdpa")


@functools.cache
def stopping_batch() -> tuple[Inputs, list[int]]:
    """A left-padded batch and end tokens that stop its rows at different steps."""
    inputs = batch(seed=6)
    return inputs, eos_tokens(run(model(), inputs, **GREEDY, max_new_tokens=NEW).sequences, 17, NEW)


# Processors

WARPERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6, "top_k": 0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6, "top_k": 0},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.7},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "eta_cutoff": {"eta_cutoff": 0.02},
    "top_h": {"top_h": 0.5, "top_k": 0},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.95},
}


def processors() -> dict[str, dict[str, Any]]:
    """Arguments that make logits processors, aimed at tokens the plain run would emit."""
    plain = base()
    return {
        "repetition_penalty": {"repetition_penalty": 1.4},
        "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.3},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
        "bad_words_ids": {"bad_words_ids": [[plain[5]], [plain[7], plain[8]]]},
        "suppress_tokens": {"suppress_tokens": [plain[2], plain[3]]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [plain[0]]},
        "sequence_bias": {"sequence_bias": [[[plain[3]], -20.0], [[plain[0], plain[1]], 8.0]]},
        "forced_eos_token_id": {"forced_eos_token_id": 5, "eos_token_id": 5},
        "exponential_decay": {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": plain[20]},
        "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": plain[4]},
        "min_length": {"min_length": 22, "eos_token_id": plain[4]},
        "remove_invalid_values": {"remove_invalid_values": True},
        "renormalize_logits": {"renormalize_logits": True},
        "prefix_allowed_tokens_fn": {
            "prefix_allowed_tokens_fn": lambda row, ids: list(range(3 + (len(ids) + row) % 5, VOCAB, 2))
        },
        "guidance_scale": {"guidance_scale": 1.5},
        "negative_prompt": {"guidance_scale": 2.0, "negative_prompt_ids": prompt(4, seed=8)["input_ids"]},
        "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash", context_width=2)},
        "synthid": {
            "watermarking_config": SynthIDTextWatermarkingConfig(
                ngram_len=3, keys=[3, 14, 15, 92], sampling_table_size=1024, context_history_size=64
            )
        },
    }


PROCESSORS = [
    "repetition_penalty",
    "encoder_repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "sequence_bias",
    "forced_eos_token_id",
    "exponential_decay",
    "min_new_tokens",
    "min_length",
    "remove_invalid_values",
    "renormalize_logits",
    "prefix_allowed_tokens_fn",
    "guidance_scale",
    "negative_prompt",
    "watermark",
    "synthid",
]
#: Processors whose plain run must differ from the bare one, or the case shows nothing.
CHANGES_NOTHING = {"remove_invalid_values", "renormalize_logits", "encoder_repetition_penalty"}


def eos_of(options: dict[str, Any]) -> list[int]:
    eos = options.get("eos_token_id")
    return [] if eos is None else eos if isinstance(eos, list) else [eos]


@pytest.mark.parametrize("name", WARPERS)
@pytest.mark.parametrize("rows", [1, 4])
def test_warpers(name: str, rows: int) -> None:
    inputs, eos = (prompt(), []) if rows == 1 else stopping_batch()
    options = {"do_sample": True, "temperature": 1.1, **WARPERS[name], **({"eos_token_id": eos} if eos else {})}
    compare(model(), inputs, seed=rows, eos=eos, **options)


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_greedy(name: str) -> None:
    options = processors()[name]
    plain, _, drafter = compare(model(), prompt(), kind="half", seed=2, eos=eos_of(options), **GREEDY, **options)
    if name not in CHANGES_NOTHING:
        assert plain.sequences[0, 9:].tolist() != base()
    assert drafter.last_report.acceptance_length > 1.0, "the walk never left a root: nothing was shown"


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_sampled_batch(name: str) -> None:
    options = processors()[name]
    inputs = batch(seed=4)
    if name == "negative_prompt":
        options = {**options, "negative_prompt_ids": options["negative_prompt_ids"].expand(4, -1)}
    compare(model(), inputs, kind="half", seed=5, eos=eos_of(options), max_new_tokens=14, **SAMPLED, **options)


def test_forced_bos() -> None:
    inputs = {"input_ids": torch.tensor([[1]]), "attention_mask": torch.tensor([[1]])}
    plain, _, _ = compare(model(), inputs, forced_bos_token_id=9, **GREEDY)
    assert int(plain.sequences[0, 1]) == 9


class Grammar(LogitsProcessor):
    """Allows tokens by the sum of the prefix; must see each row's prefix grow by one token a call, and none twice."""

    def __init__(self) -> None:
        self.seen: torch.Tensor | None = None
        self.calls: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.seen is not None:
            assert input_ids.shape[1] == self.seen.shape[1] + 1, f"{self.seen.shape} then {input_ids.shape}"
            assert torch.equal(input_ids[:, :-1], self.seen), "a prefix changed between two calls"
        assert scores.shape == (len(input_ids), VOCAB)
        self.seen = input_ids.clone()
        self.calls.append(input_ids.tolist())
        banned = (input_ids.sum(1, keepdim=True) + torch.arange(VOCAB)) % 3 == 0
        return scores.masked_fill(banned, -torch.inf)


class Recording:
    """Builds an option anew for each run and keeps what was built: plain first, assisted second."""

    def __init__(self, option: str, make: Callable[[], Any]) -> None:
        self.option, self.make, self.made = option, make, []  # type: ignore[var-annotated]

    def __call__(self) -> dict[str, Any]:
        self.made.append(self.make())
        wrap = {"logits_processor": LogitsProcessorList, "stopping_criteria": StoppingCriteriaList}.get(self.option)
        return {self.option: wrap([self.made[-1]]) if wrap else self.made[-1]}


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_stateful_processor_sees_what_plain_shows_it(rows: int, mode: dict[str, Any]) -> None:
    inputs, eos = (prompt(), []) if rows == 1 else stopping_batch()
    recording = Recording("logits_processor", Grammar)
    extra = {"eos_token_id": eos} if eos else {}
    compare(model(), inputs, per_run=recording, eos=eos, seed=1, **mode, **extra)
    plain, assisted = recording.made[:2]
    assert assisted.calls == plain.calls


class EndsOn(StoppingCriteria):
    """Ends a row on a multiple of 7 after some length; knows what it was shown."""

    def __init__(self, length: int, after: int) -> None:
        self.length, self.after = length, after
        self.calls: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        shown = None if scores is None else len(scores)
        self.calls.append((input_ids.tolist(), shown))
        late = input_ids.shape[1] >= self.length + self.after
        return (input_ids[:, -1] % 7 == 0) & late


@pytest.mark.parametrize("with_scores", [False, True])
@pytest.mark.parametrize("with_eos", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
def test_custom_criteria_are_called_per_token(rows: int, with_eos: bool, with_scores: bool) -> None:
    inputs, eos = (prompt(), [base()[20]]) if rows == 1 else stopping_batch()
    recording = Recording("stopping_criteria", lambda: EndsOn(inputs["input_ids"].shape[1], 4))
    options: dict[str, Any] = {"eos_token_id": eos} if with_eos else {}
    if with_scores:
        options |= {"return_dict_in_generate": True, "output_scores": True}
    drafter = rigged([], "half", seed=3)
    # Without an end token a stopped row goes on until all have stopped: the oracle's rows then have no end.
    compare(model(), inputs, per_run=recording, drafter=drafter, eos=eos if with_eos else (), **GREEDY, **options)
    plain, assisted = recording.made[:2]
    assert assisted.calls == plain.calls
    assert len(plain.calls) < NEW, "the criterion never fired"


@pytest.mark.parametrize("rows", [1, 4])
def test_stop_strings(rows: int) -> None:
    inputs = prompt() if rows == 1 else batch(seed=6)
    free = run(model(), inputs, **GREEDY, max_new_tokens=NEW).sequences[:, inputs["input_ids"].shape[1] :]
    strings = [tokenizer().decode(row[6 + index : 8 + index]) for index, row in enumerate(free)]
    eos = {"eos_token_id": int(free[-1, 3])} if rows > 1 else {}
    plain, _, _ = compare(
        model(), inputs, stop_strings=strings, tokenizer=tokenizer(), eos=list(eos.values()), **GREEDY, **eos
    )
    assert plain.sequences.shape[1] < inputs["input_ids"].shape[1] + NEW or rows > 1


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_stopped_rows_go_on_where_nothing_pads(mode: dict[str, Any]) -> None:
    """Without an end token a row that a stop string ended generates on until the last row has stopped."""
    inputs = batch(seed=6)
    free = run(model(), inputs, **mode, max_new_tokens=NEW).sequences[:, inputs["input_ids"].shape[1] :]
    strings = [tokenizer().decode(row[2 + 2 * index : 4 + 2 * index]) for index, row in enumerate(free)]
    for kind in ("half", "perfect"):
        options = {"stop_strings": strings, "tokenizer": tokenizer(), "return_dict_in_generate": True}
        plain, assisted, _ = compare(model(), inputs, kind=kind, **options, **mode)
        length = plain.sequences.shape[1]
        assert length < inputs["input_ids"].shape[1] + NEW
        # A row that ran ahead is cut back in the cache as well.
        assert cache_of(assisted.output).get_seq_length() == cache_of(plain.output).get_seq_length() == length - 1
        keys = [cache_of(run.output).layers[0].keys for run in (plain, assisted)]
        assert torch.allclose(*keys, atol=1e-4)
        session = contexts._CONTEXTS[cache_of(assisted.output)].session
        assert session.lengths == [length - 1 - 17 + real for real in BATCH_LENGTHS]
        assert torch.equal(plain.sequences[:, 17:], free[:, : plain.sequences.shape[1] - 17])


@pytest.mark.parametrize("eos", [[7], [7, 5], [0], [20, 9, 4]], ids=str)
def test_eos_lists(eos: list[int]) -> None:
    tokens = [base()[step] for step in eos]
    for kind in ("perfect", "half"):
        plain, _, drafter = compare(model(), prompt(), kind=kind, eos=tokens, eos_token_id=tokens, **GREEDY)
        assert int(plain.sequences[0, -1]) in tokens
        assert drafter.last_report.tokens == plain.sequences.shape[1] - 9


@pytest.mark.parametrize("new", [1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("rows", [1, 4])
def test_max_new_tokens(new: int, rows: int) -> None:
    inputs = prompt() if rows == 1 else batch(seed=2)
    for kind in ("perfect", "wrong"):
        _, _, drafter = compare(model(), inputs, kind=kind, max_new_tokens=new, **SAMPLED)
        assert drafter.last_report.tokens == new * rows
        for call in drafter.rig.proposals:
            committed = min(
                position - int(mask.sum()) + 1
                for position, mask in zip(call["positions"], inputs["attention_mask"], strict=True)
            )
            assert call["depth"] < new - committed, "the last token comes from the last node, whatever was drafted"


def test_max_length_near_the_prompt() -> None:
    compare(model(), prompt(), max_new_tokens=None, max_length=11, **GREEDY)


@pytest.mark.parametrize("seconds", [0.0, 1000.0])
def test_max_time(seconds: float) -> None:
    plain, _, _ = compare(model(), prompt(), max_time=seconds, **GREEDY)
    assert plain.sequences.shape[1] == (10 if seconds == 0.0 else 9 + NEW)


# Streamers


class Puts:
    """Notes what a streamer is given."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.log.append((tuple(value.shape), value.tolist()))

    def end(self) -> None:
        self.log.append("end")


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 4])
def test_streamer_puts(rows: int, mode: dict[str, Any]) -> None:
    inputs, eos = (prompt(), []) if rows == 1 else stopping_batch()
    recording = Recording("streamer", Puts)
    extra = {"eos_token_id": eos} if eos else {}
    compare(model(), inputs, per_run=recording, eos=eos, **mode, **extra)
    plain, assisted = recording.made[:2]
    assert assisted.log == plain.log
    assert assisted.log[1][0] == (rows,)


def test_nothing_is_streamed_before_all_rows_have_it() -> None:
    """The row that stops last is far ahead of one that stopped before it, and goes on where nothing pads."""
    inputs = batch((9, 9), seed=6)
    free = run(model(), inputs, **GREEDY, max_new_tokens=NEW).sequences[:, 9:]
    strings = [tokenizer().decode(free[0, :2]), tokenizer().decode(free[1, 7:9])]
    options = {"max_new_tokens": NEW, "stop_strings": strings, "tokenizer": tokenizer(), **GREEDY}
    streamers = Puts(), Puts()
    plain = run(model(), inputs, streamer=streamers[0], **options)
    assert plain.sequences.shape[1] == 9 + 9
    rows = rows_of(plain.sequences, inputs)
    drafter = rigged([[0] * len(rows[0]), rows[1]], "perfect")
    same_script(drafter, strict=False)
    run(model(), inputs, assistant_model=drafter.with_options(budget=8), streamer=streamers[1], **options)
    assert streamers[1].log == streamers[0].log


def test_text_streamer(capsys: pytest.CaptureFixture[str]) -> None:
    compare(model(), prompt(), per_run=lambda: {"streamer": TextStreamer(tokenizer(), skip_prompt=True)}, **GREEDY)
    printed = capsys.readouterr().out.strip().split("\n")
    assert printed[0] == printed[1] == tokenizer().decode(base())


def test_iterator_streamer() -> None:
    streamer = TextIteratorStreamer(tokenizer(), skip_prompt=True)
    drafter = rigged([prompt()["input_ids"][0].tolist() + base()]).with_options(budget=8)
    call = {"assistant_model": drafter, "streamer": streamer, "max_new_tokens": NEW, **GREEDY}
    thread = threading.Thread(target=run, args=(model(), prompt()), kwargs=call)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer().decode(base())


# Outputs


def test_num_return_sequences() -> None:
    plain, _, _ = compare(model(), prompt(), num_return_sequences=3, **SAMPLED)
    assert len({tuple(row) for row in plain.sequences.tolist()}) == 3
    inputs = batch((4, 7), seed=1)
    compare(model(), inputs, num_return_sequences=2, **SAMPLED)


def finite(scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(scores.isinf(), -1e4)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("rows", [1, 4])
def test_return_dict(family: str, rows: int) -> None:
    network = target(family, "sdpa")
    inputs = prompt(12, seed=1) if rows == 1 else batch(seed=6)
    length = inputs["input_ids"].shape[1]
    free = run(network, inputs, **GREEDY, max_new_tokens=16).sequences
    eos = eos_tokens(free, length, 16) if rows > 1 else [int(free[0, -2])]
    outputs = dict.fromkeys(
        ("return_dict_in_generate", "output_scores", "output_logits", "output_hidden_states"), True
    )
    plain, assisted, drafter = compare(
        network, inputs, eos=eos, eos_token_id=eos, max_new_tokens=16, repetition_penalty=1.3, **GREEDY, **outputs
    )
    expected, actual = plain.output, assisted.output
    assert type(actual) is type(expected)
    assert set(actual.keys()) == set(expected.keys())
    steps = expected.sequences.shape[1] - length
    assert len(actual.scores) == len(actual.logits) == len(actual.hidden_states) == len(expected.scores) == steps
    prompts = inputs["attention_mask"].sum(1).tolist()
    counts = [len(tokens) - taken for tokens, taken in zip(drafter.rig.rows, prompts, strict=True)]
    for step in range(steps):
        live = [row for row, count in enumerate(counts) if step < count]
        assert actual.scores[step].shape == expected.scores[step].shape
        assert torch.allclose(finite(actual.scores[step])[live], finite(expected.scores[step])[live], atol=2e-4)
        assert torch.allclose(actual.logits[step][live], expected.logits[step][live], atol=2e-4)
        assert actual.logits[step].dtype == expected.logits[step].dtype
        assert len(actual.hidden_states[step]) == len(expected.hidden_states[step])
        for ours, theirs in zip(actual.hidden_states[step], expected.hidden_states[step], strict=True):
            assert ours.shape == theirs.shape
            assert torch.allclose(ours[live], theirs[live], atol=5e-4), float((ours[live] - theirs[live]).abs().max())
    ours = network.compute_transition_scores(actual.sequences, actual.scores, normalize_logits=True)
    theirs = network.compute_transition_scores(expected.sequences, expected.scores, normalize_logits=True)
    for row, count in enumerate(counts):
        assert torch.allclose(ours[row, :count], theirs[row, :count], atol=2e-4)
    if rows == 1:
        assert cache_of(actual).get_seq_length() == cache_of(expected).get_seq_length() == length + steps - 1


def test_hidden_states_beside_a_row_that_ends_with_its_first_token() -> None:
    """Its only states are those of the whole prompt; steps after it have one position in every row."""
    inputs = batch(seed=6)
    first = run(model(), inputs, **GREEDY, max_new_tokens=1).sequences[:, -1].tolist()
    outputs = {"return_dict_in_generate": True, "output_hidden_states": True}
    eos = first[:1]
    plain, assisted, _ = compare(model(), inputs, eos=eos, eos_token_id=eos, max_new_tokens=8, **GREEDY, **outputs)
    assert len(set(first)) > 1
    shapes = [[[layer.shape for layer in step] for step in out.output.hidden_states] for out in (plain, assisted)]
    assert shapes[0] == shapes[1]


def test_scores_are_raw_when_only_logits_are_asked_for() -> None:
    """Raw logits are not the tensors that processors write into."""
    options = {"return_dict_in_generate": True, "output_logits": True, "suppress_tokens": [base()[0]]}
    plain, assisted, _ = compare(model(), prompt(), **GREEDY, **options)
    assert assisted.output.scores is None
    assert torch.stack(assisted.output.logits).isfinite().all()
    assert torch.allclose(torch.stack(assisted.output.logits), torch.stack(plain.output.logits), atol=2e-4)


class InPlace(LogitsProcessor):
    """Writes into the scores it is given, as many processors in the wild do."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, input_ids[0, -1]] = -torch.inf
        return scores


@pytest.mark.parametrize("rows", [1, 4])
def test_processors_that_write_in_place(rows: int) -> None:
    options = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    recording = Recording("logits_processor", InPlace)
    inputs = prompt() if rows == 1 else batch(seed=6)
    plain, assisted, _ = compare(model(), inputs, per_run=recording, **options, **GREEDY)
    for ours, theirs in zip(assisted.output.logits, plain.output.logits, strict=True):
        assert torch.allclose(finite(ours), finite(theirs), atol=2e-4)


# Caches


def cache_of(output: Any) -> Any:
    return output[CACHE_KEYWORD]


# A windowed cache cannot be cropped once the call that recorded its past is over.
@pytest.mark.parametrize(("family", "cropped"), [("qwen3", 0), ("qwen3", 5), ("gemma3", 0), ("mistral", 0)])
@pytest.mark.parametrize("first", ["plain", "assisted"])
@pytest.mark.parametrize("second", ["plain", "assisted"])
def test_continuing_from_a_returned_cache(family: str, first: str, second: str, cropped: int) -> None:
    """Turn two goes on from the cache of turn one, cropped or not, with new user tokens appended."""
    network = target(family, "sdpa")
    inputs = prompt(7, seed=2)
    whole = run(network, inputs, **GREEDY, max_new_tokens=12).sequences
    kept = whole[:, : whole.shape[1] - cropped]
    turn = torch.cat([kept, torch.tensor([[11, 23, 31]])], 1)
    turn_inputs = {"input_ids": turn, "attention_mask": torch.ones_like(turn)}
    expected = run(network, turn_inputs, **GREEDY, max_new_tokens=12)

    drafter = rigged(rows_of(whole, inputs), "half", seed=4)
    drafter.rig.gap = True
    view = drafter.with_options(budget=8)
    assistants = {"plain": {}, "assisted": {"assistant_model": view}}
    output = run(
        network, inputs, **GREEDY, max_new_tokens=12, return_dict_in_generate=True, **assistants[first]
    ).output
    assert torch.equal(output.sequences, whole)
    cache = cache_of(output)
    assert cache.get_seq_length() == whole.shape[1] - 1
    if cropped:
        cache.crop(-cropped)
    drafter.rig.rows = rows_of(expected.sequences, turn_inputs)
    again = run(network, turn_inputs, **GREEDY, max_new_tokens=12, **{CACHE_KEYWORD: cache}, **assistants[second])
    assert_same(expected, again, network, turn_inputs, {**GREEDY, "max_new_tokens": 12})
    if first == second == "assisted":
        starts = [session.first[0] for session in drafter.rig.sessions]
        assert starts[-1] == 0, "the draft context of turn one was lost"


def test_prefill_in_chunks() -> None:
    """The drafter sees the features of the whole prompt, and the same acceptance as without chunks."""
    inputs = prompt(11, seed=3)
    reports = []
    for chunk in ({}, {"prefill_chunk_size": 4}):
        _, _, drafter = compare(model(), inputs, seed=1, **GREEDY, **chunk)
        assert drafter.rig.calls[0]["added"] == [11]
        reports.append(drafter.last_report.acceptance_length)
    assert reports[0] == reports[1]


@pytest.mark.parametrize("with_ids", [False, True])
def test_inputs_embeds(with_ids: bool) -> None:
    ids = prompt(9)
    inputs: Inputs = {"inputs_embeds": model().get_input_embeddings()(ids["input_ids"]).detach()}
    if with_ids:
        inputs = {**inputs, **ids}
    plain = run(model(), inputs, **GREEDY, max_new_tokens=NEW)
    assert plain.sequences[0, -NEW:].tolist() == base()
    view = rigged([ids["input_ids"][0].tolist() + base()], "half").with_options(budget=8)
    assisted = run(model(), inputs, **GREEDY, max_new_tokens=NEW, assistant_model=view)
    assert torch.equal(assisted.sequences, plain.sequences)
    assert view.last_report.acceptance_length > 1.0


@pytest.mark.parametrize("implementation", ["dynamic", "static", "quantized"])
def test_cache_implementations(implementation: str) -> None:
    options: dict[str, Any] = {"cache_implementation": implementation}
    if implementation == "quantized":
        options["cache_config"] = {"backend": "fp8"}
    for mode in (GREEDY, SAMPLED):
        compare(model(), prompt(), seed=1, decoding={"budget": 16}, **mode, **options)


USER_CACHES: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda config: DynamicCache(),
    "dynamic-config": lambda config: DynamicCache(config=config),
    "static-roomy": lambda config: StaticCache(config=config, max_cache_len=128),
    "static-tight": lambda config: StaticCache(config=config, max_cache_len=9 + NEW),
    "static-full": lambda config: StaticCache(config=config, max_cache_len=9 + NEW - 1),
    "quantized": lambda config: QuantizedCache(backend="fp8", config=config),
}


# QuantizedCache takes full attention layers only.
@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("qwen3", kind) for kind in USER_CACHES), *(("gemma3", kind) for kind in USER_CACHES if kind != "quantized")],
)
def test_user_made_caches(kind: str, family: str) -> None:
    """A cache of the user's is used, filled as plain decoding fills it, and never outgrown."""
    network = target(family, "sdpa")
    recording = Recording(CACHE_KEYWORD, lambda: USER_CACHES[kind](network.config))
    options = {"per_run": recording, "seed": 2, "decoding": {"budget": 32}, **GREEDY}
    _, _, drafter = compare(network, prompt(), **options)
    plain, assisted = recording.made[:2]
    assert int(assisted.get_seq_length()) == int(plain.get_seq_length()) == 9 + NEW - 1
    assert type(assisted) is type(plain)
    assert drafter.last_report.rounds <= NEW - 1


# Errors before prefill


def encoder_decoder() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 3}, "beam"),
    "prompt_lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup"),
    "early_exit": ({"assistant_early_exit": 2}, "early_exit"),
    "ensemble": ({"assistant_ensemble_weight": 0.5}, "ensemble"),
    "mtp": ({"use_mtp": True}, "mtp"),
    "no_cache": ({"use_cache": False}, "cache"),
    "synced": ({"synced_gpus": True}, "synced_gpus"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "attention"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_named_errors_before_prefill(name: str) -> None:
    options, word = REFUSED[name]
    network = target("qwen3", "eager")
    drafter = rigged([]).with_options(budget=8)
    hooks = hook_count(network)
    with counting(network) as forwards, pytest.raises((ValueError, NotImplementedError), match=f"(?i){word}"):
        run(network, prompt(), assistant_model=drafter, max_new_tokens=8, **GREEDY, **options)
    assert forwards == [], "the error came after a forward"
    assert hook_count(network) == hooks


def test_encoder_decoder_is_refused() -> None:
    network = encoder_decoder()
    with counting(network) as forwards, pytest.raises(ValueError, match=r"(?i)encoder"):
        run(network, prompt(), assistant_model=rigged([]).with_options(budget=8), max_new_tokens=8, **GREEDY)
    assert forwards == []


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings of the integration."""
    messages: list[str] = []
    monkeypatch.setattr(integration.logger, "warning", messages.append)
    return messages


@pytest.mark.parametrize("name", ["attentions", "no_cache", "beams"])
def test_unsupported_requests_can_be_decoded_plainly(name: str, warned: list[str]) -> None:
    options, word = REFUSED[name]
    network = target("qwen3", "eager")
    plain = run(network, prompt(), max_new_tokens=8, **GREEDY, **options)
    drafter = rigged([]).with_options(budget=8, on_unsupported="plain")
    assisted = run(network, prompt(), assistant_model=drafter, max_new_tokens=8, **GREEDY, **options)
    assert torch.equal(plain.sequences, assisted.sequences)
    (message,) = warned
    assert drafter.last_report.reason in message
    assert str(drafter.last_report) == f"plain decoding: {drafter.last_report.reason}"
    assert re.search(f"(?i){word}", message)
    if name == "attentions":
        assert len(assisted.output.attentions) == 8


@pytest.mark.parametrize("name", ["some/path", Path("some/path")], ids=["str", "Path"])
def test_the_name_of_an_assistant_is_refused(name: Any) -> None:
    with counting(model()) as forwards, pytest.raises(TypeError, match=r"AutoDrafter\.from_pretrained\('some/path'\)"):
        run(model(), prompt(), assistant_model=name, max_new_tokens=8, **GREEDY)
    assert forwards == []


def test_a_drafter_for_another_vocabulary_is_refused() -> None:
    drafter = rigged([], vocab_size=50).with_options(budget=8)
    with counting(model()) as forwards, pytest.raises(ValueError, match="vocab"):
        run(model(), prompt(), assistant_model=drafter, max_new_tokens=8, **GREEDY)
    assert forwards == []


# Nothing is changed that is not ours

ORDINARY = """
import json, sys
sys.path.insert(0, {tests!r})
if {teach}:
    import hf_treespec
import torch
torch.set_num_threads(1)
from models import build, prompt, batch
model, other = build("qwen3", "sdpa"), build("llama", "sdpa", seed=4)
other.generation_config.num_assistant_tokens = 4
cases = {{
    "plain": dict(do_sample=False),
    "sampled": dict(do_sample=True, top_p=0.9),
    "beams": dict(num_beams=3, do_sample=False),
    "lookup": dict(prompt_lookup_num_tokens=3, do_sample=False),
    "assistant": dict(assistant_model=other, do_sample=False),
    "assistant_sampled": dict(assistant_model=other, do_sample=True, temperature=0.7),
    "static": dict(cache_implementation="static", do_sample=False),
    "typo": dict(max_new_token=3),
    "assistant_batch": dict(assistant_model=other, num_return_sequences=2, do_sample=True),
}}
table = {{}}
for name, options in cases.items():
    torch.manual_seed(7)
    try:
        table[name] = model.generate(**prompt(), max_new_tokens=12, **options).tolist()
    except Exception as error:
        table[name] = type(error).__name__ + ": " + str(error)
torch.manual_seed(7)
table["batch"] = model.generate(**batch(), max_new_tokens=12, do_sample=True).tolist()
print("TABLE" + json.dumps(table))
"""


def test_everything_else_is_as_before() -> None:
    """Ordinary assistants, prompt lookup, beams and sampling give the same with and without the library."""
    tables = []
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(here.parent), "OMP_NUM_THREADS": "1"}
    for teach in (False, True):
        script = ORDINARY.format(tests=str(here), teach=teach)
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        tables.append(json.loads(done.stdout.split("TABLE")[1]))
    assert tables[0] == tables[1]
    assert isinstance(tables[0]["assistant"], list)
    assert isinstance(tables[0]["typo"], str)


def test_configurations_are_untouched() -> None:
    config = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=PAD, num_assistant_tokens=5)
    view = rigged([prompt()["input_ids"][0].tolist() + base()]).with_options(budget=8)
    own = getattr(view, "generation_config", None)

    def snapshot() -> list[Any]:
        parts = [config, model().generation_config, model().config, view.config, *([own] if own is not None else [])]
        return copy.deepcopy([part.to_dict() for part in parts])

    before = snapshot()
    sequences = model().generate(**prompt(), generation_config=config, assistant_model=view)
    assert sequences[0, 9:].tolist() == base()[:12]
    assert snapshot() == before
    assert max(call["depth"] for call in view.rig.proposals) <= 5


def test_options_of_the_generation_config_win() -> None:
    """The same option given twice: the generation config's counts."""
    plain = run(model(), prompt(), **GREEDY, max_new_tokens=NEW)
    view = rigged(rows_of(plain.sequences, prompt()), "half").with_options(budget=24)
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=PAD)
    config.treespec = hf_treespec.TreeSpecConfig(budget=3)
    assisted = run(model(), prompt(), generation_config=config, assistant_model=view)
    assert_same(plain, assisted, model(), prompt(), {**GREEDY, "max_new_tokens": NEW})
    assert 1 < view.last_report.mean_nodes <= 3
    run(model(), prompt(), **GREEDY, max_new_tokens=NEW, assistant_model=view)
    assert view.last_report.mean_nodes > 3


def test_misspelt_arguments_are_still_caught() -> None:
    with pytest.raises(ValueError, match="max_new_token"):
        model().generate(**prompt(), assistant_model=rigged([]).with_options(budget=4), max_new_token=3)


def test_the_stock_loop_for_dflash_is_left_alone() -> None:
    """`speculation_type="dflash"` asks for transformers' own loop, which drives our drafter too."""
    options = {"max_new_tokens": NEW, **GREEDY}
    drafter = dflash("qwen3", "sdpa").with_options(budget=8)
    assisted = run(model(), prompt(), assistant_model=drafter, speculation_type="dflash", **options)
    assert torch.equal(assisted.sequences, run(model(), prompt(), **options).sequences)
    assert drafter.last_report is None


# Company on one target


def test_threads_on_one_target() -> None:
    """Two assisted calls and a plain one at the same time keep out of each other's way."""
    network = target("gemma3", "sdpa")
    hooks = hook_count(network)
    requests = [(prompt(8 + seed, seed=seed), seed) for seed in range(3)]
    plain = [run(network, inputs, **GREEDY, max_new_tokens=NEW).sequences for inputs, _ in requests]
    drafters = [rigged(rows_of(plain[seed], inputs), "half", seed=seed) for inputs, seed in requests]
    results: dict[int, Any] = {}
    gate = threading.Barrier(3)

    def work(index: int) -> None:
        gate.wait()
        extra = {} if index == 2 else {"assistant_model": drafters[index].with_options(budget=8)}
        try:
            results[index] = network.generate(**requests[index][0], **GREEDY, max_new_tokens=NEW, **extra)
        except BaseException as error:
            results[index] = error

    for _ in range(3):
        for drafter in drafters:
            drafter.rig.calls.clear()
        threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index, expected in enumerate(plain):
            if isinstance(results[index], BaseException):
                raise results[index]
            assert torch.equal(results[index], expected), index
    assert hook_count(network) == hooks


class Probe(LogitsProcessor):
    """Runs the target itself, with and without a cache, and lets the result count."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = model()(input_ids=input_ids[:, -5:], use_cache=False).logits[:, -1]
            model()(input_ids=input_ids[:, -4:], use_cache=True)
        return scores + 0.3 * logits


@pytest.mark.parametrize("attention", ["sdpa", "treespec"])
def test_a_processor_may_call_the_target(attention: str) -> None:
    network = target("qwen3", attention)
    plain, _, _ = compare(network, prompt(), per_run=Recording("logits_processor", Probe), seed=1, **GREEDY)
    assert plain.sequences[0, 9:].tolist() != base()


# Ways out


class Boom(KeyboardInterrupt):
    pass


class Failing:
    """A processor, criterion or streamer that fails at its n-th call."""

    def __init__(self, error: type[BaseException], at: int) -> None:
        self.error, self.left = error, at

    def tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error("on purpose")

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            return function(*args, **kwargs)

        return wrapped


class FailingProcessor(Failing, LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.tick()
        return scores


class FailingCriterion(Failing, StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.tick()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class FailingStreamer(Failing):
    def put(self, value: torch.Tensor) -> None:
        self.tick()

    def end(self) -> None:
        pass


FAILURES: dict[str, Callable[[type[BaseException], int], dict[str, Any]]] = {
    "processor": lambda error, at: {"logits_processor": LogitsProcessorList([FailingProcessor(error, at)])},
    "criterion": lambda error, at: {"stopping_criteria": StoppingCriteriaList([FailingCriterion(error, at)])},
    "streamer": lambda error, at: {"streamer": FailingStreamer(error, at)},
}


@pytest.mark.parametrize("attention", ["sdpa", "treespec"])
@pytest.mark.parametrize("error", [Boom, RuntimeError])
@pytest.mark.parametrize("where", [*FAILURES, "drafter", "target"])
def test_nothing_is_left_behind(where: str, error: type[BaseException], attention: str, monkeypatch: Any) -> None:
    network = target("qwen3", attention)
    hooks = hook_count(network)
    implementation = network.config._attn_implementation
    drafter = rigged([prompt()["input_ids"][0].tolist() + base()], "half")
    view = drafter.with_options(budget=8)
    for at in (2, 6):
        options = FAILURES[where](error, at) if where in FAILURES else {}
        with monkeypatch.context() as patch:
            failing = Failing(error, min(at, 3))
            if where == "drafter":
                patch.setattr(
                    drafter.session_class, "right_tokens", failing.before(drafter.session_class.right_tokens)
                )
            if where == "target":
                mlp = network.get_decoder().layers[1].mlp
                patch.setattr(mlp, "forward", failing.before(mlp.forward))
            with pytest.raises(error, match="on purpose"):
                run(network, prompt(), assistant_model=view, max_new_tokens=NEW, **GREEDY, **options)
        assert hook_count(network) == hooks, "hooks were left on the target"
        assert network.config._attn_implementation == implementation
        assert all(session.closed for session in drafter.rig.sessions)
        plain = run(network, prompt(), max_new_tokens=NEW, **GREEDY)
        assert plain.sequences[0, 9:].tolist() == base()
        again = run(network, prompt(), assistant_model=view, max_new_tokens=NEW, **GREEDY)
        assert again.sequences[0, 9:].tolist() == base()


def test_install_is_idempotent() -> None:
    """Teaching generate() twice changes nothing; the signatures generate() inspects stay."""
    import inspect

    from transformers import GenerationMixin

    assisted = GenerationMixin._assisted_decoding
    assert "inputs_tensor" in inspect.signature(assisted).parameters
    import importlib

    importlib.reload(sys.modules[hf_treespec.__name__])
    assert GenerationMixin._assisted_decoding is assisted


def test_the_drafter_can_be_reused_on_another_target() -> None:
    """A drafter keeps nothing of a target or a call."""
    drafter = rigged([], "half", seed=9)
    for family in ("qwen3", "llama", "qwen3"):
        compare(target(family, "sdpa"), prompt(6, seed=3), drafter=drafter, **GREEDY)
    private = build("qwen3", "sdpa", seed=8)
    compare(private, prompt(6, seed=3), drafter=drafter, **GREEDY)
    import gc
    import weakref

    gone = weakref.ref(private)
    drafter.rig.sessions.clear()
    drafter.rig.checked.clear()
    del private
    gc.collect()
    assert gone() is None, "the drafter holds on to its target"
