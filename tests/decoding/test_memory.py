"""What a call with a drafter holds and writes beyond plain decoding."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from models import build, dflash, prompt, target
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from hf_treespec.compat import CACHE_KEYWORD
from hf_treespec.decoding import contexts

PROMPT, NODES, NEW = 4096, 16, 24


class StorageMeter(TorchDispatchMode):
    """Follows the bytes of all storages created inside it, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live: set[int] = set()
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._track(tensor.untyped_storage())
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.live or not size:
            return
        self.live.add(key)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.live.discard(key)
        self.bytes -= size


def peak_bytes(model: Any, inputs: Any, **options: Any) -> int:
    gc.collect()
    with StorageMeter() as meter:
        model.generate(**inputs, do_sample=False, max_new_tokens=NEW, **options)
    return meter.peak


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_peak_on_a_long_prompt(family: str) -> None:
    """Above plain: the drafter's K/V, one fused feature a prompt token, and the tree's rows."""
    model = build(family, max_position_embeddings=PROMPT + 512)
    drafter = dflash(family).with_options(budget=NODES)
    inputs = prompt(PROMPT)
    plain = peak_bytes(model, inputs)
    assisted = peak_bytes(model, inputs, assistant_model=drafter)
    config = drafter.config
    layer_kv = 4 * 2 * config.num_key_value_heads * config.head_dim
    draft_kv = config.num_hidden_layers * layer_kv * 2 * PROMPT  # buffers double when they grow
    features = 4 * PROMPT * config.hidden_size
    slack = 600 * 4 * 2 * 4 * 2 * 16  # cache headroom for the answer: columns x layers x (K, V) x heads x width, fp32
    tree_rows = NODES * 4 * (64 * 8 + 97 * 4) * 4
    assert assisted - plain <= draft_kv + features + slack + tree_rows


def test_cache_bytes_a_round_do_not_grow_with_the_prefix() -> None:
    model = target("qwen3")
    drafter = dflash("qwen3").with_options(budget=NODES)
    row_bytes = 4 * 2 * 2 * 16 * 4  # layers x (K, V) x heads x width x fp32
    for length in (32, 400):
        model.generate(**prompt(length), do_sample=False, max_new_tokens=40, assistant_model=drafter)
        report = drafter.last_report
        assert 0 < report.cache_bytes_written <= 3 * NODES * row_bytes * report.rounds


def test_a_drafter_keeps_nothing_of_a_call_alive() -> None:
    model = build("qwen3")
    drafter = copy.copy(dflash("qwen3"))
    model.generate(**prompt(), do_sample=False, max_new_tokens=12, assistant_model=drafter)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_a_context_lives_as_long_as_its_cache() -> None:
    model, drafter = target("qwen3"), dflash("qwen3")
    gc.collect()
    before = len(contexts._CONTEXTS)
    cache = DynamicCache(config=model.config)
    options = {"do_sample": False, "max_new_tokens": 12, CACHE_KEYWORD: cache}
    out = model.generate(**prompt(), assistant_model=drafter, **options)
    assert len(contexts._CONTEXTS) == before + 1
    del cache, out, options
    gc.collect()
    assert len(contexts._CONTEXTS) == before


def test_a_context_keeps_no_target_alive() -> None:
    model, drafter = build("qwen3"), dflash("qwen3")
    cache = DynamicCache(config=model.config)
    options = {"do_sample": False, "max_new_tokens": 12, CACHE_KEYWORD: cache}
    out = model.generate(**prompt(), assistant_model=drafter, **options)
    head, embedding = weakref.ref(model.lm_head), weakref.ref(model.get_input_embeddings())
    assert cache in contexts._CONTEXTS
    del model, out, options
    gc.collect()
    assert head() is None
    assert embedding() is None
