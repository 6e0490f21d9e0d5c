"""Verification forwards of tiny targets: every node's logits are those of its path run as a plain sequence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import FAMILIES, batch, build, prompt
from test_masks import random_tree
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_treespec.attention import ARMED, TreeAttention, TreeMasks, armed, install, interface, uninstall
from hf_treespec.trees import DraftTree

FAMILY_NAMES = sorted(set(FAMILIES) - {"qwen2_5_vl"})
CASES = [(family, attention) for family in FAMILY_NAMES for attention in FAMILIES[family].attentions]
MAPPING = AttentionInterface._global_mapping


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    was_installed = interface.NAME in MAPPING
    install()
    yield
    if not was_installed:
        uninstall()


def prefilled(model: Any, inputs: dict[str, torch.Tensor]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    model(**inputs, position_ids=positions, cache=cache, use_cache=True)
    cache.activate_past_recording()
    return cache


def verify(
    model: Any,
    inputs: dict[str, torch.Tensor],
    tree: DraftTree,
    arm: bool = True,
    change: Callable[[torch.Tensor], object] | None = None,
) -> torch.Tensor:
    """Logits `[B, N, V]` of a verification forward over a prefix."""
    cache = prefilled(model, inputs)
    length, nodes = inputs["input_ids"].shape[1], len(tree)
    valid = inputs["attention_mask"].bool()
    masks = TreeMasks.for_config(model.config, model.dtype, "cpu", valid)
    views = {}
    for layer, kind in enumerate(masks.kinds):
        columns, offset = cache.get_mask_sizes(nodes, layer)
        views[kind] = (offset, columns - nodes)
    mask = masks.build(tree.ancestors(), tree.depths, [length] * tree.batch_size, views)
    if change is not None:
        for tensor in mask.values() if isinstance(mask, dict) else [mask]:
            change(tensor)
    positions = valid.sum(1, keepdim=True) + tree.depths
    token = ARMED.set(TreeAttention(nodes, masks.prefix_visible) if arm else None)
    try:
        return model(
            input_ids=tree.tokens, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True
        ).logits
    finally:
        ARMED.reset(token)


def plain(model: Any, inputs: dict[str, torch.Tensor], tree: DraftTree) -> torch.Tensor:
    """The same logits, of every node's path run after its row's prompt without cache or padding."""
    rows = []
    for row in range(tree.batch_size):
        prefix = inputs["input_ids"][row][inputs["attention_mask"][row].bool()]
        parents, tokens = tree.parents[row].tolist(), tree.tokens[row].tolist()
        logits = []
        for node in range(len(tree)):
            path = []
            while node >= 0:
                path.insert(0, tokens[node])
                node = parents[node]
            ids = torch.cat([prefix, torch.tensor(path)])[None]
            logits.append(model(input_ids=ids, use_cache=False).logits[0, -1])
        rows.append(torch.stack(logits))
    return torch.stack(rows)


@pytest.mark.parametrize(("family", "attention"), CASES)
@pytest.mark.parametrize("length", [3, 21])
@torch.no_grad()
def test_every_node_equals_its_path(family: str, attention: str, length: int) -> None:
    model = build(family, attention)
    tree = random_tree([9], seed=length)
    inputs = prompt(length, seed=length)
    torch.testing.assert_close(verify(model, inputs, tree), plain(model, inputs, tree), rtol=0, atol=5e-5)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mistral"])
@pytest.mark.parametrize("attention", ["sdpa", "treespec"])
@torch.no_grad()
def test_left_padded_rows_equal_their_paths(family: str, attention: str) -> None:
    model = build(family, attention)
    tree = random_tree([9, 9], seed=1)
    inputs = batch((5, 13), seed=1)
    torch.testing.assert_close(verify(model, inputs, tree), plain(model, inputs, tree), rtol=0, atol=5e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "treespec"])
@torch.no_grad()
def test_a_visible_sibling_shows(attention: str) -> None:
    model = build("qwen3", attention)
    tree = DraftTree.from_rows([([3, 4, 5, 6], [-1, 0, 0, 1], [0.0] * 4)])
    inputs = prompt(6)

    def show_sibling(mask: torch.Tensor) -> None:
        mask[..., 2, 6 + 1] = 0.0

    expected = plain(model, inputs, tree)
    found = verify(model, inputs, tree, change=show_sibling)
    torch.testing.assert_close(found[:, [0, 1, 3]], expected[:, [0, 1, 3]], rtol=0, atol=5e-5)
    assert float((found[:, 2] - expected[:, 2]).abs().max()) > 0.1


class Recorder:
    """Stands in for attention functions to see which one runs, and with what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.keys: list[torch.Size] = []
        split, dense = interface.split_attention, F.scaled_dot_product_attention

        def split_recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.calls.append("split visible" if args[6] else "split")
            return split(*args, **kwargs)

        def dense_recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.calls.append("grouped" if kwargs.get("enable_gqa") else "dense")
            self.keys.append(args[1].shape)
            return dense(*args, **kwargs)

        monkeypatch.setattr(interface, "split_attention", split_recorded)
        monkeypatch.setattr(F, "scaled_dot_product_attention", dense_recorded)


