"""Trains a DFlash drafter for a frozen target (arXiv 2602.06036, section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..drafters.dflash import DFlashDrafter
from .distillation import DistillationObjective, Gamma, RunSettings, distill


def initialise_from_target(
    drafter: DFlashDrafter, target: PreTrainedModel, layers: Sequence[int] | None = None
) -> DFlashDrafter:
    """Starts a drafter from its target's weights, where shapes agree. Returns the drafter.

    The target's final norm is copied, since it scales the hidden states for the borrowed head. With `layers`, so are
    whole decoder layers, and the fusion starts as the last feature alone, under the norm that the last of those layers
    puts before its attention: its keys and values of the context start near the target's own.

    Args:
        layers: The target's layer that each draft layer starts as; None = fresh layers.

    Raises:
        ValueError: `layers` does not name one target layer for each draft layer, or their shapes differ.
    """
    decoder = target.get_decoder()
    weight = getattr(getattr(decoder, "norm", None), "weight", None)
    if isinstance(weight, torch.Tensor) and weight.shape == drafter.norm.weight.shape:
        drafter.norm.weight.data.copy_(weight.data)
    if layers is None:
        return drafter
    if len(layers) != len(drafter.layers):
        raise ValueError(f"`layers` names {len(layers)} target layers, the drafter has {len(drafter.layers)}.")
    for layer, index in zip(drafter.layers, layers, strict=True):
        try:
            layer.load_state_dict(decoder.layers[index].state_dict())
        except RuntimeError as error:
            raise ValueError(f"target layer {index} has not the shape of a draft layer: {error}") from None
    width = drafter.config.target_hidden_size
    with torch.no_grad():
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -width:] = torch.eye(drafter.config.hidden_size, width)
        drafter.hidden_norm.weight.copy_(decoder.layers[layers[-1]].input_layernorm.weight)
    return drafter


def train_dflash(
    drafter: DFlashDrafter,
    target: PreTrainedModel,
    sequences: np.ndarray,
    held_out: np.ndarray,
    output_dir: str | Path,
    *,
    anchors: int = 128,
    loss: str = "kl",
    temperature: float = 1.0,
    gamma: Gamma = "paper",
    **run: Any,
) -> dict[str, float]:
    """Trains `drafter` in place on a cosine schedule.

    A run that finds a checkpoint in `output_dir` goes on from it; a killed run loses at most `save_steps` steps.

    Args:
        sequences: Token sequences to train on, `[n, L]`: continuations sampled from the target, or real text.
        held_out: Prompts and continuations of the target to measure on, `[m, L']`.
        anchors: Blocks drawn for each sequence, anew each time it is seen.
        loss: `"kl"` to the target's distribution at `temperature`, or `"ce"` to the tokens, see `distillation_loss`.
        gamma: Decay of the weights along a block; the paper's for the block size, a number, or None for no decay.
        run: Fields of `RunSettings`; `prompt_length` is required.

    Returns:
        See `distill`: the held-out acceptance lengths among others, `eval_tau_chain` and `eval_tau_tree_N`.
    """
    objective = DistillationObjective(
        drafter, target, anchors=anchors, loss=loss, temperature=temperature, gamma=gamma
    )
    return distill(objective, sequences, held_out, output_dir, RunSettings(**run))
