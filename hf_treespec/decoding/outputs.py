"""What `generate` returns, in the shape plain decoding returns it."""

from __future__ import annotations

import torch
from transformers import Cache
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..compat import CACHE_KEYWORD
from .rows import Rows, by_step


def build_output(rows: Rows, cache: Cache, return_dict: bool) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """The finished sequences, or the output class with everything the rows kept, for every step of the call."""
    sequences = rows.result()
    if not return_dict:
        return sequences
    assert rows.steps is not None
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=by_step(rows.scores, rows.steps, torch.stack),
        logits=by_step(rows.logits, rows.steps, torch.stack),
        hidden_states=by_step(rows.hidden, rows.steps, _join_layers),
        **{CACHE_KEYWORD: cache},
    )


def _join_layers(rows: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    # A row that ended with its first token repeats the states of the whole prompt.
    length = min(layers[0].shape[1] for layers in rows)
    return tuple(torch.cat([part[:, -length:] for part in layer]) for layer in zip(*rows, strict=True))
