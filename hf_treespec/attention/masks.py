"""Additive attention masks of verification forwards, built from sequence indices.

Column `c` of a row holds its token with sequence index `c`, left padding included; a node at depth `d` of a row with
`lengths[b]` cached columns has index `lengths[b] + d`. A view of the cache shows `count` prefix columns, with indices
`offset … offset + count − 1`, then the N rows of the tree. Windows go by these indices: two nodes side by side in the
tree may be the same token of the sequence, so column distances say nothing.

Masks are in the model's dtype with its lowest finite number, never bool: eager attention adds what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..transfer import to_device

#: How a cache shows itself to a layer: `(offset, count)`, or `(offset, count, tree_start)` where the tree's columns do
#: not come last (static caches); the columns after the tree are then empty slots.
Columns = tuple[int, int] | tuple[int, int, int]


@dataclass(frozen=True)
class LayerKind:
    """What a decoder layer's attention may look back at.

    Attributes:
        name: "full_attention", "sliding_attention" or "chunked_attention".
        window: Tokens of the sliding window (the query included) or of a chunk; None for full attention.
    """

    name: str
    window: int | None = None

    def spans(self, first: int, last: int, padding: int = 0) -> bool:
        """Whether the token with sequence index `last` sees back to index `first`: no window hides anything."""
        if self.window is None:
            return True
        if self.name == "chunked_attention":
            return (first - padding) // self.window == (last - padding) // self.window
        return last - first < self.window


def layer_kinds(text_config: Any) -> list[LayerKind]:
    """The kind of every decoder layer, by the rule transformers builds its own masks with.

    Raises:
        ValueError: A layer's attention is of a type whose trees are not known here.
    """
    window = getattr(text_config, "sliding_window", None)
    chunk = getattr(text_config, "attention_chunk_size", None)
    names = getattr(text_config, "layer_types", None)
    if names is None:
        # Configurations that switch the window off (`use_sliding_window`) set it to None themselves.
        name = "sliding_attention" if window else "chunked_attention" if chunk else "full_attention"
        names = [name] * text_config.num_hidden_layers
    windows = {"full_attention": None, "sliding_attention": window, "chunked_attention": chunk}
    for name in names:
        if name not in windows:
            raise ValueError(f"layers of type {name!r} cannot verify draft trees; known: {', '.join(windows)}")
        if name != "full_attention" and not windows[name]:
            raise ValueError(f"the configuration has {name!r} layers but not the size of their window")
    return [LayerKind(name, windows[name]) for name in names]


def tree_mask(
    kind: LayerKind,
    tree_ancestors: torch.Tensor,
    depths: torch.Tensor,
    lengths: torch.Tensor,
    columns: Columns,
    valid: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The additive mask of a layer kind, computed in full.

    Args:
        kind: The layer kind.
        tree_ancestors: Which nodes each node sees, bool `[B, N, N]`.
        depths: Depths of the nodes, long `[B, N]`.
        lengths: Cached columns of each row, long `[B]`.
        columns: The cache's view.
        valid: False where a column of the prompt is padding, bool `[B, S0]`; None if there is none.
        dtype: The model's dtype.

    Returns:
        `[B, 1, N, count + N]` (queries see columns whose entry is 0).
    """
    offset, count = columns[:2]
    start = columns[2] if len(columns) == 3 else count
    nodes = depths.shape[1]
    padding = _left_padding(valid)
    tree_index = lengths.view(-1, 1) + depths
    prefix_index = torch.arange(offset, offset + start, device=depths.device)
    prefix = prefix_index < lengths.view(-1, 1, 1)
    if valid is not None:
        prefix = prefix & _is_valid(valid, offset, offset + start).unsqueeze(1)
    prefix = prefix & _within(kind, tree_index.unsqueeze(2), prefix_index, padding)
    tree = tree_ancestors & _within(kind, tree_index.unsqueeze(2), tree_index.unsqueeze(1), padding)
    visible = torch.zeros(len(depths), nodes, count + nodes, dtype=torch.bool, device=depths.device)
    visible[..., :start] = prefix
    visible[..., start : start + nodes] = tree
    return _additive(visible, dtype).unsqueeze(1)


