"""Exact merging of attention computed in parts, from the log-sum-exp of each part's scores.

Attention over a set of keys is the average of the attentions over its parts, weighted by exp(lse) (FlashAttention,
FlashDecoding). Everywhere here `out` is `[B, H, N, D]` and `lse` float32 `[B, H, N]`; a part that a query cannot see
has an lse of −inf, or near the lowest finite number where an additive mask hid it.
"""

from __future__ import annotations

import torch


def merge(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges two partial attentions `(out, lse)` over disjoint keys into that over all of them.

    Returns:
        `(out, lse)`, both float32 unless the outputs are wider. Queries that see neither part get zeros and −inf where
        both lse are −inf.
    """
    (out_a, lse_a), (out_b, lse_b) = first, second
    # With both at −inf the differences would be NaN; any finite reference gives the weights 0 and 0.
    reference = torch.maximum(lse_a, lse_b).clamp(min=torch.finfo(lse_a.dtype).min)
    weight_a, weight_b = (lse_a - reference).exp(), (lse_b - reference).exp()
    total = weight_a + weight_b
    lse = reference + total.log()
    # Dividing, rather than subtracting lse in the exponent, keeps the weights' sum 1 when lse is large.
    total = total.masked_fill(total == 0, 1.0)
    weight_a, weight_b = (weight_a / total).unsqueeze(-1), (weight_b / total).unsqueeze(-1)
    # A kernel may leave NaN in rows that saw nothing, and NaN · 0 is NaN.
    merged = (out_a * weight_a).masked_fill(weight_a == 0, 0.0) + (out_b * weight_b).masked_fill(weight_b == 0, 0.0)
    return merged, lse


def apply_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds attention sinks: a logit per head, `[H]`, that takes part in the softmax and holds no value (GPT-OSS).

    The output shrinks by exp(lse − logaddexp(lse, sink)), which is sigmoid(lse − sink).
    """
    sink = sinks.to(lse.dtype).view(1, -1, 1)
    scaled = out * torch.sigmoid(lse - sink).unsqueeze(-1)
    return scaled.to(out.dtype), torch.logaddexp(lse, sink)
