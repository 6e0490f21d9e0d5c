"""How long the target takes to verify N nodes: a roofline, and what it cannot say.

`T(N, c, b) = max(α_c·FLOPs/peak + β_c, α_m·bytes/bandwidth + β_m) · residual(N·b) · slowdown`. The roofline carries
measurements over to other contexts and sizes (BASTION, arXiv 2605.29727); `corrections` keeps the rest, and how much
of what it says of longer contexts comes true.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from .corrections import CALIBRATION_FREEDOM, CALIBRATION_NOISE, USUAL, Corrections, ForwardKind
from .roofline import DevicePeak, Workload

Array = npt.NDArray[np.float64]

#: How many times more than usual residuals may differ where there is no roofline.
_WITHOUT_ROOFLINE = 3.0
_SMALLEST_CURVE = 64
_CONTEXT_STEP = 64


@dataclass(frozen=True)
class LatencyPoint:
    """A measured forward.

    Args:
        rows: Nodes verified for each row of the batch, N, the root included.
        context: Cached columns before the forward.
        batch: Rows of the batch.
        ms: Milliseconds it took.
        kind: What else it was.
    """

    rows: int
    context: int
    batch: int
    ms: float
    kind: ForwardKind = USUAL


class LatencyModel:
    """Milliseconds of a verification forward, fitted to points and corrected while running.

    Args:
        workload: FLOPs and bytes of a forward; None for a model that only interpolates between measured sizes.
        peak: The device's peaks; None measures in units that the fit absorbs.
        online: Whether `update` corrects the model; False keeps it as it was fitted.
    """

    def __init__(
        self, workload: Workload | None = None, peak: DevicePeak | None = None, *, online: bool = True
    ) -> None:
        self.workload = workload
        self.peak = peak or DevicePeak(1e12, 1e11)
        self.online = online
        self._roofline: _Roofline | None = None
        self._fitted_context = 0
        self._start()

    def _start(self) -> None:
        self._corrections = Corrections(1.0 if self.workload is not None else _WITHOUT_ROOFLINE)
        # Of (size, context, batch, riding): FLOPs and bytes in ms, and the log of the roofline; and of a kind.
        self._ideals: dict[tuple[int, int, int, bool], tuple[Array, Array]] = {}
        self._bases: dict[tuple[int, int, int, bool], Array] = {}
        self._curves: dict[tuple[int, int, int, ForwardKind], Array] = {}

    @property
    def fitted(self) -> bool:
        """Whether anything was measured yet."""
        return self._roofline is not None

    @property
    def slowdown(self) -> float:
        """How many times longer than when it was fitted everything takes on this machine."""
        return math.exp(self._corrections.drift)

    def fit(self, points: Iterable[LatencyPoint]) -> None:
        """Starts anew from measured forwards.

        Raises:
            ValueError: No usable point.
        """
        usable = [point for point in points if point.ms > 0 and math.isfinite(point.ms)]
        if not usable:
            raise ValueError("a latency model needs at least one measured forward")
        self._start()
        usual = Counter(point.kind for point in usable).most_common(1)[0][0]
        usable.sort(key=lambda point: point.kind != usual)
        fitted = [point for point in usable if point.kind == usual]
        compute, memory = np.array([self._ideal_at(point) for point in fitted]).T
        self._roofline = _Roofline(*_fit_roofline(compute, memory, np.array([point.ms for point in fitted])))
        self._fitted_context = _bucket(sorted(point.context for point in fitted)[len(fitted) // 2])
        for point in usable:
            size, ratio = point.rows * point.batch, self._log_ratio(point)
            self._corrections.observe(point.kind, size, *ratio, CALIBRATION_NOISE, CALIBRATION_FREEDOM)

    def curve(
        self, largest: int, context: int, batch: int = 1, split: bool | None = None, riding: bool = False
    ) -> Array:
        """Milliseconds at N = 1 … `largest`, non-decreasing, float64 `[largest]`.

        Args:
            largest: Most nodes asked for.
            context: Cached columns; rounded to steps that make no difference, so that curves are reused.
            batch: Rows of the batch.
            split: The attention meant; None for the better of those measured, size by size.
            riding: Whether nodes bring rows of the drafter's own along.
        """
        return self.steady_curve(largest, context, batch, split, riding) * self.slowdown

    def steady_curve(
        self, largest: int, context: int, batch: int = 1, split: bool | None = None, riding: bool = False
    ) -> Array:
        """`curve` on the machine as it was when the model was fitted, whatever `slowdown` is now."""
        if not self._corrections.kinds:
            raise RuntimeError("the latency model was not fitted")
        splits = self._splits(riding)
        if split is None and len(splits) > 1:
            curves = [self.steady_curve(largest, context, batch, each, riding) for each in splits]
            return np.minimum(*curves)
        key = (_size(largest), _bucket(context), batch, ForwardKind(splits[0] if split is None else split, riding))
        curve = self._curves.get(key)
        if curve is None:
            curve = self._curves[key] = self._compute_curve(*key)
        return curve[:largest]

    @overload
    def predict(
        self, rows: int, context: int, batch: int = 1, split: bool | None = None, riding: bool = False
    ) -> float: ...
    @overload
    def predict(
        self, rows: torch.Tensor, context: int, batch: int = 1, split: bool | None = None, riding: bool = False
    ) -> torch.Tensor: ...
    def predict(
        self,
        rows: int | torch.Tensor,
        context: int,
        batch: int = 1,
        split: bool | None = None,
        riding: bool = False,
    ) -> float | torch.Tensor:
        """Milliseconds of a forward of `rows` nodes, or of each of many sizes, float64; arguments as for `curve`."""
        if isinstance(rows, torch.Tensor):
            curve = torch.from_numpy(self.curve(int(rows.max()), context, batch, split, riding).copy())
            return curve[rows.cpu().long() - 1]
        return float(self.curve(rows, context, batch, split, riding)[rows - 1])

    def best_split(self, rows: int, context: int, batch: int = 1, riding: bool = False) -> bool:
        """Whether split attention is the quicker; where only one kind was measured, that one."""
        return min(self._splits(riding), key=lambda split: self.predict(rows, context, batch, split, riding))

    def known(self, rows: int, batch: int = 1, split: bool | None = None, riding: bool = False) -> bool:
        """Whether a size was measured so often, or its neighbours were, that noise does not matter."""
        kind = ForwardKind(self._splits(riding)[0] if split is None else split, riding)
        return kind in self._corrections.kinds and self._corrections.known(kind, rows * batch)

    def update(
        self, rows: int, context: int, batch: int, ms: float, kind: ForwardKind = USUAL, forwards: int = 1
    ) -> None:
        """Corrects the model by a measured forward, or the median of several; one outlier moves nothing by 2 %."""
        if not self.online or not ms > 0 or not math.isfinite(ms):
            return
        point = LatencyPoint(rows, context, batch, ms, kind)
        if self._roofline is None:
            self.fit([point])
            return
        self._corrections.pass_time(forwards)
        self._corrections.observe(kind, rows * batch, *self._log_ratio(point), forwards=forwards)
        self._curves.clear()

    def to_dict(self) -> dict[str, Any]:
        """The fit and its corrections, as JSON holds them."""
        return {
            "peak": [self.peak.flops_per_second, self.peak.bytes_per_second],
            "roofline": None if self._roofline is None else vars(self._roofline),
            "drift": self._corrections.drift,
            "context": [self._fitted_context, *self._corrections.to_pair()],
            "kinds": self._corrections.to_list(),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any], workload: Workload | None = None, *, online: bool = True) -> LatencyModel:
        """The model that `to_dict` described.

        Args:
            data: What `to_dict` returned.
            workload: As it was when the model was fitted.
            online: Whether `update` corrects the model.

        Raises:
            KeyError, TypeError, ValueError: `data` is no such description.
        """
        model = cls(workload, DevicePeak(*map(float, data["peak"])), online=online)
        if data["roofline"] is not None:
            branches = ((_finite(a), _finite(b)) for a, b in (data["roofline"][n] for n in ("compute", "memory")))
            model._roofline = _Roofline(*branches)
            fitted, *share = map(_finite, data["context"])
            model._fitted_context = int(fitted)
            model._corrections.load(_finite(data["drift"]), (share[0], share[1]), data["kinds"])
        return model

    def _splits(self, riding: bool) -> list[bool]:
        """Kinds of attention measured with or without riding rows, the usual one first; never empty."""
        kinds = self._corrections.kinds
        return [kind.split for kind in kinds if kind.riding == riding] or [bool(kinds) and kinds[0].split]

    def _compute_curve(self, size: int, context: int, batch: int, kind: ForwardKind) -> Array:
        base, fitted = (self._base(size, columns, batch, kind.riding) for columns in (context, self._fitted_context))
        logs = base + self._corrections.context * (base - fitted)
        logs = logs + self._corrections.residuals(kind, _log_sizes(size, batch))
        # Noise may order sizes wrongly: halfway between the least curve above and the largest below.
        above, below = np.maximum.accumulate(logs), np.minimum.accumulate(logs[::-1])[::-1]
        return np.asarray(np.exp((above + below) / 2))

    def _log_ratio(self, point: LatencyPoint) -> tuple[float, float]:
        """Log of a forward's time over the roofline's, and of that over the roofline's at the context of the fit."""
        base, fitted = (
            float(self._base(_size(point.rows), context, point.batch, point.kind.riding)[point.rows - 1])
            for context in (_bucket(point.context), self._fitted_context)
        )
        return math.log(point.ms) - base, base - fitted

    def _base(self, size: int, context: int, batch: int, riding: bool) -> Array:
        key = (size, context, batch, riding)
        base = self._bases.get(key)
        if base is None:
            assert self._roofline is not None
            base = self._bases[key] = np.log(self._roofline.ms(*self._ideal(*key)))
        return base

    def _ideal_at(self, point: LatencyPoint) -> tuple[float, float]:
        compute, memory = self._ideal(_size(point.rows), _bucket(point.context), point.batch, point.kind.riding)
        return float(compute[point.rows - 1]), float(memory[point.rows - 1])

    def _ideal(self, size: int, context: int, batch: int, riding: bool) -> tuple[Array, Array]:
        """Milliseconds at the device's peaks, of compute and of memory, at N = 1 … `size`."""
        if self.workload is None:
            return np.ones(size), np.ones(size)
        key = (size, context, batch, riding)
        if key not in self._ideals:
            rows = np.arange(1, size + 1, dtype=np.float64)
            compute = 1e3 * self.workload.flops(rows, context, batch, riding) / self.peak.flops_per_second
            memory = 1e3 * self.workload.bytes(rows, context, batch, riding) / self.peak.bytes_per_second
            self._ideals[key] = np.asarray(compute), np.asarray(memory)
        return self._ideals[key]


