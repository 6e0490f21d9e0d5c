"""Measuring the target on first use: real rounds, each verifying a tree of another size."""

from __future__ import annotations

from collections.abc import Sequence

from .latency import LatencyPoint

#: Small and large mixed, so that an estimate exists early; the dearest last, so that they can be left out.
_SIZES = (8, 1, 16, 2, 4, 32, 64, 128)
#: Forwards of each size: the first of a kind warms up.
_FORWARDS = 2
#: How much more than seemed possible a tree may yield before a size is left out.
_HOPE = 1.25
#: Rows at which another kind of attention is compared.
_COMPARED = 16


class Calibration:
    """The sizes still to be measured and what was measured.

    Args:
        largest: Most rows a round may verify.
        splits: Kinds of attention that the device has, the usual one first: whether each is split.
    """

    def __init__(self, largest: int, splits: Sequence[bool] = (False,)) -> None:
        sizes = [size for size in _SIZES if size <= largest]
        # Of each forward: rows, and whether attention is split.
        self._queue = [(size, splits[0]) for size in sizes for _ in range(_FORWARDS)]
        if _COMPARED in sizes:
            self._queue += [(_COMPARED, split) for split in splits[1:] for _ in range(_FORWARDS)]
        self.points: list[LatencyPoint] = []

    @property
    def size(self) -> int | None:
        """Rows the next round should verify; None once everything is measured."""
        return self._queue[0][0] if self._queue else None

    @property
    def split(self) -> bool:
        """Whether the next round's attention should be split."""
        return bool(self._queue) and self._queue[0][1]

    def record(self, point: LatencyPoint, surrogate: Sequence[float] = ()) -> None:
        """Takes the round's forward; of two looks at a size the quicker one stays, as noise only slows.

        Args:
            point: The forward.
            surrogate: Expected tokens of a row with N = 1, 2, … nodes: sizes that cannot pay even where trees yield
                more are left out.
        """
        # A tree may have had fewer nodes than asked for: what was measured counts, the size is done.
        done = self._queue.pop(0)
        kept = [p for p in self.points if (p.rows, p.batch, p.kind) == (point.rows, point.batch, point.kind)]
        if kept:
            self.points.remove(kept[0])
            point = min(point, kept[0], key=lambda p: p.ms)
        self.points.append(point)
        if surrogate and done not in self._queue:
            self._leave_out(surrogate)

    def _leave_out(self, surrogate: Sequence[float]) -> None:
        plain = min((point.ms for point in self.points if point.rows == 1 and not point.kind.riding), default=0.0)
        if not plain:
            return

        def pays(size: int) -> bool:
            at_least = max((point.ms for point in self.points if point.rows <= size), default=0.0)
            hoped = _HOPE * surrogate[min(size, len(surrogate)) - 1]
            return hoped * plain > at_least

        self._queue = [(size, split) for size, split in self._queue if size < 4 or pays(size)]
