"""Trees verified and committed through our layers equal plain decoding with a stock cache, node by node."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from models import LAYERS, WINDOW
from transformers import DynamicCache
from transformers.cache_utils import Cache
from tree_reference import (
    CAPACITY,
    RESIDUAL,
    PlainRow,
    forward,
    make_cache,
    model_of,
    path_to,
    prefill,
    prompts,
    random_tree,
    tree_logits,
)

from hf_treespec.attention.masks import LayerKind
from hf_treespec.caches import TreeCache

NODES = 7
TOLERANCE = 5e-5
FAMILIES = ("qwen3", "qwen3_sliding", "gemma3", "mistral", "gpt_oss")
CASES = [(family, kind) for family in FAMILIES for kind in ("dynamic", "static")]
CASES += [("gemma3", "unconfigured"), ("qwen3", "fp8"), ("qwen3", "residual")]
#: One of every kind of layer.
KINDS = [("gemma3", "dynamic"), ("gemma3", "static"), ("qwen3", "fp8"), ("qwen3", "residual")]


class Decoding:
    """A tree cache and, for every row, plain decoding beside it."""

    def __init__(self, family: str, kind: str, lengths: Sequence[int], chunk: int = 10**6) -> None:
        self.model = model_of(family)
        self.tokens, self.valid = prompts(lengths)
        self.paddings = [max(lengths) - length for length in lengths]
        stock = make_cache(kind, self.model)
        expected = prefill(self.model, stock, self.tokens, self.valid, chunk)
        self.rows = [PlainRow(self.model, stock, row, self.valid) for row in range(len(lengths))]
        self.cache = make_cache(kind, self.model)
        self.tree_cache = self.attach()
        logits = prefill(self.model, self.cache, self.tokens, self.valid, chunk)
        self.same(logits[self.valid.bool()], expected[self.valid.bool()])
        self.tree_cache.prefilled()

    def attach(self) -> TreeCache:
        return TreeCache.attach(self.cache, self.model.config, len(self.tokens), CAPACITY)

    def same(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)

    def round(self, seed: int, counts: Sequence[int] | None = None, nodes: int = NODES) -> None:
        """Verifies random trees, compares every node, and commits a random path or one of `counts` rows."""
        tree = random_tree(seed, len(self.rows), nodes)
        logits = tree_logits(self.model, self.cache, self.tree_cache, tree, self.paddings)
        chooser, limit = random.Random(seed), self.tree_cache.depth_limit() or nodes
        paths: list[list[int]] = []
        for row, plain in enumerate(self.rows):
            if counts is not None and counts[row] == 0:
                paths.append([])
                continue
            tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
            expected = plain.node_logits(tokens, parents, limit)
            self.same(logits[row, list(expected)], torch.stack(list(expected.values())))
            candidates = [path_to(parents, node) for node in expected]
            if counts is not None:
                candidates = [path for path in candidates if len(path) == counts[row]]
            paths.append(chooser.choice(candidates))
            for node in paths[-1]:
                plain.step(tokens[node])
        self.tree_cache.commit(paths)
        assert all(
            length == plain.length
            for length, plain, path in zip(self.tree_cache.lengths, self.rows, paths, strict=True)
            if path
        )

    def continues(self, steps: int = 4) -> None:
        """Plain steps on the detached cache equal plain decoding; all rows are equally long."""
        self.tree_cache.detach()
        length = self.rows[0].length
        assert int(self.cache.get_seq_length()) == length
        for step in range(steps):
            tokens = torch.randint(2, 97, (len(self.rows), 1), generator=torch.Generator().manual_seed(step))
            expected = torch.stack(
                [plain.step(token) for plain, token in zip(self.rows, tokens[:, 0].tolist(), strict=True)]
            )
            valid = torch.cat([plain.valid for plain in self.rows])
            positions = valid.sum(1, keepdim=True) - 1
            self.same(forward(self.model, self.cache, tokens, valid, positions)[:, -1], expected)


@pytest.mark.parametrize("length", [3, WINDOW, 21], ids=["below", "equal", "beyond"])
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_random_paths_of_one_row(family: str, kind: str, length: int) -> None:
    decoding = Decoding(family, kind, [length])
    for seed in range(3):
        decoding.round(seed + 10 * length)
    decoding.continues()


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_ragged_batch(family: str, kind: str) -> None:
    decoding = Decoding(family, kind, [5, 17, 11])
    counts = [(1, 2, 3), (3, 1, 2), (2, 3, 1)]
    if decoding.tree_cache.requires_lockstep:
        counts = [(3, 3, 3), (1, 1, 1), (2, 2, 2)]
    for seed, count in enumerate(counts):
        decoding.round(seed, count)
    decoding.continues()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_finished_row_leaves_windows_behind(kind: str) -> None:
    decoding = Decoding("gemma3", kind, [5, 17, 11])
    decoding.round(0, (2, 1, 3))
    for seed in range(1, 5):
        decoding.round(seed, (3, 0, 1))
    lengths = decoding.tree_cache.lengths
    assert lengths == [17 + 2 + 12, 18, 17 + 3 + 4]
    shortest_live = lengths[2]
    offset, count = decoding.tree_cache.view(LayerKind("sliding_attention", WINDOW), NODES)
    assert (offset, offset + count) == (shortest_live - WINDOW + 1, lengths[0])
    tree_logits(decoding.model, decoding.cache, decoding.tree_cache, random_tree(9, 3, NODES), decoding.paddings)
    with pytest.raises(ValueError, match=r"rows \[1\].*finished"):
        decoding.tree_cache.commit([[0], [0], [0]])
    decoding.tree_cache.detach()
    full = decoding.cache.layers[1]
    for row, length in enumerate(lengths):
        assert full.keys[row, :, decoding.paddings[row] : length].abs().sum(-1).all()
        assert not full.keys[row, :, length : max(lengths)].any()
        assert not full.values[row, :, length : max(lengths)].any()


@pytest.mark.parametrize("chunk", [1, 3, 10])
@pytest.mark.parametrize(("family", "kind"), [("gemma3", "dynamic"), ("gemma3", "static"), ("qwen3", "fp8")])
def test_chunked_prefill(family: str, kind: str, chunk: int) -> None:
    decoding = Decoding(family, kind, [5, 21], chunk)
    decoding.round(0, (2, 2))
    decoding.continues()


def test_long_prompt_passes_through_a_sliding_layer() -> None:
    """Returned columns and mask sizes are the stock layer's; what stays is the window."""
    model = model_of("mistral")
    for sizes in ([1500, 900, 4, 1, 700], [3, 1500, 2]):
        stock, cache = DynamicCache(config=model.config), DynamicCache(config=model.config)
        TreeCache.attach(cache, model.config, 1, 4096)
        for seed, size in enumerate(sizes):
            states = torch.randn(1, 2, size, 16, generator=torch.Generator().manual_seed(seed))
            assert cache.get_mask_sizes(size, 0) == stock.get_mask_sizes(size, 0)
            seen, expected = cache.update(states, -states, 0), stock.update(states, -states, 0)
            assert torch.equal(seen[0], expected[0])
            assert torch.equal(seen[1], expected[1])
            assert cache.get_seq_length() == stock.get_seq_length()
        assert cache.layers[0].keys.shape[2] < 700


