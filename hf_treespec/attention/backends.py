"""Attention kernels that also return the log-sum-exp of their scores, behind one signature.

Every backend's `attend` takes `query [B, H, N, D]`, `key` and `value [B, Hk, S, D]` with S > 0 and `Hk` dividing `H`,
an additive mask `[B or 1, 1 or H, N, S]` or None, and a scale; it returns `out [B, H, N, D]`, in the query's dtype or
in float32, and float32 `lse [B, H, N]`. Keys and values are never repeated for grouped queries: the queries of a group
are packed as more rows of their key head.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import torch

Partial = tuple[torch.Tensor, torch.Tensor]
#: A flash kernel: `query [B, N, H, D]`, `key` and `value [B, S, Hk, D]`, scale → `out [B, N, H, D]`, lse.
FlashKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Partial]


class Backend(Protocol):
    """A way to compute attention together with its lse."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
    ) -> Partial: ...


class MathBackend:
    """Plain tensor operations in float32: any device, dtype, head size and mask; the only one with soft-capping."""

    def __init__(self, softcap: float | None = None) -> None:
        self.softcap = softcap

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> Partial:
        batch, heads, rows, _ = query.shape
        packed = pack_groups(query, key.shape[1])
        scores = packed.float() @ key.float().transpose(-1, -2) * scale
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh() * self.softcap
        scores = scores.view(batch, heads, rows, -1)
        if mask is not None:
            scores = scores + mask.float()
        lse = scores.logsumexp(-1)
        # A row that sees nothing has lse −inf, and −inf − −inf is NaN.
        weights = (scores - lse.clamp(min=torch.finfo(torch.float32).min).unsqueeze(-1)).exp()
        out = pack_groups(weights, key.shape[1]) @ value.float()
        return out.view(batch, heads, rows, -1), lse


