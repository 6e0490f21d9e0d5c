"""Trains a FlexDraft drafter: projections of mask rows, then calibration by the bonus token (arXiv 2605.20022)."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..drafters.flexdraft import FlexDraftDrafter, packed_blocks
from ..drafters.flexdraft.layout import decoder_of
from .acceptance import acceptance_lengths
from .distillation import DistillationObjective, Gamma, RunSettings, distill
from .losses import calibration_loss

Part = Literal["attention", "calibration"]

#: What is trained, one after the other.
PARTS: tuple[Part, ...] = ("attention", "calibration")


class FlexDraftObjective(DistillationObjective):
    """The loss of blocks that the target drafts in its last layers, under teacher forcing.

    The texts are the target's own, so that the anchor of a block is its own prediction: what the bonus token is when
    decoding.

    Args:
        part: `"attention"` trains projections and mask embedding, on logits that are not calibrated; `"calibration"`
            trains the calibration over drafts that stay as they are.
        options: Those of `DistillationObjective`.

    Raises:
        ValueError: The drafter has no calibration to train.
    """

    drafter: FlexDraftDrafter

    def __init__(
        self,
        drafter: FlexDraftDrafter,
        target: PreTrainedModel,
        *,
        part: Part = "attention",
        **options: Any,
    ) -> None:
        super().__init__(drafter, target, **options)
        self.part = part
        if part == "calibration" and drafter.anchor_bias_mlp is None:
            raise ValueError(
                "the drafter has no calibration to train (its configuration's calibration_rank is None); start from "
                "FlexDraftDrafter.from_target with a calibration_rank."
            )
        drafter.requires_grad_(part == "attention")
        if drafter.anchor_bias_mlp is not None:
            drafter.anchor_bias_mlp.requires_grad_(part == "calibration")

    def draft(self, input_ids: torch.Tensor, anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.set_grad_enabled(self.part == "attention" and torch.is_grad_enabled()):
            packed = packed_blocks(self.drafter, self.target, input_ids, anchors)
        return packed.drafted, packed.teacher

    def rows_loss(
        self,
        hidden: torch.Tensor,
        bonus: torch.Tensor,
        teacher_hidden: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        if self.part == "attention":
            return super().rows_loss(hidden, bonus, teacher_hidden, labels, weights)
        calibration, modules = self.drafter.anchor_bias_mlp, self.borrowed
        assert calibration is not None
        with torch.no_grad():
            embedded = modules.embed(bonus, hidden.dtype)
        return calibration_loss(
            hidden,
            lambda rows: calibration(embedded[rows], hidden[rows]),
            teacher_hidden,
            labels,
            weights,
            modules.logits,
            kind=self.loss,
            temperature=self.temperature,
            vocab_size=modules.vocab_size,
        )

    def measure(self, sequences: torch.Tensor, settings: RunSettings) -> dict[str, float]:
        """Acceptance lengths `tau_…` on sequences `[n, L]` that the target wrote."""
        return acceptance_lengths(
            self.drafter, self.target, sequences, settings.prompt_length, tree_nodes=settings.tree_nodes
        )


def train_flexdraft(
    drafter: FlexDraftDrafter,
    target: PreTrainedModel,
    sequences: np.ndarray,
    held_out: np.ndarray,
    output_dir: str | Path,
    *,
    anchors: int = 128,
    loss: str = "kl",
    temperature: float = 1.0,
    gamma: Gamma = "paper",
    calibration_steps: int | None = None,
    calibration_batch_size: int | None = None,
    calibration_learning_rate: float = 3e-3,
    **run: Any,
) -> dict[str, float]:
    """Trains `drafter`, such as `FlexDraftDrafter.from_target` makes one, in place: attention, then calibration.

    Runs that find a checkpoint in `output_dir` go on from it; a killed run loses at most `save_steps` steps.

    Args:
        sequences: Continuations sampled from the target to train on, `[n, L]`.
        held_out: Prompts and continuations of the target to measure on, `[m, L']`.
        anchors: Blocks drawn for each sequence, anew each time it is seen.
        loss: `"kl"` to the target's distribution at `temperature`, or `"ce"` to the tokens.
        gamma: Decay of the weights along a block, as DFlash has it; None = none.
        calibration_steps: Steps of the calibration; None = a quarter of `max_steps`. A drafter without a calibration
            trains its attention alone.
        calibration_batch_size: Sequences a step of it; None = four times `batch_size`. Without gradients through the
            target they are cheap, and steps over few texts, hence few different bonus tokens, teach it little.
        calibration_learning_rate: Its peak, by AdamW whatever trains the attention: the calibration's few tensors take
            larger steps than a whole model.
        run: Fields of `RunSettings`; `prompt_length` is required.

    Returns:
        See `distill`: the held-out acceptance lengths at the end, `eval_tau_chain` and `eval_tau_tree_N`, and as
        `eval_attention_tau_…` those before the calibration.

    Raises:
        RuntimeError: The target is not what it was before.
    """
    before, settings = fingerprint(target), RunSettings(**run)
    options: dict[str, Any] = {"anchors": anchors, "loss": loss, "temperature": temperature, "gamma": gamma}
    metrics: dict[str, float] = {}
    try:
        for part in PARTS if drafter.anchor_bias_mlp is not None else PARTS[:1]:
            if part == "calibration":
                metrics = {name.replace("eval_", "eval_attention_"): value for name, value in metrics.items()}
                steps = calibration_steps or max(1, settings.max_steps // 4)
                settings = replace(
                    settings,
                    max_steps=steps,
                    batch_size=calibration_batch_size or 4 * settings.batch_size,
                    optimizer="adamw",
                    learning_rate=calibration_learning_rate,
                )
            objective = FlexDraftObjective(drafter, target, part=part, **options)
            found = distill(objective, sequences, held_out, Path(output_dir) / part, settings)
            metrics = {**metrics, **found}
    finally:
        drafter.requires_grad_(True)
    if fingerprint(target) != before:
        raise RuntimeError("the target's weights changed while its drafter was trained; load it anew.")
    return metrics


@torch.no_grad()
def initialise_from_text(drafter: FlexDraftDrafter, target: PreTrainedModel, sequences: np.ndarray) -> None:
    """Fits a fresh drafter's scales to the states that the target has on some text.

    Mask rows enter as the average of what enters the split layer: the mean token embedding of `from_target` lies far
    from the states of a middle layer, which are many times larger, and is slow to move there. The calibration's
    weights of the bonus token are raised until its embedding counts as much as the states beside it, which the final
    norm makes many times larger.

    Args:
        sequences: Token ids without padding, `[n, L]`; few are enough.
    """
    tokens = torch.from_numpy(sequences.astype(np.int64)).to(target.device)
    entering: list[torch.Tensor] = []
    layer = decoder_of(target)[1][drafter.config.split_layer]
    handle = layer.register_forward_pre_hook(
        lambda module, args, kwargs: entering.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    try:
        final = target.get_decoder()(tokens, use_cache=False).last_hidden_state
    finally:
        handle.remove()
    # The first token's state is an attention sink in most models and unlike all others.
    drafter.mask_embedding.copy_(entering[0][:, 1:].float().mean((0, 1)))
    calibration = drafter.anchor_bias_mlp
    if calibration is not None:
        embedded = drafter.borrow(target).embed(tokens, torch.float32)
        ratio = (final[:, 1:].float().square().mean() / embedded.square().mean()).sqrt()
        first = calibration[0]
        assert isinstance(first, nn.Linear)
        first.weight[:, : calibration.hidden_size] *= ratio


def fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 of every tensor of a model, by name."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