@torch.no_grad()
def test_sdpa_keeps_grouped_heads_when_armed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tree, inputs = build("qwen3", "sdpa"), random_tree([5], seed=0), prompt(6)
    recorder = Recorder(monkeypatch)
    unarmed = verify(model, inputs, tree, arm=False)
    assert recorder.calls[-1] == "dense"
    assert recorder.keys[-1][1] == 4  # transformers repeated the 2 key heads
    recorder.calls.clear()
    found = verify(model, inputs, tree)
    assert recorder.calls[-4:] == ["grouped"] * 4
    assert recorder.keys[-1][1] == 2
    torch.testing.assert_close(found, unarmed, rtol=0, atol=5e-5)


@torch.no_grad()
def test_treespec_splits_when_armed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tree = build("qwen3_sliding", "treespec"), random_tree([5], seed=0)
    recorder = Recorder(monkeypatch)
    verify(model, prompt(6), tree, arm=False)
    assert not [call for call in recorder.calls if call.startswith("split")]
    recorder.calls.clear()
    # Two full layers, then two whose window of 8 does not span 6 + 5 columns.
    verify(model, prompt(6), tree)
    assert recorder.calls[-4:] == ["split visible"] * 2 + ["split"] * 2


@torch.no_grad()
def test_a_window_overrules_a_single_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.randn(1, 4, 3, 16)
    key = torch.randn(1, 2, 12, 16)
    mask = torch.zeros(1, 1, 3, 12)
    recorder = Recorder(monkeypatch)
    module = torch.nn.Module()
    for window in (None, 12, 11):
        with armed(TreeAttention(3, prefix_visible=True)):
            interface.tree_attention_forward(module, query, key, key, mask, sliding_window=window)
    assert recorder.calls == ["split visible", "split visible", "split"]
    # Per-layer answers need to know the layer.
    with armed(TreeAttention(3, prefix_visible=[True])):
        interface.tree_attention_forward(module, query, key, key, mask)
    assert recorder.calls[-1] == "split"


@pytest.mark.parametrize("family", FAMILY_NAMES)
@torch.no_grad()
def test_unarmed_treespec_generates_as_transformers_does(family: str) -> None:
    attentions = FAMILIES[family].attentions
    reference = "sdpa" if "sdpa" in attentions else "eager"
    for inputs in (prompt(12), batch((5, 13))):
        options = {"max_new_tokens": 6, "do_sample": False}
        expected = build(family, reference).generate(**inputs, **options)
        assert build(family, "treespec").generate(**inputs, **options).tolist() == expected.tolist()


def test_unarmed_treespec_is_sdpa_bit_for_bit() -> None:
    query, key = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    expected, _ = sdpa_attention_forward(module, query, key, key, None, scaling=0.2)
    found, _ = interface.tree_attention_forward(module, query, key, key, None, scaling=0.2)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("arm", [False, True])
def test_soft_capping_is_dense_and_right(arm: bool) -> None:
    query, key = torch.randn(1, 4, 3, 16), torch.randn(1, 4, 8, 16)
    hidden = torch.rand(1, 1, 3, 8) < 0.3
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    token = ARMED.set(TreeAttention(3) if arm else None)
    found, _ = interface.tree_attention_forward(torch.nn.Module(), query, key, key, mask, scaling=0.5, softcap=2.0)
    ARMED.reset(token)
    weights = ((query @ key.mT * 0.5 / 2.0).tanh() * 2.0 + mask).softmax(-1)
    torch.testing.assert_close(found, (weights @ key).transpose(1, 2), rtol=0, atol=2e-6)


