"""How a token is picked from a node's scores: exactly as plain `generate` picks it.

`torch.multinomial(p, 1)` equals `argmax(p / E)` with `E = empty_like(p).exponential_()` on the same generator, and
leaves the generator in the same state. So the noise `E` is drawn once per generation step, in order, as plain decoding
draws it, and every node that could be the token of step g uses its row's noise of step g: nodes and rows may then be
visited in any order, and the same seed gives the same tokens.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp

from .support import UnsupportedRequestError

#: Processors that treat every row alone and look at its scores only.
_SCORES_ONLY = (
    lp.TemperatureLogitsWarper,
    lp.TopKLogitsWarper,
    lp.TopPLogitsWarper,
    lp.MinPLogitsWarper,
    lp.TypicalLogitsWarper,
    lp.EpsilonLogitsWarper,
    lp.EtaLogitsWarper,
    lp.SuppressTokensLogitsProcessor,
    lp.LogitNormalization,
    lp.InfNanRemoveLogitsProcessor,
)
#: Processors that treat every row alone and look at its scores and its own tokens.
_ROW_WISE = (
    *_SCORES_ONLY,
    lp.RepetitionPenaltyLogitsProcessor,
    lp.NoRepeatNGramLogitsProcessor,
    lp.NoBadWordsLogitsProcessor,
    lp.SequenceBiasLogitsProcessor,
    lp.MinLengthLogitsProcessor,
    lp.MinNewTokensLengthLogitsProcessor,
    lp.ForcedBOSTokenLogitsProcessor,
    lp.ForcedEOSTokenLogitsProcessor,
    lp.ExponentialDecayLengthPenalty,
    lp.SuppressTokensAtBeginLogitsProcessor,
)
#: What a repetition penalty holds for each row in a padded batch.
_PER_ROW = "prompt_ignore_length"
#: Noise kept at most, in bytes; rows that fall further behind redraw it from a stored generator state.
_NOISE_BYTES = 64 * 2**20


def scores_only(processors: LogitsProcessorList) -> bool:
    """Whether the processors may run on all nodes of all rows at once."""
    return all(type(processor) in _SCORES_ONLY for processor in processors)


def for_rows(processors: LogitsProcessorList, rows: list[int]) -> LogitsProcessorList:
    """Row-wise processors as they are for some rows of the batch: those that hold a value a row get those rows'."""
    if not any(isinstance(getattr(processor, _PER_ROW, None), torch.Tensor) for processor in processors):
        return processors
    chosen = LogitsProcessorList()
    for processor in processors:
        values = getattr(processor, _PER_ROW, None)
        if isinstance(values, torch.Tensor) and values.ndim:
            processor = copy.copy(processor)
            setattr(processor, _PER_ROW, values[rows])
        chosen.append(processor)
    return chosen


def row_wise(processors: LogitsProcessorList) -> bool:
    """Whether the processors may run on some rows of the batch without the others."""
    return all(type(processor) in _ROW_WISE for processor in processors)


@functools.cache
def multinomial_is_exponential_race(device_type: str) -> bool:
    """Checks on this device that `multinomial(p, 1)` is `argmax(p / E)` bit for bit, on a generator of its own."""
    generator = torch.Generator(device_type)
    for seed, (rows, vocab) in enumerate(((1, 97), (3, 1031), (4, 4096))):
        generator.manual_seed(seed)
        p = torch.rand(rows, vocab, generator=generator, device=device_type).softmax(-1)
        state = generator.get_state()
        picked, after = torch.multinomial(p, 1, generator=generator).squeeze(1), generator.get_state()
        generator.set_state(state)
        raced = (p / torch.empty_like(p).exponential_(generator=generator)).argmax(-1)
        if not (torch.equal(picked, raced) and torch.equal(after, generator.get_state())):
            return False
    return True


