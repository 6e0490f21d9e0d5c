"""The draft tree's own views of itself, dummies included."""

from __future__ import annotations

import random

import pytest
import torch

from hf_treespec.trees import DraftTree

INFINITY = float("inf")


def batch() -> DraftTree:
    first = ([7, 1, 2, 1], [-1, 0, 1, 0], [0.0, -0.5, -0.75, -1.0])
    second = ([8, 3], [-1, 0], [0.0, -2.0])
    return DraftTree.from_rows([first, second])


def test_shorter_rows_end_in_dummies() -> None:
    tree = batch()
    assert tree.sizes == [4, 2]
    assert (len(tree), tree.batch_size) == (4, 2)
    assert tree.tokens.tolist() == [[7, 1, 2, 1], [8, 3, 8, 8]]
    assert tree.parents.tolist() == [[-1, 0, 1, 0], [-1, 0, -1, -1]]
    assert tree.depths.tolist() == [[0, 1, 2, 1], [0, 1, 0, 0]]
    assert tree.log_scores[1].tolist() == [0.0, -2.0, -INFINITY, -INFINITY]
    assert tree.scores()[1, 2:].tolist() == [0.0, 0.0]


def test_nodes_see_themselves_and_their_ancestors() -> None:
    seen = batch().ancestors().int().tolist()
    assert seen[0] == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    assert seen[1] == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_dummies_see_only_themselves_where_sizes_are_a_bound() -> None:
    tree = batch()
    bounded = DraftTree(tree.tokens, tree.parents, tree.depths, tree.log_scores, [4, 4])
    torch.testing.assert_close(bounded.ancestors(), tree.ancestors())


def test_children_by_node_and_token() -> None:
    tree = DraftTree.from_rows([([7, 1, 2, 2], [-1, 0, 1, 0], [0.0, -0.5, -0.75, -1.0]), ([8], [-1], [0.0])])
    expected = [{(0, 1): 1, (1, 2): 2, (0, 2): 3}, {}]
    assert tree.children() == expected
    assert DraftTree(tree.tokens, tree.parents, tree.depths, tree.log_scores, [4, 4]).children() == expected


def test_a_prefix_is_a_tree() -> None:
    tree = batch().prefix(3)
    assert tree.sizes == [3, 2]
    assert tree.ancestors()[0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert batch().prefix(9).sizes == [4, 2]


def test_a_root_is_a_plain_step() -> None:
    tree = DraftTree.root(torch.tensor([4, 5]))
    assert tree.tokens.tolist() == [[4], [5]]
    assert tree.parents.tolist() == [[-1], [-1]]
    assert tree.log_scores.tolist() == [[0.0], [0.0]]
    assert tree.ancestors().tolist() == [[[True]], [[True]]]
    assert tree.children() == [{}, {}]


@pytest.mark.parametrize("parents", [[-1, 1], [-1, -1], [0, 0], [-1, 2, 0]])
def test_a_parent_must_precede_its_child(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="parent"):
        DraftTree.from_rows([([0] * len(parents), parents, [0.0] * len(parents))])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_ancestors_agree_on_a_gpu() -> None:
    draw = random.Random(0)
    rows = []
    for size in (1, 33, 64):
        parents = [-1, *(draw.randrange(node) for node in range(1, size))]
        rows.append(([0] * size, parents, [0.0] * size))
    host, device = DraftTree.from_rows(rows), DraftTree.from_rows(rows, "cuda")
    torch.testing.assert_close(device.ancestors().cpu(), host.ancestors())
