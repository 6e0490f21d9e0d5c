"""Timing one `generate` call, prefill apart, by the same clock for every way of decoding."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer


class FirstTokenClock(BaseStreamer):
    """A streamer that only notes when the first new tokens came, how many came with them, and how often more came."""

    def __init__(self) -> None:
        self.prompt_seen = False
        self.first_at: float | None = None
        self.first_tokens = 0
        self.deliveries = 0

    def put(self, value: torch.Tensor) -> None:
        """Receives the prompt first, then new tokens."""
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        self.deliveries += 1
        if self.first_at is None:
            self.first_at = time.perf_counter()
            self.first_tokens = value.numel()

    def end(self) -> None:
        """Receives the end of generation."""


@dataclass(frozen=True)
class TimedCall:
    """One measured `generate` call.

    Attributes:
        sequence: The whole output on the CPU, long `[B, T]`.
        new_tokens: Tokens generated over all rows, without what pads finished ones.
        seconds: The call from end to end.
        decode_seconds: From the first new token of every row to the end.
        decode_tokens: Tokens generated in `decode_seconds`.
        deliveries: Times that new tokens came, which is once a forward in transformers' own loops.
        peak_bytes: Most memory allocated on the GPU during the call, weights included; None on other devices, whose
            allocators hand no such number out.
    """

    sequence: torch.Tensor
    new_tokens: int
    seconds: float
    decode_seconds: float
    decode_tokens: int
    deliveries: int = 0
    peak_bytes: int | None = None


def timed_generate(
    target: PreTrainedModel, inputs: dict[str, torch.Tensor], *, seed: int, **options: Any
) -> TimedCall:
    """Seeds torch, generates and measures. `options` are `generate`'s."""
    clock = FirstTokenClock()
    on_gpu = target.device.type == "cuda"
    torch.manual_seed(seed)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(target.device)
    start = time.perf_counter()
    sequence = target.generate(**inputs, streamer=clock, **options).cpu()
    end = time.perf_counter()
    peak_bytes = torch.cuda.max_memory_allocated(target.device) if on_gpu else None
    eos = options.get("eos_token_id", target.generation_config.eos_token_id)
    new_tokens = count_tokens(sequence[:, inputs["input_ids"].shape[1] :], eos)
    first_at = end if clock.first_at is None else clock.first_at
    return TimedCall(
        sequence,
        new_tokens,
        end - start,
        end - first_at,
        new_tokens - clock.first_tokens,
        clock.deliveries,
        peak_bytes,
    )


def count_tokens(generated: torch.Tensor, eos_token_id: int | list[int] | None) -> int:
    """Tokens of long `[B, T]` up to each row's first end-of-text token, which counts."""
    if eos_token_id is None:
        return generated.numel()
    is_end = torch.isin(generated, torch.as_tensor(eos_token_id))
    return int((is_end.long().cumsum(1) - is_end.long() == 0).sum())
