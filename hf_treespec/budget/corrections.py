"""What a roofline does not say of a forward, learned from forwards: a Kalman filter over sizes and time.

`log T = log roofline + s·x + r_k(N·b) + d`. The residual `r_k` of a kind k of forwards holds the steps of real
kernels: a Wiener process over log₂ N·b, kept at knots and linear between. With x the roofline's log of how much longer
a forward takes than at the context it was fitted at, `s` is what has to be added for what really is so: attention
reaches another share of the device's peak than the layers around it. The drift `d`, a random walk, is the machine that
gets slower or faster.

What is wrong with a prediction is shared out by how little is known of each: a machine that wanders for some seconds
moves the drift and leaves the sizes' order alone. Noise is Student's t: a forward far off the prediction says little,
unless others bear it out.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

#: Knots: powers of 2, one more than each, where kernels take another turn, and halfway to the next.
_KNOTS = np.array(sorted({1, 2, 3, *(k for e in range(2, 12) for k in (1 << e, (1 << e) + 1, 3 << (e - 1)))}), float)
_LOG_KNOTS = np.log2(_KNOTS)
#: Standard deviation of residuals, in log: of the first knot's; of what the step from one row to two adds, where
#: products of matrices take the place of those with vectors; of what one row more than a power of 2 adds; and of what
#: an octave adds beside.
_LEVEL, _FIRST_STEP, _TURN_STEP, _STEP = 0.3, 0.5, 0.2, 0.1
#: Standard deviation of `s`: its usual values lie between −1, contexts cost nothing, and 1, twice as much as said.
_CONTEXT = 0.5
#: Standard deviation of a forward, in log: of a calibration's, the quickest of its size, and of a round's.
CALIBRATION_NOISE, ROUND_NOISE = 0.05, 0.1
#: Degrees of freedom of Student's t: of a calibration's forwards, which are no outliers, and of a round's.
CALIBRATION_FREEDOM, _FREEDOM = 1e9, 4.0
#: Standard deviations that two errors of a size in a row have to be off by for a change to be believed.
_SURPRISE = 2.5
#: Forwards whose median bears itself out.
_BORNE_OUT = 3
#: Standard deviation, in log, of what a round changes: of the machine's speed, and of a knot.
_DRIFT_STEP, _KNOT_STEP = 0.02, 0.001
#: How well a stored drift is known in another process, in log.
_STORED_DRIFT = 0.3
#: Places of the state before the knots.
_SHARED = 2
#: Standard deviation below which a size is known, in log.
_KNOWN = 0.06


class ForwardKind(NamedTuple):
    """What sets forwards of the same size apart.

    Args:
        split: Whether attention is split into prefix and tree; False for dense.
        riding: Whether nodes bring rows of the drafter's own along.
    """

    split: bool = False
    riding: bool = False


USUAL = ForwardKind()


class Corrections:
    """Logarithms of the factors that roofline predictions have to be multiplied with.

    Args:
        spread: How many times more than usual residuals may differ, for predictions without a roofline.
    """

    def __init__(self, spread: float = 1.0) -> None:
        self._prior = spread**2 * _prior()
        self._kinds: list[ForwardKind] = []
        # Of the drift, of the share of longer contexts, then of the knots of each kind.
        self._mean, self._covariance = np.zeros(_SHARED), np.diag([0.0, _CONTEXT**2])
        self._errors: dict[tuple[ForwardKind, int], float] = {}  # the last of each kind and N·b

    @property
    def kinds(self) -> list[ForwardKind]:
        """Kinds that were measured, the usual one first."""
        return self._kinds

    @property
    def drift(self) -> float:
        """Log of how many times slower the machine is than when it was measured first."""
        return float(self._mean[0])

    @property
    def context(self) -> float:
        """What has to be added to 1 for the share that comes true of what the roofline says of longer contexts."""
        return float(self._mean[1])

    def residuals(self, kind: ForwardKind, sizes: Array) -> Array:
        """Residuals at log₂ N·b, of the usual kind where this one was never measured."""
        return np.interp(sizes, _LOG_KNOTS, self._mean[self._knots(kind)])

    def known(self, kind: ForwardKind, rows: int) -> bool:
        """Whether what is uncertain of a size N·b is less than what matters."""
        places, weights = self._read(kind, rows)
        return self._covered(places[_SHARED:], weights[_SHARED:])[1] < _KNOWN**2

    def observe(
        self,
        kind: ForwardKind,
        rows: int,
        log: float,
        longer: float = 0.0,
        noise: float = ROUND_NOISE,
        freedom: float = _FREEDOM,
        forwards: int = 1,
    ) -> None:
        """Learns from a forward.

        Args:
            kind: Its kind.
            rows: N·b.
            log: Log of its time over the roofline's prediction.
            longer: x, the log of that prediction over the one at the context of the fit.
            noise: Standard deviation of that.
            freedom: Degrees of freedom of Student's t; the more, the less an error is taken for an outlier.
            forwards: Forwards of the size whose median it is: of several, no outlier is the median.
        """
        noise /= math.sqrt(forwards)
        if kind not in self._kinds:
            self._add(kind)
        places, weights = self._read(kind, rows, longer)
        error = log - float(weights @ self._mean[places])
        lasting = self._lasting(kind, rows, error) if forwards < _BORNE_OUT else abs(error)
        covered, expected = self._covered(places, weights)
        if lasting > _SURPRISE * math.sqrt(expected + noise**2):
            # Either the machine or this size has changed: what other sizes take will tell.
            self._covariance[places, places] += np.abs(weights) * lasting**2
            covered, expected = self._covered(places, weights)
        surprise = error**2 / (expected + noise**2)
        variance = expected + noise**2 * max((freedom + surprise) / (freedom + 1), 1.0)
        self._mean += covered * (error / variance)
        self._covariance -= np.outer(covered, covered / variance)

    def _covered(self, places: npt.NDArray[np.intp], weights: Array) -> tuple[Array, float]:
        """Covariance of every part of the state with a sum of parts, and that sum's variance."""
        covered = self._covariance[:, places] @ weights
        return covered, float(weights @ covered[places])

    def _lasting(self, kind: ForwardKind, rows: int, error: float) -> float:
        """The part of an error that the size's last one bears out: nothing of a lone outlier."""
        last = self._errors.get((kind, rows), 0.0)
        self._errors[kind, rows] = error
        return min(abs(error), abs(last)) if error * last > 0 else 0.0

    def pass_time(self, rounds: int = 1) -> None:
        """Lets rounds go by, after which less is certain."""
        self._covariance[0, 0] += rounds * _DRIFT_STEP**2
        diagonal = self._covariance.reshape(-1)[:: len(self._mean) + 1]
        diagonal[_SHARED:] += rounds * _KNOT_STEP**2

    def to_pair(self) -> list[float]:
        """Mean and standard deviation of `s`."""
        return [round(self.context, 5), round(float(np.sqrt(max(self._covariance[1, 1], 0.0))), 5)]

    def to_list(self) -> list[dict[str, Any]]:
        """Mean and standard deviation of each kind's residuals, as JSON holds them."""
        deviations = np.sqrt(np.diag(self._covariance).clip(0))
        return [
            {
                **kind._asdict(),
                "residuals": [
                    [int(knot), round(float(mean), 5), round(float(deviation), 5)]
                    for knot, mean, deviation in zip(
                        _KNOTS, self._mean[self._knots(kind)], deviations[self._knots(kind)], strict=True
                    )
                ],
            }
            for kind in self._kinds
        ]

    def load(self, drift: float, context: tuple[float, float], kinds: list[dict[str, Any]]) -> None:
        """Goes on from `drift`, `to_pair` and what `to_list` returned: how sizes hang together is as it was at first.

        Raises:
            KeyError, TypeError, ValueError: `kinds` is no such list.
        """
        for stored in kinds:
            kind = ForwardKind(bool(stored["split"]), bool(stored["riding"]))
            self._add(kind)
            knots, means, deviations = np.array(stored["residuals"], dtype=float).T
            if len(knots) != len(_KNOTS) or (knots != _KNOTS).any() or not np.isfinite([means, deviations]).all():
                raise ValueError("residuals are stored at other sizes, or not finite")
            block = self._knots(kind)
            scale = deviations / np.sqrt(np.diag(self._prior))
            self._mean[block] = means
            self._covariance[block, :] = self._covariance[:, block] = 0.0
            self._covariance[block, block] = self._prior * np.outer(scale, scale)
        self._mean[:_SHARED] = drift, context[0]
        self._covariance[0, 0], self._covariance[1, 1] = _STORED_DRIFT**2, context[1] ** 2

    def _add(self, kind: ForwardKind) -> None:
        """Takes up a kind: the first is as the roofline has it, another as the usual one, and its own."""
        held = len(self._mean)
        usual = self._knots(self._kinds[0]) if self._kinds else None
        self._kinds.append(kind)
        mean, covariance = np.zeros(held + len(_KNOTS)), np.zeros((held + len(_KNOTS),) * 2)
        mean[:held], covariance[:held, :held] = self._mean, self._covariance
        covariance[held:, held:] = self._prior
        if usual is not None:
            mean[held:] = self._mean[usual]
            covariance[held:, :held] = self._covariance[usual]
            covariance[:held, held:] = self._covariance[:, usual]
            covariance[held:, held:] += self._covariance[usual, usual]
        self._mean, self._covariance = mean, covariance

    def _knots(self, kind: ForwardKind) -> slice:
        """Places of the knots of a kind, the usual one where it was never measured."""
        start = _SHARED + len(_KNOTS) * (self._kinds.index(kind) if kind in self._kinds else 0)
        return slice(start, start + len(_KNOTS))

    def _read(self, kind: ForwardKind, rows: int, longer: float = 0.0) -> tuple[npt.NDArray[np.intp], Array]:
        """Places in the state, and their weights, that the factor of N·b is the sum of."""
        left, share = _between(rows)
        start = self._knots(kind).start + left
        return np.array([0, 1, start, start + 1]), np.array([1.0, longer, 1.0 - share, share])


@functools.cache
def _prior() -> Array:
    """Covariance of residuals before anything was measured."""
    variances = _STEP**2 * np.diff(_LOG_KNOTS)
    variances[np.diff(_KNOTS) == 1] += _TURN_STEP**2
    variances[0] = _FIRST_STEP**2
    below = np.concatenate([[0.0], variances.cumsum()])
    return np.asarray(_LEVEL**2 + np.minimum(below[:, None], below[None]))


@functools.lru_cache(1024)
def _between(rows: int) -> tuple[int, float]:
    """The knot at or below `rows`, and the share of the next one."""
    at = min(max(math.log2(rows), 0.0), float(_LOG_KNOTS[-1]))
    left = min(int(np.searchsorted(_LOG_KNOTS, at, side="right")) - 1, len(_KNOTS) - 2)
    return left, float((at - _LOG_KNOTS[left]) / (_LOG_KNOTS[left + 1] - _LOG_KNOTS[left]))
