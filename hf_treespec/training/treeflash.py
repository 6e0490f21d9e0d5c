"""Trains the one-token-lookback head of a TreeFlash drafter (arXiv 2606.03819, section 4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from ..drafters.treeflash import TreeFlashDrafter
from .distillation import DistillationObjective, Gamma, RunSettings, distill


class TreeFlashObjective(DistillationObjective):
    """The loss of corrected slots under teacher forcing: the previous token of a slot is the text's own.

    Args:
        freeze_backbone: Train the head alone. The rest then takes part in no gradient: its layers run as in inference.
        options: Those of `DistillationObjective`.

    Raises:
        ValueError: The drafter has no head to train.
    """

    drafter: TreeFlashDrafter

    def __init__(
        self, drafter: TreeFlashDrafter, target: PreTrainedModel, *, freeze_backbone: bool = True, **options: Any
    ) -> None:
        super().__init__(drafter, target, **options)
        if drafter.ar_approximation is None:
            raise ValueError(
                "the drafter has no head to train (its configuration's ar_approximation is None); start from "
                "TreeFlashDrafter.from_dflash."
            )
        drafter.requires_grad_(not freeze_backbone)
        drafter.ar_approximation.requires_grad_(True)


def train_treeflash(
    drafter: TreeFlashDrafter,
    target: PreTrainedModel,
    sequences: np.ndarray,
    held_out: np.ndarray,
    output_dir: str | Path,
    *,
    anchors: int = 128,
    loss: str = "kl",
    temperature: float = 1.0,
    gamma: Gamma = "paper",
    freeze_backbone: bool = True,
    **run: Any,
) -> dict[str, float]:
    """Trains `drafter`, such as `TreeFlashDrafter.from_dflash` makes one, in place on a cosine schedule.

    A run that finds a checkpoint in `output_dir` goes on from it; a killed run loses at most `save_steps` steps.

    Args:
        sequences: Continuations sampled from the target to train on, `[n, L]`.
        held_out: Prompts and continuations of the target to measure on, `[m, L']`.
        anchors: Blocks drawn for each sequence, anew each time it is seen.
        loss: `"kl"` forward to the target's distribution at `temperature`, or `"ce"` to the tokens.
        gamma: Decay of the weights along a block, as DFlash has it; None = none. The paper saw no difference.
        freeze_backbone: Train the head alone, which the paper found as good as training everything.
        run: Fields of `RunSettings`; `prompt_length` is required. The paper's peak learning rate is 1e-4, from a
            backbone that is trained as well.

    Returns:
        See `distill`: the held-out acceptance lengths among others, `eval_tau_chain` and `eval_tau_tree_N`.
    """
    objective = TreeFlashObjective(
        drafter,
        target,
        freeze_backbone=freeze_backbone,
        anchors=anchors,
        loss=loss,
        temperature=temperature,
        gamma=gamma,
    )
    try:
        return distill(objective, sequences, held_out, output_dir, RunSettings(**run))
    finally:
        drafter.requires_grad_(True)