@pytest.mark.parametrize(("family", "kind"), [("qwen3", "dynamic"), ("gemma3", "dynamic"), ("qwen3", "fp8")])
@pytest.mark.parametrize("lengths", [[21], [5, 17, 11]], ids=["one", "batch"])
def test_bytes_and_addresses(family: str, kind: str, lengths: list[int]) -> None:
    decoding = Decoding(family, kind, lengths)
    layers = decoding.cache.layers
    addresses = [layer.keys.data_ptr() for layer in layers]
    element = 1 if kind == "fp8" else 4
    tree_bytes = LAYERS * len(lengths) * 2 * NODES * 2 * 16 * element
    for seed in range(3):
        before = decoding.tree_cache.bytes_written
        decoding.round(seed)
        assert tree_bytes <= decoding.tree_cache.bytes_written - before <= 3 * tree_bytes
    assert [layer.keys.data_ptr() for layer in layers] == addresses
    assert decoding.tree_cache.bytes_relocated == 0


def test_a_path_already_in_place_is_not_moved() -> None:
    decoding = Decoding("qwen3", "dynamic", [9])
    tree = random_tree(0, 1, NODES)
    tree_logits(decoding.model, decoding.cache, decoding.tree_cache, tree, [0])
    before = decoding.tree_cache.bytes_written
    decoding.tree_cache.commit([[0, 1]])
    assert decoding.tree_cache.bytes_written == before
    tree_logits(decoding.model, decoding.cache, decoding.tree_cache, tree, [0])
    before = decoding.tree_cache.bytes_written
    decoding.tree_cache.commit([[0, 1, 3]])
    assert decoding.tree_cache.bytes_written - before == LAYERS * 2 * 2 * 16 * 4


