"""Training of a drafter for a frozen target: what the families share (DFlash, arXiv 2602.06036, section 4.2)."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainerControl, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from ..drafters.base import TargetModules
from .acceptance import acceptance_lengths
from .blocks import draft_blocks, sample_anchors
from .losses import distillation_loss
from .muon import MuonWithAdamW
from .teacher import teacher_forward

#: Decay γ of the weight e^{−(k−1)/γ} of the k-th drafted token, by block size (paper, A.1).
GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}


class TokenSequences(Dataset):
    """Sequences of one length, as `{"input_ids"}` of shape `[L]`."""

    def __init__(self, sequences: np.ndarray) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.from_numpy(self.sequences[index].astype(np.int64))}


class DrafterObjective(nn.Module):
    """The training loss of a batch of sequences; the frozen target is a teacher and no part of the module's state.

    Args:
        drafter: A drafter that denoises blocks with a `backbone`.
        target: Its target.
        anchors: Blocks drawn for each sequence.
        loss: `"kl"` or `"ce"`, see `distillation_loss`.
        temperature: Temperature of the target's distribution for `"kl"`.
        gamma: Decay of the weights along a block; by block size when None, none when infinite.
    """

    target: PreTrainedModel
    borrowed: TargetModules

    def __init__(
        self,
        drafter: Any,
        target: PreTrainedModel,
        *,
        anchors: int = 128,
        loss: str = "kl",
        temperature: float = 1.0,
        gamma: float | None = None,
    ) -> None:
        super().__init__()
        self.drafter = drafter
        # Kept out of the registered modules: neither saved nor trained nor moved with the drafter.
        object.__setattr__(self, "target", target.eval().requires_grad_(False))
        object.__setattr__(self, "borrowed", TargetModules(target))
        self.anchors, self.loss, self.temperature = anchors, loss, temperature
        size = drafter.config.block_size
        decay = gamma or GAMMA.get(size, size / 2)
        self.slot_weights = [math.exp(-slot / decay) for slot in range(size - 1)]

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Loss of whole sequences, long `[B, T]`, over freshly drawn anchors."""
        batch, length = input_ids.shape
        anchors = sample_anchors(batch, length, self.drafter.config.block_size, self.anchors)
        return {"loss": self.loss_at(input_ids, anchors.to(input_ids.device))}

    def loss_at(self, input_ids: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Loss over the blocks of given anchors, long `[B, A]`."""
        drafter, modules = self.drafter, self.borrowed
        features, teacher = teacher_forward(self.target, input_ids, drafter.config.target_layer_ids)
        hidden = self.drafted(input_ids, features, anchors)
        places = anchors[:, :, None] + torch.arange(1, drafter.config.block_size, device=anchors.device)
        batch = torch.arange(len(input_ids), device=anchors.device)[:, None, None]
        weights = torch.tensor(self.slot_weights, device=hidden.device).expand(places.shape)
        return distillation_loss(
            hidden.flatten(0, 2),
            teacher[batch, places - 1].flatten(0, 2),
            input_ids[batch, places].flatten(),
            weights.flatten(),
            modules.logits,
            kind=self.loss,
            temperature=self.temperature,
            vocab_size=modules.vocab_size,
        )

    def drafted(self, input_ids: torch.Tensor, features: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Final hidden states of the drafted rows, ready for the head, `[B, A, block_size − 1, H]`.

        Args:
            input_ids: Token ids, long `[B, T]`.
            features: The target's features `[B, T, layers · H]`.
            anchors: Positions of the anchors, long `[B, A]`.
        """
        backbone = self.drafter.backbone
        return backbone.norm(draft_blocks(backbone, self.borrowed, input_ids, features, anchors))


class DrafterTrainer(Trainer):
    """A Trainer whose evaluation is the acceptance length on text the target wrote."""

    def __init__(self, *args: Any, prompt_length: int, tree_nodes: Sequence[int] = (16,), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prompt_length, self.tree_nodes = prompt_length, tree_nodes

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        objective = self.accelerator.unwrap_model(self.model)
        was_training = objective.training
        objective.eval()
        sequences = torch.stack([dataset[index]["input_ids"] for index in range(len(dataset))])
        found = acceptance_lengths(
            objective.drafter,
            objective.target,
            sequences.to(objective.target.device),
            self.prompt_length,
            tree_nodes=self.tree_nodes,
        )
        objective.train(was_training)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        self.log(metrics)
        self.control: TrainerControl = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def train_drafter(
    objective: DrafterObjective,
    sequences: np.ndarray,
    held_out: np.ndarray,
    output_dir: str | Path,
    *,
    prompt_length: int,
    tree_nodes: Sequence[int] = (16,),
    batch_size: int = 4,
    max_steps: int = 2000,
    optimizer: Literal["adamw", "muon"] = "adamw",
    learning_rate: float = 6e-4,
    weight_decay: float = 0.0,
    save_steps: int = 250,
    logging_steps: int = 20,
    seed: int = 0,
) -> dict[str, float]:
    """Trains the parameters of `objective.drafter` that require gradients, in place, on a cosine schedule.

    A run that finds a checkpoint in `output_dir` goes on from it; a killed run loses at most `save_steps` steps.

    Args:
        sequences: Token sequences to train on, `[n, L]`: continuations sampled from the target, or real text.
        held_out: Prompts and continuations of the target for the acceptance lengths, `[m, L']`.
        prompt_length: Prompt tokens of the held-out sequences.
        tree_nodes: Budgets whose acceptance length is logged beside the chain's.
        optimizer: `"adamw"` as in the papers, or `"muon"`, which needs far fewer steps where data and time are short.

    Returns:
        The held-out acceptance lengths at the end, `eval_tau_chain` and `eval_tau_tree_N`; the tokens a second of the
        training, and the peak of the process's memory in bytes.
    """
    arguments = TrainingArguments(
        output_dir=str(output_dir),
        max_steps=max_steps,
        per_device_train_batch_size=batch_size,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.02},
        warmup_steps=max(1, max_steps // 25),
        logging_steps=logging_steps,
        save_steps=save_steps,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=save_steps,
        report_to=[],
        seed=seed,
        data_seed=seed,
        dataloader_pin_memory=False,
    )
    own = None
    if optimizer == "muon":
        own = MuonWithAdamW(objective.named_parameters(), lr=learning_rate, weight_decay=weight_decay)
    trainer = DrafterTrainer(
        model=objective,
        args=arguments,
        train_dataset=TokenSequences(sequences),
        eval_dataset=TokenSequences(held_out),
        optimizers=(own, None),
        prompt_length=prompt_length,
        tree_nodes=tree_nodes,
    )
    objective.target.to(arguments.device)
    checkpoint = get_last_checkpoint(str(output_dir)) if Path(output_dir).is_dir() else None
    done = trainer.train(resume_from_checkpoint=checkpoint).metrics
    tokens = sequences.shape[1] * done["train_samples_per_second"]
    return {**trainer.evaluate(), "train_tokens_per_second": tokens, "peak_memory_bytes": peak_memory_bytes()}


def peak_memory_bytes() -> int:
    """The most memory this process has held: of the GPU where there is one, or resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else 1024 * usage
