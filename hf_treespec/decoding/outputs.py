"""What `generate` returns, in the shape plain decoding returns it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..compat import CACHE_KEYWORD
from .rows import Rows


def build_output(rows: Rows, cache: Cache, return_dict: bool) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """The finished sequences, or the output class with everything the rows kept.

    Per-token entries cover every step of the call. A row that finished early repeats its last entry: what plain
    decoding reports there belongs to padding.
    """
    sequences = rows.result()
    if not return_dict:
        return sequences
    assert rows.steps is not None
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=_by_step(rows.scores, rows.steps, torch.stack),
        logits=_by_step(rows.logits, rows.steps, torch.stack),
        hidden_states=_by_step(rows.hidden, rows.steps, _join_layers),
        **{CACHE_KEYWORD: cache},
    )


def _by_step(kept: list[list[Any]] | None, steps: int, join: Callable[[list[Any]], Any]) -> tuple[Any, ...] | None:
    if kept is None:
        return None
    return tuple(join([row[min(step, len(row) - 1)] for row in kept]) for step in range(steps))


def _join_layers(rows: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.cat(layer) for layer in zip(*rows, strict=True))
