"""BASTION's budget (arXiv 2605.29727), to compare with: the first maximum of its estimate, in steps of 32."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from .calibration import Calibration
from .latency import LatencyModel, LatencyPoint
from .policy import BudgetPolicy, RoundRecord

#: Least tree, and the step that grown trees are truncated down to.
_STEP = 32
#: Drafted rounds that the times beside the verification are taken from.
_PROFILED_ROUNDS = 8


class BastionPolicy(BudgetPolicy):
    """Grows a tree until S(N) = Â(N) ÷ (T_draft + T_aux + T_verify(N)) falls.

    Goes by the drafter's raw scores and by latencies measured once.

    Args:
        latency: The target's latency; measured by the first rounds where it is not fitted, never corrected.
        largest: Most rows a round may verify.
    """

    def __init__(self, latency: LatencyModel, largest: int = 64) -> None:
        self.limit = largest
        self.latency = latency
        self._calibration = None if latency.fitted else Calibration(largest)
        self._profiled: list[float] = []
        self._batch, self._context = 1, 0

    def begin(self, context: int, batch: int) -> None:
        self._context, self._batch = context, batch

    def should_draft(self) -> bool:
        self.reason = "best" if self._calibration is None else "calibrating"
        return self._calibration is None or self._calibration.size != 1

    def choose(
        self,
        scores: torch.Tensor,
        depths: torch.Tensor | None = None,
        leads: Sequence[int] | None = None,
        riding: bool = False,
    ) -> int:
        nodes = min(scores.shape[1], self.limit)
        if self._calibration is not None:
            return min(self._calibration.size or 1, nodes)
        gains = scores[:, :nodes].detach().sum(0, dtype=torch.float64).tolist()
        verify_ms = self.latency.curve(nodes, self._context, self._batch, riding=riding).tolist()
        beside = statistics.fmean(self._profiled) if self._profiled else 0.0
        chosen, surrogate = 1, gains[0]
        while chosen < nodes:
            gain = gains[chosen] * (beside + verify_ms[chosen - 1])
            if chosen >= _STEP and gain <= surrogate * (verify_ms[chosen] - verify_ms[chosen - 1]):
                break
            surrogate += gains[chosen]
            chosen += 1
        return chosen // _STEP * _STEP or nodes

    def record(self, record: RoundRecord) -> None:
        self._batch, self._context = record.batch, record.context + round(record.tokens / max(record.live, 1))
        if record.drafted and len(self._profiled) < _PROFILED_ROUNDS:
            self._profiled.append(record.draft_ms + record.other_ms)
        if self._calibration is not None:
            self._calibration.record(
                LatencyPoint(record.nodes, record.context, record.batch, record.verify_ms, record.kind)
            )
            if self._calibration.size is None:
                self.latency.fit(self._calibration.points)
                self._calibration = None
