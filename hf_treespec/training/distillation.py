"""Training a drafter that drafts whole blocks towards a frozen target: the objective and its run.

What a family trains, and with which weights along a block, is its own module's (`dflash`, `treeflash`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_model
from torch import nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainerControl, TrainingArguments
from transformers.utils import SAFE_WEIGHTS_NAME

from ..drafters.base import BlockDrafter, TargetModules
from ..drafters.dflash import DFlashDrafter
from .acceptance import acceptance_lengths
from .agreement import depth_agreement
from .blocks import draft_blocks, sample_anchors
from .checkpoints import last_checkpoint, steps_of
from .losses import distillation_loss
from .meter import Meter
from .muon import MuonWithAdamW
from .teacher import teacher_forward

#: Decay γ of the weight e^{−(k−1)/γ} of the k-th drafted token, by block size, which is a token more
#: than it drafts (DFlash, A.1).
GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}

#: A decay of the weights along a block, the paper's for the block size, or None: all weights are one.
Gamma = float | Literal["paper"] | None


def slot_weights(depths: int, gamma: Gamma) -> list[float]:
    """Loss weight of each drafted token of a block: early ones count most, since later ones need them accepted."""
    if gamma is None:
        return [1.0] * depths
    decay = GAMMA.get(depths + 1, (depths + 1) / 2) if isinstance(gamma, str) else gamma
    return [math.exp(-slot / decay) for slot in range(depths)]


class TokenSequences(Dataset):
    """Sequences of one length, as `{"input_ids"}` of shape `[L]`."""

    def __init__(self, sequences: np.ndarray) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.from_numpy(self.sequences[index].astype(np.int64))}


class DistillationObjective(nn.Module):
    """The training loss of a batch of sequences; the frozen target is a teacher and no part of the module's state.

    Args:
        anchors: Blocks drawn for each sequence.
        loss: `"kl"` or `"ce"`, see `distillation_loss`.
        temperature: Temperature of the target's distribution for `"kl"`.
        gamma: Decay of the weights along a block, see `slot_weights`.
    """

    drafter: BlockDrafter
    target: PreTrainedModel
    borrowed: TargetModules
    teacher: TargetModules

    def __init__(
        self,
        drafter: BlockDrafter,
        target: PreTrainedModel,
        *,
        anchors: int = 128,
        loss: str = "kl",
        temperature: float = 1.0,
        gamma: Gamma = "paper",
    ) -> None:
        super().__init__()
        self.drafter = drafter
        # Kept out of the registered modules: neither saved nor trained nor moved with the drafter.
        object.__setattr__(self, "target", target.eval().requires_grad_(False))
        object.__setattr__(self, "borrowed", drafter.borrow(target))
        object.__setattr__(self, "teacher", TargetModules(target))
        self.anchors, self.loss, self.temperature = anchors, loss, temperature
        self.slot_weights = slot_weights(drafter.drafted_depths, gamma)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Loss of whole sequences, long `[B, T]`, over freshly drawn anchors."""
        batch, length = input_ids.shape
        anchors = sample_anchors(batch, length, self.drafter.drafted_depths, self.anchors)
        return {"loss": self.loss_at(input_ids, anchors.to(input_ids.device))}

    def loss_at(self, input_ids: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Loss over the blocks of given anchors, long `[B, A]`."""
        hidden, teacher = self.draft(input_ids, anchors)
        places = anchors[:, :, None] + torch.arange(1, self.drafter.drafted_depths + 1, device=anchors.device)
        batch = torch.arange(len(input_ids), device=anchors.device)[:, None, None]
        labels, known = self.borrowed.columns(input_ids[batch, places])
        weights = torch.tensor(self.slot_weights, device=hidden.device).expand(places.shape)
        if self.loss == "ce":
            weights = weights * known
        return self.rows_loss(
            hidden.flatten(0, 2),
            input_ids.gather(1, anchors)[:, :, None].expand(places.shape).flatten(),
            teacher[batch, places - 1].flatten(0, 2),
            labels.flatten(),
            weights.flatten(),
        )

    def draft(self, input_ids: torch.Tensor, anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Final hidden states of drafted rows `[B, A, D, H]`, and the target's own `[B, T, H]`."""
        drafter = self.drafter
        assert isinstance(drafter, DFlashDrafter)
        features, teacher = teacher_forward(self.target, input_ids, drafter.config.target_layer_ids)
        return draft_blocks(drafter, self.borrowed, input_ids, features, anchors), teacher

    def rows_loss(
        self,
        hidden: torch.Tensor,
        bonus: torch.Tensor,
        teacher_hidden: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Loss of drafted rows, see `distillation_loss`; `bonus`, long `[rows]`, is the anchor each row follows."""
        modules = self.borrowed
        return distillation_loss(
            hidden,
            teacher_hidden,
            labels,
            weights,
            modules.logits,
            lambda states: modules.restrict(self.teacher.logits(states)),
            kind=self.loss,
            temperature=self.temperature,
            vocab_size=modules.vocab_size,
        )

    def measure(self, sequences: torch.Tensor, settings: RunSettings) -> dict[str, float]:
        """Acceptance lengths `tau_…` and the distance to the target, on sequences `[n, L]` that the target wrote.

        `tvd` is the mean total variation distance over all depths; `tvd_first` and `tvd_last` are those of the first
        and the last depth.
        """
        drafter, target = self.drafter, self.target
        assert isinstance(drafter, DFlashDrafter)
        found = acceptance_lengths(drafter, target, sequences, settings.prompt_length, tree_nodes=settings.tree_nodes)
        distances = depth_agreement(
            drafter,
            target,
            sequences,
            settings.prompt_length,
            temperature=self.temperature,
            ranks=(1,),
            stride=settings.eval_stride,
        ).total_variation
        return {**found, "tvd": sum(distances) / len(distances), "tvd_first": distances[0], "tvd_last": distances[-1]}


@dataclass(frozen=True)
class RunSettings:
    """How a drafter is trained, whatever is trained of it.

    Attributes:
        prompt_length: Prompt tokens of the held-out sequences.
        tree_nodes: Budgets whose acceptance length is logged beside the chain's.
        batch_size: Sequences of a forward.
        accumulate: Forwards of an optimiser step.
        max_steps: Optimiser steps of the whole run; the learning rate follows a cosine over them.
        optimizer: `"adamw"` as in the papers, or `"muon"`, which needs far fewer steps where data and time are short.
        learning_rate: Its peak.
        weight_decay: Decoupled decay.
        save_steps: Steps between checkpoints and measurements; a killed run loses at most as many.
        logging_steps: Steps between logged losses.
        live_sequences: Held-out sequences measured on during the run; None = all, as at its end.
        eval_stride: Positions from one block to the next in the measured distance to the target.
        seed: Of the order of sequences and the choice of anchors.
    """

    prompt_length: int
    tree_nodes: Sequence[int] = (16,)
    batch_size: int = 4
    accumulate: int = 1
    max_steps: int = 2000
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 6e-4
    weight_decay: float = 0.0
    save_steps: int = 250
    logging_steps: int = 20
    live_sequences: int | None = 16
    eval_stride: int = 4
    seed: int = 0

    def arguments(self, output_dir: str | Path) -> TrainingArguments:
        """The Trainer's arguments."""
        return TrainingArguments(
            output_dir=str(output_dir),
            max_steps=self.max_steps,
            per_device_train_batch_size=self.batch_size,
            gradient_accumulation_steps=self.accumulate,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.02},
            warmup_steps=max(1, self.max_steps // 25),
            logging_steps=self.logging_steps,
            save_steps=self.save_steps,
            save_total_limit=2,
            eval_strategy="steps",
            eval_steps=self.save_steps,
            report_to=[],
            seed=self.seed,
            data_seed=self.seed,
            dataloader_pin_memory=False,
        )


class DistillationTrainer(Trainer):
    """A Trainer whose evaluation is acceptance and distance to the target, on text the target wrote."""

    def __init__(self, *args: Any, settings: RunSettings, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = settings

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        objective = self.accelerator.unwrap_model(self.model)
        sequences = torch.stack([dataset[index]["input_ids"] for index in range(len(dataset))])
        was_training = objective.training
        objective.eval()
        found = objective.measure(sequences.to(objective.target.device), self.settings)
        objective.train(was_training)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        self.log(metrics)
        self.control: TrainerControl = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def distill(
    objective: DistillationObjective,
    sequences: np.ndarray,
    held_out: np.ndarray,
    output_dir: str | Path,
    settings: RunSettings,
) -> dict[str, float]:
    """Trains an objective's drafter in place.

    A run that finds a checkpoint in `output_dir` goes on from it and ends with the same bits as one never stopped.

    Args:
        sequences: Token sequences to train on, `[n, L]`: continuations sampled from the target, or real text.
        held_out: Prompts and continuations of the target to measure on, `[m, L']`.

    Returns:
        The held-out figures at the end, those of the objective's `measure` each led by `eval_`, and the `Meter`'s.
    """
    arguments = settings.arguments(output_dir)
    own = None
    if settings.optimizer == "muon":
        own = MuonWithAdamW(
            objective.named_parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
    trainer = DistillationTrainer(
        model=objective,
        args=arguments,
        train_dataset=TokenSequences(sequences),
        eval_dataset=TokenSequences(held_out[: settings.live_sequences]),
        optimizers=(own, None),
        settings=settings,
    )
    objective.target.to(arguments.device)
    resumed = last_checkpoint(output_dir)
    meter = Meter(arguments.device, resumed)
    trainer.add_callback(meter)
    if resumed is not None and steps_of(resumed) >= settings.max_steps:
        # Nothing is left to do, and the Trainer would do one step more.
        load_model(objective, Path(resumed) / SAFE_WEIGHTS_NAME)
    else:
        trainer.train(resume_from_checkpoint=resumed)
    tokens_a_step = settings.batch_size * settings.accumulate * arguments.world_size * sequences.shape[1]
    return {**trainer.evaluate(TokenSequences(held_out)), **meter.figures(tokens_a_step)}
