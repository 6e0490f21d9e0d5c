"""Prompts as model inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

Inputs = dict[str, torch.Tensor]


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, device: torch.device | str = "cpu") -> Inputs:
    """Inputs of plain text to go on from, led by the begin-of-text token where the tokenizer has one."""
    ids = tokenizer(text)["input_ids"]
    start = tokenizer.bos_token_id
    if start is not None and ids[:1] != [start]:
        ids = [start, *ids]
    input_ids = torch.tensor([ids], device=device)
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


def encode_turns(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[str],
    answers: Sequence[str],
    *,
    chat: bool = True,
    device: torch.device | str = "cpu",
) -> Inputs:
    """Inputs that ask for the answer to the last of some user turns.

    Args:
        tokenizer: With a chat template the turns become a conversation, thinking switched off; without one, text.
        turns: What the user said, in order.
        answers: What came back to all turns but the last.
        chat: Whether a chat template may be used.
        device: Where to put the inputs.
    """
    if not chat or tokenizer.chat_template is None:
        said = [text for pair in zip(turns, answers, strict=False) for text in pair]
        return encode_text(tokenizer, "\n".join([*said, turns[-1]]), device)
    messages = []
    for turn, answer in zip(turns, answers, strict=False):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    encoded = tokenizer.apply_chat_template(
        [*messages, {"role": "user", "content": turns[-1]}],
        add_generation_prompt=True,
        enable_thinking=False,
        return_tensors="pt",
        return_dict=True,
    )
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def pad_left(requests: Sequence[Inputs], pad_token_id: int) -> Inputs:
    """One batch of several single-row inputs, padded on the left."""
    width = max(inputs["input_ids"].shape[1] for inputs in requests)

    def padded(name: str, value: int) -> torch.Tensor:
        rows = [inputs[name] for inputs in requests]
        return torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0), value=value) for row in rows])

    return {"input_ids": padded("input_ids", pad_token_id), "attention_mask": padded("attention_mask", 0)}
