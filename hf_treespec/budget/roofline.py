"""What a forward costs at best: its FLOPs and bytes, and the device's peaks.

A forward takes the longer of its compute and its memory traffic (the roofline; for draft trees BASTION,
arXiv 2605.29727). Both are counted from the model's own parameters, so quantised weights, shared heads and mixtures
of experts need no table.
"""

from __future__ import annotations

import functools
import statistics
import time
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

#: Rows of a forward: a number, or an array or tensor of numbers.
Count = TypeVar("Count", float, np.ndarray, torch.Tensor)


@dataclass(frozen=True)
class AttentionLayers:
    """Layers that attend over the same span.

    Args:
        layers: How many.
        window: Context columns they see; None for all.
        pair_flops: FLOPs of one query with one key in one layer: scores and values of all heads.
        column_bytes: Bytes of one cached column in one layer, K and V.
    """

    layers: int
    window: int | None
    pair_flops: float
    column_bytes: float


@dataclass(frozen=True)
class Workload:
    """FLOPs and bytes of one verification forward.

    Args:
        row_flops: FLOPs of a row in all matrices; attention's scores excluded.
        weight_bytes: Bytes read once a forward, whatever its rows.
        row_bytes: Activation bytes a row moves through the matrices.
        expert_bytes: Bytes of all routed experts of all layers.
        experts: Routed experts of a layer; 0 for a dense model.
        experts_per_row: Experts that a row is routed to.
        attention: Layers whose cost grows with the context.
        riding_per_node: What the rows cost that ride behind a node, in rows of the whole forward.
    """

    row_flops: float
    weight_bytes: float
    row_bytes: float = 0.0
    expert_bytes: float = 0.0
    experts: int = 0
    experts_per_row: int = 0
    attention: tuple[AttentionLayers, ...] = ()
    riding_per_node: float = 0.0

    def flops(self, rows: Count, context: int, batch: int = 1, riding: bool = False) -> Count:
        """FLOPs of a forward.

        Args:
            rows: Nodes verified for each row of the batch, N.
            context: Cached columns, c.
            batch: Rows of the batch, b.
            riding: Whether nodes bring rows of the drafter's own along.
        """
        rows = self._with_riding(rows, riding)
        total = rows * batch * self.row_flops
        for group in self.attention:
            seen = rows + _span(group, context)
            total = total + rows * seen * (batch * group.layers * group.pair_flops)
        return total

    def bytes(self, rows: Count, context: int, batch: int = 1, riding: bool = False) -> Count:
        """Bytes of a forward; arguments as for `flops`."""
        rows = self._with_riding(rows, riding)
        total = rows * batch * self.row_bytes + self.weight_bytes
        if self.experts:
            # Expected share of the experts that at least one of the rows is routed to.
            missed = (1 - self.experts_per_row / self.experts) ** (rows * batch)
            total = total + (1 - missed) * self.expert_bytes
        for group in self.attention:
            seen = rows + _span(group, context)
            total = total + seen * (batch * group.layers * group.column_bytes)
        return total

    def _with_riding(self, rows: Count, riding: bool) -> Count:
        return rows * (1 + self.riding_per_node) if riding else rows

    @classmethod
    def from_model(
        cls, model: nn.Module, riding_per_node: float = 0.0, kv_dtype: torch.dtype | None = None
    ) -> Workload:
        """Counts a causal LM's text part.

        Whatever the config does not say is left out: of an unknown architecture all matrices are read once and
        multiplied with every row.

        Args:
            model: The target.
            riding_per_node: What the rows cost that ride behind a node, in rows of the whole forward.
            kv_dtype: Dtype of the cached K/V; by default the model's.
        """
        config = _text_config(model)
        dtype = getattr(model, "dtype", None)
        width = (dtype if isinstance(dtype, torch.dtype) else torch.float32).itemsize
        experts = _first_int(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts") or 0
        routed = _first_int(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k") or 0
        if not 0 < routed < experts:
            experts = routed = 0
        row_flops = weight_bytes = row_bytes = expert_bytes = 0.0
        for matrix in _matrices(model):
            share = 1.0
            if experts and matrix.routed:
                share = routed / experts
                expert_bytes += matrix.bytes
            else:
                weight_bytes += matrix.bytes
            row_flops += 2 * matrix.elements * share
            row_bytes += matrix.ports * share * width
        return cls(
            row_flops,
            weight_bytes,
            row_bytes,
            expert_bytes,
            experts,
            routed,
            _attention(config, width if kv_dtype is None else kv_dtype.itemsize),
            riding_per_node,
        )


@dataclass(frozen=True)
class DevicePeak:
    """What a device reaches at best: FLOPs and bytes a second."""

    flops_per_second: float
    bytes_per_second: float


@functools.cache
def measure_peak(device: torch.device | str, dtype: torch.dtype) -> DevicePeak:
    """Times a matrix product and a large copy, once a process for a device and dtype; some tens of milliseconds."""
    device = torch.device(device)
    accelerated = device.type != "cpu"
    side, count = (4096, 2**28) if accelerated else (384, 2**24)
    left = torch.ones(side, side, device=device, dtype=dtype)
    source = torch.zeros(count, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    product = _seconds(device, lambda: left @ left)
    copy = _seconds(device, lambda: target.copy_(source))
    return DevicePeak(2 * side**3 / product, 2 * count / copy)


def _seconds(device: torch.device, work: Any) -> float:
    taken = []
    for _ in range(6):
        _synchronize(device)
        began = time.perf_counter()
        work()
        _synchronize(device)
        taken.append(time.perf_counter() - began)
    return max(statistics.median(taken[1:]), 1e-9)  # the first one warms up


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass(frozen=True)
class _Matrix:
    """A matrix of the model: bytes as stored, elements as multiplied, inputs plus outputs of a row."""

    bytes: float
    elements: float
    ports: float
    routed: bool


def _matrices(model: nn.Module) -> list[_Matrix]:
    """The parameters a decoding step uses: the decoder and the head, shared ones once, embeddings left out."""
    decoder, head = _call(model, "get_decoder"), _call(model, "get_output_embeddings")
    parts = [part for part in (decoder, head) if part is not None] if decoder is not None else [model]
    found: list[_Matrix] = []
    counted: set[int] = set()
    for part in parts:
        for name, module in part.named_modules():
            if isinstance(module, nn.Embedding):
                continue  # looked up, not read; a head that shares it is read
            tensors = list(module.parameters(recurse=False))
            routed = "experts" in name.split(".")
            fan_in, fan_out = getattr(module, "in_features", None), getattr(module, "out_features", None)
            if isinstance(fan_in, int) and isinstance(fan_out, int):
                # Quantised layers pack their elements, some into buffers: the sides are the layer's own.
                stored = [t for t in (*tensors, *module.buffers(recurse=False)) if id(t) not in counted]
                if stored:
                    found.append(_Matrix(_bytes(stored), fan_in * fan_out, fan_in + fan_out, routed))
                    counted.update(map(id, stored))
                continue
            for tensor in tensors:
                if id(tensor) in counted:
                    continue
                counted.add(id(tensor))
                wide = tensor.ndim > 1
                many = tensor.shape[0] if tensor.ndim > 2 else 1
                ports = many * sum(tensor.shape[-2:]) if wide else 0
                found.append(_Matrix(_bytes([tensor]), tensor.numel() if wide else 0, ports, routed))
    return found


def _attention(config: Any, width: int) -> tuple[AttentionLayers, ...]:
    """Groups the layers by window; empty where the config does not tell."""
    layers = _first_int(config, "num_hidden_layers", "n_layer", "n_layers")
    heads = _first_int(config, "num_attention_heads", "n_head", "n_heads")
    hidden = _first_int(config, "hidden_size", "n_embd", "d_model")
    if not layers or not heads or not hidden:
        return ()
    size = _first_int(config, "head_dim") or hidden // heads
    shared = _first_int(config, "num_key_value_heads") or heads
    window = _first_int(config, "sliding_window", "attention_chunk_size")
    types = getattr(config, "layer_types", None)
    if not types:
        slides = window is not None and getattr(config, "use_sliding_window", True)
        types = ["sliding_attention" if slides else "full_attention"] * layers
    groups: dict[int | None, int] = {}
    for kind in types:
        if "attention" not in kind or "linear" in kind:
            continue  # recurrent and convolutional layers have no context to read
        span = None if kind == "full_attention" else window
        groups[span] = groups.get(span, 0) + 1
    return tuple(
        AttentionLayers(count, span, 4.0 * heads * size, 2.0 * shared * size * width) for span, count in groups.items()
    )


def _span(group: AttentionLayers, context: int) -> int:
    return context if group.window is None else min(context, group.window)


def _bytes(tensors: list[torch.Tensor]) -> float:
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _first_int(config: Any, *names: str) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _call(model: nn.Module, name: str) -> nn.Module | None:
    """Asks an optional accessor; models raise all kinds of errors for what they do not have."""
    try:
        part = getattr(model, name)()
    except (AttributeError, NotImplementedError, TypeError, KeyError):
        return None
    return part if isinstance(part, nn.Module) else None
