"""Distances, coverages and children's accuracy against plain loops over sessions and whole distributions."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "drafters"))

from dflash_models import BLOCK, VOCAB, fused_features, state, tiny_drafter, tiny_target
from flexdraft_models import tiny_flexdraft

from hf_treespec.drafters.dflash import DFlashDrafter
from hf_treespec.drafters.treeflash import TreeFlashDrafter
from hf_treespec.evaluation.distribution import child_accuracy, marginal_spines, measure
from hf_treespec.training.continuations import sample_continuations
from hf_treespec.training.lattices import lattices_along
from hf_treespec.trees import expand

PROMPT, NODES = 6, 12


def texts(rows: int = 3, length: int = 30) -> torch.Tensor:
    prompts = torch.randint(0, VOCAB, (rows, PROMPT), generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(4)
    return sample_continuations(tiny_target(), prompts, length - PROMPT, temperature=0.3, generator=generator)


def corrected() -> TreeFlashDrafter:
    drafter = TreeFlashDrafter.from_dflash(tiny_drafter(tiny_target()), num_parents=5)
    torch.manual_seed(6)
    for parameter in drafter.ar_approximation.parameters():
        parameter.data.normal_(0.0, 0.3)
    return drafter.eval()


@pytest.fixture(params=["dflash", "treeflash"])
def drafter(request: pytest.FixtureRequest) -> DFlashDrafter:
    return corrected() if request.param == "treeflash" else tiny_drafter(tiny_target())


@torch.no_grad()
def drafted(drafter: DFlashDrafter, tokens: torch.Tensor, anchor: int, look_back: bool) -> torch.Tensor:
    """The draft's distributions along one text, `[D, V]`, from a session's states."""
    target = tiny_target()
    session = drafter.start(target, 1, 64)
    states = session.denoise(state(tokens, fused_features(session, target, tokens), 0, anchor))[0, 1:]
    if look_back and isinstance(drafter, TreeFlashDrafter):
        previous = target.get_input_embeddings()(tokens[0, anchor : anchor + BLOCK - 1])
        states = drafter.correct(previous, states)
    return session.modules.logits(drafter.norm(states)).softmax(-1)


@torch.no_grad()
def test_distances_and_coverages(drafter: DFlashDrafter):
    target, tokens = tiny_target(), texts()
    found = measure(drafter, target, tokens, PROMPT, temperature=0.3, ranks=(1, 4), nodes=NODES, stride=3).depths
    wanted = (target(tokens).logits / 0.3).softmax(-1)
    rows = []
    for row, anchor in ((row, anchor) for row in range(3) for anchor in range(PROMPT, 30 - BLOCK + 1, 3)):
        draft = drafted(drafter, tokens[row : row + 1], anchor, look_back=True)
        truth = wanted[row, anchor : anchor + BLOCK - 1]
        best = draft.topk(4).indices
        covered = truth.gather(-1, best)
        rows.append(torch.stack([(draft - truth).abs().sum(-1) / 2, covered[:, 0], covered.sum(-1)]))
    distance, first, fourth = torch.stack(rows).mean(0)
    assert found.blocks == len(rows)
    assert found.total_variation == pytest.approx(distance.tolist(), abs=1e-5)
    assert found.coverage[1] == pytest.approx(first.tolist(), abs=1e-5)
    assert found.coverage[4] == pytest.approx(fourth.tolist(), abs=1e-5)


def test_spines_are_the_marginals(drafter: DFlashDrafter):
    tokens = texts()
    spines = marginal_spines(drafter, tiny_target(), tokens, PROMPT, 4)
    assert spines.shape == (3, len(range(PROMPT, 30 - BLOCK + 1, 4)), BLOCK - 1)
    for row in range(3):
        expected = drafted(drafter, tokens[row : row + 1], PROMPT + 4, look_back=False).argmax(-1)
        assert torch.equal(spines[row, 1], expected)


def test_children_against_a_walk(drafter: DFlashDrafter):
    """Counted node by node, through each tree's table of children."""
    target, tokens = tiny_target(), texts()
    counts = {True: [0, 0, 0, 0], False: [0, 0, 0, 0]}
    for row in range(3):
        text = tokens[row : row + 1]
        for anchor in range(PROMPT, 30 - BLOCK + 1):
            session = drafter.start(target, 1, 64)
            features = fused_features(session, target, text)
            lattice = session.propose(state(text, features, 0, anchor, width=NODES - 1))
            (children,) = expand(lattice, text[:, anchor], NODES).children()
            spine = drafted(drafter, text, anchor, look_back=False).argmax(-1).tolist()
            path: list[int] = []
            node, slot = 0, 0
            for depth in range(BLOCK - 1):
                token = int(text[0, anchor + depth + 1])
                offers = lattice.tokens[0, depth, slot].tolist() if slot >= 0 else []
                side = counts[path == spine[:depth]]
                side[0] += 1
                side[1] += bool(offers) and offers[0] == token
                side[2] += spine[depth] == token
                side[3] += not offers
                if (node, token) not in children:
                    break
                node = children[node, token]
                slot = int(lattice.next_slot[0, depth, slot, offers.index(token)])
                path.append(token)
    on, off = child_accuracy(drafter, target, tokens, PROMPT, nodes=NODES, batch_size=2)
    for side, wanted in ((on, counts[True]), (off, counts[False])):
        assert [side.events, side.hits, side.marginal_hits, side.dead_ends] == wanted
    assert off.events > 0
    if type(drafter) is DFlashDrafter:
        assert (on.hits, off.hits) == (on.marginal_hits, off.marginal_hits)


def test_results_are_json(drafter: DFlashDrafter):
    found = measure(drafter, tiny_target(), texts(1), PROMPT, nodes=NODES, stride=8).to_dict()
    assert json.loads(json.dumps(found)) == found
    assert set(found["coverage"]) == {"1", "5", "16"}
    assert len(found["total_variation"]) == BLOCK - 1
    assert found["child_accuracy"]["on_spine"]["events"] > 0


@torch.no_grad()
def test_a_drafter_inside_its_target_is_measured_alike():
    target, tokens = tiny_target(), texts(2)
    drafter = tiny_flexdraft(target)
    found = measure(drafter, target, tokens, PROMPT, temperature=0.3, ranks=(1, 4), nodes=NODES, stride=3)
    wanted = (target(tokens).logits / 0.3).softmax(-1)
    distances, covered = [], []
    # Whole distributions: as many children as the vocabulary has tokens.
    for anchor, lattice, _ in lattices_along(drafter, target, tokens, PROMPT, width=VOCAB, stride=3):
        best = lattice.tokens[:, :, 0]
        truth = wanted[:, anchor : anchor + best.shape[1]].gather(-1, best)
        distances.append((lattice.log_probs[:, :, 0].exp() - truth).abs().sum(-1).mean(0) / 2)
        covered.append(truth[..., :4].sum(-1).mean(0))
    assert found.depths.blocks == 2 * len(distances)
    assert found.depths.total_variation == pytest.approx(torch.stack(distances).mean(0).tolist(), abs=1e-5)
    assert found.depths.coverage[4] == pytest.approx(torch.stack(covered).mean(0).tolist(), abs=1e-5)
    # Its depths do not look at each other: the best child is the spine's next token.
    for side in (found.on_spine, found.off_spine):
        assert side.events > 0
        assert side.hits == side.marginal_hits
