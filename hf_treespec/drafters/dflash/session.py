"""What a DFlash drafter keeps during one `generate` call: the keys and values of its context."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ...trees import DraftLattice
from ..base import DraftSession, DraftState, TargetModules
from .modeling_dflash import DFlashDrafter, block_mask, grouped_attention

_SMALLEST_CAPACITY = 64


class ContextBuffers:
    """Growable keys and values of every layer, left-aligned: row b holds `lengths[b]` columns.

    The block's keys and values are written behind the longest row, where the next append overwrites them, so that
    attention reads one view and nothing is copied between rounds.
    """

    def __init__(
        self, layers: int, batch_size: int, heads: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.storage = torch.empty(layers, 2, batch_size, heads, 0, width, dtype=dtype, device=device)
        self.positions = torch.zeros(batch_size, 0, dtype=torch.long, device=device)
        self.lengths = [0] * batch_size

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def is_uniform(self) -> bool:
        return min(self.lengths) == self.longest

    def reserve(self, columns: int) -> None:
        """Makes room for `columns` columns, at least doubling when it has to grow."""
        capacity = self.storage.shape[4]
        if columns <= capacity:
            return
        grown = max(columns, 2 * capacity, _SMALLEST_CAPACITY)
        # Zeros, because a column no row has written is still multiplied by its weight of nought.
        storage = self.storage.new_zeros(*self.storage.shape[:4], grown, self.storage.shape[5])
        positions = self.positions.new_zeros(self.positions.shape[0], grown)
        longest = self.longest
        storage[..., :longest, :] = self.storage[..., :longest, :]
        positions[:, :longest] = self.positions[:, :longest]
        self.storage, self.positions = storage, positions


class DFlashSession(DraftSession):
    """One `generate` call's draft context and the drafting over it.

    A block keeps its trained length even when fewer depths are wanted: a shorter one would draft from another
    distribution than the drafter was trained for, while the rows beyond cost no head and hardly any time.

    Args:
        temperature: Drafter temperature at which the lattice's log-probabilities are normalised.
    """

    def __init__(
        self,
        drafter: DFlashDrafter,
        target: PreTrainedModel,
        batch_size: int,
        max_length: int,
        *,
        temperature: float = 1.0,
    ) -> None:
        config = drafter.config
        self.drafter = drafter
        self.modules = TargetModules(target)
        self.temperature = temperature
        self.feature_layers = tuple(config.target_layer_ids)
        weight = drafter.fc.weight
        self.buffers = ContextBuffers(
            config.num_hidden_layers, batch_size, config.num_key_value_heads, config.head_dim, weight.dtype, weight.device
        )
        self.windows = [config.layer_window(layer) for layer in range(config.num_hidden_layers)]
        self.causal = [config.layer_is_causal(layer) for layer in range(config.num_hidden_layers)]
        self.slots = torch.arange(config.block_size, device=weight.device)
        masks = self.slots.new_full((batch_size, config.block_size), config.mask_token_id)
        with torch.no_grad():
            #: Embeddings of the block; only row 0, the anchor, changes between rounds.
            self.block = self.modules.embed(masks, weight.dtype).to(weight.device).clone()

    @property
    def lengths(self) -> list[int]:
        return list(self.buffers.lengths)

    def rollback(self, lengths: Sequence[int]) -> None:
        self.buffers.lengths = [min(held, kept) for held, kept in zip(self.buffers.lengths, lengths, strict=True)]

    def fuse(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        return self.drafter.fuse(index, hidden)

    @torch.no_grad()
    def observe(self, state: DraftState) -> None:
        append = _Append(self.buffers, state, 0)
        if append.context_rows == 0 or state.features is None:
            return
        context = self.drafter.hidden_norm(state.features.to(self.block))
        cos, sin = self.drafter.rotary_emb(context, append.positions)
        for index, layer in enumerate(self.drafter.layers):
            append.write(index, *layer.self_attn.keys_values(context, cos, sin))
        append.finish()

    @torch.no_grad()
    def propose(self, state: DraftState) -> DraftLattice:
        hidden = self.draft(state)[:, 1 : state.depth + 1]
        logits = self.modules.logits(hidden)
        if self.temperature != 1.0:
            logits = logits / self.temperature
        best, tokens = logits.topk(min(state.width, logits.shape[-1]))
        return DraftLattice.marginal(tokens, best - logits.logsumexp(-1, keepdim=True))

    def draft(self, state: DraftState) -> torch.Tensor:
        """Takes the new features into the context and returns the block's final hidden states `[B, block_size, H]`."""
        block, device = self.block, self.block.device
        block[:, 0] = self.modules.embed(state.anchors, block.dtype).to(device)
        append = _Append(self.buffers, state, block.shape[1])
        positions = state.positions.to(device)[:, None] + self.slots
        context = None
        if append.context_rows and state.features is not None:
            context = self.drafter.hidden_norm(state.features.to(block))
            append.set_positions(positions)
            positions = torch.cat([append.positions, positions], dim=1)
        else:
            append.set_positions(positions)
        masks: dict[tuple[int | None, bool], tuple[int, torch.Tensor | None]] = {}

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            append.write(layer, keys, values)
            kind = (self.windows[layer], self.causal[layer])
            if kind not in masks:
                masks[kind] = append.mask(*kind)
            first, mask = masks[kind]
            keys, values = self.buffers.storage[layer, :, :, :, first : append.end]
            return grouped_attention(queries, keys, values, mask)

        hidden = self.drafter.decode(block, context, positions, attend)
        append.finish()
        return hidden


