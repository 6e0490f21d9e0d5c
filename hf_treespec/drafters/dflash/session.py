"""What a DFlash drafter keeps during one `generate` call: the keys and values of its context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from ...configuration import TreeSpecConfig
from ...transfer import to_device
from ...trees import DraftLattice
from ..base import DraftSession, DraftState
from .block_attention import block_mask, grouped_attention

if TYPE_CHECKING:
    from .modeling_dflash import DFlashDrafter

_SMALLEST_CAPACITY = 64


class ContextBuffers:
    """Growable keys and values of every layer, left-aligned: row b holds `lengths[b]` columns.

    A block's keys and values are written behind the longest row, where the next append overwrites them: attention
    reads one view, and nothing is copied between rounds.

    Attributes:
        storage: Keys and values, `[layers, 2, B, Hkv, capacity, D]`.
        positions: Position of each column, long `[B, capacity]`; rising along a row.
    """

    def __init__(self, drafter: DFlashDrafter, batch_size: int) -> None:
        config, weight = drafter.config, drafter.fc.weight
        layers, heads = config.num_hidden_layers, config.num_key_value_heads
        self.storage = weight.new_zeros(layers, 2, batch_size, heads, 0, config.head_dim)
        self.positions = torch.zeros(batch_size, 0, dtype=torch.long, device=weight.device)
        self.lengths = [0] * batch_size

    def reserve(self, columns: int) -> None:
        """Makes room for `columns` columns, at least doubling where it has to grow."""
        capacity = self.storage.shape[4]
        if columns <= capacity:
            return
        grown, held = max(columns, 2 * capacity, _SMALLEST_CAPACITY), max(self.lengths)
        # Zeros, since attention multiplies even a column that it hides.
        storage = self.storage.new_zeros(*self.storage.shape[:4], grown, self.storage.shape[5])
        positions = self.positions.new_zeros(len(self.lengths), grown)
        storage[..., :held, :] = self.storage[..., :held, :]
        positions[:, :held] = self.positions[:, :held]
        self.storage, self.positions = storage, positions


class DFlashSession(DraftSession):
    """One `generate` call's draft context, and the drafting over it.

    A block keeps its trained length even where fewer depths are wanted: a shorter one would draft from a distribution
    the drafter was not trained for, and the rows beyond cost no head and hardly any time.
    """

    def __init__(self, drafter: DFlashDrafter, target: PreTrainedModel, batch_size: int, max_length: int) -> None:
        config, weight = drafter.config, drafter.fc.weight
        self.drafter, self.modules = drafter, drafter.borrow(target)
        self.feature_layers = tuple(config.target_layer_ids)
        self.buffers = ContextBuffers(drafter, batch_size)
        layers = range(config.num_hidden_layers)
        #: Of each layer: how far it looks back, and whether its block rows see only those before them.
        self.kinds = [(config.layer_window(layer), config.layer_is_causal(layer)) for layer in layers]
        self.slots = torch.arange(config.block_size, device=weight.device)
        masks = self.slots.new_full((batch_size, config.block_size), config.mask_token_id)
        with torch.no_grad():
            #: Embeddings of the block `[B, block_size, H]`; only row 0, the anchor, changes between rounds.
            self.block = self.modules.embed(masks, weight.dtype).to(weight.device).clone()

    def configure(self, config: TreeSpecConfig) -> None:
        super().configure(config)
        self.kinds = [
            (min((w for w in (self.drafter.config.layer_window(layer), self.window) if w), default=None), is_causal)
            for layer, (_, is_causal) in enumerate(self.kinds)
        ]

    @property
    def lengths(self) -> list[int]:
        return list(self.buffers.lengths)

    def rollback(self, lengths: Sequence[int]) -> None:
        self.buffers.lengths = [min(held, kept) for held, kept in zip(self.buffers.lengths, lengths, strict=True)]

    def fuse(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        return self.drafter.fuse(index, hidden)

    @torch.no_grad()
    def observe(self, state: DraftState) -> None:
        if state.features is None or not state.features.shape[1]:
            return
        append = _Append(self.buffers, state, None)
        context = self.drafter.hidden_norm(state.features.to(self.block))
        for layer, (keys, values) in enumerate(self.drafter.project_context(context, append.positions)):
            append.write(layer, keys, values)
        append.finish()

    @torch.no_grad()
    def propose(self, state: DraftState) -> DraftLattice:
        logits = self.modules.logits(self.drafted(self.draft(state), state.depth))
        if self.temperature != 1.0:
            logits = logits / self.temperature
        best, columns = logits.topk(min(state.width, logits.shape[-1]))
        return DraftLattice.marginal(self.modules.tokens(columns), best - logits.logsumexp(-1, keepdim=True))

    def drafted(self, block: torch.Tensor, depth: int) -> torch.Tensor:
        """The rows of a block `[B, block_size, H]` that predict depths 1 to `depth`, `[B, depth, H]`."""
        first = self.drafter.config.first_slot
        return block[:, first : first + depth]

    @torch.no_grad()
    def draft(self, state: DraftState) -> torch.Tensor:
        """Takes the new features into the context; returns the block's final hidden states `[B, block_size, H]`."""
        return self.drafter.norm(self.denoise(state))

    @torch.no_grad()
    def denoise(self, state: DraftState) -> torch.Tensor:
        """`draft` without the final norm."""
        block = self.block
        block[:, 0] = self.modules.embed(state.anchors, block.dtype).to(block.device)
        append = _Append(self.buffers, state, state.positions.to(block.device)[:, None] + self.slots)
        context = None
        if append.context_rows and state.features is not None:
            context = self.drafter.hidden_norm(state.features.to(block))
        views: dict[tuple[int | None, bool], tuple[int, torch.Tensor | None]] = {}

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            append.write(layer, keys, values)
            kind = self.kinds[layer]
            if kind not in views:
                views[kind] = append.view(*kind, self.drafter.config.window_from)
            first, mask = views[kind]
            keys, values = self.buffers.storage[layer, :, :, :, first : append.end]
            return grouped_attention(queries, keys, values, mask)

        hidden = self.drafter.denoise(block, context, append.positions, attend)
        append.finish()
        return hidden


