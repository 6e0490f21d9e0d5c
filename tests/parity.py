"""Plain against assisted decoding: runs both, compares token for token, and tells a tie from a fault."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from models import PAD, VOCAB
from rigged import RiggedDrafter, rigged, rows_of
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerFast

Inputs = dict[str, torch.Tensor]

#: Plain decoding's own top-2 gap below which rounding may decide.
TIE_GAP = 1e-4
#: One tie is allowed per so many tokens.
TOKENS_PER_TIE = 100_000

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}


@dataclass
class Ledger:
    """What has been compared in a session, and the ties among it."""

    tokens: int = 0
    ties: list[str] = field(default_factory=list)

    def settle(self) -> None:
        allowed = math.ceil(self.tokens / TOKENS_PER_TIE)
        assert len(self.ties) <= allowed, f"{len(self.ties)} ties in {self.tokens} tokens: {self.ties}"


#: The session's ledger (settled by a fixture of conftest.py).
LEDGER = Ledger()


@dataclass
class Run:
    """One call of `generate`.

    Attributes:
        output: What it returned.
        sequences: The sequences in it, long `[B, L]`.
        rng: State of the global generator afterwards.
    """

    output: Any
    sequences: torch.Tensor
    rng: torch.Tensor


def run(model: PreTrainedModel, inputs: Inputs, seed: int = 0, **options: Any) -> Run:
    """`model.generate` from a seed."""
    torch.manual_seed(seed)
    # transformers makes static caches as long as the model's longest so far: shared targets would have room to spare.
    model.__dict__.pop("_previous_max_cache_length", None)
    output = model.generate(**inputs, **options)
    return Run(output, output if isinstance(output, torch.Tensor) else output.sequences, torch.get_rng_state())


class _StateRecorder(LogitsProcessor):
    """Notes the generator's state before each draw."""

    def __init__(self) -> None:
        self.states: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.states.append(torch.get_rng_state())
        return scores


def plain_gap(
    model: PreTrainedModel, inputs: Inputs, seed: int, row: int, step: int, options: dict[str, Any]
) -> float:
    """Gap between the two tokens plain decoding was choosing from at a step.

    Of their log-probabilities, or, in a draw, of those less the logarithms of their noise.
    """
    recorder = _StateRecorder()
    processors = LogitsProcessorList([*options.get("logits_processor", []), recorder])
    asked = {"return_dict_in_generate": True, "output_scores": True, "logits_processor": processors, "streamer": None}
    scores = run(model, inputs, seed, **{**options, **asked}).output.scores[step]
    race = scores.log_softmax(-1)
    if options.get("do_sample"):
        torch.set_rng_state(recorder.states[step])
        race = race - torch.empty_like(scores).exponential_().log()
    best = race[row].topk(2).values
    return float(best[0] - best[1])


def assert_same(
    plain: Run, assisted: Run, model: PreTrainedModel, inputs: Inputs, options: dict[str, Any], seed: int = 0
) -> bool:
    """Asserts equality token for token, in shape and in the generator's state.

    Returns:
        Whether a tie excused a difference (nothing after it is comparable).
    """
    expected, actual = plain.sequences, assisted.sequences
    start = inputs["input_ids"].shape[1] if "input_ids" in inputs else 0
    LEDGER.tokens += expected[:, start:].numel()
    width = min(expected.shape[1], actual.shape[1])
    tied = False
    for row in range(expected.shape[0]):
        differing = (expected[row, :width] != actual[row, :width]).nonzero().flatten()
        if len(differing):
            place = int(differing[0])
            step = place - start
            assert step >= 0, f"row {row}: the prompt came back changed at {place}"
            gap = plain_gap(model, inputs, seed, row, step, options)
            message = (
                f"row {row}, step {step}: plain {int(expected[row, place])}, assisted {int(actual[row, place])}, "
                f"plain's top-2 gap {gap:.2e}"
            )
            context = f"plain {expected[row, start:].tolist()}, assisted {actual[row, start:].tolist()}"
            assert gap < TIE_GAP, f"{message}; {context}"
            LEDGER.ties.append(message)
            tied = True
    if not tied:
        assert expected.shape == actual.shape, (
            f"plain {tuple(expected.shape)}, assisted {tuple(actual.shape)}: plain {expected[:, start:].tolist()}, "
            f"assisted {actual[:, start:].tolist()}"
        )
        assert torch.equal(plain.rng, assisted.rng), "the generator is not left as plain generate leaves it"
    return tied


