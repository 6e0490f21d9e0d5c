"""Trains a TreeFlash head, or head and backbone, for a frozen target (arXiv 2606.03819, section 4)."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..drafters.treeflash import TreeFlashDrafter
from .blocks import draft_blocks
from .drafting import DrafterObjective, train_drafter


class TreeFlashObjective(DrafterObjective):
    """The loss of conditional distributions under teacher forcing: each slot is told the text's own previous token."""

    def drafted(self, input_ids: torch.Tensor, features: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        backbone = self.drafter.backbone
        is_frozen = not any(parameter.requires_grad for parameter in backbone.parameters())
        with torch.no_grad() if is_frozen else nullcontext():
            hidden = draft_blocks(backbone, self.borrowed, input_ids, features, anchors)
        places = anchors[:, :, None] + torch.arange(hidden.shape[2], device=anchors.device)
        previous = input_ids[torch.arange(len(input_ids), device=anchors.device)[:, None, None], places]
        embedded = self.borrowed.embed(previous, hidden.dtype).to(hidden.device)
        final: torch.Tensor = backbone.norm(self.drafter.correct(embedded, hidden))
        return final


def train_treeflash(
    drafter: TreeFlashDrafter,
    target: PreTrainedModel,
    sequences: np.ndarray,
    held_out: np.ndarray,
    output_dir: str | Path,
    *,
    freeze_backbone: bool = True,
    anchors: int = 128,
    loss: str = "kl",
    temperature: float = 1.0,
    gamma: float | None = None,
    **options: Any,
) -> dict[str, float]:
    """Trains `drafter` in place.

    Args:
        sequences: Token sequences to train on, `[n, L]`: continuations sampled from the target, or real text.
        held_out: Prompts and continuations of the target for the acceptance lengths, `[m, L']`.
        output_dir: Where checkpoints are written; a run that finds one there goes on from it.
        freeze_backbone: Whether the head alone is trained: cheaper, and by the paper's ablation as good.
        anchors: Blocks drawn for each sequence, anew each time it is seen.
        loss: `"kl"` to the target's distribution at `temperature`, or `"ce"` to the tokens, see `distillation_loss`.
        gamma: Decay of the weights along a block: by block size when None, and none when infinite.
        **options: Of `train_drafter`.

    Returns:
        As `train_drafter`.
    """
    drafter.backbone.requires_grad_(not freeze_backbone)
    objective = TreeFlashObjective(drafter, target, anchors=anchors, loss=loss, temperature=temperature, gamma=gamma)
    return train_drafter(objective, sequences, held_out, output_dir, **options)
