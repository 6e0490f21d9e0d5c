"""Cache layers of our own: growable or fixed K/V buffers that take a tree as scratch and keep a path of it in place.

Column c of a row, c below the row's length, holds that row's token with sequence index c. A tree's rows are written
for all batch rows at the same columns, from the longest row on; columns between a row's length and there are holes
that masks hide. Buffers start as zeros, so that holes are finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ..transfer import to_device
from .capabilities import LayerRole, UnsupportedCacheError, stored_columns

#: Columns allocated beyond the first forward's, so that a short answer never reallocates.
HEADROOM = 576


class Rows:
    """What the layers of one cache share: the rows' lengths, and whether a tree is being verified.

    Attributes:
        lengths: Cached columns of each row; empty until the prefill is over.
        live: Rows that committed something in the last round.
        longest: Cached columns of the longest row: where a tree's rows begin.
        shortest: Cached columns of the shortest live row: how far back a window may still look.
        bytes_written: Bytes the rounds wrote: trees' rows and moved rows.
        bytes_relocated: Bytes copied when a buffer grew or moved to its front; amortised over the tokens committed.
    """

    def __init__(self, batch_size: int, capacity: int) -> None:
        self.batch_size = batch_size
        self.capacity = capacity
        self.lengths: list[int] = []
        self.live = [True] * batch_size
        self.longest = 0
        self.shortest = 0
        self.in_tree = False
        self.bytes_written = 0
        self.bytes_relocated = 0

    def start(self, length: int) -> None:
        """Begins the rounds, with all rows `length` columns long."""
        self.lengths = [length] * self.batch_size
        self.longest = self.shortest = length

    def advance(self, counts: Sequence[int]) -> None:
        """Makes row b `counts[b]` columns longer."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.live = [count > 0 for count in counts]
        self.longest = max(self.lengths)
        living = [length for length, live in zip(self.lengths, self.live, strict=True) if live]
        self.shortest = min(living) if living else self.longest

    def trim(self, columns: int) -> None:
        """Makes no row longer than `columns` columns."""
        self.lengths = [min(length, columns) for length in self.lengths]
        self.longest = max(self.lengths)
        self.shortest = min(self.shortest, self.longest)

    def offset(self, window: int) -> int:
        """First sequence index that some live row's next token can see through `window`."""
        return max(0, self.shortest - window + 1)


class Moves:
    """Where the accepted rows of a round go. Index tensors are built once and shared by all layers of a device.

    Args:
        rows: The rows before the round.
        paths: Accepted nodes of each row, root first, ascending; empty for rows that commit nothing.
    """

    def __init__(self, rows: Rows, paths: Sequence[Sequence[int]]) -> None:
        self.paths = paths
        self.counts = [len(path) for path in paths]
        self._longest = rows.longest
        self._single = rows.batch_size == 1
        self._indices: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._sources: list[list[int]] = []
        if self._single:
            path = paths[0]
            # The leading part of the path that already stands where it belongs stays untouched.
            self._in_place = next((i for i, node in enumerate(path) if node != i), len(path))
            self._moved = list(path[self._in_place :])
        else:
            self._sources = [
                [row, rows.lengths[row] + depth, rows.longest + node]
                for row, path in enumerate(paths)
                for depth, node in enumerate(path)
                if rows.lengths[row] + depth != rows.longest + node
            ]

    @property
    def count(self) -> int:
        """Rows that move."""
        return len(self._moved) if self._single else len(self._sources)

    def apply(self, buffer: torch.Tensor, start: int) -> None:
        """Moves the accepted rows of `buffer` `[B, H, columns, D]`, whose first column has sequence index `start`."""
        if self._single:
            moved = self._index(buffer.device, 0, self._moved)
            tree = buffer.narrow(2, self._longest - start, self._moved[-1] + 1)
            kept = tree.index_select(2, moved)
            buffer.narrow(2, self._longest - start + self._in_place, len(self._moved)).copy_(kept)
        else:
            row, target, source = self._index(buffer.device, start, self._sources)
            # Reading gathers a copy first, so that sources and targets may overlap.
            buffer[row, :, target] = buffer[row, :, source]

    def select(self, states: torch.Tensor) -> torch.Tensor:
        """The accepted rows of `states` `[B, H, N, D]` as `[B, H, a, D]`.

        All rows accept `a`; idle rows repeat their root.
        """
        width = max(self.counts)
        paths = [list(path) or [0] * width for path in self.paths]
        nodes = self._index(states.device, -1, paths)
        if self._single:
            return states.index_select(2, nodes[0])
        row = torch.arange(len(paths), device=states.device)[:, None]
        return states[row, :, nodes].transpose(1, 2)

    def _index(self, device: torch.device, start: int, values: Any) -> torch.Tensor:
        index = self._indices.get((device, start))
        if index is None:
            index = to_device(values, device)
            if values is self._sources:
                index = index.T.contiguous()
                index[1:] -= start
            self._indices[device, start] = index
        return index


