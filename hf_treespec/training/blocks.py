"""Many blocks of one sequence in a single training forward (DFlash, arXiv 2602.06036, section 4.2)."""

from __future__ import annotations

import torch

from ..drafters.base import TargetModules
from ..drafters.dflash import DFlashConfig, DFlashDrafter
from ..drafters.treeflash import TreeFlashDrafter


def sample_anchors(batch_size: int, length: int, depths: int, count: int) -> torch.Tensor:
    """Draws anchors without replacement, in rising order, long `[B, count or fewer]`.

    An anchor has at least one position before it and known tokens at all `depths` behind it.
    """
    places = length - depths - 1
    picked = torch.rand(batch_size, places).topk(min(count, places)).indices
    return picked.sort().values + 1


class BlockAttention:
    """What block rows see in training: context strictly before their anchor, and their own block.

    Scores against the context and against the own block stand side by side under one softmax, so the work is that of
    `[rows, context + block]`, and blocks never meet each other.

    Args:
        anchors: Position of each block's anchor, long `[B, A]`.
        context_length: Context rows T, at positions 0 to T − 1.
    """

    def __init__(self, config: DFlashConfig, anchors: torch.Tensor, context_length: int) -> None:
        self.config, self.anchors, self.context_length = config, anchors, context_length
        self.block_size = config.block_size
        self.from_anchor = config.window_from == "anchor"
        self._biases: dict[tuple[int | None, bool], tuple[torch.Tensor, torch.Tensor | None]] = {}

    def _bias(self, layer: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Additive masks of the context `[B, 1, A, 1, S or 1, T]` and of the own block `[S, S]` (None = all seen)."""
        kind = (self.config.layer_window(layer), self.config.layer_is_causal(layer))
        if kind not in self._biases:
            window, is_causal = kind
            slots = torch.arange(self.block_size, device=like.device)
            columns = torch.arange(self.context_length, device=like.device)
            seen = columns < self.anchors[:, None, :, None, None, None]
            if window is not None:
                origins = slots.new_full((1, 1), -1) if self.from_anchor else slots[:, None]
                seen = seen & (self.anchors[:, None, :, None, None, None] + origins - columns < window)
            own = None
            distance = slots[:, None] - slots
            hidden = (distance < 0) if is_causal else torch.zeros_like(distance, dtype=torch.bool)
            if window is not None and not self.from_anchor:
                hidden = hidden | (distance >= window)
            if is_causal or window is not None:
                own = torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, torch.finfo(like.dtype).min)
            context = torch.zeros_like(seen, dtype=like.dtype).masked_fill_(~seen, torch.finfo(like.dtype).min)
            self._biases[kind] = (context, own)
        return self._biases[kind]

    def __call__(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        batch, heads, rows, width = queries.shape
        shared, length, size = keys.shape[1], self.context_length, self.block_size
        blocks, groups = rows // size, heads // keys.shape[1]
        context_bias, own_bias = self._bias(layer, queries)
        # Rows ordered (block, group, slot): the rows of a block stand together, and key heads are never repeated.
        queries = queries.view(batch, shared, groups, blocks, size, width).transpose(2, 3) * width**-0.5
        queries = queries.reshape(batch, shared, blocks * groups * size, width)
        own_keys = keys[:, :, length:].reshape(batch, shared, blocks, size, width)
        own_values = values[:, :, length:].reshape(batch, shared, blocks, size, width)

        context_scores = (queries @ keys[:, :, :length].transpose(2, 3)).view(
            batch, shared, blocks, groups, size, length
        )
        own_queries = queries.view(batch, shared, blocks, groups * size, width)
        own_scores = (own_queries @ own_keys.transpose(3, 4)).view(batch, shared, blocks, groups, size, size)
        if own_bias is not None:
            own_scores = own_scores + own_bias
        weights = torch.cat([context_scores.add_(context_bias), own_scores], dim=-1).softmax(-1)
        mixed = weights[..., :length].reshape(batch, shared, -1, length) @ values[:, :, :length]
        own = weights[..., length:].reshape(batch, shared, blocks, groups * size, size) @ own_values
        mixed = mixed.view(batch, shared, blocks, groups, size, width) + own.view(
            batch, shared, blocks, groups, size, width
        )
        return mixed.transpose(2, 3).reshape(batch, heads, rows, width)


def block_states(
    drafter: DFlashDrafter,
    modules: TargetModules,
    input_ids: torch.Tensor,
    features: torch.Tensor,
    anchors: torch.Tensor,
) -> torch.Tensor:
    """Last-layer states of the drafted rows of every block, before the final norm, `[B, A, D, H]`.

    Args:
        input_ids: Token ids of the sequences, long `[B, T]`.
        features: Feature layers' outputs of all positions, concatenated, `[B, T, layers · H_target]`.
        anchors: Positions of the anchors, long `[B, A]`.
    """
    config, dtype = drafter.config, drafter.fc.weight.dtype
    batch, length = input_ids.shape
    blocks, size = anchors.shape[1], config.block_size
    with torch.no_grad():
        tokens = input_ids.new_full((batch, blocks, size), config.mask_token_id)
        tokens[:, :, 0] = input_ids.gather(1, anchors)
        block = modules.embed(tokens, dtype).view(batch, blocks * size, -1)
    context = drafter.fuse_all(features)
    slots = anchors[:, :, None] + torch.arange(size, device=anchors.device)
    columns = torch.arange(length, device=anchors.device).expand(batch, -1)
    positions = torch.cat([columns, slots.view(batch, -1)], dim=1)
    states = drafter.denoise(block, context, positions, BlockAttention(config, anchors, length))
    return states.view(batch, blocks, size, -1)[:, :, config.first_slot :]


def draft_blocks(
    drafter: DFlashDrafter,
    modules: TargetModules,
    input_ids: torch.Tensor,
    features: torch.Tensor,
    anchors: torch.Tensor,
) -> torch.Tensor:
    """Final hidden states of the drafted rows of every block, ready for the head, `[B, A, D, H]`.

    A TreeFlash drafter is told the text's own token before each row (teacher forcing): its distributions are the
    conditional ones along the text. Arguments are those of `block_states`.
    """
    states = block_states(drafter, modules, input_ids, features, anchors)
    if isinstance(drafter, TreeFlashDrafter):
        before = anchors[:, :, None] + torch.arange(drafter.drafted_depths, device=anchors.device)
        previous = input_ids.gather(1, before.flatten(1)).view(before.shape)
        with torch.no_grad():
            embedded = modules.embed(previous, states.dtype)
        states = drafter.correct(embedded, states)
    return drafter.norm(states)