@pytest.mark.parametrize("batch", [1, 2])
def test_sliding_buffers_stay_bounded_and_cheap(batch: int) -> None:
    """Thousands of committed columns through buffers of a few windows, relocated less than they were committed.

    Rows take turns in running ahead, so that buffers are moved to their front while the rows are ragged.
    """
    model, lead = model_of("mistral"), 40
    cache = DynamicCache(config=model.config)
    tree_cache = TreeCache.attach(cache, model.config, batch, 100_000)
    start = torch.randn(batch, 2, 30, 16)
    cache.update(start, -start, 0)
    tree_cache.prefilled()
    history = list(start)
    for seed in range(1000):
        chooser = random.Random(seed)
        states = torch.randn(batch, 2, 6, 16, generator=torch.Generator().manual_seed(seed))
        offset, count = tree_cache.view(LayerKind("sliding_attention", WINDOW), 6)
        with tree_cache.tree_forward(6):
            keys, values = cache.update(states, -states, 0)
        assert keys.shape[2] == count + 6
        assert torch.equal(values, -keys)
        assert torch.equal(keys[:, :, count:], states)
        for row, length in enumerate(tree_cache.lengths):
            assert offset <= max(0, length - WINDOW + 1)
            seen = keys[row, :, : length - offset]
            assert torch.equal(seen, history[row][:, offset:length])
        fast = seed // lead % batch
        paths = [
            [0, *sorted(chooser.sample(range(1, 6), 4 if row == fast else chooser.randrange(2)))]
            for row in range(batch)
        ]
        tree_cache.commit(paths)
        history = [torch.cat([past, states[row, :, paths[row]]], 1) for row, past in enumerate(history)]
    layer = cache.layers[0]
    assert layer.keys.shape[2] <= 30 + 2 * (WINDOW + 5 * lead) + 576
    assert 0 < tree_cache.bytes_relocated <= max(tree_cache.lengths) * layer.column_bytes


@pytest.mark.parametrize("kind", ["dynamic", "fp8"])
def test_buffers_double(kind: str) -> None:
    """Beyond its first columns a buffer grows and keeps what it held."""
    decoding = Decoding("qwen3", kind, [9])
    layer = decoding.cache.layers[0]
    layer.rows.capacity = 0
    columns = layer.keys.shape[2]
    needed = columns // 3 + 1
    for seed in range(needed):
        nodes = NODES
        tree = random_tree(seed, 1, nodes)
        tree_logits(decoding.model, decoding.cache, decoding.tree_cache, tree, [0])
        path = path_to(tree.parents[0].tolist(), nodes - 2)
        decoding.tree_cache.commit([path])
        for node in path:
            decoding.rows[0].step(tree.tokens[0, node].item())
    assert layer.keys.shape[2] == 2 * columns
    assert decoding.tree_cache.bytes_relocated > 0
    decoding.continues()


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_adopts_a_cache_in_use(family: str, kind: str) -> None:
    """A second call goes on from the cache of the first, with new prompt tokens and without."""
    decoding = Decoding(family, kind, [13])
    decoding.round(0)
    for extra in (0, 4):
        decoding.tree_cache.detach()
        decoding.tree_cache = decoding.attach()
        assert decoding.tree_cache.lengths == [decoding.rows[0].length]
        if extra:
            plain, tokens = decoding.rows[0], torch.randint(2, 97, (1, extra))
            plain.valid = torch.nn.functional.pad(plain.valid, (0, extra), value=1)
            expected = prefill(decoding.model, plain.cache, tokens, plain.valid)
            decoding.same(prefill(decoding.model, decoding.cache, tokens, plain.valid), expected)
        decoding.tree_cache.prefilled()
        decoding.round(extra + 1)
        decoding.round(extra + 2)
    decoding.continues()


