"""Decides, round by round, whether to draft and how much of the expanded tree to verify."""

from __future__ import annotations

import torch


class FixedBudget:
    """Always drafts and always verifies the same number of rows.

    Args:
        budget: Rows verified in a round, the root included.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def should_draft(self) -> bool:
        """Whether the round is worth a draft, asked before the draft is paid."""
        return self.budget > 1

    def largest(self) -> int:
        """Most rows a round may verify: how far trees have to be expanded."""
        return self.budget

    def choose(self, scores: torch.Tensor) -> int:
        """Rows to verify, given the path scores ρ of the nodes in expansion order, `[B, N]`."""
        return min(self.budget, scores.shape[1])
