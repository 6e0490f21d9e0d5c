"""How conditional evaluations are laid out: as rows to compute, and as the parent slots of a lattice.

Depth 1 has one parent, the anchor, and every deeper depth has M, the candidates of the depth above: `1 + M(D − 1)`
rows are computed. A lattice has M slots at every depth, of which depth 1 uses the first.
"""

from __future__ import annotations

import torch


def rows_of_parents(anchors: torch.Tensor, parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Previous token of each row, long `[B, R]`, and the 0-based depth it predicts, long `[R]`.

    Args:
        anchors: Long `[B]`.
        parents: Parents of depths 2 to D, long `[B, D − 1, M]`.
    """
    depths, slots = parents.shape[1], parents.shape[2]
    deeper = torch.arange(1, depths + 1, device=parents.device).repeat_interleave(slots, output_size=depths * slots)
    return torch.cat([anchors[:, None], parents.flatten(1)], dim=1), torch.cat([deeper.new_zeros(1), deeper])


def rows_to_slots(rows: torch.Tensor, slots: int) -> torch.Tensor:
    """Rows `[B, R, …]` as parent slots `[B, D, M, …]`; the unused ones of depth 1 are zero."""
    unused = rows.new_zeros(rows.shape[0], slots - 1, *rows.shape[2:])
    return torch.cat([rows[:, :1], unused, rows[:, 1:]], dim=1).unflatten(1, (-1, slots))


def child_slots(tokens: torch.Tensor, parents: torch.Tensor, dead_end: int) -> torch.Tensor:
    """Parent slot of each child one depth on, long `[B, D, M, K]`; −1 at the last depth.

    Args:
        tokens: Children, long `[B, D, M, K]`.
        parents: Parents of depths 2 to D, distinct within a depth, long `[B, D − 1, M]`.
        dead_end: Slot of a child that is no parent of the next depth.
    """
    ranks = torch.arange(parents.shape[2], device=parents.device)
    found = tokens[:, :-1, :, :, None] == parents[:, :, None, None]
    slots = torch.where(found.any(-1), (found * ranks).sum(-1), dead_end)
    return torch.cat([slots, torch.full_like(tokens[:, -1:], -1)], dim=1)
