"""How the rows of a block attend: to a context of which they see all or a window, and to one another."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def block_mask(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    valid: torch.Tensor | None,
    window: int | None,
    is_causal: bool,
    window_from: str = "row",
) -> torch.Tensor | None:
    """Which columns block rows see, bool `[B or 1, 1, S or 1, columns]`; None = all of them.

    Args:
        query_positions: Positions of the block rows, `[B or 1, S]`.
        key_positions: Positions of the columns, `[B or 1, columns]`; the block's are the last S.
        valid: Columns that hold something, bool `[B, columns]`; None = all.
        window: Positions a row reaches back, itself included; None = all.
        is_causal: Whether a block row sees only block rows up to itself.
        window_from: Of `"anchor"`, the window is that many positions before the block, and the block besides.
    """
    mask = None if valid is None else valid[:, None, None]
    if window is not None and key_positions.shape[1] > window:
        origins = query_positions if window_from == "row" else query_positions[:, :1] - 1
        near = origins[:, None, :, None] - key_positions[:, None, None] < window
        mask = near if mask is None else mask & near
    if is_causal:
        past = query_positions[:, None, :, None] >= key_positions[:, None, None]
        mask = past if mask is None else mask & past
    return mask


def grouped_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention of `[B, Hq, S, D]` queries to `[B, Hkv, columns, D]` keys and values, which are never repeated.

    The query heads that share a key head become more rows of it.
    """
    batch, heads, rows, width = queries.shape
    groups = heads // keys.shape[1]
    if groups == 1:
        return F.scaled_dot_product_attention(queries, keys, values, mask)
    if mask is not None and mask.shape[2] != 1:
        mask = mask.repeat(1, 1, groups, 1)
    folded = queries.reshape(batch, keys.shape[1], groups * rows, width)
    return F.scaled_dot_product_attention(folded, keys, values, mask).reshape(batch, heads, rows, width)
