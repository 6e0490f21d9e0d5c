"""A tiny random target with a real DFlash drafter and a tokenizer, as files; nothing in it is trained."""

from __future__ import annotations

from pathlib import Path

import models
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_treespec.drafters.base import BlockDrafter
from hf_treespec.drafters.dflash import DFlashConfig, DFlashDrafter
from hf_treespec.training.corpus import train_tokenizer

VOCAB = 300
PROMPT = "def push(self, item):\n"

Pair = tuple[PreTrainedModel, BlockDrafter, PreTrainedTokenizerBase]


def build_pair(seed: int = 0, block_size: int = 5) -> Pair:
    """Target, drafter and tokenizer in memory."""
    target = models.build("qwen3", seed=seed, vocab_size=VOCAB)
    config = DFlashConfig.for_target(
        target.config, num_hidden_layers=1, block_size=block_size, mask_token_id=2, target_layer_ids=[0, 2]
    )
    torch.manual_seed(seed)
    drafter = DFlashDrafter(config).eval()
    return target, drafter, train_tokenizer([PROMPT * 50], VOCAB)


def save_pair(pair: Pair, folder: Path) -> tuple[str, str]:
    """Saves a pair and returns the paths of target and drafter."""
    target, drafter, tokenizer = pair
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    drafter.save_pretrained(folder / "drafter")
    return str(folder / "target"), str(folder / "drafter")
