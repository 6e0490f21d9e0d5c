"""Many blocks of whole texts in one forward of the target, as a FlexDraft drafter is trained (arXiv 2605.20022)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ...attention.masks import TreeMasks, tree_mask
from .layout import decoder_of, final_norm_of
from .mask_rows import MaskRows
from .modeling_flexdraft import FlexDraftDrafter

#: Attention implementations that take an additive mask and have a gradient.
ATTENTIONS = ("eager", "sdpa", "treespec")


@dataclass(frozen=True)
class PackedBlocks:
    """What one forward gave.

    Attributes:
        drafted: States of the drafted rows of every block behind the final norm, `[B, A, block_size − 1, H]`; the
            gradient goes to the drafter's tensors alone.
        teacher: The target's own states behind the final norm, `[B, T, H]`, without a gradient.
    """

    drafted: torch.Tensor
    teacher: torch.Tensor


def packed_blocks(
    drafter: FlexDraftDrafter, target: PreTrainedModel, input_ids: torch.Tensor, anchors: torch.Tensor
) -> PackedBlocks:
    """Drafts blocks at many places of whole texts (teacher forcing), and runs the target over the texts.

    A block is what decoding would draft with the text up to its anchor committed: its rows see the text strictly
    before the anchor, in whose place the first of them stands, and each other, and no other block. Nothing is
    calibrated yet; `drafter.anchor_bias_mlp` takes `drafted` and the embeddings of the anchors.

    Args:
        input_ids: Token ids without padding, long `[B, T]`.
        anchors: Positions of the anchors, at least 1, long `[B, A]`.

    Raises:
        ValueError: The target's attention takes no additive mask.
    """
    attention = getattr(target.config.get_text_config(), "_attn_implementation", None)
    if attention not in ATTENTIONS:
        raise ValueError(
            f"blocks are packed by additive masks, which {attention!r} attention does not take; load the target with "
            f"attn_implementation in {ATTENTIONS}."
        )
    (batch, length), device, size = input_ids.shape, input_ids.device, drafter.config.block_size
    places = torch.arange(length, device=device)[None]
    slots = torch.arange(size, device=device)
    blocks = torch.arange(anchors.shape[1], device=device).repeat_interleave(size).expand(batch, -1)
    rows = MaskRows(
        drafter.mask_embedding,
        (anchors - 1).repeat_interleave(size, 1),
        (slots + 1).repeat(anchors.shape[1]).expand(batch, -1),
        blocks,
        places.expand(batch, -1),
    )
    tuning = drafter.tuning(target)
    if tuning.is_ambiguous(length + blocks.shape[1]):
        rows = rows.padded()
    decoder, _ = decoder_of(target)
    tuning.attach()
    try:
        with tuning.riding(rows):
            teacher = decoder(
                input_ids=input_ids,
                attention_mask=_causal_masks(target, length),
                position_ids=places,
                use_cache=False,
            ).last_hidden_state
        hidden = tuning.hidden
    finally:
        tuning.detach()
    assert hidden is not None
    hidden = hidden[:, : blocks.shape[1]].unflatten(1, (-1, size))[:, :, 1:]
    return PackedBlocks(final_norm_of(decoder)(hidden), teacher.detach())


def _causal_masks(target: PreTrainedModel, length: int) -> torch.Tensor | dict[str, torch.Tensor]:
    """The masks of whole texts in the form that mask rows ride in: additive, for every kind of layer."""
    masks = TreeMasks.for_config(target.config.get_text_config(), target.dtype, target.device)
    causal = torch.ones(1, length, length, dtype=torch.bool, device=target.device).tril()
    places = torch.arange(length, device=target.device)[None]
    found = {
        kind.name: tree_mask(kind, causal, places, places.new_zeros(1), (0, 0), None, target.dtype)
        for kind in masks.kinds
    }
    return found if masks.keyed else next(iter(found.values()))
