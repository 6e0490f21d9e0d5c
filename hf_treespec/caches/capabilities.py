"""What a cache can do for tree verification, read off its layers; everything else is refused before prefill."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from transformers import PreTrainedConfig, cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    QuantizedLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)


class UnsupportedCacheError(ValueError):
    """A cache that cannot verify draft trees; the message names the rule, the value and the fix."""


class LayerRole(Enum):
    """How a stock layer keeps its keys and values."""

    STATELESS = "keeps nothing"
    FULL = "grows"
    SLIDING = "grows up to a window"
    STATIC = "fixed tensors"
    STATIC_SLIDING = "fixed tensors of one window"
    FP8 = "appends rows of 8-bit floats under frozen scales"
    RESIDUAL = "quantises again whenever its residual rows are full"


_ROLES: dict[type[CacheLayerMixin], LayerRole] = {
    DynamicLayer: LayerRole.FULL,
    DynamicSlidingWindowLayer: LayerRole.SLIDING,
    StaticLayer: LayerRole.STATIC,
    StaticSlidingWindowLayer: LayerRole.STATIC_SLIDING,
    QuantizedLayer: LayerRole.RESIDUAL,
}
# Kinds of layers that not every supported transformers has.
if hasattr(cache_utils, "Fp8QuantizedLayer"):
    _ROLES[cache_utils.Fp8QuantizedLayer] = LayerRole.FP8
_STATELESS: Any = getattr(cache_utils, "DummyLayer", ())

_LAYER_METHODS = ("update", "get_mask_sizes", "get_seq_length")
_CACHE_METHODS = ("update", "get_mask_sizes", "get_seq_length", "get_query_offset")


def _differs(cls: type, base: type, methods: tuple[str, ...]) -> list[str]:
    return [name for name in methods if getattr(cls, name) is not getattr(base, name)]


def layer_role(layer: Any, index: int) -> LayerRole:
    """The role of a stock layer, decided by the methods its class really runs.

    Args:
        layer: A layer of a transformers cache.
        index: Its place, for messages.

    Raises:
        UnsupportedCacheError: The layer keeps states that a branch cannot be rolled back from, or is of no known kind.
    """
    cls = type(layer)
    where = f"cache layer {index} ({cls.__name__})"
    if hasattr(layer, "recurrent_states") or hasattr(cls, "update_recurrent_state"):
        raise UnsupportedCacheError(
            f"tree verification needs layers that can forget a branch, but {where} keeps convolution or recurrent "
            "states, which cannot be rolled back to a branch; use a target without recurrent layers, or generate "
            "without a drafter"
        )
    if isinstance(layer, _STATELESS):
        return LayerRole.STATELESS
    extra = sorted(name for name in dir(cls) if name.startswith("update_"))
    if extra:
        raise UnsupportedCacheError(
            f"tree verification moves keys and values only, but {where} keeps more ({', '.join(extra)}); use a "
            "target without an indexer or compressor, or generate without a drafter"
        )
    for base, role in _ROLES.items():
        if isinstance(layer, base) and not _differs(cls, base, _LAYER_METHODS):
            return role
    known = ", ".join(base.__name__ for base in _ROLES)
    raise UnsupportedCacheError(
        f"tree verification replaces layers that store like {known}, but {where} stores in its own way; pass a "
        "DynamicCache, or no cache"
    )


def check_cache(cache: Any, text_config: PreTrainedConfig) -> None:
    """Checks the cache object itself; its layers are judged by `layer_role`.

    Raises:
        UnsupportedCacheError: Encoder-decoder, offloaded, or not a cache of transformers' own behaviour.
    """
    name = type(cache).__name__
    if hasattr(cache, "cross_attention_cache") or getattr(text_config, "is_encoder_decoder", False):
        raise UnsupportedCacheError(f"tree verification is for decoder-only targets, but the cache is a {name}")
    if not isinstance(cache, Cache):
        raise UnsupportedCacheError(
            f"the cache must be a transformers Cache, not {name}; pass a DynamicCache, or no cache"
        )
    own = _differs(type(cache), Cache, _CACHE_METHODS)
    if own:
        raise UnsupportedCacheError(f"{name} has its own {', '.join(own)}; pass a DynamicCache, or no cache")
    if cache.offloading:
        raise UnsupportedCacheError(
            f"tree verification writes every layer in place, but this {name} is offloaded (offloading=True); pass a "
            "cache that stays on the device, or a quantised one"
        )


def stored_columns(layer: Any, role: LayerRole) -> tuple[Any, Any] | None:
    """Keys and values a stock layer holds, `[B, H, columns, D]` (bytes for fp8), or None where it holds none."""
    if not layer.is_initialized or int(layer.get_seq_length()) == 0:
        return None
    if role is LayerRole.FP8:
        return layer._quantized_keys[0].view(torch.uint8), layer._quantized_values[0].view(torch.uint8)
    if role in (LayerRole.STATIC, LayerRole.STATIC_SLIDING):
        columns = min(int(layer.get_seq_length()), layer.max_cache_len)
        return layer.keys[:, :, :columns], layer.values[:, :, :columns]
    return layer.keys, layer.values


def check_content(layer: Any, role: LayerRole, index: int, batch_size: int, capacity: int) -> None:
    """Checks what a layer already holds and how much it can hold.

    Args:
        batch_size: Rows of the call.
        capacity: Longest sequence of the call plus its largest tree.

    Raises:
        UnsupportedCacheError: Other rows than the call's, a static layer too small for a batch, a sliding layer that
            lost columns it would need (cropped after passing its window), groups that mix the rows of a batch.
    """
    where = f"cache layer {index} ({type(layer).__name__})"
    length = int(layer.get_seq_length())
    # A row that ends first may fill all but its last token, and the others' trees still come after it.
    needed = capacity - 1
    if role is LayerRole.STATIC and batch_size > 1 and layer.max_cache_len < needed:
        raise UnsupportedCacheError(
            f"a static cache must hold {needed} columns for the trees of a batch of {batch_size}, but {where} has "
            f"max_cache_len={layer.max_cache_len}; pass a StaticCache of {needed} columns, or no cache"
        )
    if role is LayerRole.RESIDUAL:
        axes = (layer.axis_key, layer.axis_value)
        if batch_size > 1 and axes != (0, 0):
            raise UnsupportedCacheError(
                f"in a batch of {batch_size} a quantisation group may not mix rows, but {where} groups along axes "
                f"{axes}; set axis_key=0 and axis_value=0, use the fp8 backend, or one row"
            )
        if getattr(layer, "_pending_beam_idx", None) is not None:
            raise UnsupportedCacheError(
                f"{where} waits for a beam reordering; pass a cache that no beam search has used"
            )
    content = stored_columns(layer, role)
    if content is None:
        return
    keys = content[0]
    if keys.dim() == 4 and keys.shape[0] != batch_size:
        raise UnsupportedCacheError(
            f"the cache must hold the {batch_size} rows of the call, but {where} has {len(keys)}"
        )
    if role is LayerRole.SLIDING and keys.shape[2] < min(length, layer.sliding_window - 1):
        raise UnsupportedCacheError(
            f"{where} should hold the last {min(length, layer.sliding_window - 1)} of its {length} columns but has "
            f"{keys.shape[2]}: it was cropped after passing its window; call `activate_past_recording()` before, or "
            "pass a new cache"
        )
    if isinstance(layer, StaticSlidingWindowLayer):
        # Its counter tensor follows the length until the window is full and then stands still; a crop moves both.
        counted = int(layer.cumulative_length)
        if counted < 0 or (length < layer.max_cache_len and counted != length):
            raise UnsupportedCacheError(f"{where} was cropped after passing its window; pass a new cache")
        if role is LayerRole.STATIC and length > layer.max_cache_len:
            raise UnsupportedCacheError(
                f"{where} holds the last {layer.max_cache_len} of {length} columns, fewer than its window reaches; "
                "pass a larger StaticCache, or no cache"
            )


def grow_static(cache: Cache, config: PreTrainedConfig, slots: int) -> StaticCache:
    """A fresh static cache with `slots + 1` more columns, to replace one that `generate` has just made.

    Args:
        cache: A static cache that holds nothing yet.
        config: The target's config.
        slots: Rows of the largest tree beyond its root. One column more is for batches, whose trees may come after a
            row that is already complete.

    Raises:
        ValueError: `cache` is not static, or not empty.
    """
    if not isinstance(cache, StaticCache):
        raise ValueError(f"only a StaticCache can be replaced by a larger one, not {type(cache).__name__}")
    if any(layer.is_initialized and int(layer.get_seq_length()) for layer in _with_columns(cache)):
        raise ValueError("only an empty StaticCache can be replaced by a larger one")
    columns = max(layer.max_cache_len for layer in _with_columns(cache))
    return StaticCache(config=config, max_cache_len=columns + slots + 1, offloading=cache.offloading)


def _with_columns(cache: Cache) -> list[Any]:
    return [layer for layer in cache.layers if hasattr(layer, "max_cache_len")]


__all__ = [
    "LayerRole",
    "UnsupportedCacheError",
    "check_cache",
    "check_content",
    "grow_static",
    "layer_role",
    "stored_columns",
]
