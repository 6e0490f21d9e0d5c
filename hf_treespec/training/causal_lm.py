"""Trains a small causal language model from scratch: the embedded target."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments

from .checkpoints import last_checkpoint
from .muon import MuonWithAdamW


class TokenWindows(Dataset):
    """Consecutive windows of a token stream, as `{"input_ids", "labels"}` of shape `[length]`."""

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        self.windows = torch.from_numpy(tokens[: len(tokens) // length * length].astype(np.int64)).view(-1, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def train_causal_lm(
    model: PreTrainedModel,
    train_tokens: np.ndarray,
    held_out_tokens: np.ndarray,
    output_dir: str | Path,
    *,
    length: int = 512,
    batch_size: int = 6,
    max_steps: int = 2000,
    learning_rate: float = 4e-3,
    weight_decay: float = 0.1,
    save_steps: int = 200,
    seed: int = 0,
) -> dict[str, float]:
    """Trains `model` in place with Muon on a cosine schedule and returns the held-out metrics.

    A run that finds a checkpoint in `output_dir` goes on from it; a killed run loses at most `save_steps` steps.

    Args:
        train_tokens: Token stream to train on, shape `[tokens]`.
        held_out_tokens: Token stream to evaluate on, shape `[tokens]`.

    Returns:
        The Trainer's evaluation metrics; `eval_loss` is in nats a token.
    """
    arguments = TrainingArguments(
        output_dir=str(output_dir),
        max_steps=max_steps,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        max_grad_norm=1.0,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.05},
        warmup_steps=max(1, max_steps // 25),
        logging_steps=20,
        save_steps=save_steps,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=save_steps,
        report_to=[],
        seed=seed,
        data_seed=seed,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=TokenWindows(train_tokens, length),
        eval_dataset=TokenWindows(held_out_tokens[: 40 * length], length),
        optimizers=(MuonWithAdamW(model.named_parameters(), lr=learning_rate, weight_decay=weight_decay), None),
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(output_dir))
    return trainer.evaluate()
