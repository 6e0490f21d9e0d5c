"""How long the target takes to verify N nodes: a roofline, what it cannot say, and what changes while running.

`T(N, c, b) = max(α_c·FLOPs/peak + β_c, α_m·bytes/bandwidth + β_m) · residual(N·b) · drift`. The roofline carries
measurements over to other contexts and sizes (BASTION, arXiv 2605.29727), the residual keeps the steps of real kernels
where they were measured, and the drift follows a machine that gets slower or faster.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from .roofline import DevicePeak, Workload

Array = npt.NDArray[np.float64]

#: Share of a lasting error that the drift follows in a round: 2× slower is 90 % followed after some twenty rounds.
_DRIFT_GAIN = 0.1
#: Least share that a residual follows. Slow: an error common to all sizes belongs to the drift.
_RESIDUAL_GAIN = 0.02
#: Observations after which a residual is settled: errors speak of the machine then. What is fitted is settled.
_SETTLED = 4
#: Observations after which a residual is as stiff as it gets.
_MOST_SEEN = 50
#: Most that a first observation of a new size may say against its neighbours, in log.
_FIRST_CLIP = math.log(4)
#: How far residuals may move before curves are computed again, in log.
_STALE = 0.005
#: Sizes that have to be measured for a roofline.
_ROOFLINE_POINTS = 3
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
        split: Whether attention was split into prefix and tree; False for dense.
    """

    rows: int
    context: int
    batch: int
    ms: float
    split: bool = False


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
        self._modes: dict[bool, _Mode] = {}
        self._drift = 0.0
        self._last_error, self._last_size = 0.0, 0
        self._stale = 0.0  # by how much residuals have moved since the curves were computed, in log
        # Of (size, context, batch): FLOPs and bytes in ms; and of the same with the mode: the log of its roofline.
        self._ideals: dict[tuple[int, int, int], tuple[Array, Array]] = {}
        self._bases: dict[tuple[int, int, int, bool], Array] = {}
        self._curves: dict[tuple[int, int, int, bool], Array] = {}

    @property
    def fitted(self) -> bool:
        """Whether anything was measured yet."""
        return bool(self._modes)

    def fit(self, points: Iterable[LatencyPoint]) -> None:
        """Starts anew from measured forwards.

        Raises:
            ValueError: No usable point.
        """
        usable = [point for point in points if point.ms > 0 and math.isfinite(point.ms)]
        if not usable:
            raise ValueError("a latency model needs at least one measured forward")
        self._modes, self._drift, self._last_error = {}, 0.0, 0.0
        self._bases.clear()
        self._curves.clear()
        kinds = Counter(point.split for point in usable)
        for split, _ in kinds.most_common():
            chosen = [point for point in usable if point.split is split]
            if self._modes and len({point.rows for point in chosen}) < _ROOFLINE_POINTS:
                # Too few for a roofline of its own: the other kind's, as much slower or quicker as it was here.
                usual = next(iter(self._modes))
                off = [math.log(p.ms / self.predict(p.rows, p.context, p.batch, usual)) for p in chosen]
                self._modes[split] = self._modes[usual].shifted(float(np.median(off)))
                continue
            compute, memory = np.array([self._ideal_at(p.rows, p.context, p.batch) for p in chosen]).T
            measured = np.array([point.ms for point in chosen])
            mode = self._modes[split] = _Mode(*_fit_roofline(compute, memory, measured))
            ratios: dict[int, list[float]] = {}
            for point in chosen:
                base = self._base(_size(point.rows), _bucket(point.context), point.batch, split)[point.rows - 1]
                ratios.setdefault(point.rows * point.batch, []).append(math.log(point.ms) - float(base))
            for rows, logs in ratios.items():
                mode.residuals[rows] = _Residual(float(np.median(logs)), len(logs))

    def curve(self, largest: int, context: int, batch: int = 1, split: bool | None = None) -> Array:
        """Milliseconds at N = 1 … `largest`, non-decreasing, float64 `[largest]`.

        Args:
            largest: Most nodes asked for.
            context: Cached columns; rounded to steps that make no difference, so that curves are reused.
            batch: Rows of the batch.
            split: The attention meant; None for the better of those measured, size by size.
        """
        if not self._modes:
            raise RuntimeError("the latency model was not fitted")
        if split is None and len(self._modes) > 1:
            return np.minimum(self.curve(largest, context, batch, True), self.curve(largest, context, batch, False))
        mode = split if split in self._modes else next(iter(self._modes))
        key = (_size(largest), _bucket(context), batch, bool(mode))
        curve = self._curves.get(key)
        if curve is None:
            curve = self._curves[key] = self._compute_curve(*key)
        return curve[:largest] * math.exp(self._drift)

    @overload
    def predict(self, rows: int, context: int, batch: int = 1, split: bool | None = None) -> float: ...
    @overload
    def predict(self, rows: torch.Tensor, context: int, batch: int = 1, split: bool | None = None) -> torch.Tensor: ...
    def predict(
        self, rows: int | torch.Tensor, context: int, batch: int = 1, split: bool | None = None
    ) -> float | torch.Tensor:
        """Milliseconds of a forward of `rows` nodes, or of each of many sizes, float64; arguments as for `curve`."""
        if isinstance(rows, torch.Tensor):
            curve = torch.from_numpy(self.curve(int(rows.max()), context, batch, split).copy())
            return curve[rows.cpu().long() - 1]
        return float(self.curve(rows, context, batch, split)[rows - 1])

    def best_split(self, rows: int, context: int, batch: int = 1) -> bool:
        """Whether split attention is the quicker; where only one kind was measured, that one."""
        if len(self._modes) < 2:
            return next(iter(self._modes), False)
        return self.predict(rows, context, batch, True) < self.predict(rows, context, batch, False)

    def settled(self, rows: int, batch: int = 1, split: bool | None = None) -> bool:
        """Whether a size was measured often enough for noise not to matter."""
        mode = self._modes.get(split) if split is not None else next(iter(self._modes.values()), None)
        residual = None if mode is None else mode.residuals.get(rows * batch)
        return residual is not None and residual.seen >= _SETTLED

    def update(self, rows: int, context: int, batch: int, ms: float, split: bool = False) -> None:
        """Corrects the model by a measured forward; a single outlier moves nothing of a known size by 2 %."""
        if not self.online or not ms > 0 or not math.isfinite(ms):
            return
        if not self._modes:
            self.fit([LatencyPoint(rows, context, batch, ms, split)])
            return
        if split not in self._modes:
            other = next(iter(self._modes.values()))
            self._modes[split] = _Mode(other.compute, other.memory)
        mode = self._modes[split]
        error = math.log(ms / self.predict(rows, context, batch, split))
        residual = mode.residuals.get(rows * batch)
        if residual is None:
            # A size between measured ones: its neighbours' guess and this observation count alike, and what is wrong
            # with it says nothing about the machine.
            guess = mode.residual(np.log2([float(rows * batch)]))[0]
            moved = float(guess) + 0.5 * min(max(error, -_FIRST_CLIP), _FIRST_CLIP)
            mode.residuals[rows * batch] = _Residual(moved, 1, error)
        else:
            # What another size bears out, or a known one, belongs to the machine: the rest to this size alone.
            known = residual.seen >= _SETTLED
            shared = _agreed(error, self._last_error) if known or rows * batch != self._last_size else 0.0
            self._drift += (_DRIFT_GAIN if known else 2 * _DRIFT_GAIN) * shared
            self._last_error, self._last_size = error, rows * batch
            if not known:
                error -= shared
            before = residual.log
            residual.follow(error)
            self._stale += abs(residual.log - before)
            if self._stale < _STALE:
                return
        self._curves.clear()
        self._stale = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The fit and its corrections, as JSON holds them."""
        return {
            "peak": [self.peak.flops_per_second, self.peak.bytes_per_second],
            "drift": self._drift,
            "modes": [
                {
                    "split": split,
                    "compute": list(mode.compute),
                    "memory": list(mode.memory),
                    "residuals": [[n, item.log, item.seen] for n, item in sorted(mode.residuals.items())],
                }
                for split, mode in self._modes.items()
            ],
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
        model._drift = _finite(data["drift"])
        for item in data["modes"]:
            compute, memory = ((_finite(a), _finite(b)) for a, b in (item["compute"], item["memory"]))
            mode = model._modes[bool(item["split"])] = _Mode(compute, memory)
            for n, log, seen in item["residuals"]:
                mode.residuals[int(n)] = _Residual(_finite(log), int(seen))
        return model

    def _compute_curve(self, size: int, context: int, batch: int, split: bool) -> Array:
        mode = self._modes[split]
        logs = self._base(size, context, batch, split) + mode.residual(_log_sizes(size, batch))
        measured = [n // batch - 1 for n in sorted(mode.residuals) if n % batch == 0 and n <= size * batch]
        if measured:
            # Noise may order measured sizes wrongly: halfway between the least curve above and the largest below.
            known = logs[measured]
            known = (np.maximum.accumulate(known) + np.minimum.accumulate(known[::-1])[::-1]) / 2
            # What lies between two measured sizes costs no less than the one and no more than the other.
            below, above = np.full(size, -np.inf), np.full(size, np.inf)
            below[measured] = above[measured] = known
            above = np.minimum.accumulate(above[::-1])[::-1]
            logs = np.minimum(np.maximum(logs, np.maximum.accumulate(below)), above)
        return np.asarray(np.exp(np.maximum.accumulate(logs)))

    def _base(self, size: int, context: int, batch: int, split: bool) -> Array:
        key = (size, context, batch, split)
        base = self._bases.get(key)
        if base is None:
            compute, memory = self._ideal(size, context, batch)
            base = self._bases[key] = np.log(self._modes[split].roofline(compute, memory))
        return base

    def _ideal_at(self, rows: int, context: int, batch: int) -> tuple[float, float]:
        compute, memory = self._ideal(_size(rows), _bucket(context), batch)
        return float(compute[rows - 1]), float(memory[rows - 1])

    def _ideal(self, size: int, context: int, batch: int) -> tuple[Array, Array]:
        """Milliseconds at the device's peaks, of compute and of memory, at N = 1 … `size`."""
        if self.workload is None:
            return np.ones(size), np.ones(size)
        key = (size, context, batch)
        if key not in self._ideals:
            rows = np.arange(1, size + 1, dtype=np.float64)
            compute = 1e3 * self.workload.flops(rows, context, batch) / self.peak.flops_per_second
            memory = 1e3 * self.workload.bytes(rows, context, batch) / self.peak.bytes_per_second
            self._ideals[key] = np.asarray(compute), np.asarray(memory)
        return self._ideals[key]