@pytest.mark.parametrize(("family", "length"), [("qwen3", 13), ("gemma3", 5)])
def test_reattach_after_crop(family: str, length: int) -> None:
    decoding = Decoding(family, "dynamic", [length])
    decoding.tree_cache.detach()
    plain = decoding.rows[0]
    for cache in (decoding.cache, plain.cache):
        cache.crop(-2)
    plain.valid = plain.valid[:, :-2]
    decoding.tree_cache = decoding.attach()
    decoding.tree_cache.prefilled()
    for seed in range(3):
        decoding.round(seed)
    decoding.continues()


def test_reattach_after_crop_beyond_the_window() -> None:
    """A recording cache can be cropped past its window, and stays a recording one."""
    model = model_of("gemma3")
    tokens, valid = prompts([21])
    decoding = Decoding("gemma3", "dynamic", [15])
    decoding.cache = DynamicCache(config=model.config)
    decoding.cache.activate_past_recording()
    prefill(model, decoding.cache, tokens[:, :15], valid[:, :15])
    prefill(model, decoding.cache, tokens[:, 15:], valid)
    decoding.cache.crop(-6)
    decoding.rows[0].cache = DynamicCache(config=model.config)
    prefill(model, decoding.rows[0].cache, tokens[:, :15], valid[:, :15])
    decoding.tree_cache = decoding.attach()
    decoding.tree_cache.prefilled()
    decoding.round(0)
    decoding.tree_cache.detach()
    assert [layer.record_past for layer in decoding.cache.layers if layer.is_sliding] == [True, True]
    decoding.continues(3)


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_exception_in_a_tree_forward(family: str, kind: str) -> None:
    decoding = Decoding(family, kind, [13])
    decoding.round(0)
    broken = decoding.model.get_decoder().layers[2].mlp

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    hook = broken.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        tree_logits(decoding.model, decoding.cache, decoding.tree_cache, random_tree(1, 1, NODES), [0])
    hook.remove()
    with pytest.raises(RuntimeError, match="wrote 0 rows"):
        decoding.tree_cache.commit([[0]])
    decoding.continues()
    decoding.tree_cache.detach()
    with pytest.raises(RuntimeError, match="attached"), decoding.tree_cache.tree_forward(1):
        pass


def test_detach_during_a_prefill() -> None:
    decoding = Decoding("gemma3", "dynamic", [13])
    cache = DynamicCache(config=decoding.model.config)
    tree_cache = TreeCache.attach(cache, decoding.model.config, 1, CAPACITY)
    prefill(decoding.model, cache, decoding.tokens, decoding.valid)
    decoding.cache, decoding.tree_cache = cache, tree_cache
    decoding.continues()


def test_stock_layers_come_back() -> None:
    for kind in ("dynamic", "static", "unconfigured", "fp8", "residual"):
        model = model_of("qwen3")
        cache: Cache = make_cache(kind, model)
        before = list(cache.layers)
        replicated = cache.layer_class_to_replicate
        tree_cache = TreeCache.attach(cache, model.config, 1, CAPACITY)
        assert not cache.is_compileable
        tree_cache.detach()
        tree_cache.detach()
        assert cache.layers == before
        assert cache.layer_class_to_replicate is replicated


def test_static_tensors_stay_where_they_are() -> None:
    decoding = Decoding("gemma3", "static", [13])
    stock = decoding.tree_cache._stock
    full = [layer.keys.data_ptr() for layer in stock if not layer.is_sliding]
    decoding.round(0)
    decoding.tree_cache.detach()
    assert [layer.keys.data_ptr() for layer in decoding.cache.layers if not layer.is_sliding] == full
    assert all(int(layer.get_seq_length()) == decoding.rows[0].length for layer in decoding.cache.layers)


