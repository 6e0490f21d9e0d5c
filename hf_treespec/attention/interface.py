"""Tree attention as transformers sees it: a registered implementation, and wrappers of the implementations in use.

Both act only while a verification forward of ours has armed them; at any other time the original functions run
untouched, so another forward of the same target (inside a logits processor, in another thread) never notices.

Attention over a tree is split: the prefix, for which no mask is needed where every node sees all of it, and the N
columns of the tree, merged exactly through their log-sum-exp. `scaled_dot_product_attention` has no maskless kernel
for queries that follow a past, and flash kernels take no tree mask; the split gives both the fast kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .backends import MathBackend, cast_mask, choose_backend
from .merging import apply_sinks, merge

NAME = "treespec"
AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True)
class TreeAttention:
    """What attention must know about the verification forward under way.

    Attributes:
        nodes: Columns of the tree, the last of every layer's keys: the nodes, and any extra rows behind them.
        prefix_visible: Whether every query sees every column before those; one answer, or one per decoder layer.
            False is always safe.
        split: Whether "sdpa" is computed in two parts; None = as is usual on the device.
    """

    nodes: int
    prefix_visible: bool | Sequence[bool] = False
    split: bool | None = None

    def sees_prefix(self, module: torch.nn.Module) -> bool:
        """Whether the prefix needs no mask in this attention module."""
        if isinstance(self.prefix_visible, bool):
            return self.prefix_visible
        layer = getattr(module, "layer_idx", None)
        return layer is not None and self.prefix_visible[layer]


#: The verification forward under way in this context, if any.
ARMED: ContextVar[TreeAttention | None] = ContextVar("hf_treespec_tree_attention", default=None)


@contextmanager
def armed(tree: TreeAttention) -> Iterator[None]:
    """Makes attention treat forwards of this context as the verification of a tree."""
    token = ARMED.set(tree)
    try:
        yield
    finally:
        ARMED.reset(token)


def split_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    nodes: int,
    scale: float,
    prefix_visible: bool,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over prefix and tree apart, merged exactly.

    Args:
        query: `[B, H, N, D]`.
        key: `[B, Hk, S + nodes, D]`, the tree's columns last.
        value: `[B, Hk, S + nodes, D]`.
        mask: Additive `[B or 1, 1 or H, N, S + nodes]`.
        nodes: Columns of the tree.
        scale: Factor of the scores.
        prefix_visible: Whether the mask's first S columns hide nothing, so that it need not be read.
        sinks: Sink logits `[H]`, or None.

    Returns:
        `[B, H, N, D]` in the query's dtype.
    """
    if not query.dtype == key.dtype == value.dtype:
        # Autocast leaves rotated queries and keys in float32; kernels take one dtype.
        query, key = query.to(value.dtype), key.to(value.dtype)
    prefix = key.shape[2] - nodes
    # The tree part is a few rows by a few columns: on a GPU plain operations do, whatever dtype and mask.
    tree = MathBackend() if query.device.type != "cpu" else choose_backend(query, value, masked=True)
    part = tree.attend(query, key[:, :, prefix:], value[:, :, prefix:], mask[..., prefix:], scale)
    if prefix:  # an empty prefix crashes kernels
        seen = None if prefix_visible else mask[..., :prefix]
        backend = choose_backend(query, value, masked=seen is not None)
        part = merge(backend.attend(query, key[:, :, :prefix], value[:, :, :prefix], seen, scale), part)
    if sinks is not None:
        part = apply_sinks(*part, sinks)
    return part[0].to(query.dtype)


