"""Both forms of `expand` against an enumeration of every path of the lattice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_treespec.trees import DraftLattice, DraftTree, expand
from hf_treespec.trees.expansion import expand_heap, expand_levels

FIELDS = ("tokens", "parents", "depths", "log_scores")
VOCAB = 7
# Few distinct values, so that ties of whole paths are the rule: −0.5 − 1.5 = −1 − 1, 0 − 2 = −2 − 0.
LOG_PROBS = (0.0, 0.0, -0.25, -0.5, -1.0, -1.5, -2.0, -torch.inf)


@st.composite
def lattices(draw: st.DrawFn) -> DraftLattice:
    batch, depth, slots = (draw(st.integers(1, high)) for high in (2, 4, 3))
    ranks = draw(st.integers(1, VOCAB))
    seed = draw(st.integers(0, 2**32 - 1))
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, depth, slots, ranks)
    if draw(st.booleans()):
        log_probs = torch.tensor(LOG_PROBS)[torch.randint(len(LOG_PROBS), shape, generator=generator)]
    else:
        log_probs = (3 * torch.randn(shape, generator=generator)).log_softmax(-1)
    log_probs = log_probs.sort(-1, descending=True).values
    log_probs[:, 0, 1:] = -torch.inf
    tokens = torch.rand(*shape[:3], VOCAB, generator=generator).argsort(-1)[..., :ranks]
    next_slot = torch.randint(-1, slots, shape, generator=generator)
    next_slot[:, -1] = -1
    return DraftLattice(tokens, log_probs, next_slot)


def enumerate_row(lattice: DraftLattice, row: int, anchor: int, budget: int) -> list[tuple[int, int, int, float]]:
    """`(token, parent, depth, log score)` of the best nodes: all paths, sorted by the definition of the order.

    "Parent's order" compares parents by the same order; parents at one depth by (−ρ, their parents' order, rank), so
    a node's key is its path of (−ρ, rank) pairs from the root down, most significant first among equal depths.
    """
    log_probs, next_slot = lattice.log_probs[row].numpy(), lattice.next_slot[row].tolist()
    tokens = lattice.tokens[row].tolist()
    nodes: dict[tuple[int, ...], np.float32] = {(): np.float32(0)}
    found: dict[tuple[int, ...], int] = {(): anchor}

    def visit(path: tuple[int, ...], slot: int) -> None:
        depth = len(path)
        for rank in range(log_probs.shape[2]):
            score = np.float32(nodes[path] + log_probs[depth, slot, rank])
            if score == -np.inf:
                continue
            child = (*path, rank)
            nodes[child], found[child] = score, tokens[depth][slot][rank]
            following = next_slot[depth][slot][rank]
            if depth + 1 < lattice.depth and following >= 0:
                visit(child, following)

    visit((), 0)

    def before(path: tuple[int, ...]) -> tuple[object, ...]:
        # (−ρ, depth), then the parent's key without the depth, then the rank.
        return (-nodes[path], len(path), order_within_depth(path))

    def order_within_depth(path: tuple[int, ...]) -> tuple[object, ...]:
        return (-nodes[path], order_within_depth(path[:-1]), path[-1]) if path else ()

    chosen = sorted(nodes, key=before)[:budget]
    place = {path: index for index, path in enumerate(chosen)}
    return [(found[p], place[p[:-1]] if p else -1, len(p), float(nodes[p])) for p in chosen]


def assert_same(tree: DraftTree, other: DraftTree) -> None:
    for field in FIELDS:
        torch.testing.assert_close(getattr(tree, field), getattr(other, field), rtol=0, atol=0)


@settings(max_examples=150, deadline=None)
@given(lattice=lattices(), budget=st.integers(1, 40))
def test_both_forms_are_the_best_nodes_of_all_paths(lattice: DraftLattice, budget: int) -> None:
    anchors = torch.arange(lattice.batch_size) + VOCAB
    heap, levels = expand_heap(lattice, anchors, budget), expand_levels(lattice, anchors, budget)
    for row, anchor in enumerate(anchors.tolist()):
        expected = enumerate_row(lattice, row, anchor, budget)
        assert heap.sizes[row] == len(expected)
        padding = [(anchor, -1, 0, -float("inf"))] * (len(levels) - len(expected))
        for tree in (heap, levels):
            columns = [getattr(tree, field)[row].tolist() for field in FIELDS]
            assert list(zip(*columns, strict=True)) == (expected + padding)[: len(tree)]
    assert_same(heap, levels.prefix(len(heap)))
    assert levels.children() == heap.children()
    torch.testing.assert_close(levels.ancestors()[:, : len(heap), : len(heap)], heap.ancestors())


@settings(max_examples=50, deadline=None)
@given(lattice=lattices(), budget=st.integers(2, 30), data=st.data())
def test_a_smaller_budget_gives_a_prefix(lattice: DraftLattice, budget: int, data: st.DataObject) -> None:
    smaller = data.draw(st.integers(1, budget - 1))
    anchors = torch.zeros(lattice.batch_size, dtype=torch.long)
    for form in (expand_heap, expand_levels):
        large, small = form(lattice, anchors, budget), form(lattice, anchors, smaller)
        assert_same(small, large.prefix(len(small)))
        assert bool((small.parents < torch.arange(len(small))).all())


def test_parents_precede_children_of_probability_one() -> None:
    # A lead of 16 nats gives exactly 0.0, and a careless normaliser a little more.
    log_probs = torch.tensor([[[0.0, -17.0], [1e-7, -17.0], [0.0, -17.0]]])
    lattice = DraftLattice.marginal(torch.tensor([[[1, 2], [3, 4], [5, 6]]]), log_probs)
    for form in (expand_heap, expand_levels):
        tree = form(lattice, torch.tensor([9]), 4)
        assert tree.tokens.tolist() == [[9, 1, 3, 5]]
        assert tree.parents.tolist() == [[-1, 0, 1, 2]]
        assert tree.log_scores.tolist() == [[0.0, 0.0, 0.0, 0.0]]


def test_no_rounding_error_lifts_a_node_over_its_parent() -> None:
    log_probs = torch.tensor([[[2e-7, 1e-7], [3e-7, 2e-7]]])
    lattice = DraftLattice.marginal(torch.tensor([[[1, 2], [3, 4]]]), log_probs)
    for form in (expand_heap, expand_levels):
        tree = form(lattice, torch.tensor([9]), 7)
        assert tree.tokens.tolist() == [[9, 1, 2, 3, 4, 3, 4]]
        assert tree.parents.tolist() == [[-1, 0, 0, 1, 1, 2, 2]]
        assert not tree.log_scores.any()


def test_scores_that_overflow_are_no_nodes() -> None:
    low = torch.finfo(torch.float32).min
    lattice = DraftLattice.marginal(torch.tensor([[[1], [2]]]), torch.tensor([[[low], [low]]]))
    for form in (expand_heap, expand_levels):
        assert form(lattice, torch.tensor([9]), 4).children() == [{(0, 1): 1}]


def test_nothing_drafted_is_the_root_alone() -> None:
    empty = torch.full((2, 3, 1, 4), -torch.inf)
    lattice = DraftLattice(torch.zeros(2, 3, 1, 4, dtype=torch.long), empty, torch.zeros(2, 3, 1, 4, dtype=torch.long))
    tree = expand(lattice, torch.tensor([5, 6]), 8)
    assert tree.tokens.tolist() == [[5], [6]]
    assert tree.sizes == [1, 1]
    assert expand_levels(lattice, torch.tensor([5, 6]), 8).children() == [{}, {}]
    with pytest.raises(ValueError, match="budget is 0"):
        expand(lattice, torch.tensor([5, 6]), 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("slots", [1, 3])
def test_levels_never_read_the_device_and_can_be_captured(slots: int) -> None:
    generator = torch.Generator().manual_seed(slots)
    shape = (3, 6, slots, 16)
    log_probs = (2 * torch.randn(shape, generator=generator)).round().log_softmax(-1).sort(-1, descending=True).values
    log_probs[:, 0, 1:] = -torch.inf
    tokens = torch.rand(*shape[:3], 50, generator=generator).argsort(-1)[..., :16]
    next_slot = torch.randint(-1, slots, shape, generator=generator)
    next_slot[:, -1] = -1
    lattice, anchors = DraftLattice(tokens, log_probs, next_slot), torch.tensor([50, 51, 52])
    expected = expand_heap(lattice, anchors, 24)
    device = DraftLattice(tokens.cuda(), log_probs.cuda(), next_slot.cuda())
    device_anchors = anchors.cuda()
    expand_levels(device, device_anchors, 24)  # loads the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        tree = expand(device, device_anchors, 24)
        tree.ancestors()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = expand_levels(device, device_anchors, 24)
    graph.replay()
    torch.cuda.synchronize()
    for result in (tree, captured):
        for field in FIELDS:
            found = getattr(result, field)[:, : len(expected)].cpu()
            torch.testing.assert_close(found, getattr(expected, field), rtol=0, atol=0)
