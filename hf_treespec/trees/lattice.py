"""The draft lattice: what a session proposes, before any tree is chosen from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DraftLattice:
    """Candidate tokens for every drafted depth and every parent slot.

    Attributes:
        tokens: Candidate tokens, long `[B, D, M, K]`; distinct within a parent slot.
        log_probs: Their log-probabilities, float32 `[B, D, M, K]`, descending in K. Index 0 of D is depth 1, where
            only parent slot 0 exists: the other slots hold −inf.
        next_slot: Parent slot of the child's own distribution one depth on, long `[B, D, M, K]`: 0 everywhere when
            `M = 1`, −1 for dead ends and at the last depth.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    next_slot: torch.Tensor

    @classmethod
    def marginal(cls, tokens: torch.Tensor, log_probs: torch.Tensor) -> DraftLattice:
        """Lattice of a drafter whose depths do not know each other: one parent slot, from `[B, D, K]` tensors."""
        next_slot = torch.zeros_like(tokens)
        next_slot[:, -1:] = -1
        return cls(tokens.unsqueeze(2), log_probs.unsqueeze(2), next_slot.unsqueeze(2))

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def depth(self) -> int:
        """Number of drafted depths D."""
        return self.tokens.shape[1]

    def is_finite(self) -> bool:
        """Whether no log-probability is NaN or +inf (−inf marks absent candidates). Reads the device once."""
        return bool((self.log_probs < torch.inf).all())