def test_flash_entries_split_when_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def flash(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        seen.append(kwargs)
        return query.transpose(1, 2), None

    monkeypatch.setitem(MAPPING, "kernels-community/flash-attn9", flash)
    install()
    function = MAPPING["kernels-community/flash-attn9"]
    assert function is not flash
    query, key = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 12, 16)
    mask = torch.zeros(1, 1, 3, 12)
    mask[..., 9:] = torch.finfo(torch.float32).min * torch.ones(3, 3).triu(1)
    with armed(TreeAttention(3, prefix_visible=True)):
        found, _ = function(torch.nn.Module(), query, key, key, mask, scaling=0.5, sliding_window=None)
    assert not seen
    dense = F.scaled_dot_product_attention(query, key, key, attn_mask=mask, scale=0.5, enable_gqa=True)
    torch.testing.assert_close(found, dense.transpose(1, 2), rtol=0, atol=2e-6)
    function(torch.nn.Module(), query, key, key, None, scaling=0.5)
    assert seen == [{"scaling": 0.5}]


def test_install_is_reversible_and_idempotent() -> None:
    uninstall()
    before, masks_before = dict(MAPPING), dict(AttentionMaskInterface._global_mapping)
    install()
    wrapped = dict(MAPPING)
    assert wrapped["sdpa"] is not before["sdpa"]
    assert wrapped["flash_attention_2"] is not before["flash_attention_2"]
    assert wrapped["paged|eager"] is before["paged|eager"]
    install()
    assert wrapped == MAPPING
    uninstall()
    assert before == MAPPING
    assert masks_before == AttentionMaskInterface._global_mapping
    uninstall()
    assert before == MAPPING


def test_an_entry_replaced_by_another_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def another(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    monkeypatch.setitem(MAPPING, "sdpa", another)
    uninstall()
    assert MAPPING["sdpa"] is another


def test_arming_ends_with_the_forward_and_stays_in_its_thread() -> None:
    found: list[TreeAttention | None] = []
    tree = TreeAttention(4)

    def fail() -> None:
        with armed(tree):
            thread = threading.Thread(target=lambda: found.append(ARMED.get()))
            thread.start()
            thread.join()
            found.append(ARMED.get())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    found.append(ARMED.get())
    assert found == [None, tree, None]


def test_other_attention_in_an_armed_forward_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    query, key = torch.randn(1, 4, 3, 16), torch.randn(1, 4, 12, 16)
    masks = [None, torch.ones(1, 1, 3, 12, dtype=torch.bool), torch.zeros(1, 1, 1, 12)]
    with armed(TreeAttention(3)):
        for mask in masks:
            MAPPING["sdpa"](torch.nn.Module(), query, key, key, mask)
    assert recorder.calls == ["dense"] * 3


def test_wrapped_functions_compile_in_one_graph() -> None:
    module = torch.nn.Module()
    query = torch.randn(1, 4, 6, 16)

    def attend(query: torch.Tensor) -> torch.Tensor:
        return MAPPING["sdpa"](module, query, query, query, None)[0]

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(query), attend(query), rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_sliding", "gemma3", "mistral"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.5)])
@torch.no_grad()
def test_armed_sdpa_on_a_gpu(family: str, dtype: torch.dtype, tolerance: float) -> None:
    reference, model = build(family, "sdpa"), build(family, "sdpa").to("cuda", dtype)
    tree, inputs = random_tree([9], seed=0), prompt(21)
    expected = plain(reference, inputs, tree)
    cache = prefilled(model, {name: tensor.cuda() for name, tensor in inputs.items()})
    masks = TreeMasks.for_config(model.config, dtype, "cuda")
    views = {}
    for layer, kind in enumerate(masks.kinds):
        columns, offset = cache.get_mask_sizes(9, layer)
        views[kind] = (offset, columns - 9)
    mask = masks.build(tree.ancestors().cuda(), tree.depths.cuda(), [21], views)
    with armed(TreeAttention(9, masks.prefix_visible)):
        found = model(
            input_ids=tree.tokens.cuda(),
            attention_mask=mask,
            position_ids=21 + tree.depths.cuda(),
            cache=cache,
            use_cache=True,
        ).logits
    torch.testing.assert_close(found.float().cpu(), expected, rtol=0, atol=tolerance)