def tree_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention registered as "treespec".

    Armed, it splits. Unarmed it is transformers' "sdpa", except for what that lacks: sinks (`s_aux`) and soft-capping
    (`softcap`) are computed by our backends.
    """
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    tree = _applicable(query, key, attention_mask)
    if tree is None and softcap is None and sinks is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if tree is not None and softcap is None:
        assert attention_mask is not None
        visible = _sees_prefix(tree, module, key, kwargs)
        out = split_attention(query, key, value, attention_mask, tree.nodes, scale, visible, sinks)
        return out.transpose(1, 2).contiguous(), None
    mask = _dense_mask(module, query, key, attention_mask, kwargs)
    backend = choose_backend(query, value, mask is not None) if softcap is None else MathBackend(softcap)
    out, lse = backend.attend(query, key, value, mask, scale)
    if sinks is not None:
        out, lse = apply_sinks(out, lse, sinks)
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


#: Of every wrapped entry of the registry: the original function and our wrapper.
_wrapped: dict[str, tuple[AttentionFunction, AttentionFunction]] = {}


def install() -> None:
    """Registers "treespec" and wraps the registered "sdpa", flex and flash implementations.

    Idempotent; call it again once new implementations (Hub kernels) may have been registered. The class-wide mapping
    is the one wrapped: every instance of the registry falls back to it, and models look functions up at every call.
    """
    AttentionInterface.register(NAME, tree_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    for name, function in list(AttentionInterface._global_mapping.items()):
        if name in _wrapped and function is _wrapped[name][1]:
            continue
        if name == "sdpa":
            wrapper = _wrap(function, None)
        elif not name.startswith("paged|") and ("flash" in name or name == "flex_attention"):
            wrapper = _wrap(function, tree_attention_forward)
        else:
            continue
        _wrapped[name] = function, wrapper
        AttentionInterface.register(name, wrapper)


def uninstall() -> None:
    """Gives the registry back the functions that `install` wrapped, and removes "treespec"."""
    for name, (original, wrapper) in _wrapped.items():
        # An entry replaced since then belongs to whoever replaced it.
        if AttentionInterface._global_mapping.get(name) is wrapper:
            AttentionInterface.register(name, original)
    _wrapped.clear()
    AttentionInterface._global_mapping.pop(NAME, None)
    AttentionMaskInterface._global_mapping.pop(NAME, None)


def _wrap(original: AttentionFunction, armed_function: AttentionFunction | None) -> AttentionFunction:
    """`original`, except in armed forwards; `armed_function` None stands for what suits "sdpa"."""

    @functools.wraps(original)
    def wrapper(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # Compiled targets keep the graph they had: a context variable is not for a graph to read.
        function = original
        if not torch.compiler.is_compiling():
            tree = _applicable(query, key, attention_mask)
            if tree is not None:
                function = armed_function or _tree_sdpa(tree, original, query, kwargs)
        return function(module, query, key, value, attention_mask, **kwargs)

    return wrapper


def kinds_of_attention(implementation: str | None, device: torch.device) -> tuple[bool, ...]:
    """The kinds that an armed forward can choose from, the usual one first: whether each is split."""
    usual = device.type == "cuda" or implementation == NAME
    return (usual, not usual) if implementation == "sdpa" and device.type in _SDPA_DEVICES else (usual,)


#: Devices on which an armed "sdpa" is one of ours.
_SDPA_DEVICES = ("cpu", "cuda")


def _tree_sdpa(
    tree: TreeAttention, original: AttentionFunction, query: torch.Tensor, kwargs: dict[str, Any]
) -> AttentionFunction:
    """What replaces "sdpa" in an armed forward: usually the split on CUDA, one dense call on the CPU."""
    get, device = kwargs.get, query.device.type
    if get("s_aux") is not None or get("softcap") is not None or get("position_bias") is not None:
        return original
    if device not in _SDPA_DEVICES:
        return original
    split = device == "cuda" if tree.split is None else tree.split
    return tree_attention_forward if split else _grouped_sdpa


def _grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Dense attention that leaves grouped heads alone; transformers would repeat keys and values."""
    mask = None if attention_mask is None else cast_mask(attention_mask, query.dtype)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def _applicable(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> TreeAttention | None:
    """The armed tree, if this attention is its target's: with an additive mask of exactly these queries and keys."""
    tree = ARMED.get()
    if tree is None or mask is None or mask.ndim != 4 or not mask.is_floating_point():
        return None
    fits = mask.shape[2] == query.shape[2] and mask.shape[3] == key.shape[2] >= tree.nodes
    return tree if fits else None


def _sees_prefix(tree: TreeAttention, module: torch.nn.Module, key: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    # A lone True may have been said with full attention in mind: a window shorter than the keys overrules it.
    window = kwargs.get("sliding_window")
    return tree.sees_prefix(module) and (window is None or key.shape[2] - 1 < window)


def _dense_mask(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """The additive form of the mask that "sdpa" would be given, causality included."""
    if mask is None:
        causal = kwargs.get("is_causal")
        if query.shape[2] == 1 or not (getattr(module, "is_causal", True) if causal is None else causal):
            return None
        # Without a mask queries and keys start together; keys beyond the queries are empty slots of a static cache.
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    if mask.dtype != torch.bool:
        return mask
    lowest = torch.finfo(query.dtype).min
    return torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, lowest)