def test_static_caps_the_tree() -> None:
    model = model_of("gemma3")
    tokens, valid = prompts([13])
    cache = make_cache("static", model, 18)
    tree_cache = TreeCache.attach(cache, model.config, 1, CAPACITY)
    prefill(model, cache, tokens, valid)
    tree_cache.prefilled()
    assert tree_cache.free_rows() == 5
    with pytest.raises(ValueError, match="6 rows does not fit the 5 free"), tree_cache.tree_forward(6):
        pass
    tree_logits(model, cache, tree_cache, random_tree(0, 1, 5), [0])
    tree_cache.commit([[0, 2]])
    assert tree_cache.free_rows() == 3
    assert Decoding("qwen3", "dynamic", [3]).tree_cache.free_rows() is None


@pytest.mark.parametrize("columns", [WINDOW - 1, WINDOW, WINDOW + 1])
def test_static_near_its_window(columns: int) -> None:
    """Shorter than the window a static cache is bounded, from the window on it slides and is not."""
    model = model_of("mistral")
    tokens, valid = prompts([3])
    stock, cache = make_cache("static", model, columns), make_cache("static", model, columns)
    prefill(model, stock, tokens, valid)
    plain = PlainRow(model, stock, 0, valid)
    tree_cache = TreeCache.attach(cache, model.config, 1, CAPACITY)
    prefill(model, cache, tokens, valid)
    tree_cache.prefilled()
    assert tree_cache.free_rows() == (columns - 3 if columns < WINDOW else None)
    tree = random_tree(0, 1, 4)
    rounds = 1 if columns < WINDOW else 5
    for _ in range(rounds):
        logits = tree_logits(model, cache, tree_cache, tree, [0])
        tree_cache.commit([[0, 2]])
        for node in (0, 2):
            torch.testing.assert_close(
                logits[0, node], plain.step(tree.tokens[0, node].item()), atol=TOLERANCE, rtol=0
            )
    tree_cache.detach()
    logits = forward(model, cache, torch.tensor([[5]]), None, torch.tensor([[plain.length]]))[0, -1]
    torch.testing.assert_close(logits, plain.step(5), atol=TOLERANCE, rtol=0)


def test_residual_schedule() -> None:
    decoding = Decoding("qwen3", "residual", [9])
    limits = []
    for seed, count in enumerate((1, 2, 1, 3, 1)):
        limits.append(decoding.tree_cache.depth_limit())
        decoding.round(seed, (count,))
    assert limits == [RESIDUAL, RESIDUAL - 1, 1, RESIDUAL, 1]
    tree = random_tree(3, 1, NODES)
    tree_logits(decoding.model, decoding.cache, decoding.tree_cache, tree, [0])
    decoding.tree_cache.commit([[0, 2]])
    tree_logits(decoding.model, decoding.cache, decoding.tree_cache, tree, [0])
    with pytest.raises(ValueError, match="can commit 2"):
        decoding.tree_cache.commit([[0, 2, NODES - 2]])


def test_commit_refuses_what_is_no_path() -> None:
    decoding = Decoding("qwen3", "residual", [9, 7])
    tree_logits(decoding.model, decoding.cache, decoding.tree_cache, random_tree(0, 2, NODES), decoding.paddings)
    for paths, message in (
        ([[0]], "each of 2 rows"),
        ([[1], [0]], "starts at node 0"),
        ([[0, 2, 1], [0, 1, 2]], "ascends"),
        ([[0], [0, 1]], "equally many"),
    ):
        with pytest.raises(ValueError, match=message):
            decoding.tree_cache.commit(paths)
    with pytest.raises(RuntimeError, match="wrote 7 rows"):
        decoding.tree_cache.commit([[0, 7], [0, 1]])
    decoding.tree_cache.commit([[0, 1], []])
    assert decoding.tree_cache.lengths == [11, 9]
    with pytest.raises(RuntimeError, match="only written inside"):
        prefill(decoding.model, decoding.cache, decoding.tokens, decoding.valid)
