"""A tiny random Muse Glimmer target, transformers' assistant for it and the drafter that has its weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

pytest.importorskip("transformers.models.muse_glimmer_assistant")

from transformers import (
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
)

from hf_treespec.drafters.muse import MuseConfig, MuseDrafter

BLOCK, WINDOW = 5, 6


def tiny_muse_target(vocab_size: int = 61, **overrides: Any) -> PreTrainedModel:
    """Six layers, every fourth from the last full and without rotation, the others with a window of 8."""
    text: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.3,
        "sliding_window": 8,
        "output_multiplier": 0.7,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    vision = {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
    }
    # Placeholder ids outside the vocabulary: a random model must not be able to emit an image token.
    ids = {"image_token_id": vocab_size + 100, "video_token_id": vocab_size + 101}
    config = MuseGlimmerConfig(
        text_config={**text, **overrides}, vision_config=vision, out_hidden_size=64, projector_hidden_size=16, **ids
    )
    torch.manual_seed(1)
    target = MuseGlimmerForConditionalGeneration(config).eval()
    for name, parameter in target.named_parameters():
        if "norm" in name:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        elif "embed_tokens" in name:
            # Rows of unequal lengths, so that the embedding's norm matters.
            parameter.data.mul_(torch.rand(len(parameter), 1) + 0.5)
    target.generation_config.pad_token_id = 0
    return target


def tiny_assistant(target: PreTrainedModel, **overrides: Any) -> MuseGlimmerAssistantModel:
    """transformers' own drafter; its window is shorter than the sequences of the tests."""
    text = target.config.get_text_config()
    fields: dict[str, Any] = {
        "hidden_size": text.hidden_size,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": WINDOW,
        "block_size": BLOCK,
        "mask_token_id": text.vocab_size - 1,
        "target_layer_ids": [1, 3],
    }
    torch.manual_seed(2)
    assistant = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**{**fields, **overrides})).eval()
    for name, parameter in assistant.named_parameters():
        parameter.data = torch.rand_like(parameter) + 0.5 if "norm" in name else 0.3 * torch.randn_like(parameter)
    return assistant


def muse_of(assistant: MuseGlimmerAssistantModel, **overrides: Any) -> MuseDrafter:
    """Our drafter with the weights of transformers'."""
    drafter = MuseDrafter(MuseConfig(**{**assistant.config.to_dict(), **overrides})).eval()
    drafter.load_state_dict(assistant.state_dict())
    return drafter
