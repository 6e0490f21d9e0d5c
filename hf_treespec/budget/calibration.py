"""Measuring the target on first use: real rounds, each verifying a tree of another size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .latency import LatencyPoint

#: Small and large mixed, so that an estimate exists early; the dearest last, so that they can be left out.
_SIZES = (8, 1, 16, 2, 4, 32, 64)
#: Rounds spent on second looks at sizes that seem too slow.
_SECOND_LOOKS = 3
#: How much more than seemed possible a tree may yield before a size is left out.
_HOPE = 1.25
#: Rows at which another kind of attention is compared, and how often.
_COMPARED, _COMPARISONS = 16, 2


Surrogate = npt.NDArray[np.float64]


class Calibration:
    """The sizes still to be measured and what was measured.

    Args:
        largest: Most rows a round may verify.
        splits: Kinds of attention that the device has, the usual one first: whether each is split.
    """

    def __init__(self, largest: int, splits: Sequence[bool] = (False,)) -> None:
        #: Whether the next round's attention should be split.
        self.split = splits[0]
        self._queue = [size for size in _SIZES if size <= largest]
        self._others = [split for split in splits[1:] for _ in range(_COMPARISONS)]
        self._looks = _SECOND_LOOKS
        self.points: list[LatencyPoint] = []

    @property
    def size(self) -> int | None:
        """Rows the next round should verify; None once everything is measured."""
        return self._queue[0] if self._queue else None

    def record(self, point: LatencyPoint, surrogate: Surrogate | None = None) -> None:
        """Takes the round's forward; of two looks at a size the quicker one stays, as noise only slows.

        Args:
            point: The forward.
            surrogate: Expected tokens of a row with N = 1, 2, … nodes: sizes that cannot pay even where trees yield
                more are left out.
        """
        if self._queue:
            # A tree may have had fewer nodes than asked for: what was measured counts, the size is done.
            self._queue.pop(0)
        kept = [p for p in self.points if (p.rows, p.batch, p.split) == (point.rows, point.batch, point.split)]
        if kept:
            self.points.remove(kept[0])
            point = min(point, kept[0], key=lambda p: p.ms)
        self.points.append(point)
        if surrogate is not None and len(surrogate):
            self._leave_out(surrogate)
        if not self._queue and self._looks:
            self._looks -= 1
            self._queue += self._suspicious(point.rows)[:1]
        if not self._queue and self._others and any(p.rows == _COMPARED for p in self.points):
            self.split = self._others.pop()
            self._queue.append(_COMPARED)

    def resume(self, point: LatencyPoint) -> None:
        """Takes a point that an earlier call measured."""
        self.points.append(point)
        self._queue = [size for size in self._queue if size != point.rows]

    def _leave_out(self, surrogate: Surrogate) -> None:
        doubtful = self._suspicious(0)
        trusted = [point for point in self.points if point.rows not in doubtful]
        plain = min((p.ms for p in trusted if p.rows == 1), default=0.0)
        if not plain:
            return

        def pays(size: int) -> bool:
            at_least = max((p.ms for p in trusted if p.rows <= size), default=0.0)
            hoped = _HOPE * float(surrogate[min(size, len(surrogate)) - 1])
            return hoped * plain > at_least

        self._queue = [size for size in self._queue if size < 4 or pays(size)]

    def _suspicious(self, last: int) -> list[int]:
        """Sizes that took longer than a larger one, or grew faster than their rows: first forwards warm up.

        Args:
            last: The size measured last; looked at once more only if nothing else is suspicious.
        """
        usual = self.points[0].split
        points = sorted((p for p in self.points if p.split is usual), key=lambda p: p.rows)
        found = []
        for index, point in enumerate(points):
            slower = any(point.ms > 1.1 * later.ms for later in points[index + 1 :])
            before = points[index - 1] if index else None
            steep = before is not None and point.ms / before.ms > 1.1 * point.rows / before.rows
            if slower or steep:
                found.append(point.rows)
        return sorted(found, key=lambda rows: rows == last)
