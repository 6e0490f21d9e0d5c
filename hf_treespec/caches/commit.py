"""The adapter round a transformers cache for one `generate` call: tree rows in as scratch, accepted paths kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from .capabilities import LayerRole, UnsupportedCacheError, check_cache, check_content, grow_static, layer_role
from .tree_layers import Moves, Rows, TreeLayer, TreeResidualLayer, TreeSlidingLayer, TreeStaticLayer, tree_layer

if TYPE_CHECKING:
    from ..attention.masks import LayerKind


@contextmanager
def scratch_forward(cache: Any) -> Iterator[None]:
    """Inside, what is written to a cache that holds our layers is scratch: the next forward overwrites it.

    For a session that runs layers of the target over the committed prefix between two verification forwards.
    """
    rows = next(layer.rows for layer in cache.layers if isinstance(layer, TreeLayer))
    rows.in_tree = True
    try:
        yield
    finally:
        rows.in_tree = False


@dataclass(frozen=True)
class _Replicas:
    """Makes our layers for a cache that gets them one by one, in its first forward."""

    stock: Callable[[], Any]
    role: LayerRole
    rows: Rows

    def __call__(self) -> TreeLayer:
        return tree_layer(self.stock(), self.role, self.rows)


def takes_trees(cache: Any) -> bool:
    """Whether a cache holds our layers, or will once a forward has filled it."""
    return isinstance(cache.layer_class_to_replicate, _Replicas) or any(
        isinstance(layer, TreeLayer) for layer in cache.layers
    )


class TreeCache:
    """Our layers in a user's cache, from `attach` to `detach`.

    The order of calls: `attach`, the prefill, `prefilled`, then a round at a time `view`, `tree_forward` and `commit`,
    and `detach` on every way out.
    """

    grow_static = staticmethod(grow_static)

    def __init__(self, cache: Any, rows: Rows) -> None:
        self._cache = cache
        self._rows = rows
        self._stock: list[Any] = list(cache.layers)
        self._stock_class = cache.layer_class_to_replicate
        self._attached = True

    @classmethod
    def attach(cls, cache: Any, text_config: PreTrainedConfig, batch_size: int, capacity: int) -> TreeCache:
        """Swaps every layer of `cache` for one of ours. Nothing is allocated or copied before the first forward.

        Args:
            cache: A transformers cache, empty or not.
            text_config: The target's text config.
            batch_size: Rows of the call, B.
            capacity: Longest sequence of the call plus its largest tree.

        Raises:
            UnsupportedCacheError: The cache cannot verify trees; it is left as it was.
        """
        check_cache(cache, text_config)
        rows = Rows(batch_size, capacity)
        layers: list[Any] = []
        windows = {getattr(text_config, name, None) for name in ("sliding_window", "attention_chunk_size")}
        for index, stock in enumerate(cache.layers):
            role = layer_role(stock, index)
            if role is LayerRole.STATELESS:
                layers.append(stock)
                continue
            if role is LayerRole.STATIC_SLIDING and stock.max_cache_len not in windows:
                # Shorter than its window: it may never evict, and is as bounded as full attention.
                role = LayerRole.STATIC
            check_content(stock, role, index, batch_size, capacity)
            layers.append(tree_layer(stock, role, rows))
        held = {layer.length for layer in layers if isinstance(layer, TreeLayer)} - {0}
        if len(held) > 1:
            raise UnsupportedCacheError(
                f"all layers of a cache must hold the same tokens, but lengths are {sorted(held)}"
            )
        stock_class = cache.layer_class_to_replicate
        if stock_class is not None:
            role = layer_role(stock_class(), len(layers))
            cache.layer_class_to_replicate = _Replicas(stock_class, role, rows)
        tree_cache = cls(cache, rows)
        tree_cache._stock_class = stock_class
        cache.layers[:] = layers
        return tree_cache

    @property
    def lengths(self) -> list[int]:
        """Cached columns of each row; during the prefill, of all rows alike."""
        if self._rows.lengths:
            return list(self._rows.lengths)
        return [max((layer.length for layer in self._layers()), default=0)] * self._rows.batch_size

    @property
    def bytes_written(self) -> int:
        """Bytes the rounds wrote to the cache so far: trees' rows and moved rows."""
        return self._rows.bytes_written

    @property
    def bytes_relocated(self) -> int:
        """Bytes copied so far when buffers grew, or when sliding ones moved to their front."""
        return self._rows.bytes_relocated

    @property
    def requires_lockstep(self) -> bool:
        """Whether all rows that commit must commit equally many nodes."""
        return self._rows.batch_size > 1 and any(isinstance(layer, TreeResidualLayer) for layer in self._layers())

    def prefilled(self) -> None:
        """Ends the prefill: from here on the cache is written only inside `tree_forward`.

        Raises:
            RuntimeError: The layers hold different numbers of columns.
        """
        lengths = {layer.length for layer in self._layers() if layer.length} or {0}
        if len(lengths) > 1:
            raise RuntimeError(f"the prefill left layers of different lengths {sorted(lengths)}")
        self._rows.start(lengths.pop())

    def view(self, kind: LayerKind, nodes: int) -> tuple[int, int]:
        """What a tree forward of `nodes` rows sees of the prefix in layers of `kind`.

        Returns:
            `(offset, count)`: columns with sequence indices `offset .. offset + count − 1`; the tree's rows follow.
        """
        slides = kind.name != "full_attention" and any(
            isinstance(layer, TreeSlidingLayer) and layer.window == kind.window for layer in self._layers()
        )
        offset = self._rows.offset(kind.window) if slides and kind.window is not None else 0
        return offset, self._rows.longest - offset

    def depth_limit(self) -> int | None:
        """Most nodes a path may commit in this round, the root included; None for no limit."""
        limits = [layer.depth_limit() for layer in self._layers() if isinstance(layer, TreeResidualLayer)]
        return min(limits, default=None)

    def free_rows(self) -> int | None:
        """Most rows a tree may have in this round; None for no limit."""
        free = [layer.free_rows() for layer in self._layers() if isinstance(layer, TreeStaticLayer)]
        return min(free, default=None)

    @contextmanager
    def tree_forward(self, nodes: int) -> Iterator[None]:
        """Inside, every layer takes the forward's rows as a tree: scratch after the longest row, no length moves.

        Args:
            nodes: Rows of the forward (extra rows of deeper layers included).

        Raises:
            UnsupportedCacheError: More rows than `free_rows`.
            RuntimeError: Before `prefilled`, or after `detach`.
        """
        if not self._rows.lengths or not self._attached:
            raise RuntimeError("tree_forward needs an attached cache and comes after prefilled()")
        free = self.free_rows()
        if free is not None and nodes > free:
            raise UnsupportedCacheError(
                f"a tree of {nodes} rows does not fit the {free} free columns of the static cache; pass a larger "
                "StaticCache, or no cache"
            )
        for layer in self._layers():
            layer.scratch = 0
        self._rows.in_tree = True
        try:
            yield
        except BaseException:
            for layer in self._layers():
                layer.scratch = 0
            raise
        finally:
            self._rows.in_tree = False

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the accepted nodes of the last tree forward, in place.

        Args:
            paths: Accepted nodes of each row, root first; empty for rows that commit nothing and are finished.

        Raises:
            ValueError: Not a path a row, nodes not ascending from the root, more nodes than `depth_limit`, unequal
                counts where `requires_lockstep`, or a finished row that resumes after its window was given up.
            RuntimeError: No tree forward preceded.
        """
        rows = self._rows
        layers = [layer for layer in self._layers() if layer.is_initialized]
        self._check_paths(paths, layers)
        if not any(paths):
            rows.advance([0] * rows.batch_size)
            return
        moves = Moves(rows, paths)
        for layer in layers:
            layer.commit(moves)
        rows.advance(moves.counts)
        for layer in layers:
            layer.length, layer.scratch = rows.longest, 0

    def trim(self, columns: int) -> None:
        """Forgets what rows hold beyond `columns` columns, before `detach`."""
        if self._rows.lengths and self._rows.longest > columns:
            self._rows.trim(columns)
            for layer in self._layers():
                layer.length = min(layer.length, columns)

    def _check_paths(self, paths: Sequence[Sequence[int]], layers: list[TreeLayer]) -> None:
        rows = self._rows
        if len(paths) != rows.batch_size:
            raise ValueError(f"commit needs a path for each of {rows.batch_size} rows, got {len(paths)}")
        deepest = max((path[-1] for path in paths if path), default=-1)
        short = next((layer for layer in layers if layer.scratch <= deepest), None)
        if short is not None:
            raise RuntimeError(f"a path reaches node {deepest}, but the last tree forward wrote {short.scratch} rows")
        for path in paths:
            if path and (path[0] != 0 or any(b <= a for a, b in pairwise(path))):
                raise ValueError(f"a path starts at node 0 and ascends, got {list(path)}")
        counts = {len(path) for path in paths if path}
        limit = self.depth_limit()
        if limit is not None and counts and max(counts) > limit:
            raise ValueError(f"this cache can commit {limit} nodes in this round, got {max(counts)}")
        if self.requires_lockstep and len(counts) > 1:
            raise ValueError(f"rows of a quantised cache commit equally many nodes, got {sorted(counts)}")
        if any(isinstance(layer, TreeSlidingLayer) for layer in layers):
            resumed = [row for row, path in enumerate(paths) if path and not rows.live[row]]
            if resumed:
                raise ValueError(f"rows {resumed} committed nothing before: they are finished and cannot resume")

    def detach(self) -> None:
        """Puts the stock layers back, holding what the rows committed; the holes of shorter rows are zeros.

        Safe to call again, and after an exception in any forward: scratch rows are dropped.
        """
        if not self._attached:
            return
        self._attached = False
        self._rows.in_tree = False
        self._cache.layers[:] = [
            layer.restore() if isinstance(layer, TreeLayer) else layer for layer in self._cache.layers
        ]
        self._cache.layer_class_to_replicate = self._stock_class

    def _layers(self) -> list[TreeLayer]:
        return [layer for layer in self._cache.layers if isinstance(layer, TreeLayer)]
