"""How far a drafter's promises can be trusted, learned depth by depth while it drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Standard errors of the recent rounds beyond which what was learned before is given up.
_SURPRISE = 2.5
#: Half-life of what counts as recent, in rounds.
_RECENT = 12.0
#: Rounds after a surprise that only recent ones count: by then they have forgotten what came before.
_UNSETTLED = 24
#: Most that a promise is raised by.
_MOST = 2.0
_BINS = 10


@dataclass(frozen=True)
class ReliabilityBin:
    """Promises of similar probability: their mean, the share that was accepted, and how many there were."""

    promised: float
    accepted: float
    count: float


class CalibratedAcceptance:
    """Learns accepted ÷ promised by depth and corrects path scores by it.

    A depth that was seen little follows the one above it, and the first one follows the drafter. Learning is slow,
    but where recent rounds contradict it they take its place at once: another text, or another drafter.

    Args:
        prior: Promised nodes of a depth, per row, that weigh as much as the assumption to start from.
        half_life: Drafted rounds after which a round counts half.
    """

    def __init__(self, prior: float = 2.0, half_life: float = 200.0) -> None:
        self.prior = prior
        self._kept, self._kept_recent = 0.5 ** (1 / half_life), 0.5 ** (1 / _RECENT)
        # Of depths 1, 2, …: sums of promises and of acceptances, over all rounds and over the recent ones.
        self._sums: list[list[float]] = []
        self._recent: list[list[float]] = []
        self._surprise = [0.0, 0.0]  # sum of the recent rounds' errors, and of their squares
        self._unsettled = 0
        self._bins = [[0.0, 0.0, 0.0] for _ in range(_BINS)]
        self._foreseen = [0.0, 0.0]  # expected and accepted nodes a row, the roots included
        self._moments = [0.0] * 6  # count, Σx, Σy, Σx², Σy², Σxy of promised and accepted nodes a row

    @property
    def unsettled(self) -> bool:
        """Whether recent rounds have just taken the place of what was learned before."""
        return self._unsettled > 0

    def correct(self, scores: Sequence[float], depths: Sequence[int]) -> list[float]:
        """The path scores of a row as experience has them.

        Args:
            scores: Path scores ρ of N nodes.
            depths: Their depths; 0 for roots and dummies.

        Returns:
            Probabilities that the walk takes each node; of roots unchanged.
        """
        factors = self.factors()
        factors += factors[-1:] * (max(depths) + 1 - len(factors))
        return [min(score * factors[depth], 1.0) for score, depth in zip(scores, depths, strict=True)]

    def factors(self) -> list[float]:
        """Accepted ÷ promised at depths 0, 1, …; deeper ones are as the last."""
        return self._factors_of(self._sums)

    def record(self, promised: Sequence[float], accepted: Sequence[int]) -> None:
        """Learns from a drafted round.

        Args:
            promised: Σρ of the verified nodes of each depth over the rows, the roots first.
            accepted: Walks that reached each depth, as long.
        """
        if not promised or promised[0] <= 0:
            return
        factors = self.factors()
        factors += factors[-1:] * (len(promised) - len(factors))
        expected = sum(p * factor for p, factor in zip(promised, factors, strict=False))
        error = sum(accepted) - expected
        for index, nodes in enumerate((expected, sum(accepted))):
            self._foreseen[index] = self._kept * self._foreseen[index] + nodes / promised[0]
        self._add(self._sums, self._kept, promised, accepted)
        self._add(self._recent, self._kept_recent, promised, accepted)
        kept = self._kept_recent
        self._surprise = [kept * self._surprise[0] + error, kept * self._surprise[1] + error * error]
        doubtful = abs(self._surprise[0]) > _SURPRISE * math.sqrt(self._surprise[1])
        if doubtful and self._misses(self._recent) < self._misses(self._sums):
            self._unsettled = _UNSETTLED
        if self.unsettled:
            self._sums = [list(sums) for sums in self._recent]
            self._unsettled -= 1
        self._tabulate(promised, accepted)

    def reliability(self) -> list[ReliabilityBin]:
        """How often walks reached a depth, by the probability promised for it; bins without any are left out."""
        return [ReliabilityBin(p / count, a / count, count) for p, a, count in self._bins if count]

    def foresight(self) -> float:
        """Accepted nodes over those expected with what was known before each round; NaN without any round."""
        expected, accepted = self._foreseen
        return accepted / expected if expected else math.nan

    def correlation(self) -> float:
        """Pearson's r of the surrogate Â and the accepted length, over drafted rounds; NaN without spread."""
        count, x, y, xx, yy, xy = self._moments
        spread = (count * xx - x * x) * (count * yy - y * y)
        return (count * xy - x * y) / math.sqrt(spread) if spread > 1e-12 else math.nan

    def _factors_of(self, sums: list[list[float]]) -> list[float]:
        factors = [1.0]
        for promised, accepted in sums:
            factors.append(min((accepted + self.prior * factors[-1]) / (promised + self.prior), _MOST))
        return factors

    def _misses(self, sums: list[list[float]]) -> float:
        """By how many nodes the factors of `sums` miss what the recent rounds accepted."""
        factors = self._factors_of(sums)[1:]
        return abs(sum(a - p * factor for (p, a), factor in zip(self._recent, factors, strict=True)))

    @staticmethod
    def _add(sums: list[list[float]], kept: float, promised: Sequence[float], accepted: Sequence[int]) -> None:
        sums.extend([0.0, 0.0] for _ in range(len(promised) - 1 - len(sums)))
        for index, pair in enumerate(sums):
            seen = index + 1 < len(promised)
            pair[0] = kept * pair[0] + (promised[index + 1] if seen else 0.0)
            pair[1] = kept * pair[1] + (accepted[index + 1] if seen else 0.0)

    def _tabulate(self, promised: Sequence[float], accepted: Sequence[int]) -> None:
        rows = promised[0]
        for p, a in zip(promised[1:], accepted[1:], strict=True):
            table = self._bins[min(int(p / rows * _BINS), _BINS - 1)]
            for index, value in enumerate((p, a, rows)):
                table[index] += value
        x, y = sum(promised) / rows, sum(accepted) / rows
        for index, value in enumerate((1.0, x, y, x * x, y * y, x * y)):
            self._moments[index] += value
