"""Selective verification: fewer groups and fewer candidates, and what stands in where a group is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flexdraft_models import BLOCK, Guide, guided, tiny_flexdraft
from models import batch, prompt, target
from parity import GREEDY, Inputs, run
from rigged import rows_of

import hf_treespec  # noqa: F401  (teaches generate() about drafters)
from hf_treespec.drafters.flexdraft import FlexDraftOptions, FlexDraftSession
from hf_treespec.trees import DraftTree


def decode(inputs: Inputs, **options: Any) -> tuple[Guide, Any]:
    model = target("qwen3", "sdpa")
    plain = run(model, inputs, max_new_tokens=20, **GREEDY).sequences
    guide = Guide(rows=rows_of(plain, inputs))
    view = guided(tiny_flexdraft(model), guide, flex_mode="parallel", **options)
    assisted = run(model, inputs, max_new_tokens=20, assistant_model=view, **GREEDY).sequences
    assert torch.equal(plain, assisted)
    return guide, view.last_report


def same_drafts(one: Guide, other: Guide) -> bool:
    pairs = zip(one.drafts, other.drafts, strict=True)
    return all(torch.allclose(first[1], second[1], atol=2e-5) for first, second in pairs)


@pytest.mark.parametrize("inputs", [prompt(12, seed=3), batch((5, 13, 9), seed=6)], ids=["one row", "three rows"])
def test_a_draft_without_its_group_is_made_alone_and_is_the_same(inputs: Inputs) -> None:
    whole, _ = decode(inputs)
    pruned, report = decode(inputs, flex_groups=2)
    assert all(states.shape[1] == 2 * BLOCK for _, _, states in pruned.groups)
    assert report.mean_nodes < report.mean_rows <= report.mean_nodes + 2 * BLOCK
    assert all(was_brought for _, _, was_brought in whole.drafts[1:])
    assert not all(was_brought for _, _, was_brought in pruned.drafts[1:])
    assert same_drafts(whole, pruned)


def test_only_nodes_of_some_path_score_bring_groups() -> None:
    guide, _ = decode(prompt(12, seed=3), flex_group_score=0.3, shape="tree", budget=12)
    widths = set()
    for _, tree, states in guide.groups:
        groups = states.shape[1] // BLOCK
        assert groups == len(tree) >= 1
        assert bool((tree.scores()[:, :groups] >= 0.3).all())
        widths.add(groups)
    assert min(widths) < 12


@pytest.mark.parametrize(("shape", "score"), [("chain", 0.7), ("tree", 0.2)])
def test_candidates_below_a_path_score_are_not_verified(shape: str, score: float) -> None:
    _, whole = decode(prompt(12, seed=3), shape=shape, budget=12)
    guide, pruned = decode(prompt(12, seed=3), shape=shape, budget=12, flex_verify_score=score)
    assert pruned.mean_nodes < whole.mean_nodes
    assert pruned.mean_rows < whole.mean_rows
    for _, tree, _ in guide.groups:
        real = tree.log_scores > -torch.inf
        # A child is kept by the best path to its depth; a chain has no other.
        assert shape == "tree" or bool((tree.scores()[real] >= score - 1e-6).all())


def test_the_rows_that_ride_are_told() -> None:
    """Verification sizes what depends on the rows of its forward by them."""
    model = target("qwen3", "sdpa")
    session = FlexDraftSession(tiny_flexdraft(model), model, 1, 64)
    assert session.riding_rows == 0
    session.configure(FlexDraftOptions().with_options(flex_mode="parallel"))
    try:
        session.extra_rows(DraftTree.root(torch.tensor([5])))
        assert session.riding_rows == BLOCK
        session.configure(FlexDraftOptions().with_options(flex_mode="sequential"))
        session.extra_rows(DraftTree.root(torch.tensor([5])))
        assert session.riding_rows == 0
    finally:
        session.close()
    assert session.riding_rows == 0


def test_the_threshold_of_groups_goes_by_the_device() -> None:
    options = FlexDraftOptions()
    assert options.group_score(torch.device("cpu")) > options.group_score(torch.device("cuda"))
    assert FlexDraftOptions(flex_group_score=0.0).group_score(torch.device("cpu")) == 0.0
