"""Caches that cannot verify trees are refused before anything is touched, with the rule, the value and the fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import LAYERS, WINDOW
from transformers import DynamicCache, EncoderDecoderCache, QuantizedCache, StaticCache
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
    MtpCache,
    StaticIndexedLayer,
)
from tree_reference import CAPACITY, RoundingLayer, model_of, prefill, prompts

from hf_treespec.caches import TreeCache, UnsupportedCacheError, grow_static


class Compressed(DynamicLayer):
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(key_states[:, :, ::2], value_states[:, :, ::2])


def offloaded() -> Cache:
    cache = DynamicCache()
    cache.offloading = True
    return cache


def cropped_sliding() -> Cache:
    """More columns removed than were recorded: what a window needs is gone, and stock does not notice."""
    layer = DynamicSlidingWindowLayer(sliding_window=WINDOW)
    layer.update(torch.zeros(1, 2, 20, 4), torch.zeros(1, 2, 20, 4))
    layer.activate_past_recording()
    layer.crop(-3)
    return Cache(layers=[layer])


def static_sliding(columns: int, crop: int) -> Cache:
    cache = StaticCache(config=model_of("mistral").config, max_cache_len=columns)
    for index in range(LAYERS):
        cache.update(torch.zeros(1, 2, 10, 16), torch.zeros(1, 2, 10, 16), index)
    cache.crop(-crop)
    return cache


def axes(*values: int) -> Cache:
    layer = RoundingLayer()
    layer.axis_key, layer.axis_value = values
    return Cache(layers=[layer])


def uneven() -> Cache:
    cache = DynamicCache()
    for index, length in enumerate((3, 4)):
        cache.update(torch.zeros(1, 2, length, 4), torch.zeros(1, 2, length, 4), index)
    return cache


@pytest.mark.parametrize(
    ("make", "batch", "message"),
    [
        (lambda: Cache(layers=[LinearAttentionLayer()]), 1, "cannot be rolled back to a branch"),
        (lambda: Cache(layers=[DynamicLayer(), LinearAttentionAndFullAttentionLayer()]), 1, "layer 1 .*rolled back"),
        (lambda: Cache(layers=[DynamicIndexedLayer()]), 1, "update_indexer"),
        (lambda: Cache(layers=[StaticIndexedLayer(8)]), 1, "update_indexer"),
        (lambda: Cache(layers=[Compressed()]), 1, "stores in its own way"),
        (lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()), 1, "decoder-only"),
        (lambda: MtpCache(), 1, "own get_mask_sizes, get_query_offset"),
        (lambda: ((torch.zeros(1), torch.zeros(1)),), 1, "not tuple"),
        (offloaded, 1, "offloading=True"),
        (cropped_sliding, 1, "hold the last 7 .* but has 4.*cropped"),
        (lambda: static_sliding(32, 4), 1, "cropped after passing its window"),
        (lambda: static_sliding(6, 0), 1, "last 6 of 10 columns"),
        (lambda: axes(0, 1), 2, r"axes \(0, 1\)"),
        (uneven, 1, r"lengths are \[3, 4\]"),
        (uneven, 2, "2 rows of the call, but .* has 1"),
        (lambda: StaticCache(config=model_of("qwen3").config, max_cache_len=CAPACITY - 2), 2, "max_cache_len=94"),
    ],
)
def test_refused(make: Any, batch: int, message: str) -> None:
    cache = make()
    before = list(getattr(cache, "layers", ()))
    with pytest.raises(UnsupportedCacheError, match=message):
        TreeCache.attach(cache, model_of("mistral").config, batch, CAPACITY)
    assert list(getattr(cache, "layers", ())) == before


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (lambda: axes(0, 1), 1),
        (lambda: axes(0, 0), 2),
        (lambda: StaticCache(config=model_of("qwen3").config, max_cache_len=CAPACITY - 1), 2),
        (lambda: StaticCache(config=model_of("qwen3").config, max_cache_len=4), 1),
        (lambda: StaticCache(config=model_of("mistral").config, max_cache_len=WINDOW), 2),
    ],
)
def test_accepted(make: Any, batch: int) -> None:
    config = model_of("mistral").config
    assert TreeCache.attach(make(), config, batch, CAPACITY).lengths == [0] * batch


def test_lockstep_is_for_batches_of_residual_layers() -> None:
    config = model_of("qwen3").config
    assert TreeCache.attach(axes(0, 0), config, 2, CAPACITY).requires_lockstep
    assert not TreeCache.attach(axes(0, 0), config, 1, CAPACITY).requires_lockstep
    assert not TreeCache.attach(QuantizedCache("fp8", config), config, 2, CAPACITY).requires_lockstep


@pytest.mark.parametrize(("family", "columns"), [("qwen3", 25), ("gemma3", 25), ("gemma3", 5), ("mistral", WINDOW)])
def test_grow_static(family: str, columns: int) -> None:
    model = model_of(family)
    cache = StaticCache(config=model.config, max_cache_len=columns)
    larger = TreeCache.grow_static(cache, model.config, 6)
    for old, new in zip(cache.layers, larger.layers, strict=True):
        assert type(new) is type(old)
        assert new.max_cache_len == (WINDOW if new.is_sliding else columns + 7)
    # Longest sequence of 26 tokens, trees of 7: just what a batch needs.
    TreeCache.attach(larger, model.config, 2, columns + 1 + 7)


def test_grow_static_refuses_what_is_in_use() -> None:
    model = model_of("qwen3")
    cache = StaticCache(config=model.config, max_cache_len=25)
    prefill(model, cache, *prompts([4]))
    with pytest.raises(ValueError, match="empty"):
        grow_static(cache, model.config, 6)
    with pytest.raises(ValueError, match="not DynamicCache"):
        grow_static(DynamicCache(), model.config, 6)
