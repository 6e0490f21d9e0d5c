"""What rounds of one batch size take and yield, and whether drafting pays there."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from .policy import RoundRecord

#: Share that a running mean moves by once it has settled.
_GAIN = 1 / 32
#: How many times the mean a duration may count in it.
_CLIP = 3.0
#: What one round is forgotten by in the running rate: a memory of some fifty rounds.
_RATE_KEPT = 0.98
#: Tokens that the assumption weighs that the slowest row comes on as expected.
_LAG_PRIOR = 4.0
#: Drafted rounds before drafting may be given up, and the standard errors it has to be on the wrong side by.
EVIDENCE, _DOUBT = 8, 0.5
#: Plain rounds before the first and before the last probe.
_FIRST_WAIT, _LAST_WAIT = 8, 128
#: Gains over losses, in probes one after the other, for drafting to be taken up whatever was expected.
_WINS = 3
#: How much a probe tells against what is known from before.
_PROBE_GAIN = 0.3
#: Running means of a pace that are durations.
_DURATIONS = ("draft", "other", "other_plain")


@dataclass
class RunningMean:
    """A running mean: of all values at first, of the recent ones later."""

    value: float = 0.0
    count: int = 0
    square: float = 0.0  # running variance of the values
    share: float = 0.0  # of that variance, what the mean has: Σ of its squared weights

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return math.sqrt(self.square * self.share)

    def add(self, value: float, gain: float = 0.0) -> None:
        if self.count == 1 and self.value > _CLIP * value > 0:
            self.value = value  # the first one warmed up
        self.count += 1
        gain = max(1 / self.count, _GAIN, gain)
        self.square = (1 - gain) * (self.square + gain * (value - self.value) ** 2)
        self.share = (1 - gain) ** 2 * self.share + gain**2
        self.value += gain * (value - self.value)

    def add_time(self, ms: float, gain: float = 0.0) -> None:
        """Adds a duration; one far above the mean counts as far as the mean allows."""
        self.add(min(ms, _CLIP * self.value) if self.count > 1 and self.value > 0 else ms, gain)


@dataclass
class Pace:
    """What rounds of one batch size take and yield, of the slowest row, in steady ms, and whether drafting pays."""

    tokens: float = 0.0
    ms: float = 0.0
    draft: RunningMean = field(default_factory=RunningMean)
    verify: RunningMean = field(default_factory=RunningMean)
    other: RunningMean = field(default_factory=RunningMean)
    other_plain: RunningMean = field(default_factory=RunningMean)
    yielded: RunningMean = field(default_factory=RunningMean)
    advantage: RunningMean = field(default_factory=RunningMean)
    #: Whether the durations of drafted rounds are of rounds with riding rows.
    riding: bool = False
    paused: bool = False
    wait: int = _FIRST_WAIT
    left: int = 0
    wins: int = 0
    verdict: str = "does not pay"
    #: Sums of the tokens beyond the first that the slowest row should have come on, and did.
    due: float = _LAG_PRIOR
    came: float = _LAG_PRIOR

    @property
    def rate(self) -> float:
        return self.tokens / self.ms if self.ms > 0 else 0.0

    def rate_over(self, plain_ms: float) -> float:
        """The rate to decide by: plain decoding's at least, which can always be had."""
        return max(self.rate, 1 / plain_ms)

    @property
    def measured(self) -> bool:
        return self.draft.count > 0

    @property
    def fixed_ms(self) -> float:
        """Milliseconds of a drafted round beside the verification."""
        return self.draft.value + self.other.value

    @property
    def plain_other(self) -> float:
        """Milliseconds of a plain round beside the forward."""
        return (self.other_plain if self.other_plain.count else self.other).value

    @property
    def draft_ms(self) -> float:
        return self.draft.value

    @property
    def verify_ms(self) -> float:
        return self.verify.value

    @property
    def drafted_tokens(self) -> float:
        return self.yielded.value

    def time(self, record: RoundRecord) -> None:
        """Takes the round's durations."""
        if record.drafted:
            if record.kind.riding != self.riding:
                self._start_over(record.kind.riding)
            self.draft.add_time(record.draft_ms)
            self.verify.add_time(record.verify_ms)
            self.other.add_time(record.other_ms)
            self.yielded.add(record.progress)
        else:
            self.other_plain.add_time(record.other_ms, _GAIN * record.rounds)

    def _start_over(self, riding: bool) -> None:
        """Drafts another way from now on, whose durations soon outvote the old ones."""
        self.riding = riding
        for mean in (self.draft, self.verify, self.other):
            mean.count = min(mean.count, 1)

    @property
    def lag(self) -> float:
        """By how much less than the least of expectations the slowest of several rows comes on.

        Another row may be the slowest each time: the least of chances is less than the least chance.
        """
        return self.came / self.due

    def fall_behind(self, expected: float, tokens: float) -> None:
        """Takes a round's tokens of the slowest of several rows, and those expected, into `lag`."""
        kept_prior = (1 - _RATE_KEPT) * _LAG_PRIOR
        self.due = _RATE_KEPT * self.due + kept_prior + expected - 1
        self.came = _RATE_KEPT * self.came + kept_prior + tokens - 1

    def count(self, tokens: float, ms: float, rounds: int = 1) -> None:
        """Takes a round, or several together, into the running rate."""
        kept = _RATE_KEPT**rounds
        self.tokens = kept * self.tokens + tokens
        self.ms = kept * self.ms + ms

    def pays(self, plain: float) -> bool:
        """Whether drafted rounds have lately been quicker a token than a plain one of `plain` milliseconds."""
        return self.drafted_tokens * plain > self.fixed_ms + self.verify_ms

    def judge(self, advantage: float, realised: float, unsettled: bool, pays: bool) -> None:
        """Decides whether to go on drafting.

        Args:
            advantage: Tokens by which the round should beat a plain one at the running rate.
            realised: By which it did.
            pays: Whether drafted rounds have lately paid: a running rate that lags behind a text that became harder,
                or a machine that became slower, must not speak against a drafter that does.
            unsettled: Whether the drafter has just turned out to be different: what was expected before is worth less.
        """
        self.advantage.add(advantage, _PROBE_GAIN if self.paused or unsettled else 0.0)
        hopeless = self.advantage.value < -_DOUBT * self.advantage.error
        if not self.paused:
            if self.advantage.count >= EVIDENCE and hopeless and not pays:
                self.paused, self.left, self.wins = True, self.wait, 0
            return
        # A probe that gains is followed by another at once, until gains or losses prevail.
        first = self.wins == 0
        self.wins += 1 if realised > 0 else -1
        if not hopeless or self.wins >= _WINS:
            self.paused, self.wait, self.wins = False, _FIRST_WAIT, 0
            self.advantage.count = 0 if hopeless else min(self.advantage.count, EVIDENCE // 2)
        elif self.wins <= 0:
            self.wait = min(2 * self.wait, _LAST_WAIT) if first else _FIRST_WAIT
            self.left, self.wins = self.wait, 0

    def settle(self) -> None:
        """Ends the calibration."""
        self.tokens = self.ms = 0.0

    def take_over(self, other: Pace) -> None:
        """Starts from another batch size's durations, to be outvoted soon."""
        for name in ("draft", "verify", "other", "other_plain", "yielded"):
            known: RunningMean = getattr(other, name)
            setattr(self, name, RunningMean(known.value, min(known.count, 1)))
        self.riding = other.riding

    def durations(self) -> dict[str, Any]:
        """What rounds take, without what they yield."""
        return {name: list(vars(getattr(self, name)).values()) for name in _DURATIONS} | {"riding": self.riding}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Pace:
        """The pace whose `durations` these are."""
        pace = cls(riding=bool(data["riding"]))
        for name in _DURATIONS:
            value, count, square, share = data[name]
            setattr(pace, name, RunningMean(float(value), int(count), float(square), float(share)))
        return pace
