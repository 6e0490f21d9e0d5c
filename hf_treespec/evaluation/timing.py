"""Timing one `generate` call, prefill apart, by the same clock for every way of decoding."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer


class FirstTokenClock(BaseStreamer):
    """A streamer that only notes when the first new tokens came, and how many came with them."""

    def __init__(self) -> None:
        self.prompt_seen = False
        self.first_at: float | None = None
        self.first_tokens = 0

    def put(self, value: torch.Tensor) -> None:
        """Receives the prompt first, then new tokens."""
        if not self.prompt_seen:
            self.prompt_seen = True
        elif self.first_at is None:
            self.first_at = time.perf_counter()
            self.first_tokens = value.numel()

    def end(self) -> None:
        """Receives the end of generation."""


@dataclass(frozen=True)
class TimedCall:
    """One measured `generate` call of a single row.

    Attributes:
        sequence: The whole output on the CPU, long `[1, T]`.
        new_tokens: Tokens generated.
        seconds: The call from end to end.
        decode_seconds: From the first new token to the end.
        decode_tokens: Tokens generated in `decode_seconds`.
    """

    sequence: torch.Tensor
    new_tokens: int
    seconds: float
    decode_seconds: float
    decode_tokens: int


def timed_generate(
    target: PreTrainedModel, inputs: dict[str, torch.Tensor], *, seed: int, **options: Any
) -> TimedCall:
    """Seeds torch, generates and measures. One row; `options` are `generate`'s."""
    clock = FirstTokenClock()
    torch.manual_seed(seed)
    start = time.perf_counter()
    sequence = target.generate(**inputs, streamer=clock, **options).cpu()
    end = time.perf_counter()
    new_tokens = sequence.shape[1] - inputs["input_ids"].shape[1]
    first_at = end if clock.first_at is None else clock.first_at
    return TimedCall(sequence, new_tokens, end - start, end - first_at, new_tokens - clock.first_tokens)
