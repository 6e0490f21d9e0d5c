"""What decides how many nodes a round verifies, and what it is told of finished rounds."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .corrections import USUAL, ForwardKind


@dataclass(frozen=True)
class RoundRecord:
    """What a finished round says.

    Args:
        nodes: Rows verified for each row of the batch, N, the root included; 1 for a plain round.
        drafted: Whether a draft was paid.
        batch: Rows of the batch, finished ones too: they cost.
        live: Rows that were generating.
        context: Cached columns before the round.
        draft_ms: Milliseconds of propose and expand; 0 for a plain round.
        verify_ms: Milliseconds of the target's forward.
        other_ms: Milliseconds of walk, commit and the rest.
        tokens: Tokens committed over the live rows.
        progress: Tokens that the slowest of them came on, of those that go on if any does: a call ends with its last
            row.
        promised: Σρ of the verified nodes by depth over live rows, the roots first.
        accepted: Walks that reached each depth, as long.
        kind: What the forward was beside its size.
        trial: Whether the drafter tried a way of drafting that it may not go on with, which durations are then of.
        rounds: Plain rounds, one after the other, that the record stands for; its durations are their medians.
    """

    nodes: int
    drafted: bool
    batch: int
    live: int
    context: int
    draft_ms: float
    verify_ms: float
    other_ms: float
    tokens: int
    progress: int
    promised: list[float]
    accepted: list[int]
    kind: ForwardKind = USUAL
    trial: bool = False
    rounds: int = 1

    @property
    def total_ms(self) -> float:
        return self.draft_ms + self.verify_ms + self.other_ms

    def at(self, speed: float) -> RoundRecord:
        """The same round with all durations `speed` times as long."""
        draft_ms, verify_ms, other_ms = (ms * speed for ms in (self.draft_ms, self.verify_ms, self.other_ms))
        return replace(self, draft_ms=draft_ms, verify_ms=verify_ms, other_ms=other_ms)

    @classmethod
    def of_plain(cls, records: Sequence[RoundRecord]) -> RoundRecord:
        """One record for plain rounds one after the other."""
        return replace(
            records[0],
            verify_ms=statistics.median(record.verify_ms for record in records),
            other_ms=statistics.median(record.other_ms for record in records),
            tokens=sum(record.tokens for record in records),
            progress=sum(record.progress for record in records),
            live=max(record.live for record in records),
            rounds=len(records),
        )


class BudgetPolicy(ABC):
    """Decides, round by round, whether to draft and how much of the expanded tree to verify.

    The order of calls: `begin`, then a round at a time `should_draft`, `choose` if it drafts, and `record`, or for
    rounds that `patience` waited with `record_all`. A round that was decided but never recorded changes nothing.
    """

    #: Most rows that any round may verify.
    limit: int
    #: Why the last round was decided as it was, in short words.
    reason: str = ""
    #: Whether the round's attention should be split into prefix and tree; None leaves it to the device's usual kind.
    split: bool | None = None
    #: Whether records of rounds change anything: without that nobody needs to make them.
    learns: bool = True
    #: Whether the user has been told of the verdict that stands; a call that drafting paid in asks for a new warning.
    warned: bool = False

    @property
    def patience(self) -> int:
        """Rounds that may be over before `record` is told of them, all at once."""
        return 4

    @property
    def verdict(self) -> str:
        """Why drafting does not pay, where it was given up; empty where it was not."""
        return ""

    def summary(self) -> dict[str, Any]:
        """What the policy knows, as JSON holds it."""
        return {}

    def begin(self, context: int, batch: int) -> None:
        """Starts a call.

        Args:
            context: Cached columns after the prefill.
            batch: Rows of the batch.
        """

    @abstractmethod
    def should_draft(self) -> bool:
        """Whether the round is worth a draft, asked before the draft is paid."""

    def largest(self) -> int:
        """Most rows this round may verify: how far trees have to be expanded."""
        return self.limit

    @abstractmethod
    def choose(
        self,
        scores: torch.Tensor,
        depths: torch.Tensor | None = None,
        leads: Sequence[int] | None = None,
        riding: bool = False,
    ) -> int:
        """How many nodes of the expanded trees to verify.

        Args:
            scores: Path scores ρ of the nodes of the live rows, in expansion order, `[R, N]`.
            depths: Their depths, long `[R, N]`; None corrects no score.
            leads: Tokens that each live row is ahead of the slowest, `[R]`; None for none.
            riding: Whether nodes bring rows of the drafter's own along, which cost.

        Returns:
            Rows to verify, 1 … N: a prefix of the order.
        """

    def record(self, record: RoundRecord) -> None:
        """Learns from a finished round."""

    def record_all(self, records: Sequence[RoundRecord]) -> None:
        """Learns from finished rounds, in order, of which nothing was decided since the first."""
        for record in records:
            self.record(record)


class FixedBudget(BudgetPolicy):
    """Always drafts and always verifies the same number of rows.

    Args:
        budget: Rows verified in a round, the root included.
    """

    reason = "fixed"
    learns = False

    def __init__(self, budget: int) -> None:
        self.budget = self.limit = budget

    def should_draft(self) -> bool:
        return self.budget > 1

    def choose(
        self,
        scores: torch.Tensor,
        depths: torch.Tensor | None = None,
        leads: Sequence[int] | None = None,
        riding: bool = False,
    ) -> int:
        return min(self.budget, scores.shape[1])