def eos_tokens(sequences: torch.Tensor, start: int, length: int) -> list[int]:
    """Two tokens which, as ends of sequence, stop the rows of a plain run at steps as different as possible."""
    continuation = sequences[:, start : start + length]
    vocabulary = int(sequences.max()) + 1
    first = torch.full((len(sequences), vocabulary), length)
    for step in range(continuation.shape[1] - 1, -1, -1):
        first.scatter_(1, continuation[:, step : step + 1], step)
    used = continuation.unique().tolist()
    best: tuple[tuple[int, int, int], list[int]] = ((0, 0, 0), used[:2])
    for index, one in enumerate(used):
        for two in used[index + 1 :]:
            ends = torch.minimum(first[:, one], first[:, two])
            score = (len(ends.unique()), int(ends.min().clamp(max=3)), int(ends.max()))
            if score > best[0]:
                best = (score, [one, two])
    return best[1]


def compare(
    model: PreTrainedModel,
    inputs: Inputs,
    *,
    kind: str = "half",
    slots: int = 1,
    seed: int = 0,
    decoding: dict[str, Any] | None = None,
    per_run: Any = None,
    drafter: RiggedDrafter | None = None,
    eos: Sequence[int] = (),
    **options: Any,
) -> tuple[Run, Run, Any]:
    """Runs plain and assisted decoding of the same request with a rigged drafter and compares them.

    Args:
        kind: See `rigged.Rig`.
        slots: See `rigged.Rig`.
        seed: Seed of both runs and of the drafts.
        decoding: Options of the drafter (`with_options`).
        per_run: Called before each run; returns further options (stateful processors, streamers).
        drafter: Use this drafter, with its oracle set from the plain run.
        eos: End tokens after which a row of the oracle is over.
        options: Options of `generate`.

    Returns:
        The plain run, the assisted run and the drafter that was used.
    """
    options = {"max_new_tokens": 24, **options}
    fresh = per_run if per_run is not None else dict
    plain = run(model, inputs, seed, **options, **fresh())
    rows = rows_of(plain.sequences, inputs, eos)
    if len(rows) > 1:
        # Rows that something else than an end token stopped go on as padding.
        rows = [row[: max(place for place, token in enumerate(row) if token != PAD) + 1] for row in rows]
    vocabulary = model.config.get_text_config().vocab_size
    drafter = drafter if drafter is not None else rigged(rows, kind, slots=slots, seed=seed, vocab_size=vocabulary)
    drafter.rig.rows = rows
    view = drafter.with_options(**{"budget": 16, **(decoding or {})})
    assisted = run(model, inputs, seed, assistant_model=view, **options, **fresh())
    assert_same(plain, assisted, model, inputs, {**options, **fresh()}, seed)
    for session in drafter.rig.sessions:
        assert session.closed >= 1, "a session was left open"
    return plain, assisted, view


@contextmanager
def counting(model: PreTrainedModel) -> Iterator[list[int]]:
    """Counts forwards of a target; the list grows by the rows of each."""
    forwards: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids")
        forwards.append(0 if ids is None else ids.shape[1])

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield forwards
    finally:
        handle.remove()


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of one printable character per token, for the tiny targets' vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<bos>": 1, "<unk>": 2}
    vocabulary.update({chr(33 + index): 3 + index for index in range(VOCAB - 3)})
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", unk_token="<unk>")