class _Append:
    """One write to the buffers: new context rows, then a block's rows as scratch behind them.

    Attributes:
        positions: Positions of the rows written, the context's then the block's, long `[B, context_rows + S]`.
        end: Columns in use once everything is written.
    """

    def __init__(self, buffers: ContextBuffers, state: DraftState, block_positions: torch.Tensor | None) -> None:
        device, old = buffers.positions.device, buffers.lengths
        self.buffers, self.block_positions = buffers, block_positions
        self.context_rows = 0 if state.features is None else state.features.shape[1]
        parts = [] if block_positions is None else [block_positions]
        #: Row, column and source row of each real context row; None where all rows get the same columns.
        self.scatter: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self.lengths = [length + self.context_rows for length in old]
        if self.context_rows:
            assert state.feature_positions is not None
            parts.insert(0, state.feature_positions.to(device))
            valid = state.feature_valid
            if valid is not None or min(old) != max(old):
                real = parts[0].new_ones(parts[0].shape, dtype=torch.bool) if valid is None else valid.to(device)
                self.lengths = [length + count for length, count in zip(old, real.sum(1).tolist(), strict=True)]
                rows, sources = real.nonzero(as_tuple=True)
                columns = real.cumsum(1) - 1 + to_device(old, device)[:, None]
                self.scatter = (rows, columns[rows, sources], sources)
        self.positions = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        self.context_end = max(self.lengths)
        self.end = self.context_end + (0 if block_positions is None else block_positions.shape[1])
        buffers.reserve(self.end)
        self._store(buffers.positions[:, None, :, None], self.positions[:, None, :, None])

    def _store(self, columns: torch.Tensor, fresh: torch.Tensor) -> None:
        """Writes rows `[B, heads, context_rows + S, width]` into their columns of `[B, heads, capacity, width]`."""
        if self.scatter is None:
            columns[:, :, self.context_end - self.context_rows : self.end] = fresh
            return
        rows, places, sources = self.scatter
        columns[rows, :, places] = fresh[rows, :, sources]
        if self.end > self.context_end:
            columns[:, :, self.context_end : self.end] = fresh[:, :, self.context_rows :]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores one layer's keys and values `[B, Hkv, context_rows + S, D]`."""
        self._store(self.buffers.storage[layer, 0], keys)
        self._store(self.buffers.storage[layer, 1], values)

    def view(self, window: int | None, is_causal: bool, window_from: str) -> tuple[int, torch.Tensor | None]:
        """The first column that a kind of layer reads, and which columns from there on its block rows see."""
        assert self.block_positions is not None
        shortest = min(self.lengths)
        # Positions rise along a row: a column further back than the window lies at least as many positions back.
        first = 0 if window is None else max(0, shortest - window)
        positions = self.buffers.positions[:, first : self.end]
        held = None
        if shortest != self.context_end:
            columns = torch.arange(first, self.end, device=positions.device)
            lengths = to_device(self.lengths, positions.device)[:, None]
            held = (columns < lengths) | (columns >= self.context_end)
        return first, block_mask(self.block_positions, positions, held, window, is_causal, window_from)

    def finish(self) -> None:
        """Makes the context rows part of the context; the block's stay scratch."""
        self.buffers.lengths = self.lengths