class _Append:
    """One write to the buffers: new context rows, then the block's rows as scratch behind them."""

    def __init__(self, buffers: ContextBuffers, state: DraftState, block_rows: int) -> None:
        self.buffers, self.block_rows = buffers, block_rows
        device = buffers.positions.device
        self.old = list(buffers.lengths)
        self.context_rows = 0 if state.features is None else state.features.shape[1]
        self.valid = state.feature_valid if self.context_rows else None
        if self.context_rows:
            assert state.feature_positions is not None
            self.positions = state.feature_positions.to(device)
        #: Where each real context row goes, `(rows, columns, source rows)`; None when every row gets the same columns.
        self.scatter: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if self.valid is not None:
            valid = self.valid.to(device)
            self.new = [old + count for old, count in zip(self.old, valid.sum(1).tolist(), strict=True)]
            columns = valid.cumsum(1) - 1 + torch.tensor(self.old, device=device)[:, None]
            rows, sources = valid.nonzero(as_tuple=True)
            self.scatter = (rows, columns[rows, sources], sources)
        else:
            self.new = [old + self.context_rows for old in self.old]
            if self.context_rows and not buffers.is_uniform:
                columns = torch.tensor(self.old, device=device)[:, None] + torch.arange(self.context_rows, device=device)
                rows = torch.arange(len(self.old), device=device)[:, None].expand_as(columns)
                sources = torch.arange(self.context_rows, device=device).expand_as(columns)
                self.scatter = (rows.reshape(-1), columns.reshape(-1), sources.reshape(-1))
        self.context_end = max(self.new)
        self.end = self.context_end + block_rows
        buffers.reserve(self.end)
        if self.context_rows:
            if self.scatter is None:
                buffers.positions[:, self.old[0] : self.new[0]] = self.positions
            else:
                rows, columns, sources = self.scatter
                buffers.positions[rows, columns] = self.positions[rows, sources]

    def set_positions(self, block_positions: torch.Tensor) -> None:
        """Notes the positions of the block's scratch columns."""
        self.block_positions = block_positions
        self.buffers.positions[:, self.context_end : self.end] = block_positions

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores one layer's keys and values `[B, Hkv, context_rows + block_rows, D]`."""
        for store, fresh in zip(self.buffers.storage[layer], (keys, values), strict=True):
            if self.scatter is None:
                store[:, :, self.context_end - self.context_rows : self.end] = fresh
            else:
                rows, columns, sources = self.scatter
                store[rows, :, columns] = fresh[rows, :, sources]
                store[:, :, self.context_end : self.end] = fresh[:, :, self.context_rows :]

    def mask(self, window: int | None, is_causal: bool) -> tuple[int, torch.Tensor | None]:
        """First column a kind of layer reads, and which of the columns from there its block rows see."""
        first = 0
        if window is not None:
            # Positions rise along a row, so a column that lies a window of columns back lies at least as many
            # positions back.
            first = max(0, min(self.new) - window)
        valid = None
        columns = self.buffers.positions[:, first : self.end]
        if min(self.new) != self.context_end:
            index = torch.arange(first, self.end, device=columns.device)
            held = torch.tensor(self.new, device=columns.device)[:, None]
            valid = (index < held) | (index >= self.context_end)
        return first, block_mask(self.block_positions, columns, valid, window, is_causal)

    def finish(self) -> None:
        """Makes the context rows part of the context; the block's stay scratch."""
        self.buffers.lengths = self.new
