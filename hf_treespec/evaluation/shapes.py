"""Other rules than best-first for which nodes a tree is made of, as baselines.

Each is a function from lattice to lattice whose best-first tree is the tree of the rule, so the decoding loop needs to
know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..drafters.base import BlockDrafter, DraftSession
from ..trees import DraftLattice

Reshape = Callable[[DraftLattice], DraftLattice]


def reshaped(drafter: BlockDrafter, reshape: Reshape, **options: Any) -> BlockDrafter:
    """A view of a drafter, with other options, whose sessions propose reshaped lattices."""
    view = drafter.with_options(**options)
    start = view.start

    def start_reshaped(*args: Any, **kwargs: Any) -> DraftSession:
        session = start(*args, **kwargs)
        propose = session.propose
        # An attribute of this one session, so that everything else of it stays the family's own.
        session.propose = lambda state: reshape(propose(state))  # type: ignore[method-assign]
        return session

    view.start = start_reshaped  # type: ignore[method-assign]
    return view


def beam_lattice(lattice: DraftLattice, width: int) -> DraftLattice:
    """Only what a beam search over a lattice keeps: at every depth the `width` best continuations of those before.

    Returns:
        A lattice `[B, D, width, min(width, K)]` with one parent slot for each node of the beam.
    """
    batch, depths, _, candidates = lattice.tokens.shape
    # A child behind `width` better siblings is never in the beam.
    ranks = min(width, candidates)
    slots = lattice.tokens.new_zeros(batch, width).index_fill_(
        1, torch.arange(1, width, device=lattice.tokens.device), -1
    )
    scores = lattice.log_probs.new_zeros(batch, width)
    levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for depth in range(depths):
        rows = slots.clamp(min=0).unsqueeze(2).expand(-1, -1, ranks)
        tokens, log_probs, following = (
            tensor[:, depth, :, :ranks].gather(1, rows)
            for tensor in (lattice.tokens, lattice.log_probs, lattice.next_slot)
        )
        log_probs = log_probs.masked_fill(slots.unsqueeze(2) < 0, -torch.inf)
        totals = (scores.unsqueeze(2) + log_probs).flatten(1)
        # Stable, so that of equal siblings the first stays and each parent keeps a prefix of its candidates.
        best = totals.argsort(dim=1, descending=True, stable=True)[:, :width]
        # The beam's own number of each child that it keeps, −1 for the others.
        numbers = torch.arange(best.shape[1], device=best.device).expand(batch, -1)
        kept = torch.full_like(totals, -1, dtype=torch.long).scatter(1, best, numbers)
        kept = kept.masked_fill(totals == -torch.inf, -1).view_as(following)
        log_probs = log_probs.masked_fill(kept < 0, -torch.inf)
        levels.append((tokens, log_probs, kept.masked_fill(following < 0, -1)))
        scores = totals.gather(1, best)
        slots = following.flatten(1).gather(1, best).masked_fill(scores == -torch.inf, -1)
        if best.shape[1] < width:
            missing = width - best.shape[1]
            scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
            slots = torch.nn.functional.pad(slots, (0, missing), value=-1)
    stacked = [torch.stack(tensors, dim=1) for tensors in zip(*levels, strict=True)]
    return DraftLattice(stacked[0], stacked[1], stacked[2])


class StaticTopology:
    """One topology for every round, as Medusa and EAGLE verify: which ranks follow which is settled beforehand.

    The first rounds keep the drafter's own trees and average its probabilities by depth and rank; every later lattice
    gets those averages instead of its own, so its best tree has the same form every time.

    Args:
        calibration: Rounds averaged.
    """

    def __init__(self, calibration: int = 8) -> None:
        self.remaining = calibration
        self._sums = torch.zeros(0, 0)
        self._counts = torch.zeros(0, 1)

    def __call__(self, lattice: DraftLattice) -> DraftLattice:
        """The lattice with the average log-probabilities `[D, K]`.

        Raises:
            ValueError: A parent's candidates depend on the parent.
        """
        if lattice.tokens.shape[2] != 1:
            raise ValueError("a static topology needs a drafter whose depths do not depend on one another")
        if self.remaining:
            self.remaining -= 1
            self._add(lattice.log_probs[:, :, 0].exp().mean(0).cpu())
            return lattice
        depths, ranks = lattice.tokens.shape[1], lattice.tokens.shape[3]
        averages = (self._sums / self._counts.clamp(min=1))[:depths, :ranks].log()
        log_probs = averages.to(lattice.log_probs)[None, :, None].expand_as(lattice.log_probs).contiguous()
        return DraftLattice(lattice.tokens, log_probs, lattice.next_slot)

    def _add(self, probabilities: torch.Tensor) -> None:
        """Adds one round's `[D, K]`; rounds near the end of a call are shallower."""
        depths, ranks = (max(seen, new) for seen, new in zip(self._sums.shape, probabilities.shape, strict=True))
        sums, counts = torch.zeros(depths, ranks), torch.zeros(depths, 1)
        for total, part in ((sums, self._sums), (sums, probabilities)):
            total[: part.shape[0], : part.shape[1]] += part
        counts[: len(self._counts)] += self._counts
        counts[: len(probabilities)] += 1
        self._sums, self._counts = sums, counts
