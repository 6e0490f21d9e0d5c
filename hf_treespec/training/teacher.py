"""The frozen target as a drafter's teacher."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel


@torch.no_grad()
def teacher_forward(
    target: PreTrainedModel, input_ids: torch.Tensor, layers: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and final hidden states of a batch of whole sequences.

    Args:
        input_ids: Token ids without padding, long `[B, T]`.
        layers: 0-based decoder layers whose outputs are the features.

    Returns:
        Features `[B, T, len(layers) · H]`, concatenated in the order of `layers`, and hidden states `[B, T, H]` after
        the final norm, ready for the head.
    """
    decoder = target.get_decoder()
    recorded: dict[int, torch.Tensor] = {}

    def record(index: int):  # type: ignore[no-untyped-def]
        def hook(module, args, output):  # type: ignore[no-untyped-def]
            recorded[index] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [decoder.layers[index].register_forward_hook(record(index)) for index in set(layers)]
    try:
        hidden = decoder(input_ids=input_ids, use_cache=False).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat([recorded[index] for index in layers], dim=-1), hidden