class TreeMasks:
    """Builds the `attention_mask` argument of every verification forward of one `generate` call.

    Layers that see the whole prefix keep one buffer, whose prefix columns are settled once: a round writes the
    columns since the last round and the tree's own. Layers that hide part of the prefix behind a window, of which
    their cache shows little, are computed anew.

    Attributes:
        prefix_visible: Per decoder layer, whether every node of the last mask built sees every prefix column, so that
            attention over the prefix needs no mask.
    """

    def __init__(
        self,
        kinds: Sequence[LayerKind],
        dtype: torch.dtype,
        device: torch.device | str,
        valid: torch.Tensor | None = None,
        keyed: bool = False,
    ) -> None:
        """Masks of a target's layers.

        Args:
            kinds: Kind of every decoder layer.
            dtype: The model's dtype.
            device: The masks' device.
            valid: The prompt's attention mask as bool `[B, S0]`, or None. Read once here.
            keyed: Whether the model takes a dict of masks by layer type rather than one tensor.
        """
        self.kinds = list(kinds)
        self._distinct = list(dict.fromkeys(self.kinds))
        self._places = [self._distinct.index(kind) for kind in self.kinds]
        self.dtype = dtype
        self.device = torch.device(device)
        self.valid = None if valid is None or bool(valid.all()) else valid.to(self.device, torch.bool)
        self.keyed = keyed
        self.prefix_visible = [False] * len(self.kinds)
        self._paddings: list[int] | None = None if self.valid is None else _padding_of(self.valid).tolist()
        self._buffers: dict[LayerKind, _Buffer] = {}

    @classmethod
    def for_config(
        cls, text_config: Any, dtype: torch.dtype, device: torch.device | str, valid: torch.Tensor | None = None
    ) -> TreeMasks:
        """Masks for a text configuration; a dict iff it has `layer_types`, which is transformers' own rule."""
        keyed = getattr(text_config, "layer_types", None) is not None
        return cls(layer_kinds(text_config), dtype, device, valid, keyed)

    def build(
        self,
        tree_ancestors: torch.Tensor,
        depths: torch.Tensor,
        lengths: Sequence[int] | torch.Tensor,
        views: Mapping[LayerKind, Columns],
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """The mask of a round, valid until the next call.

        Args:
            tree_ancestors: Which nodes each node sees, bool `[B, N, N]`.
            depths: Depths of the nodes, long `[B, N]`.
            lengths: Cached columns of each row; host numbers save a read of the device.
            views: The cache's view for every layer kind.

        Returns:
            Additive masks `[B, 1, N, count + N]`, by layer type or the one there is.
        """
        host = lengths.tolist() if isinstance(lengths, torch.Tensor) else list(lengths)
        built = [self._build_kind(kind, tree_ancestors, depths, host, views[kind]) for kind in self._distinct]
        self.prefix_visible = [built[place][1] for place in self._places]
        if self.keyed:
            return {kind.name: mask for kind, (mask, _) in zip(self._distinct, built, strict=True)}
        return built[0][0]

    def _build_kind(
        self, kind: LayerKind, tree_ancestors: torch.Tensor, depths: torch.Tensor, lengths: list[int], columns: Columns
    ) -> tuple[torch.Tensor, bool]:
        nodes = depths.shape[1]
        offset, count = columns[:2]
        paddings = self._paddings or [0] * len(lengths)
        # The number of nodes bounds the depth without reading it.
        unwindowed = all(
            kind.spans(max(offset, padding), length + nodes - 1, padding)
            for length, padding in zip(lengths, paddings, strict=True)
        )
        visible = unwindowed and self.valid is None and len(columns) == 2 and min(lengths) >= offset + count
        if unwindowed and offset == 0 and len(columns) == 2:
            buffer = self._buffers.get(kind)
            if buffer is None:
                buffer = self._buffers[kind] = _Buffer(len(lengths), self.dtype, self.device, self.valid)
            return buffer.write(tree_ancestors, lengths, count), visible
        on_device = to_device(lengths, self.device)
        return tree_mask(kind, tree_ancestors, depths, on_device, columns, self.valid, self.dtype), visible


class _Buffer:
    """One mask, kept between rounds, of layers whose nodes see their row's whole prefix.

    Columns below `settled` hold what they will hold for good, in every line of the buffer.
    """

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device, valid: torch.Tensor | None) -> None:
        self.valid = valid
        self.settled = 0
        self.mask = torch.zeros(rows, 1, 0, 0, dtype=dtype, device=device)

    def write(self, tree_ancestors: torch.Tensor, lengths: list[int], count: int) -> torch.Tensor:
        nodes = tree_ancestors.shape[1]
        if nodes > self.mask.shape[2] or count + nodes > self.mask.shape[3]:
            # Lines of a multiple of 64 columns: kernels want aligned biases. Doubling, so that growth is rare.
            lines = max(nodes, self.mask.shape[2])
            width = self.mask.shape[3] if count + nodes <= self.mask.shape[3] else -(-2 * (count + nodes) // 64) * 64
            self.mask = self.mask.new_zeros(self.mask.shape[0], 1, lines, width)
            self.settled = 0
        low = min(lengths)
        first = min(self.settled, low)
        fresh = self.mask[:, :, :, first:count]
        if self.valid is None and low >= count:
            fresh.zero_()
        else:
            index = torch.arange(first, count, device=self.mask.device)
            cached = index < to_device(lengths, self.mask.device).view(-1, 1)
            if self.valid is not None:
                cached = cached & _is_valid(self.valid, first, count)
            fresh.copy_(_additive(cached, self.mask.dtype)[:, None, None])
        self.settled = min(low, count)
        tree = self.mask[:, :, :nodes, count : count + nodes]
        if nodes == 1:
            tree.zero_()
        else:
            tree.copy_(_additive(tree_ancestors, self.mask.dtype).unsqueeze(1))
        return self.mask[:, :, :nodes, : count + nodes]


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, torch.finfo(dtype).min
    )


def _within(
    kind: LayerKind, query: torch.Tensor, key: torch.Tensor, padding: torch.Tensor | int
) -> torch.Tensor | bool:
    """The window rule between sequence indices."""
    if kind.window is None:
        return True
    if kind.name == "chunked_attention":
        # transformers counts chunks from a row's first real token.
        chunks = [(index - padding).div(kind.window, rounding_mode="floor") for index in (query, key)]
        return chunks[0] == chunks[1]
    return query - key < kind.window


def _is_valid(valid: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Whether columns `first … last − 1` hold tokens, bool `[B, last − first]`; past the prompt all do."""
    known = valid[:, first:last]
    return torch.nn.functional.pad(known, (0, last - first - known.shape[1]), value=True)


def _padding_of(valid: torch.Tensor) -> torch.Tensor:
    """Padding columns before each row's first token, long `[B]`."""
    return (valid.cumsum(1) == 0).sum(1)


def _left_padding(valid: torch.Tensor | None) -> torch.Tensor | int:
    return 0 if valid is None else _padding_of(valid).view(-1, 1, 1)
