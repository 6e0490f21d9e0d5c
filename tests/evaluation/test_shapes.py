"""Lattices reshaped into beams and static topologies, against the rules written out."""

from __future__ import annotations

import itertools

import models
import pytest
import torch
from pairs import build_pair
from rigged import rigged, rows_of

from hf_treespec.evaluation.shapes import StaticTopology, beam_lattice, reshaped
from hf_treespec.trees import DraftLattice, expand


def lattice(seed: int, depth: int = 4, slots: int = 1, ranks: int = 6, batch: int = 2, ties: bool = False):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, depth, slots, ranks)
    tokens = torch.rand(*shape[:3], 50, generator=generator).argsort(-1)[..., :ranks]
    scores = torch.randn(shape, generator=generator)
    if ties:
        scores = scores.round()
    log_probs = scores.log_softmax(-1).sort(-1, descending=True).values
    log_probs[:, 0, 1:] = -torch.inf
    if slots == 1:
        return DraftLattice.marginal(tokens[:, :, 0], log_probs[:, :, 0])
    next_slot = torch.randint(-1, slots, shape, generator=generator)
    next_slot[:, -1] = -1
    return DraftLattice(tokens, log_probs, next_slot)


def paths(source: DraftLattice, row: int, width: int) -> dict[tuple[int, ...], float]:
    """Every node a beam search keeps, by its tokens, with its log score."""
    beam = [((), 0.0, 0)]
    kept: dict[tuple[int, ...], float] = {}
    for depth in range(source.depth):
        following = []
        for (path, score, slot), rank in itertools.product(beam, range(source.tokens.shape[3])):
            if slot >= 0 and (step := source.log_probs[row, depth, slot, rank].item()) > -torch.inf:
                place = (row, depth, slot, rank)
                following.append(((*path, int(source.tokens[place])), score + step, int(source.next_slot[place])))
        beam = sorted(following, key=lambda node: -node[1])[:width]
        kept |= {path: score for path, score, _ in beam}
    return kept


def tree_paths(tree, row: int) -> dict[tuple[int, ...], float]:
    found: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, tree.sizes[row]):
        found[node] = (*found[int(tree.parents[row, node])], int(tree.tokens[row, node]))
    return {path: float(tree.log_scores[row, node]) for node, path in found.items() if node}


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_beams(slots: int, width: int):
    for seed in range(6):
        source = lattice(seed, slots=slots)
        reshaped_lattice = beam_lattice(source, width)
        assert reshaped_lattice.tokens.shape == (2, 4, width, min(width, 6))
        tree = expand(reshaped_lattice, torch.zeros(2, dtype=torch.long), 200)
        for row in range(2):
            expected = paths(source, row, width)
            found = tree_paths(tree, row)
            assert found.keys() == expected.keys()
            for path, score in found.items():
                assert score == pytest.approx(expected[path], abs=1e-4)


@pytest.mark.parametrize("slots", [1, 3])
def test_beams_keep_a_lattices_rules(slots: int):
    for seed in range(4):
        result = beam_lattice(lattice(seed, slots=slots, ties=True), 3)
        assert (result.log_probs.diff(dim=-1).nan_to_num(0.0) <= 0).all()
        assert (result.log_probs[:, 0, 1:] == -torch.inf).all()
        assert (result.next_slot[:, -1] == -1).all()
        for candidates in result.tokens.flatten(0, 2).tolist():
            assert len(set(candidates)) == len(candidates)
        parents = expand(result, torch.zeros(2, dtype=torch.long), 100).depths[:, 1:].tolist()
        for row in parents:
            assert max(row.count(depth) for depth in range(1, 5)) <= 3


def test_a_wide_beam_is_everything():
    source = lattice(0, depth=2, ranks=3)
    tree = expand(beam_lattice(source, 40), torch.zeros(2, dtype=torch.long), 100)
    assert tree.sizes == expand(source, torch.zeros(2, dtype=torch.long), 100).sizes


def test_a_static_topology_is_the_averages_best_tree():
    topology = StaticTopology(calibration=2)
    anchors = torch.zeros(1, dtype=torch.long)
    seen = [lattice(seed, batch=1) for seed in (0, 1)]
    for source in seen:
        assert topology(source) is source
    average = torch.stack([source.log_probs.exp() for source in seen]).mean(0).log()
    expected = expand(DraftLattice(seen[0].tokens, average, seen[0].next_slot), anchors, 12)
    for seed in range(2, 6):
        source = lattice(seed, batch=1)
        tree = expand(topology(source), anchors, 12)
        assert torch.equal(tree.parents, expected.parents)
        assert set(tree_paths(tree, 0)) <= set(itertools.chain.from_iterable([paths(source, 0, 1000)]))


def test_shallow_rounds_fit_a_static_topology():
    topology = StaticTopology(calibration=2)
    topology(lattice(0, depth=2, batch=1))
    topology(lattice(1, depth=4, batch=1))
    for depth in (1, 3, 4):
        assert topology(lattice(2, depth=depth, batch=1)).is_finite()


def test_a_static_topology_needs_marginals():
    with pytest.raises(ValueError, match="do not depend on one another"):
        StaticTopology()(lattice(0, slots=2))


@pytest.mark.parametrize(
    "reshape", [lambda source: beam_lattice(source, 2), StaticTopology(2)], ids=["beam", "static"]
)
def test_decoding_stays_exact(reshape):
    """Batches of trees of both shapes through the real loop, with a drafter that is often right."""
    target = models.target("qwen3")
    inputs = models.batch()
    options = {"max_new_tokens": 24, "do_sample": False}
    plain = target.generate(**inputs, **options)
    drafter = rigged(rows_of(plain, inputs), "half")
    view = reshaped(drafter, reshape, budget=9, shape="tree")
    for _ in range(2):
        assert torch.equal(target.generate(**inputs, assistant_model=view, **options), plain)
    assert view.last_report.mean_nodes <= 9
    assert view.last_report.acceptance_length > 1
    assert drafter.last_report is None


def test_a_view_leaves_the_drafter_alone():
    target, drafter, _ = build_pair()
    seen = []

    def note(source: DraftLattice) -> DraftLattice:
        seen.append(source)
        return source

    reshaped(drafter, note, budget=4)
    target.generate(**models.prompt(), assistant_model=drafter, max_new_tokens=6)
    assert not seen