@dataclass
class _Residual:
    """What the roofline does not say at one N·b, in log, and how often it was seen."""

    log: float
    seen: int
    last_error: float = 0.0

    def follow(self, error: float) -> None:
        if self.seen < _SETTLED:
            # The mean of what was seen: one unlucky measurement must not outlive a few others.
            self.log += min(max(error, -_FIRST_CLIP), _FIRST_CLIP) / (self.seen + 1)
        else:
            self.log += max(0.3 / (self.seen - 2), _RESIDUAL_GAIN) * _agreed(error, self.last_error)
        self.last_error = error
        self.seen = min(self.seen + 1, _MOST_SEEN)


@dataclass
class _Mode:
    """The fit for one kind of attention: (α, β) of both branches and the residuals by N·b."""

    compute: tuple[float, float]
    memory: tuple[float, float]
    residuals: dict[int, _Residual] = field(default_factory=dict)

    def shifted(self, log: float) -> _Mode:
        """A kind of attention that takes e^`log` times as long."""
        residuals = {n: _Residual(item.log + log, item.seen) for n, item in self.residuals.items()}
        return _Mode(self.compute, self.memory, residuals)

    def roofline(self, compute: Array, memory: Array) -> Array:
        bound = np.maximum(self.compute[0] * compute + self.compute[1], self.memory[0] * memory + self.memory[1])
        return np.asarray(np.maximum(bound, 1e-9))

    def residual(self, sizes: Array) -> Array:
        """Log residuals at log₂ N·b: linear between measured sizes, and constant beyond them."""
        if not self.residuals:
            return np.zeros_like(sizes)
        known = sorted(self.residuals)
        return np.interp(sizes, np.log2(known), [self.residuals[n].log for n in known])


def _agreed(error: float, last: float) -> float:
    """The part of an error that the one before it bears out: nothing of a lone outlier, all of a lasting change."""
    if error * last <= 0:
        return 0.0
    return math.copysign(min(abs(error), abs(last)), error)


def _fit_roofline(compute: Array, memory: Array, measured: Array) -> tuple[tuple[float, float], tuple[float, float]]:
    """(α, β) ≥ 0 of both branches, with the least relative error of their maximum.

    Points in order of size are divided into those that memory bounds and those that compute bounds; each division's
    branches have a closed form, and the best division wins.
    """
    order = np.argsort(compute / np.maximum(memory, 1e-12), kind="stable")
    compute, memory, measured = compute[order], memory[order], measured[order]
    best, least = ((0.0, 0.0), (0.0, 0.0)), math.inf
    for cut in range(len(measured) + 1):
        low, high = _fit_branch(memory[:cut], measured[:cut]), _fit_branch(compute[cut:], measured[cut:])
        bound = np.maximum(low[0] * memory + low[1], high[0] * compute + high[1])
        loss = float(np.square(bound / measured - 1).sum())
        if loss < least * (1 - 1e-9):
            best, least = (high, low), loss
    return best


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