@dataclass(frozen=True)
class _Roofline:
    """(α, β) of both branches."""

    compute: tuple[float, float]
    memory: tuple[float, float]

    def ms(self, compute: Array, memory: Array) -> Array:
        bound = np.maximum(self.compute[0] * compute + self.compute[1], self.memory[0] * memory + self.memory[1])
        return np.asarray(np.maximum(bound, 1e-9))


def _fit_roofline(compute: Array, memory: Array, measured: Array) -> tuple[tuple[float, float], tuple[float, float]]:
    """(α, β) ≥ 0 of both branches, with the least relative error of their maximum.

    Points in order of size are divided into those that memory bounds and those that compute bounds; each division's
    branches have a closed form, and the best division wins: one branch for all where two are better by noise only.
    """
    order = np.argsort(compute / np.maximum(memory, 1e-12), kind="stable")
    compute, memory, measured = compute[order], memory[order], measured[order]

    def divided(cut: int) -> tuple[float, tuple[tuple[float, float], tuple[float, float]]]:
        """The squared error where memory bounds the first `cut` points, and the branches."""
        low, high = _fit_branch(memory[:cut], measured[:cut]), _fit_branch(compute[cut:], measured[cut:])
        bound = np.maximum(low[0] * memory + low[1], high[0] * compute + high[1])
        return float(np.square(bound / measured - 1).sum()), (high, low)

    one = min(divided(0), divided(len(measured)))
    two = min((divided(cut) for cut in range(1, len(measured))), default=one)
    return two[1] if two[0] < one[0] - CALIBRATION_NOISE**2 else one[1]