class SdpaBackend:
    """The kernels behind `scaled_dot_product_attention` that take a mask: flash on CPU, memory-efficient on CUDA."""

    @staticmethod
    def supports(query: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether there is a kernel for such heads (at least one of them; training is not asked for)."""
        same_size = query.shape[-1] == value.shape[-1]
        if query.device.type == "cpu":
            return same_size
        return query.device.type == "cuda" and query.shape[-1] % 8 == 0 and value.shape[-1] % 8 == 0

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> Partial:
        batch, heads, rows, _ = query.shape
        groups = key.shape[1]
        if mask is not None:
            mask = cast_mask(mask, query.dtype)
        if query.device.type == "cpu":
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            if mask is not None:
                # The kernel maps query heads to key heads itself; packing would repeat the mask.
                return kernel(query, key, value, attn_mask=mask, scale=scale)
            out, lse = kernel(pack_groups(query, groups), key, value, scale=scale)
        else:
            bias = None
            if mask is not None:
                per_head = mask.shape[1] > 1
                bias = pack_groups(mask, groups) if per_head else mask.repeat(1, 1, heads // groups, 1)
                bias = align_bias(bias).expand(batch, groups, -1, -1)
            out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
                pack_groups(query, groups), key, value, bias, True, scale=scale
            )[:2]
            # Its lse is padded to whole blocks of queries, and need not be a number where a row saw nothing.
            lse = lse_by_row(lse, rows * heads // groups)
            lse = lse.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
        return out.reshape(batch, heads, rows, -1), lse.reshape(batch, heads, rows)


class FlashBackend:
    """A flash kernel without mask, in half precision: the `flash_attn` package, or the one built into torch."""

    def __init__(self, kernel: FlashKernel | None = None) -> None:
        self.kernel = kernel or _flash_kernel()

    @staticmethod
    def supports(query: torch.Tensor, value: torch.Tensor) -> bool:
        size = query.shape[-1]
        half = query.dtype in (torch.float16, torch.bfloat16)
        return query.device.type == "cuda" and half and size % 8 == 0 and size == value.shape[-1] <= 256

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> Partial:
        if mask is not None:
            raise ValueError("flash kernels take no mask")
        batch, heads, rows, _ = query.shape
        groups = key.shape[1]
        packed = pack_groups(query, groups)
        out, lse = self.kernel(packed.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale)
        lse = normalise_lse(lse, batch, groups, packed.shape[2])
        return out.transpose(1, 2).reshape(batch, heads, rows, -1), lse.reshape(batch, heads, rows)


def choose_backend(query: torch.Tensor, value: torch.Tensor, masked: bool) -> Backend:
    """The best backend for these heads, on this device, with or without a mask."""
    if not masked and FlashBackend.supports(query, value) and _flash_works(query.device):
        return _flash_backend()
    if SdpaBackend.supports(query, value):
        return SdpaBackend()
    return MathBackend()


def pack_groups(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """`[B, H, N, D]` to `[B, groups, H / groups · N, D]`: query heads that share a key head become its rows."""
    batch, heads, rows, size = tensor.shape
    if heads == groups:
        return tensor
    return tensor.reshape(batch, groups, heads // groups * rows, size)


def cast_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An additive mask in a kernel's dtype, still finite: −inf spoils the lse of rows that see nothing."""
    return mask if mask.dtype == dtype else mask.clamp(min=torch.finfo(dtype).min).to(dtype)


def align_bias(bias: torch.Tensor) -> torch.Tensor:
    """The bias with lines that start at multiples of 16 bytes, as the memory-efficient kernel wants."""
    unit = 16 // bias.element_size()
    strides = [stride for stride, length in zip(bias.stride()[:-1], bias.shape[:-1], strict=True) if length > 1]
    if bias.stride(-1) == 1 and bias.storage_offset() % unit == 0 and all(stride % unit == 0 for stride in strides):
        return bias
    padded = torch.nn.functional.pad(bias, (0, -bias.shape[-1] % unit)) if bias.shape[-1] % unit else bias.clone()
    return padded.contiguous()[..., : bias.shape[-1]]


def lse_by_row(lse: torch.Tensor, rows: int) -> torch.Tensor:
    """From `[B, H, ≥ rows]` (dense flash kernels; padded by the memory-efficient one) or `[B, H, rows, 1]` (cuDNN)."""
    if lse.ndim == 4:
        lse = lse.squeeze(-1)
    return lse[..., :rows]


def lse_heads_first(lse: torch.Tensor, batch: int) -> torch.Tensor:
    """From `[H, B · N]`: variable-length kernels of flash_attn ≥ 2.6 and torch."""
    return lse.view(len(lse), batch, -1).transpose(0, 1)


def lse_tokens_first(lse: torch.Tensor, batch: int) -> torch.Tensor:
    """From `[B · N, H]`: the layout that torch documents for `varlen_attn`."""
    return lse.view(batch, -1, lse.shape[1]).transpose(1, 2)


def normalise_lse(lse: torch.Tensor, batch: int, heads: int, rows: int) -> torch.Tensor:
    """Any documented layout to `[B, H, N]`. Where `H = B · N` leaves both flat ones possible, heads come first."""
    if lse.ndim >= 3:
        return lse_by_row(lse, rows)
    return lse_heads_first(lse, batch) if lse.shape == (heads, batch * rows) else lse_tokens_first(lse, batch)


def _flash_kernel() -> FlashKernel:
    """The installed flash kernel."""
    if importlib.util.find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_func  # type: ignore[import-not-found, import-untyped, unused-ignore]

        def package(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> Partial:
            result: Any = flash_attn_func(query, key, value, softmax_scale=scale, return_attn_probs=True)
            return result[0], result[1]

        return package
    return _torch_flash


def _torch_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> Partial:
    result = torch.ops.aten._flash_attention_forward(
        query, key, value, None, None, query.shape[1], key.shape[1], 0.0, False, False, scale=scale
    )
    return result[0], result[1]


@functools.cache
def _flash_backend() -> FlashBackend:
    return FlashBackend()


@functools.cache
def _flash_works(device: torch.device) -> bool:
    """Whether the flash kernel runs on a device at all; builds and GPUs without it say so only when called."""
    probe = torch.zeros(1, 1, 16, 64, dtype=torch.float16, device=device)
    try:
        _flash_backend().attend(probe, probe, probe, None, 1.0)
    except (RuntimeError, NotImplementedError, ImportError):
        return False
    return True