class TreeLayer(CacheLayerMixin):
    """Full attention in place of a stock layer: buffers `[B, H, columns, D]` that double when they are full.

    `keys` and `values` are the whole buffers. Outside a tree forward, `update` appends and answers as the stock layer
    does; inside, it writes scratch rows.

    Args:
        stock: The layer this one stands for; what it holds is copied on the first update.
        role: How `stock` stores.
        rows: Shared with the other layers of the cache.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, stock: Any, role: LayerRole, rows: Rows) -> None:
        super().__init__()
        self.stock = stock
        self.role = role
        self.rows = rows
        self.length = int(stock.get_seq_length())
        #: Sequence index of the buffers' first column.
        self.start = 0
        #: Rows the current round's tree forward wrote.
        self.scratch = 0
        self.column_bytes = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates the buffers for `[B, H, n, D]` states to come, and takes over what the stock layer holds."""
        content = stored_columns(self.stock, self.role)
        stored = content[0].shape[2] if content is not None else 0
        self.start = self.length - stored
        self.device = key_states.device
        columns = self._first_columns(stored + key_states.shape[2])
        self.keys = self._zeros(key_states, columns)
        self.values = self._zeros(value_states, columns)
        self._measure()
        if content is not None:
            self.keys.narrow(2, 0, stored).copy_(content[0])
            self.values.narrow(2, 0, stored).copy_(content[1])
            self._release_stock()
        self.is_initialized = True

    def _first_columns(self, needed: int) -> int:
        return max(needed, min(self.rows.capacity, needed + HEADROOM))

    def _release_stock(self) -> None:
        self.stock.keys = self.stock.values = None
        self.stock.is_initialized = False

    def _measure(self) -> None:
        self.column_bytes = sum(
            buffer.element_size() * buffer.shape[0] * buffer.shape[1] * buffer.shape[3]
            for buffer in (self.keys, self.values)
        )

    @staticmethod
    def _zeros(like: torch.Tensor, columns: int) -> torch.Tensor:
        return like.new_zeros((like.shape[0], like.shape[1], columns, like.shape[3]))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends `[B, H, n, D]` states, or takes them as the rows of a tree; returns what the forward may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.rows.in_tree:
            return self._take_tree(key_states, value_states)
        self._check_prefill()
        seen = self._append(key_states, value_states)
        self.length += key_states.shape[2]
        return seen

    def _check_prefill(self) -> None:
        if self.rows.lengths:
            raise RuntimeError("after the prefill this cache is only written inside TreeCache.tree_forward")

    def _take_tree(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.scratch = key_states.shape[2]
        self.rows.bytes_written += self.scratch * self.column_bytes
        return self._write(self.rows.longest, self.view_offset(), key_states, value_states)

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._write(self.length, self.view_offset(), key_states, value_states)

    def _write(
        self, begin: int, offset: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes at sequence index `begin` and returns the columns from `offset` to the last one written."""
        count = key_states.shape[2]
        if begin + count - self.start > self.keys.shape[2]:
            self._make_room(begin, count)
        self.keys.narrow(2, begin - self.start, count).copy_(key_states)
        self.values.narrow(2, begin - self.start, count).copy_(value_states)
        first, seen = offset - self.start, begin + count - offset
        return self.keys.narrow(2, first, seen), self.values.narrow(2, first, seen)

    def _make_room(self, begin: int, count: int) -> None:
        """Makes room for `count` columns from sequence index `begin` on."""
        doubled = 2 * self.keys.shape[2]
        if begin + count <= self.rows.capacity:
            doubled = min(doubled, self.rows.capacity)
        self._relocate(self.start, begin - self.start, max(begin + count, doubled))

    def _relocate(self, first: int, kept: int, columns: int) -> None:
        """Moves `kept` columns from sequence index `first` on to the front of buffers of `columns` columns.

        Within one buffer this never overlaps: it is done when over `columns − count` are taken and at most half of
        that is kept.
        """
        source = first - self.start
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old if columns == old.shape[2] else self._zeros(old, columns)
            new.narrow(2, 0, kept).copy_(old.narrow(2, source, kept))
            setattr(self, name, new)
        self.rows.bytes_relocated += kept * self.column_bytes
        self.start = first

    def view_offset(self) -> int:
        """Sequence index of the first column the next forward sees."""
        return 0

    def commit(self, moves: Moves) -> None:
        """Moves the accepted rows of the last tree forward to the ends of their rows."""
        if moves.count:
            moves.apply(self.keys, self.start)
            moves.apply(self.values, self.start)
            self.rows.bytes_written += moves.count * self.column_bytes // self.rows.batch_size

    def restore(self) -> Any:
        """Gives the stock layer what plain decoding would have left in it, and returns it."""
        if self.is_initialized:
            self._clear_holes()
            self._fill_stock()
        return self.stock

    def _fill_stock(self) -> None:
        self._lend(self.length)

    def _lend(self, columns: int) -> None:
        """Lets the stock layer hold views of the last `columns` columns."""
        keys, values = self._last(columns)
        if not self.stock.is_initialized:
            self.stock.lazy_initialization(keys, values)
        self.stock.keys, self.stock.values = keys, values

    def _last(self, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.length - self.start - columns
        return self.keys.narrow(2, first, columns), self.values.narrow(2, first, columns)

    def _clear_holes(self) -> None:
        for row, length in enumerate(self.rows.lengths):
            if length == self.length:
                continue
            hole = slice(max(length, self.start) - self.start, self.length - self.start)
            self.keys[row, :, hole] = 0
            self.values[row, :, hole] = 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns the next forward of `query_length` rows sees, and the sequence index of the first."""
        offset = self.view_offset()
        return self.length - offset + query_length, offset

    def get_seq_length(self) -> int:
        """Cached columns of the longest row."""
        return self.length

    def get_max_length(self) -> int:
        """Columns the layer can hold, −1 for no limit."""
        return -1

    def reset(self) -> None:
        """Empties the layer but keeps its buffers."""
        super().reset()
        self.length = self.start = self.scratch = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last `abs(tokens_to_remove)` columns; only before the rounds."""
        self._check_prefill()
        self.length = max(0, self.length - abs(tokens_to_remove))


class TreeStaticLayer(TreeLayer):
    """The stock static layer's own tensors as buffers that never grow: their addresses stay, nothing is copied."""

    def __init__(self, stock: Any, role: LayerRole, rows: Rows) -> None:
        super().__init__(stock, role, rows)
        # A static layer shorter than its window is full attention, but masks of windows are looked up through it.
        self.is_sliding = stock.is_sliding

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if not self.stock.is_initialized:
            self.stock.lazy_initialization(key_states, value_states)
        self.keys, self.values = self.stock.keys, self.stock.values
        self.device = self.keys.device
        self._measure()
        self.is_initialized = True

    def free_rows(self) -> int:
        """Columns left behind the longest row."""
        return self.stock.max_cache_len - self.length

    def get_max_length(self) -> int:
        return self.stock.max_cache_len

    def _make_room(self, begin: int, count: int) -> None:
        raise UnsupportedCacheError(
            f"a static cache of {self.stock.max_cache_len} columns cannot take {count} rows after {begin}; pass a "
            f"StaticCache of at least {begin + count} columns, or no cache"
        )

    def _fill_stock(self) -> None:
        self.stock.cumulative_length.fill_(self.length)
        if hasattr(self.stock, "cumulative_length_int"):
            self.stock.cumulative_length_int = self.length


class TreeSlidingLayer(TreeLayer):
    """Sliding or chunked attention: keeps only what a window can still reach, and moves it to the front now and then.

    Moving costs at most one column for every column committed since the last time, as the buffers have at least as
    much room free afterwards as they keep.
    """

    is_sliding = True

    def __init__(self, stock: Any, role: LayerRole, rows: Rows) -> None:
        super().__init__(stock, role, rows)
        static = role is LayerRole.STATIC_SLIDING
        self.window: int = stock.max_cache_len if static else stock.sliding_window
        # Stock static layers keep one column more than any window reaches.
        self.keep = self.window if static else self.window - 1

    def _first_columns(self, needed: int) -> int:
        return min(super()._first_columns(needed), 2 * self.window + HEADROOM)

    def view_offset(self) -> int:
        return self.rows.offset(self.window) if self.rows.lengths else max(0, self.length - self.window + 1)

    def get_max_length(self) -> int:
        return self.window

    def crop(self, tokens_to_remove: int) -> None:
        length = max(0, self.length - abs(tokens_to_remove))
        if self.start > max(0, length - self.window + 1):
            raise RuntimeError(f"columns before {self.start} left the window of {self.window} and cannot come back")
        super().crop(tokens_to_remove)

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count, offset = key_states.shape[2], self.view_offset()
        kept = self.length - max(self.start, self.length - self.keep)
        if min(self.length - self.start, 2 * kept) + count <= self.keys.shape[2]:
            return self._write(self.length, offset, key_states, value_states)
        # A long prompt passes through: it sees everything, but only its end is stored.
        past = self.length - offset
        keys, values = key_states, value_states
        if past:
            old_keys, old_values = self._last(past)
            keys, values = torch.cat([old_keys, keys], dim=2), torch.cat([old_values, values], dim=2)
        stored = min(self.keep, keys.shape[2])
        if stored > self.keys.shape[2]:
            self.keys, self.values = self._zeros(keys, stored + HEADROOM), self._zeros(values, stored + HEADROOM)
        self.keys.narrow(2, 0, stored).copy_(keys.narrow(2, keys.shape[2] - stored, stored))
        self.values.narrow(2, 0, stored).copy_(values.narrow(2, values.shape[2] - stored, stored))
        self.start = self.length + count - stored
        return keys, values

    def _make_room(self, begin: int, count: int) -> None:
        reached = self.rows.shortest if self.rows.lengths else begin
        first = max(self.start, reached - self.keep)
        kept = begin - first
        columns = self.keys.shape[2]
        if 2 * kept + count > columns:
            columns = 2 * kept + count + HEADROOM
        self._relocate(first, kept, columns)

    def _fill_stock(self) -> None:
        if self.role is LayerRole.STATIC_SLIDING:
            columns = min(self.length, self.window, self.length - self.start)
            keys, values = self._last(columns)
            if not self.stock.is_initialized:
                self.stock.lazy_initialization(keys, values)
            self.stock.keys[:, :, :columns].copy_(keys)
            self.stock.values[:, :, :columns].copy_(values)
            self.stock.cumulative_length_int = self.length
            self.stock.cumulative_length.fill_(min(self.length, self.window))
        else:
            self._lend(min(self.length, self.keep))
            self.stock.cumulative_length = self.length

    def _release_stock(self) -> None:
        # A static layer's tensors keep their addresses; they are written back at the end.
        if self.role is LayerRole.SLIDING:
            super()._release_stock()


class TreeFp8Layer(TreeLayer):
    """Buffers of 8-bit floats under the scales that the stock layer froze on its first update.

    Plain decoding sees every row, its own included, through quantise and dequantise; so do a tree's rows here. The
    first update alone sees raw states. Scales never change, so rows may commit different counts.
    """

    _scales: tuple[torch.Tensor, torch.Tensor]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = not self.is_initialized and not self.stock.is_initialized
        if first:
            _refuse_tree(self.rows)
            self.stock.lazy_initialization(key_states, value_states)
        if not self.is_initialized:
            self._scales = self.stock._quantized_keys[1], self.stock._quantized_values[1]
        key_codes = self.stock._quantize(key_states, scale=self._scales[0])[0]
        value_codes = self.stock._quantize(value_states, scale=self._scales[1])[0]
        self._code_dtype = key_codes.dtype
        # Stored as bytes: not every kernel that moves rows knows 8-bit floats.
        keys, values = super().update(key_codes.view(torch.uint8), value_codes.view(torch.uint8))
        if first:
            return key_states, value_states
        return (
            self.stock._dequantize((keys.view(self._code_dtype), self._scales[0])),
            self.stock._dequantize((values.view(self._code_dtype), self._scales[1])),
        )

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        # The codes are held here now; the stock layer keeps its scales and dtype.
        self.stock._quantized_keys = self.stock._quantized_values = None

    def _release_stock(self) -> None:
        pass

    def _fill_stock(self) -> None:
        keys, values = self._last(self.length)
        self.stock._quantized_keys = keys.view(self._code_dtype), self._scales[0]
        self.stock._quantized_values = values.view(self._code_dtype), self._scales[1]
        self.stock.cumulative_length = self.length


class TreeResidualLayer(TreeLayer):
    """Quantised layers with residual rows: the stock layer keeps storing, in two phases.

    A tree forward sees `[dequantised | residual | tree]` and stores nothing; `commit` appends the path. Plain decoding
    appends a row a step and quantises everything after the step that fills the residual: the rows up to that step see
    each other raw, the next one does not. So a path is exact up to `depth_limit` rows, and appending it gives the very
    tensor that plain decoding would quantise.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stock = self.stock
        if not self.rows.in_tree:
            self._check_prefill()
            seen = stock.update(key_states, value_states, *args, **kwargs)
            self.length = stock.get_seq_length()
            self.is_initialized = True
            return seen
        if not stock.is_initialized:
            _refuse_tree(self.rows)
        self.is_initialized = True
        self._stash = key_states, value_states
        self.scratch = key_states.shape[2]
        self.column_bytes = sum(
            states.element_size() * states.numel() // states.shape[2] for states in (key_states, value_states)
        )
        self.rows.bytes_written += self.scratch * self.column_bytes
        keys = torch.cat([stock._dequantize(stock._quantized_keys), stock.keys, key_states], dim=-2)
        values = torch.cat([stock._dequantize(stock._quantized_values), stock.values, value_states], dim=-2)
        return keys, values

    def depth_limit(self) -> int:
        """Rows a path may commit before the layer quantises again."""
        return max(1, self.stock.residual_length - self._residual())

    def _residual(self) -> int:
        keys = self.stock.keys
        return keys.shape[-2] if keys is not None and keys.dim() == 4 else 0

    def commit(self, moves: Moves) -> None:
        count, stock = max(moves.counts), self.stock
        keys, values = (moves.select(states) for states in self._stash)
        # The row that fills the residual goes in by itself, as in plain decoding: versions differ in how they count
        # several at once.
        filling = int(self._residual() + count >= stock.residual_length)
        appended = count - filling
        if appended:
            stock.keys = torch.cat([stock.keys, keys[:, :, :appended]], dim=-2)
            stock.values = torch.cat([stock.values, values[:, :, :appended]], dim=-2)
            stock.cumulative_length += appended
        if filling:
            stock.update(keys[:, :, appended:], values[:, :, appended:])
        self.rows.bytes_written += count * self.column_bytes
        del self._stash

    def restore(self) -> Any:
        return self.stock

    def reset(self) -> None:
        self.stock.reset()
        self.length = self.scratch = 0


def _refuse_tree(rows: Rows) -> None:
    if rows.in_tree:
        raise RuntimeError("a quantised cache calibrates on its first forward, which must be the prefill")


LAYERS: dict[LayerRole, type[TreeLayer]] = {
    LayerRole.FULL: TreeLayer,
    LayerRole.SLIDING: TreeSlidingLayer,
    LayerRole.STATIC: TreeStaticLayer,
    LayerRole.STATIC_SLIDING: TreeSlidingLayer,
    LayerRole.FP8: TreeFp8Layer,
    LayerRole.RESIDUAL: TreeResidualLayer,
}


def tree_layer(stock: Any, role: LayerRole, rows: Rows) -> TreeLayer:
    """Our layer for a stock one of `role`."""
    return LAYERS[role](stock, role, rows)
