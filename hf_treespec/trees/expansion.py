"""Choosing a draft tree from a lattice: the nodes with the highest path scores.

The path score of a node is the product of the lattice's probabilities from the root to it, so a tree of the N best
nodes maximises the expected number of committed tokens (DDTree, OPT-Tree). Nodes are ranked by one total order:
higher log score, then smaller depth, then the parent that comes first, then the smaller rank among its siblings. A
parent therefore precedes its children even where a log-probability is exactly 0, and every prefix of the order is a
tree.

Log scores are float32 sums taken from the root down, the same in both forms: they agree node for node.
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush
from typing import Any

import torch

from .draft_tree import DraftTree
from .lattice import DraftLattice


def expand(lattice: DraftLattice, anchors: torch.Tensor, budget: int) -> DraftTree:
    """Chooses the best nodes of every row, by a heap on the CPU and level by level elsewhere.

    Args:
        lattice: The candidates, `[B, D, M, K]`.
        anchors: Token of each row's root, long `[B]`.
        budget: Nodes of a row, the root included.

    Returns:
        Trees of at most `budget` nodes a row; of fewer where the lattice runs out of candidates.

    Raises:
        ValueError: The budget is below 1.
    """
    if lattice.tokens.device.type == "cpu":
        return expand_heap(lattice, anchors, budget)
    return expand_levels(lattice, anchors, budget)


def expand_heap(lattice: DraftLattice, anchors: torch.Tensor, budget: int) -> DraftTree:
    """`expand` by best-first search, a row at a time on the host.

    Each node taken offers its next sibling and its first child, so the work grows with the budget alone.
    """
    depth, ranks = _reach(lattice, budget)
    if not depth:
        return DraftTree.root(anchors)
    tokens, log_probs, next_slot = (
        tensor.detach().cpu().numpy() for tensor in (lattice.tokens, lattice.log_probs, lattice.next_slot)
    )
    rows = [
        _expand_row(anchor, tokens[row], log_probs[row], next_slot[row], budget, depth, ranks)
        for row, anchor in enumerate(anchors.tolist())
    ]
    return DraftTree.from_rows(rows, lattice.tokens.device)


def expand_levels(lattice: DraftLattice, anchors: torch.Tensor, budget: int) -> DraftTree:
    """`expand` with shapes known beforehand and no host read.

    Every depth keeps the candidates that the budget can still reach, and one stable sort merges the depths.

    `sizes` of the result is an upper bound: rows that run out of candidates end in dummies.
    """
    depth_limit, _ = _reach(lattice, budget)
    batch = lattice.batch_size
    tokens = anchors.view(batch, 1)
    zeros = torch.zeros_like(tokens)
    scores, slots = zeros.float(), zeros
    # By depth; parents are columns of the depths laid end to end.
    level_scores, level_tokens, level_parents, level_depths = [scores], [tokens], [zeros], [zeros]
    start = 0
    for depth in range(1, depth_limit + 1):
        # A node at this depth follows its `depth` ancestors and its betters of the same depth.
        width = budget - depth
        ranks = min(lattice.tokens.shape[3], width)
        candidates = [
            tensor[:, depth - 1, :, :ranks] for tensor in (lattice.log_probs, lattice.tokens, lattice.next_slot)
        ]
        rows = slots.clamp(min=0).unsqueeze(2).expand(-1, -1, ranks)
        parent_scores = scores.masked_fill(slots < 0, -torch.inf).unsqueeze(2)
        # A rounding error above zero must not lift a child over its parent.
        child_scores = torch.minimum(parent_scores + candidates[0].gather(1, rows), parent_scores)
        ordered, order = child_scores.flatten(1).sort(dim=1, descending=True, stable=True)
        parents = start + order[:, :width].div(ranks, rounding_mode="floor")
        start += scores.shape[1]
        scores, order = ordered[:, :width], order[:, :width]
        tokens = candidates[1].gather(1, rows).flatten(1).gather(1, order)
        slots = candidates[2].gather(1, rows).flatten(1).gather(1, order)
        level_scores.append(scores)
        level_tokens.append(tokens)
        level_parents.append(parents)
        level_depths.append(torch.full_like(tokens, depth))
    scores, order = torch.cat(level_scores, 1).sort(dim=1, descending=True, stable=True)
    columns = torch.arange(order.shape[1], device=order.device).expand_as(order)
    places = torch.empty_like(order).scatter_(1, order, columns)
    scores, order = scores[:, :budget], order[:, :budget]
    real = scores > -torch.inf
    tokens = torch.where(real, torch.cat(level_tokens, 1).gather(1, order), anchors.view(batch, 1))
    depths = torch.cat(level_depths, 1).gather(1, order).masked_fill(~real, 0)
    parents = places.gather(1, torch.cat(level_parents, 1).gather(1, order)).masked_fill(depths == 0, -1)
    return DraftTree(tokens, parents, depths, scores, [order.shape[1]] * batch, depth_limit)


def _reach(lattice: DraftLattice, budget: int) -> tuple[int, int]:
    """The depths and ranks that a tree of `budget` nodes can reach."""
    if budget < 1:
        raise ValueError(f"a tree holds at least its root, but the budget is {budget}")
    depth, ranks = min(lattice.depth, budget - 1), min(lattice.tokens.shape[3], budget - 1)
    return (depth, ranks) if depth and ranks else (0, 0)


def _expand_row(
    anchor: int, tokens: Any, log_probs: Any, next_slot: Any, budget: int, depth_limit: int, ranks: int
) -> tuple[list[int], list[int], list[float]]:
    """Best-first search over one row's NumPy arrays `[D, M, K]`; returns tokens, parents and log scores."""
    lowest = float("-inf")
    rounded = array("f", [0.0])  # storing into it rounds a sum to float32, as tensors do
    # Log-probabilities are read a parent slot at a time, and only where the search arrives.
    ranked: dict[tuple[int, int], list[float]] = {}
    # Of each node: token, parent, log score, the slot of its children and their log-probabilities.
    out_tokens, parents, scores = [anchor], [-1], [0.0]
    slots, offers = [0], [log_probs[0, 0, :ranks].tolist()]
    heap: list[tuple[float, int, int, int]] = []  # −score, depth, parent, rank: the total order
    if offers[0][0] > lowest:
        heap.append((max(-offers[0][0], 0.0), 1, 0, 0))
    while heap:
        negated, depth, parent, rank = heappop(heap)
        slot = slots[parent]
        out_tokens.append(tokens.item(depth - 1, slot, rank))
        parents.append(parent)
        scores.append(-negated)
        node = len(parents) - 1
        if node + 1 == budget:
            break
        following = rank + 1
        steps = offers[parent]
        if following < len(steps):
            step = steps[following]
            # A rounding error above zero must not lift a child over its parent.
            rounded[0] = scores[parent] + min(step, 0.0)
            if rounded[0] > lowest:
                heappush(heap, (-rounded[0], depth, parent, following))
        slot = next_slot.item(depth - 1, slot, rank) if depth < depth_limit else -1
        slots.append(slot)
        if slot < 0:
            offers.append([])
            continue
        key = (depth, slot)
        children = ranked.get(key)
        if children is None:
            children = ranked[key] = log_probs[depth, slot, :ranks].tolist()
        offers.append(children)
        step = children[0]
        rounded[0] = scores[node] + min(step, 0.0)
        if rounded[0] > lowest:
            heappush(heap, (-rounded[0], depth + 1, node, 0))
    return out_tokens, parents, scores
