"""Prompts that a command is given: texts for a call of `generate`, and names of prompt sets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from .values import split

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


def encode(
    tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """Model inputs of a prompt, in the chat template if asked, or by default if the tokenizer has one."""
    if chat is None:
        chat = tokenizer.chat_template is not None
    if chat:
        messages = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    if encoded["input_ids"].shape[1] == 0:
        raise typer.BadParameter("the prompt has no tokens")
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def prompt_sets(data: list[str] | None, target: str) -> list[str]:
    """Names of the prompt sets asked for; by default those that the embedded target has of its own."""
    from ..evaluation.held_out import SLICES

    if not data and target != "embedded":
        raise typer.BadParameter("say which prompts to use; only the embedded pair has its own", param_hint="--data")
    return split(data) or list(SLICES)
