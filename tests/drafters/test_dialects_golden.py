"""What published code of each dialect computes, this package computes: logits of blocks, and nodes of trees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dialect_models import DIALECTS, golden, golden_states, published, target_of
from golden_inputs import ANCHORS, MASK, REDUCED, TOKENS, VOCAB, features, normal
from transformers import DynamicCache

from hf_treespec.drafters import AutoDrafter
from hf_treespec.drafters.treeflash import TreeFlashSession
from hf_treespec.trees import DraftLattice, expand


@pytest.mark.parametrize("name", [name for name in DIALECTS if name != "treeflash"])
def test_blocks_have_the_published_logits(tmp_path: Path, name: str):
    drafter = AutoDrafter.from_pretrained(published(tmp_path, name)).eval()
    session = drafter.start(target_of(drafter), 1, 64)
    for state, wanted in zip(golden_states(drafter, session), golden(name)["logits"], strict=True):
        hidden = session.drafted(session.draft(state), drafter.drafted_depths)
        found = session.modules.logits(hidden)[0]
        torch.testing.assert_close(found, torch.tensor(wanted)[-drafter.drafted_depths :], atol=1e-5, rtol=0)


def test_transformers_own_loop_gets_the_published_hidden_states(tmp_path: Path):
    """By the protocol of its cache: context and block are appended, the block is cropped off again."""
    folder = published(tmp_path, "speculators_anchor", sample_from_anchor=False)
    drafter, done, cache = AutoDrafter.from_pretrained(folder).eval(), 0, DynamicCache()
    cache.activate_past_recording()
    target, given = target_of(drafter), torch.from_numpy(features())
    for anchor, token, wanted in zip(ANCHORS, TOKENS, golden("speculators_anchor")["logits"], strict=True):
        block = target.get_input_embeddings()(torch.tensor([[token, *[MASK] * 3]]))
        hidden = drafter(block, given[:, done:anchor], cache=cache).last_hidden_state
        cache.crop(-block.shape[1])
        found = target.get_output_embeddings()(hidden)[0]
        torch.testing.assert_close(found, torch.tensor(wanted), atol=1e-5, rtol=0)
        done = anchor


def test_the_head_of_a_reduced_vocabulary_proposes_target_tokens(tmp_path: Path):
    drafter = AutoDrafter.from_pretrained(published(tmp_path, "speculators")).eval()
    session = drafter.start(target_of(drafter), 1, 64)
    for state, wanted in zip(
        golden_states(drafter, session, width=VOCAB), golden("speculators")["logits"], strict=True
    ):
        lattice = session.propose(state)
        log_probs = torch.tensor(wanted)[1:].log_softmax(-1)
        assert lattice.tokens.shape == (1, 3, 1, len(REDUCED))
        for depth in range(3):
            assert sorted(lattice.tokens[0, depth, 0].tolist()) == REDUCED
            columns = [REDUCED.index(token) for token in lattice.tokens[0, depth, 0].tolist()]
            torch.testing.assert_close(lattice.log_probs[0, depth, 0], log_probs[depth, columns], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", DIALECTS)
def test_drafted_depths(tmp_path: Path, name: str):
    drafter = AutoDrafter.from_pretrained(published(tmp_path, name))
    from_anchor = name in ("deepspec", "speculators_anchor")
    assert drafter.drafted_depths == (4 if from_anchor else 3)
    assert drafter.config.target_layer_ids == [1, 3]


def test_treeflash_corrects_as_published(tmp_path: Path):
    drafter = AutoDrafter.from_pretrained(published(tmp_path, "treeflash")).eval()
    data = golden("treeflash")
    session = drafter.start(target_of(drafter), 1, 64)
    assert isinstance(session, TreeFlashSession)
    for token, state, wanted in zip(TOKENS, golden_states(drafter, session), data["logits"], strict=True):
        hidden = session.drafted(session.denoise(state), 3)[0]
        previous = session.modules.embed(torch.tensor([token, *data["previous"]]), hidden.dtype)
        found = session.modules.logits(drafter.norm(drafter.correct(previous, hidden)))
        torch.testing.assert_close(found, torch.tensor(wanted)[1:], atol=1e-5, rtol=0)


def test_treeflash_trees_have_the_published_nodes(tmp_path: Path):
    """The published size counts the root, as budgets do here."""
    drafter = AutoDrafter.from_pretrained(published(tmp_path, "treeflash")).eval()
    drafter.config.num_parents = 5
    session = drafter.start(target_of(drafter), 1, 64)
    for token, state, wanted in zip(
        TOKENS, golden_states(drafter, session), golden("treeflash")["trees"], strict=True
    ):
        tree = expand(session.propose(state), torch.tensor([token]), 12)
        # The published code leaves the root's token to its caller.
        assert tree.tokens[0].tolist()[1:] == wanted["tokens"][1:]
        assert tree.depths[0].tolist() == wanted["depths"]
        assert tree.parents[0].tolist()[1:] == wanted["parents"][1:]


@pytest.mark.parametrize("budget", ["1", "5", "15", "40"])
def test_ddtree_trees_have_the_published_nodes(budget: str):
    """The published budget leaves the root out, budgets here count it."""
    wanted = golden("ddtree")["trees"][budget]
    best, tokens = torch.from_numpy(normal("ddtree", (4, 20), 1.5)).log_softmax(-1).sort(descending=True)
    lattice = DraftLattice.marginal(tokens[None, :, : int(budget)], best[None, :, : int(budget)])
    tree = expand(lattice, torch.tensor([7]), int(budget) + 1)
    assert tree.tokens[0].tolist() == [7, *wanted["tokens"]]
    assert tree.depths[0].tolist() == [0, *wanted["depths"]]
    assert tree.parents[0].tolist()[1:] == wanted["parents"][1:]
