"""The budget that commits the most tokens a millisecond: one rule, learned from the rounds themselves.

λ is the running rate, tokens per ms. A round takes the prefix with the largest Â(N) − λ·T(N): of all policies, those
that take it at the rate they reach have the best rate (Dinkelbach), and λ converges to it. Drafting has to beat a
plain step in the same currency.

A call of several rows ends with its last one, so there a token is one by which the slowest row came on. Rows that are
ahead do not count until it has caught up.

Decisions are made in steady milliseconds, those of the machine at the speed it was first measured at: a machine that
is slower for a while is slower in all it does, and what was best still is.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from .acceptance import CalibratedAcceptance
from .calibration import Calibration
from .corrections import ForwardKind
from .latency import LatencyModel, LatencyPoint
from .pace import EVIDENCE, Pace
from .policy import BudgetPolicy, RoundRecord
from .roofline import Workload

logger = logging.getLogger(__name__)

#: Nodes a probe verifies.
_PROBE_NODES = 8
#: Plain rounds of a pause that are learned from together: until the next probe nothing is decided.
_PAUSED_PATIENCE = 16
#: Rounds that the expectation after calibration weighs in the running rate.
_RATE_PRIOR = 6.0
#: Drafted rounds from one look at a size beside the best to the next, and how much rarer looks at known ones are: odd,
#: so that both sides are looked at.
_LOOK_AROUND, _RARER = 6, 5
#: How many times what was expected a round may count in the running rate, which has to fit latencies without spikes.
_RATE_CLIP = 1.5
#: Least that trees are expanded to.
_LEAST_EXPANDED = 16


def best_prefix(surrogate: Sequence[float], verify_ms: Sequence[float], rate: float) -> int:
    """The N that maximises Â(N) − λ·T(N), the least of equals; the larger λ, the smaller N.

    Args:
        surrogate: Â at N = 1, 2, …: expected tokens.
        verify_ms: T at the same N.
        rate: λ, tokens per ms.
    """
    # Plain numbers, here and in what leads here: between two forwards of large models nothing is left in a processor's
    # caches, and a few dozen additions are quicker than the first call of a NumPy function.
    best, most = 1, -math.inf
    for nodes, (tokens, ms) in enumerate(zip(surrogate, verify_ms, strict=True), 1):
        value = tokens - rate * ms
        if value > most:
            best, most = nodes, value
    return best


def best_rate(surrogate: Sequence[float], verify_ms: Sequence[float], fixed_ms: float) -> float:
    """The largest tokens per ms of any N, where a round takes `fixed_ms` beside the verification."""
    return max(tokens / (ms + fixed_ms) for tokens, ms in zip(surrogate, verify_ms, strict=True))


class BudgetController(BudgetPolicy):
    """Learns the machine and the drafter, and verifies what pays.

    Args:
        latency: The target's latency; measured by the first rounds where it is not fitted. None measures without a
            roofline (the moving-average policy); a model with `online=False` stays as it is (the static policy).
        largest: Most rows a round may verify.
        acceptance: What is known of the drafter.
        splits: Kinds of attention to choose from, the device's usual one first: whether each is split.
    """

    def __init__(
        self,
        latency: LatencyModel | None = None,
        largest: int = 64,
        acceptance: CalibratedAcceptance | None = None,
        splits: Sequence[bool] = (False,),
    ) -> None:
        self.limit = largest
        self.latency = latency if latency is not None else LatencyModel()
        self.acceptance = acceptance if acceptance is not None else CalibratedAcceptance()
        self._splits = tuple(splits)
        self._calibration = None if self.latency.fitted else Calibration(largest, splits)
        self._paces: dict[int, Pace] = {}
        self._batch, self._context, self._turn = 1, 0, 0
        self._riding = False  # whether drafted rounds have riding rows now
        self._recent: deque[int] = deque(maxlen=8)
        self._seen: list[_Promises] = []  # the trees of the calibration
        # What was expected of every drafted round not recorded yet; None while calibrating.
        self._expected: deque[_Expected | None] = deque()

    @property
    def calibrating(self) -> bool:
        """Whether the target is still being measured."""
        return self._calibration is not None

    @property
    def patience(self) -> int:
        """Several rounds at once, where none of them alone will change what is decided."""
        if self._calibration is not None or self.acceptance.unsettled:
            return 1
        pace = self._pace()
        if pace.paused:
            return max(1, min(pace.left, _PAUSED_PATIENCE))
        return 1 if pace.advantage.count < EVIDENCE else super().patience

    @property
    def rate(self) -> float:
        """λ, tokens of the slowest row per ms."""
        return self._pace().rate / self.latency.slowdown

    def begin(self, context: int, batch: int) -> None:
        self._context, self._batch = context, batch
        self._expected.clear()

    def should_draft(self) -> bool:
        self.split = self._splits[0]
        if self.limit < 2:
            self.reason = "fixed"
            return False
        if self._calibration is not None:
            self.reason = "calibrating"
            return self._calibration.size != 1
        pace = self._pace()
        if not pace.paused:
            self.reason = "best"
            return True
        if pace.left > 0:
            self.reason = pace.verdict
            return False
        self.reason = "probe"
        return True

    def largest(self) -> int:
        """Most rows this round may verify: somewhat more than paid lately, so that no tree is expanded for nothing."""
        if self._calibration is not None or not self._recent or self._pace().paused:
            return self.limit
        return min(self.limit, max(_LEAST_EXPANDED, 3 * max(self._recent) // 2))

    def choose(
        self,
        scores: torch.Tensor,
        depths: torch.Tensor | None = None,
        leads: Sequence[int] | None = None,
        riding: bool = False,
    ) -> int:
        nodes, self._riding = min(scores.shape[1], self.limit), riding
        promises: _Promises = (scores.tolist(), None if depths is None else depths.tolist(), leads)
        if self._calibration is not None:
            self.split = self._calibration.split
            self._seen.append(promises)
            self._expected.append(None)
            return min(self._calibration.size or 1, nodes)
        pace = self._pace()
        promised = self._surrogate(*promises)[:nodes]
        surrogate = promised if len(promises[0]) == 1 else [1 + pace.lag * (tokens - 1) for tokens in promised]
        verify_ms = self._steady_ms(nodes)
        rate = pace.rate_over(self._plain_ms(pace))
        chosen = best_prefix(surrogate, verify_ms, rate)
        if len(self._splits) > 1:
            self.split = self.latency.best_split(chosen, self._context, self._batch, riding)
        value = surrogate[chosen - 1] - rate * verify_ms[chosen - 1]
        if pace.paused:
            # Not what seems best but enough to learn from: what is known of a drafter at rest may be old or bad luck.
            verified = min(_PROBE_NODES, nodes)
        else:
            self._recent.append(chosen)
            verified = self._look_around(chosen, nodes)
        self._expected.append(_Expected(value, promised[verified - 1], len(promises[0])))
        return verified

    def _look_around(self, chosen: int, nodes: int) -> int:
        """Now and then a size beside the best: one whose only measurement was unlucky would never be tried again."""
        self._turn += 1
        if not self.latency.online or self._turn % _LOOK_AROUND:
            return chosen
        power = 1 << (chosen - 1).bit_length()  # the least power of 2 from `chosen` on
        beside = (power if power > chosen else 2 * power, max(power // 2, 2))[self._turn // _LOOK_AROUND % 2]
        often = self._turn % (_RARER * _LOOK_AROUND) == 0
        if beside > nodes or (self.latency.known(beside, self._batch, self.split, self._riding) and not often):
            return chosen
        self.reason = "looking around"
        return beside

    def record_all(self, records: Sequence[RoundRecord]) -> None:
        if len(records) > 1 and self._pace().paused and not any(record.drafted for record in records):
            # Nothing is decided by one of them, and a forward of a small model is not much longer than a lesson.
            records = [RoundRecord.of_plain(records)]
        super().record_all(records)

    def record(self, record: RoundRecord) -> None:
        expected = self._expected.popleft() if record.drafted and self._expected else None
        self._batch = record.batch
        if record.trial:
            self.acceptance.record(record.promised, record.accepted)
            return
        if self._calibration is None:
            self.latency.update(
                record.nodes, record.context, record.batch, record.verify_ms, record.kind, record.rounds
            )
            record = record.at(1 / self.latency.slowdown)
        pace = self._pace()
        tokens = record.progress
        pace.time(record)
        if record.drafted:
            self.acceptance.record(record.promised, record.accepted)
        if expected is not None and expected.rows > 1 and record.promised:
            pace.fall_behind(expected.tokens, tokens)
        if self._calibration is not None:
            self._calibrate(record)
        else:
            plain = usual = self._plain_ms(pace)
            if record.drafted:
                curve = self.latency.steady_curve(record.nodes, record.context, record.batch, *record.kind)
                usual = pace.fixed_ms + float(curve[-1])
            pace.count(tokens, min(record.total_ms, _RATE_CLIP * usual) * record.rounds, record.rounds)
            if not record.drafted:
                pace.left = max(pace.left - record.rounds, 0)
            elif expected is not None:
                rate = pace.rate_over(plain)
                threshold = 1 - rate * plain
                advantage = expected.value - rate * pace.fixed_ms - threshold
                realised = tokens - rate * record.total_ms - threshold
                pace.judge(advantage, realised, self.acceptance.unsettled, pace.pays(plain))
                if pace.paused:
                    pace.verdict = self._verdict(plain)
        self._context = record.context + round(record.tokens / max(record.live, 1))

    def profile(self) -> dict[str, Any]:
        """What a later process starts from, as JSON holds it: nothing that the drafter's weights decide."""
        return {
            "latency": self.latency.to_dict(),
            "paces": {str(batch): pace.durations() for batch, pace in self._paces.items()},
        }

    @property
    def verdict(self) -> str:
        pace = self._pace()
        return pace.verdict if pace.paused else ""

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = {"policy": "auto", "tokens_per_ms": self.rate, "calibrating": self.calibrating}
        if self.latency.fitted:
            curve, pace = self.verify_ms(self._context, self._batch), self._pace()
            summary |= {
                "verify_ms": {str(nodes): curve[nodes - 1] for nodes in _powers(self.limit)},
                "draft_ms": pace.draft_ms * self.latency.slowdown,
                "other_ms": pace.other.value * self.latency.slowdown,
            }
        bins = self.acceptance.reliability()
        summary["reliability"] = [[item.promised, item.accepted, item.count] for item in bins]
        figures = {
            "correlation": self.acceptance.correlation(),
            "accepted_over_expected": self.acceptance.foresight(),
        }
        summary |= {name: None if math.isnan(value) else value for name, value in figures.items()}
        return summary

    @classmethod
    def from_profile(
        cls,
        profile: dict[str, Any] | None,
        workload: Workload | None = None,
        largest: int = 64,
        splits: Sequence[bool] = (False,),
        **options: Any,
    ) -> BudgetController:
        """A controller that starts from a stored `profile`, or by calibrating where it makes no sense.

        Args:
            profile: What `profile` returned; None for none.
            workload: FLOPs and bytes of the target's forward.
            largest: Most rows a round may verify.
            splits: Kinds of attention to choose from, the device's usual one first.
            **options: Of `LatencyModel`.
        """
        fresh = cls(LatencyModel(workload, **options), largest, splits=splits)
        if profile is None:
            return fresh
        try:
            online = bool(options.get("online", True))
            latency = LatencyModel.from_dict(profile["latency"], workload, online=online)
            stored = cls(latency, largest, splits=splits)
            stored._paces = {int(batch): Pace.from_dict(item) for batch, item in profile["paces"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            logger.warning(f"A stored profile makes no sense ({error!r}); the target is measured again.")
            return fresh
        return stored

    def kind_of(self, nodes: int) -> ForwardKind:
        """The kind of forward that verifies so many nodes, as rounds are drafted now."""
        return ForwardKind(self._splits[0], self._riding and nodes > 1)

    def verify_ms(self, context: int, batch: int = 1) -> list[float]:
        """Milliseconds of a plain round's forward, then of verifying 2 … `limit` nodes as rounds are drafted now."""
        plain = self.latency.predict(1, context, batch)
        return [plain, *self.latency.curve(self.limit, context, batch, riding=self._riding)[1:].tolist()]

    def _pace(self) -> Pace:
        """The pace of this batch size; a new one takes over the times of the nearest."""
        pace = self._paces.get(self._batch)
        if pace is None:
            pace = self._paces[self._batch] = Pace()
            known = [batch for batch, other in self._paces.items() if other is not pace and other.measured]
            if known:
                pace.take_over(self._paces[min(known, key=lambda batch: abs(batch - self._batch))])
        if not pace.ms and self.latency.fitted:
            self._expect(pace)
        return pace

    def _plain_ms(self, pace: Pace) -> float:
        """Steady milliseconds of a plain round."""
        return float(self.latency.steady_curve(1, self._context, self._batch)[0]) + pace.plain_other

    def _steady_ms(self, nodes: int) -> list[float]:
        """Steady milliseconds of verifying 1 … `nodes` nodes, as rounds are drafted now."""
        return self.latency.steady_curve(nodes, self._context, self._batch, riding=self._riding).tolist()

    def _expect(self, pace: Pace) -> None:
        """The rate to start from: plain decoding's, or better by what the calibration's trees promise."""
        plain = self._plain_ms(pace)
        rate = 1 / plain
        surrogate = self._mean_surrogate()
        if len(surrogate):
            verify_ms = self._steady_ms(len(surrogate))
            rate = max(rate, best_rate(surrogate, verify_ms, pace.fixed_ms))
        pace.tokens, pace.ms = _RATE_PRIOR, _RATE_PRIOR / rate
        for seen in self._seen:
            surrogate = self._surrogate(*seen)
            verify_ms = self._steady_ms(len(surrogate))
            value = max(tokens - rate * ms for tokens, ms in zip(surrogate, verify_ms, strict=True))
            pace.advantage.add(value - rate * pace.fixed_ms - (1 - rate * plain))

    def _calibrate(self, record: RoundRecord) -> None:
        calibration = self._calibration
        assert calibration is not None
        calibration.record(
            LatencyPoint(record.nodes, record.context, record.batch, record.verify_ms, record.kind),
            self._mean_surrogate(),
        )
        if calibration.size is None:
            self._calibration = None
            self.latency.fit(calibration.points)
            self._paces[record.batch].settle()
            self._expect(self._paces[record.batch])
            self._seen.clear()

    def _surrogate(
        self, scores: list[list[float]], depths: list[list[int]] | None, leads: Sequence[int] | None
    ) -> list[float]:
        """Surrogate Â at N = 1, 2 and so on: how far the slowest live row should come on."""
        if depths is not None:
            scores = [self.acceptance.correct(*row) for row in zip(scores, depths, strict=True)]
        tokens = [list(accumulate(row)) for row in scores]
        if len(tokens) == 1:
            return tokens[0]
        if leads is not None:
            # Where all come on by what this one does at most, rows further ahead are not the slowest.
            most = min(lead + row[-1] for lead, row in zip(leads, tokens, strict=True))
            tokens = [
                [lead + reached for reached in row] for lead, row in zip(leads, tokens, strict=True) if lead < most
            ]
        return [min(reached) for reached in zip(*tokens, strict=True)]

    def _mean_surrogate(self) -> list[float]:
        """Â over the trees of the calibration, as far as all of them go."""
        curves = [self._surrogate(*seen) for seen in self._seen]
        return [sum(tokens) / len(curves) for tokens in zip(*curves, strict=False)]

    def _verdict(self, plain: float) -> str:
        pace, slowdown = self._pace(), self.latency.slowdown
        slowest = " in the slowest row" if self._batch > 1 else ""
        return (
            f"does not pay: {pace.drafted_tokens:.2f} tokens a drafted round{slowest}, "
            f"{pace.draft_ms * slowdown:.1f} ms of drafting and {pace.verify_ms * slowdown:.1f} ms of verifying, "
            f"against {plain * slowdown:.1f} ms of a plain step"
        )


#: Path scores of the live rows, `[R][N]`, the nodes' depths, and the rows' leads.
_Promises = tuple[list[list[float]], list[list[int]] | None, Sequence[int] | None]


@dataclass(frozen=True)
class _Expected:
    """What a drafted round was expected to be worth."""

    value: float  # Â(N) − λ·T(N) at the best N
    tokens: float  # by which the slowest row should come on with the nodes verified, if rows came on as they should
    rows: int


def _powers(largest: int) -> list[int]:
    """The powers of 2 up to `largest`, and `largest`."""
    return sorted({*(1 << exponent for exponent in range(largest.bit_length()) if 1 << exponent <= largest), largest})
