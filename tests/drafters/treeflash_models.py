"""A tiny TreeFlash drafter whose head matters, and its lattice written as a loop."""

from __future__ import annotations

from typing import Any

import torch
from dflash_models import tiny_drafter
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_treespec.drafters import DraftState
from hf_treespec.drafters.treeflash import TreeFlashDrafter, TreeFlashSession

#: Options of the head; all others are the backbone's.
HEAD_OPTIONS = ("ar_approximation", "num_parents", "head", "head_candidates", "dead_end_discount")


def tiny_treeflash(target: PreTrainedModel, scale: float = 0.5, **overrides: Any) -> TreeFlashDrafter:
    """The tiny DFlash drafter under a random head; `scale` 0 leaves the head untrained."""
    options = {name: overrides.pop(name) for name in HEAD_OPTIONS if name in overrides}
    drafter = TreeFlashDrafter.from_dflash(tiny_drafter(target, **overrides), **{"num_parents": 4, **options})
    head, generator = drafter.ar_approximation, torch.Generator().manual_seed(3)
    if head is not None:
        head.ug.bias.data.normal_(generator=generator)
        head.norm.weight.data.uniform_(0.5, 1.5, generator=generator)
        head.d.weight.data.normal_(0.0, scale, generator=generator) if scale else head.d.weight.data.zero_()
    return drafter


def dense_correction(drafter: TreeFlashDrafter, previous: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The head as the paper writes it, for vectors `[H]`."""
    head = drafter.ar_approximation
    assert head is not None
    joined = torch.cat([head.norm(previous), drafter.norm(hidden)])
    if not head.is_gated:
        return hidden + head.d(head.ug(joined))
    up, gate = head.ug(joined).chunk(2)
    return hidden + head.d(F.silu(gate) * up)


def loop_logits(session: TreeFlashSession, hidden: torch.Tensor, token: int) -> torch.Tensor:
    """Logits `[V]` of one depth, state `[H]`, after one token."""
    embedded = session.modules.embed(torch.tensor([token]), hidden.dtype)[0]
    return session.modules.logits(session.drafter.norm(dense_correction(session.drafter, embedded, hidden)))


def loop_lattice(
    session: TreeFlashSession, fresh: TreeFlashSession, state: DraftState
) -> list[list[list[tuple[list[int], list[float], list[int]]]]]:
    """Tokens, log-probabilities and next slots of every row, depth and parent slot, over the whole vocabulary."""
    hidden = fresh.denoise(state)[:, 1 : state.depth + 1]
    rows = []
    for row, states in enumerate(hidden):
        marginals = session.modules.logits(session.drafter.norm(states)) / session.temperature
        candidates = [marginal.topk(session.parents).indices.tolist() for marginal in marginals]
        depths = []
        for depth, vector in enumerate(states):
            slots = []
            for parent in candidates[depth - 1] if depth else [int(state.anchors[row])]:
                logits = loop_logits(session, vector, parent) / session.temperature
                best = logits.log_softmax(-1).topk(min(state.width, len(logits)))
                tokens = best.indices.tolist()
                last = depth == len(states) - 1
                following = [
                    candidates[depth].index(token) if not last and token in candidates[depth] else -1
                    for token in tokens
                ]
                slots.append((tokens, best.values.tolist(), following))
            depths.append(slots)
        rows.append(depths)
    return rows
