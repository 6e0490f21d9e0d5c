"""The second stage of a TreeFlash draft: distributions given the token before, for M tokens of every depth at once."""

from __future__ import annotations

import math

import torch
from torch import nn

from ...trees import DraftLattice
from ..base import TargetModules
from .approximation import ARApproximation


def conditional_lattice(
    approximation: ARApproximation,
    norm: nn.Module,
    modules: TargetModules,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    *,
    parents: int,
    candidates: int | None,
    width: int,
    temperature: float = 1.0,
    discount: float | None = None,
) -> DraftLattice:
    """Lattice of M conditional distributions a depth, and the slot's own behind them.

    Depth 1 follows the anchor; at every other depth the M best tokens of the depth before are the parents, so there
    are `M·(D − 1) + 1` evaluations of the head. Parent slot M is the slot's own distribution, for children of other
    tokens.

    Only the C tokens that a slot itself ranks best are scored. What the others have together is taken over from the
    slot's own distribution: exact for C = V, and otherwise a probability is off by the factor
    `(A + R) / (A + R′)`, where A is the conditional mass (unnormalised) of the C tokens, R what the slot gives to the
    others and R′ what the conditional distribution would give them. It touches scores only, never what is verified.

    Args:
        approximation: The head.
        norm: The drafter's last norm.
        modules: The target's embeddings and head.
        hidden: The slots' last hidden states before the norm, `[B, D, H]`.
        anchors: Last committed tokens, long `[B]`.
        parents: M, at most C.
        candidates: C; None = V.
        width: Most children K of a parent.
        temperature: Temperature of the distributions.
        discount: Of the slot's own distribution below tokens beyond the M best; None makes those leaves.
    """
    batch, depths, _ = hidden.shape
    normed = norm(hidden)
    base = modules.logits(normed)
    count = min(candidates or base.shape[-1], base.shape[-1])
    parents, width = min(parents, count), min(width, count)
    best, tokens = base.topk(count)  # [B, D, C]
    rest = None
    if count < base.shape[-1]:
        everything = base.div(temperature).logsumexp(-1)
        known = best.div(temperature).logsumexp(-1)
        # log(exp(everything) − exp(known)), where rounding may leave nothing.
        rest = everything + torch.log(-torch.expm1((known - everything).clamp(max=-1e-7)))

    # Row 0 is depth 1; then come M rows for each deeper one.
    slots = torch.arange(1, depths, device=hidden.device).repeat_interleave(parents)
    slots = torch.cat([slots.new_zeros(1), slots])
    previous = torch.cat([anchors[:, None], tokens[:, :-1, :parents].flatten(1)], 1)
    embedded = modules.embed(previous, hidden.dtype).to(hidden.device)
    corrected = approximation(embedded, hidden[:, slots], approximation.of_slots(normed)[:, slots])
    rows = torch.cat([slots.new_zeros(1), torch.arange(parents, device=hidden.device).repeat(depths - 1)])
    states = hidden.new_zeros(batch, depths, parents, hidden.shape[-1])
    states[:, slots, rows] = norm(corrected)
    conditional = torch.cat([modules.logits_of(states, tokens), best[:, :, None]], 2)  # [B, D, M + 1, C]
    conditional[:, 0, 1:] = -torch.inf
    if temperature != 1.0:
        conditional = conditional / temperature
    mass = conditional.logsumexp(-1, keepdim=True)
    if rest is not None:
        mass = torch.logaddexp(mass, rest[:, :, None, None])
    log_probs = torch.where(conditional > -torch.inf, conditional - mass, -torch.inf)
    if discount is not None:
        log_probs[:, :, parents] += math.log(discount)
    log_probs, order = log_probs.sort(dim=-1, descending=True)
    log_probs, order = log_probs[..., :width], order[..., :width]
    # A child that is among the M best of its own slot has the row of that rank one depth on.
    beyond = parents if discount is not None or width == 1 else -1
    next_slot = torch.where(order < parents, order, beyond)
    next_slot[:, -1] = -1
    children = tokens[:, :, None].expand(-1, -1, parents + 1, -1).gather(3, order)
    return DraftLattice(children, log_probs, next_slot)
