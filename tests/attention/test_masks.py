"""Masks against their definition, looped over, and against transformers' own for a chain."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from models import FAMILIES, LAYERS, WINDOW, build
from transformers import DynamicCache, Llama4TextConfig
from transformers.masking_utils import create_masks_for_generate

from hf_treespec.attention.masks import LayerKind, TreeMasks, layer_kinds, tree_mask
from hf_treespec.trees import DraftTree

FULL = LayerKind("full_attention")
SLIDING = LayerKind("sliding_attention", 6)
CHUNKED = LayerKind("chunked_attention", 5)
LOWEST = torch.finfo(torch.float32).min


def random_tree(sizes: list[int], seed: int) -> DraftTree:
    draw = random.Random(seed)
    rows = []
    for size in sizes:
        parents = [-1, *(draw.randrange(max(0, node - 3), node) for node in range(1, size))]
        rows.append(([draw.randrange(9) for _ in parents], parents, [0.0] * size))
    return DraftTree.from_rows(rows)


def left_padding(pads: list[int], width: int) -> torch.Tensor:
    return torch.arange(width) >= torch.tensor(pads)[:, None]


def visible_by_definition(
    kind: LayerKind, tree: DraftTree, lengths: list[int], offset: int, start: int, count: int, pads: list[int]
) -> torch.Tensor:
    nodes = len(tree)
    result = torch.zeros(tree.batch_size, nodes, count + nodes, dtype=torch.bool)
    for row, (length, pad) in enumerate(zip(lengths, pads, strict=True)):
        parents, depths = tree.parents[row].tolist(), tree.depths[row].tolist()

        def within(query: int, key: int, pad: int = pad) -> bool:
            if kind.name == "sliding_attention":
                return query - key < kind.window
            if kind.name == "chunked_attention":
                return (query - pad) // kind.window == (key - pad) // kind.window
            return True

        for node in range(nodes):
            index = length + depths[node]
            for column in range(start):
                key = offset + column
                result[row, node, column] = pad <= key < length and within(index, key)
            ancestor = node
            while ancestor >= 0:
                result[row, node, start + ancestor] = within(index, length + depths[ancestor])
                ancestor = parents[ancestor]
    return result


@pytest.mark.parametrize("kind", [FULL, SLIDING, CHUNKED], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("lengths", "pads", "columns"),
    [
        ([4], [0], (0, 4)),
        ([23], [0], (0, 23)),
        ([23], [0], (18, 5)),
        ([23], [0], (0, 40, 23)),
        ([17, 9], [0, 0], (0, 17)),
        ([17, 9], [2, 6], (0, 17)),
        ([17, 12], [2, 6], (11, 6)),
    ],
)
def test_masks_follow_their_definition(
    kind: LayerKind, lengths: list[int], pads: list[int], columns: tuple[int, ...]
) -> None:
    tree = random_tree([13, 8][: len(lengths)], seed=len(lengths))
    valid = left_padding(pads, 8) if any(pads) else None
    offset, count = columns[:2]
    start = columns[2] if len(columns) == 3 else count
    mask = tree_mask(kind, tree.ancestors(), tree.depths, torch.tensor(lengths), columns, valid, torch.float32)
    expected = visible_by_definition(kind, tree, lengths, offset, start, count, pads)
    assert mask.shape == (len(lengths), 1, 13, count + 13)
    assert set(mask.unique().tolist()) <= {0.0, LOWEST}
    torch.testing.assert_close(mask[:, 0] == 0, expected)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_a_kept_buffer_gives_the_same_masks_round_after_round(batch: int, padded: bool) -> None:
    valid = left_padding([3, 1][:batch], 9) if padded else torch.ones(batch, 9, dtype=torch.bool)
    kinds = [FULL, SLIDING, FULL, CHUNKED]
    masks = TreeMasks(kinds, torch.bfloat16, "cpu", valid, keyed=True)
    draw = random.Random(3)
    lengths = [9, 9][:batch]
    # Trees grow and shrink; in the middle of it rows are cropped, then go on.
    for turn, nodes in enumerate([1, 5, 3, 40, 40, 2, 7, 1, 90, 4]):
        if turn == 6:
            lengths = [10, 11][:batch]
        tree = random_tree([nodes, max(1, nodes - 2)][:batch], seed=turn)
        high = max(lengths)
        views = {FULL: (0, high), SLIDING: (max(0, high - 5), min(high, 5)), CHUNKED: (0, high)}
        built = masks.build(tree.ancestors(), tree.depths, lengths, views)
        assert isinstance(built, dict)
        for layer, kind in enumerate(kinds):
            args = (tree.ancestors(), tree.depths, torch.tensor(lengths), views[kind])
            expected = tree_mask(kind, *args, valid, torch.bfloat16)
            torch.testing.assert_close(built[kind.name], expected, rtol=0, atol=0)
            if masks.prefix_visible[layer]:
                assert bool((expected[..., : views[kind][1]] == 0).all())
        assert masks.prefix_visible[0] == (not padded and len(set(lengths)) == 1)
        lengths = [length + draw.randint(1, min(nodes, 4)) for length in lengths]


def test_a_window_opens_the_prefix_only_while_it_spans_it() -> None:
    masks = TreeMasks([SLIDING, CHUNKED, FULL], torch.float32, "cpu", keyed=True)
    tree = random_tree([3], seed=0)
    for length, expected in [(2, [True, True, True]), (3, [True, False, True]), (4, [False, False, True])]:
        masks.build(tree.ancestors(), tree.depths, [length], dict.fromkeys(masks.kinds, (0, length)))
        assert masks.prefix_visible == expected


def test_one_tensor_for_targets_without_layer_types() -> None:
    tree = random_tree([4], seed=0)
    config = SimpleNamespace(num_hidden_layers=2, sliding_window=6)
    masks = TreeMasks.for_config(config, torch.float32, "cpu")
    built = masks.build(tree.ancestors(), tree.depths, torch.tensor([5]), {SLIDING: (0, 5)})
    assert isinstance(built, torch.Tensor)
    assert built.shape == (1, 1, 4, 9)


@pytest.mark.parametrize("pads", [[0, 0], [3, 0], [7, 2]])
def test_a_chain_is_masked_as_transformers_masks_it(pads: list[int]) -> None:
    length, nodes = 17, 6
    config = Llama4TextConfig(num_hidden_layers=4, attention_chunk_size=5, sliding_window=6)
    config.layer_types = ["chunked_attention", "full_attention", "sliding_attention", "full_attention"]
    config._attn_implementation = "sdpa"
    # Layers that keep everything, so that columns compare one to one.
    cache = DynamicCache()
    for layer in range(4):
        cache.update(torch.zeros(2, 1, length, 4), torch.zeros(2, 1, length, 4), layer)
    attention_mask = left_padding(pads, length + nodes).long()
    attention_mask[:, 0] = attention_mask[:, 0] if any(pads) else 1
    theirs = create_masks_for_generate(config, torch.zeros(2, nodes, 8), attention_mask, cache)
    chain = DraftTree.from_rows([([0] * nodes, list(range(-1, nodes - 1)), [0.0] * nodes)] * 2)
    valid = left_padding(pads, length)
    masks = TreeMasks.for_config(config, torch.float32, "cpu", valid)
    ours = masks.build(chain.ancestors(), chain.depths, [length] * 2, dict.fromkeys(masks.kinds, (0, length)))
    assert isinstance(ours, dict)
    for name in set(config.layer_types):
        torch.testing.assert_close((ours[name] == 0).expand(2, -1, -1, -1), theirs[name].expand(2, -1, -1, -1))


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"qwen2_5_vl"}))
def test_layer_kinds_of_families(family: str) -> None:
    window = LayerKind("sliding_attention", WINDOW)
    expected = {
        "qwen3_sliding": [FULL, FULL, window, window],
        "gemma3": [window, FULL] * 2,
        "gpt_oss": [window, FULL] * 2,
        "mistral": [window] * LAYERS,
        "phi3": [window] * LAYERS,
    }.get(family, [FULL] * LAYERS)
    assert layer_kinds(build(family, "eager").config.get_text_config()) == expected


def test_unknown_layers_are_named() -> None:
    config = SimpleNamespace(layer_types=["full_attention", "linear_attention"], num_hidden_layers=2)
    with pytest.raises(ValueError, match="linear_attention"):
        layer_kinds(config)
    config = SimpleNamespace(layer_types=["sliding_attention"], num_hidden_layers=1, sliding_window=None)
    with pytest.raises(ValueError, match="size of their window"):
        layer_kinds(config)
    chunked = SimpleNamespace(num_hidden_layers=1, attention_chunk_size=5)
    assert layer_kinds(chunked) == [CHUNKED]
