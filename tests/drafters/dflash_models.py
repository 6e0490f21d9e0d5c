"""A tiny random target and DFlash drafter, and the states a session is fed from whole sequences."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from hf_treespec.drafters import DraftState
from hf_treespec.drafters.dflash import DFlashConfig, DFlashDrafter, DFlashSession
from hf_treespec.training.teacher import teacher_forward

VOCAB, BLOCK, MASK = 61, 5, 60


def tiny_target(**overrides: Any) -> Qwen3ForCausalLM:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(1)
    return Qwen3ForCausalLM(Qwen3Config(**{**fields, **overrides})).eval()


def tiny_drafter(target: PreTrainedModel, **overrides: Any) -> DFlashDrafter:
    """Two layers; weights large enough for every part to matter."""
    fields: dict[str, Any] = {"num_hidden_layers": 2, "block_size": BLOCK, "mask_token_id": MASK}
    torch.manual_seed(2)
    config = DFlashConfig.for_target(target.config, **{**fields, "initializer_range": 0.3, **overrides})
    drafter = DFlashDrafter(config)
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    return drafter.eval()


def fused_features(session: DFlashSession, target: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Features of whole sequences `[B, T]` as the recorder sums them, `[B, T, H]`."""
    parts = teacher_forward(target, tokens, session.feature_layers)[0].chunk(len(session.feature_layers), dim=-1)
    return sum(session.fuse(index, part) for index, part in enumerate(parts))


def state(
    tokens: torch.Tensor,
    features: torch.Tensor | None,
    first: int,
    anchor: int,
    *,
    depth: int = BLOCK - 1,
    width: int = 7,
    positions: torch.Tensor | None = None,
) -> DraftState:
    """One call's state of equal rows: the features from position `first` up to the anchor at `anchor`."""
    rows = len(tokens)
    columns = torch.arange(first, anchor).expand(rows, -1) if positions is None else positions
    return DraftState(
        anchors=tokens[:, anchor],
        positions=torch.full((rows,), anchor),
        features=None if features is None else features[:, first:anchor],
        feature_positions=None if features is None else columns,
        feature_valid=None,
        depth=depth,
        width=width,
    )