class StepNoise:
    """Exponential noise of each generation step, drawn from the global generator as plain `generate` would.

    Args:
        batch_size: Rows B of the call.
        device: Device of the scores.
    """

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self._batch_size = batch_size
        self._device = device
        self._kept: dict[int, torch.Tensor] = {}
        self._states: list[torch.Tensor] = []
        self._generator = _global_generator(device)

    def of(self, step: int, vocab_size: int) -> torch.Tensor:
        """Noise of one step for every row, float32 `[B, V]`."""
        while len(self._states) <= step:
            drawn = len(self._states)
            self._states.append(self._generator.get_state())
            self._kept[drawn] = self._draw(vocab_size)
            keep = max(2, _NOISE_BYTES // (4 * self._batch_size * vocab_size))
            self._kept.pop(drawn - keep, None)
        if step in self._kept:
            return self._kept[step]
        state = self._generator.get_state()
        self._generator.set_state(self._states[step])
        noise = self._draw(vocab_size)
        self._generator.set_state(state)
        return noise

    def _draw(self, vocab_size: int) -> torch.Tensor:
        noise = torch.empty(self._batch_size, vocab_size, dtype=torch.float32, device=self._device)
        return noise.exponential_(generator=self._generator)

    def rewind(self, steps: int) -> None:
        """Leaves the generator as plain `generate` leaves it after `steps` steps."""
        if steps < len(self._states):
            self._generator.set_state(self._states[steps])


def _global_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    return torch.default_generator


class Picker:
    """Picks tokens from processed scores, greedily or by a draw with the step's noise.

    Args:
        do_sample: Draw instead of taking the (first) best token.
        batch_size: Rows B of the call.
        device: Device of the scores.

    Raises:
        UnsupportedRequestError: Sampling a batch on a device whose `multinomial` is not the exponential race.
    """

    def __init__(self, do_sample: bool, batch_size: int, device: torch.device) -> None:
        self._noise: StepNoise | None = None
        self._do_sample = do_sample
        if do_sample:
            if multinomial_is_exponential_race(device.type):
                self._noise = StepNoise(batch_size, device)
            elif batch_size > 1:
                raise UnsupportedRequestError(
                    f"Sampling a batch needs draws that can be replayed out of order, which `torch.multinomial` on "
                    f"{device.type!r} does not allow (batch size {batch_size}). Use batch size 1 or greedy decoding."
                )

    @property
    def replays(self) -> bool:
        """Whether nodes may be picked out of order."""
        return not self._do_sample or self._noise is not None

    def pick(
        self, scores: torch.Tensor, steps: int | Sequence[int], rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Tokens for scores `[R, V]`, long `[R]`.

        Args:
            scores: Processed scores, float32 `[R, V]`.
            steps: Generation step of all of them, or of each of `rows`.
            rows: Batch rows they belong to; None = the whole batch in order.
        """
        if not self._do_sample:
            return scores.argmax(dim=-1)
        probabilities = scores.softmax(dim=-1)
        if scores.device.type == "cpu" and not math.isfinite(probabilities.sum()):
            # What `torch.multinomial` says to plain decoding.
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        if self._noise is None:
            return torch.multinomial(probabilities, num_samples=1).squeeze(1)
        return (probabilities / self._noise_of(steps, rows, scores.shape[-1])).argmax(dim=-1)

    def _noise_of(self, steps: int | Sequence[int], rows: Sequence[int] | None, vocab_size: int) -> torch.Tensor:
        """Noise of rows at one step or at their own ones, float32 `[R, V]`."""
        assert self._noise is not None
        if isinstance(steps, int):
            noise = self._noise.of(steps, vocab_size)
            return noise if rows is None else noise[rows]
        assert rows is not None
        drawn = {step: self._noise.of(step, vocab_size) for step in sorted(set(steps))}
        return torch.stack([drawn[step][row] for step, row in zip(steps, rows, strict=True)])

    def pick_nodes(
        self, scores: torch.Tensor, depths: torch.Tensor, first_steps: list[int], deepest: int
    ) -> torch.Tensor:
        """Tokens for every node of every tree at once, long `[B, N]`, without reading the device.

        Args:
            scores: Processed scores, float32 `[B, N, V]`.
            depths: Depth of each node, long `[B, N]`.
            first_steps: Generation step of each row's root.
            deepest: No node is deeper than this.
        """
        if not self._do_sample:
            return scores.argmax(dim=-1)
        assert self._noise is not None
        vocab = scores.shape[-1]
        noise = torch.stack(
            [
                torch.stack([self._noise.of(step, vocab)[row] for step in range(first, first + deepest + 1)])
                for row, first in enumerate(first_steps)
            ]
        )
        rows = torch.arange(len(first_steps), device=depths.device)[:, None]
        return (scores.softmax(dim=-1) / noise[rows, depths]).argmax(dim=-1)

    def finish(self, steps: int) -> None:
        """Leaves the global generator as plain `generate` leaves it after `steps` steps."""
        if self._noise is not None:
            self._noise.rewind(steps)