def _fit_branch(ideal: Array, measured: Array) -> tuple[float, float]:
    """(α, β) ≥ 0 minimising the squared relative errors of α·ideal + β."""
    if not len(measured):
        return 0.0, 0.0
    u, v = ideal / measured, 1 / measured
    uu, vv, uv = float(u @ u), float(v @ v), float(u @ v)
    # Of points that do not tell α and β apart, α takes all: it is what carries over to other contexts.
    vv *= 1.001
    su, sv = float(u.sum()), float(v.sum())
    determinant = uu * vv - uv * uv
    if determinant > 0:
        slope, offset = (su * vv - sv * uv) / determinant, (sv * uu - su * uv) / determinant
        if slope >= 0 and offset >= 0:
            return slope, offset
    # One of them is 0: the one whose absence costs least.
    if uu > 0 and su * su / uu >= sv * sv / vv:
        return su / uu, 0.0
    return 0.0, sv / vv


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a latency model holds finite numbers, got {value}")
    return number


@functools.lru_cache(64)
def _log_sizes(size: int, batch: int) -> Array:
    """log₂ N·b at N = 1 … `size`."""
    return np.asarray(np.log2(np.arange(1, size + 1) * float(batch)))


def _size(rows: int) -> int:
    """Length of the curve that holds `rows`: few lengths, so that curves are reused."""
    return max(_SMALLEST_CURVE, 1 << (rows - 1).bit_length())


def _bucket(context: int) -> int:
    return (context + _CONTEXT_STEP // 2) // _CONTEXT_STEP * _CONTEXT_STEP
