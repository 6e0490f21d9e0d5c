"""Tiny random targets: 4 layers, hidden size 64, vocabulary 97, float32.

Their logits are of a few units, so that greedy ties are rare.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 97
PAD = 0
WINDOW = 8
LAYERS = 4
#: Prompt lengths of the left-padded batch; the longest is beyond the window, the shortest within it.
BATCH_LENGTHS = (5, 13, 9, 17)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2


@dataclass(frozen=True)
class Family:
    """A kind of target.

    Attributes:
        config: Builds its configuration, from the common fields and overrides.
        sliding: Whether a layer has a window (shorter than the sequences of the tests).
        attentions: Attention implementations it supports.
    """

    config: Callable[..., PreTrainedConfig]
    sliding: bool = False
    attentions: tuple[str, ...] = ("eager", "sdpa", "treespec")


def _vlm(**fields: Any) -> Qwen2_5_VLConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = {**fields, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    # Placeholder ids outside the vocabulary: a random model must not be able to emit an image token.
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    special = dict(zip(names, range(200, 204), strict=True))
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **special)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, fields[name])
    return config


FAMILIES: dict[str, Family] = {
    "qwen3": Family(lambda **f: Qwen3Config(**f, head_dim=16)),
    "qwen3_sliding": Family(
        lambda **f: Qwen3Config(**f, head_dim=16, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
        sliding=True,
    ),
    "llama": Family(lambda **f: LlamaConfig(**f)),
    "mistral": Family(lambda **f: MistralConfig(**f, head_dim=16, sliding_window=WINDOW), sliding=True),
    "gemma3": Family(
        lambda **f: Gemma3TextConfig(
            **f, head_dim=16, query_pre_attn_scalar=16, sliding_window=WINDOW, layer_types=_ALTERNATING
        ),
        sliding=True,
    ),
    "phi3": Family(
        lambda **f: Phi3Config(**f, sliding_window=WINDOW, original_max_position_embeddings=512), sliding=True
    ),
    "qwen3_moe": Family(
        lambda **f: Qwen3MoeConfig(
            **f,
            head_dim=16,
            moe_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            norm_topk_prob=True,
            mlp_only_layers=[],
        )
    ),
    "gpt_oss": Family(
        lambda **f: GptOssConfig(
            **f,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            layer_types=_ALTERNATING,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        sliding=True,
        attentions=("eager", "treespec"),
    ),
    "qwen2_5_vl": Family(_vlm),
}


def build(family: str, attention: str = "sdpa", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A fresh target; norms and biases are perturbed too, so that nothing is left at its neutral value."""
    torch.manual_seed(seed)
    config = FAMILIES[family].config(**{**_COMMON, **overrides})
    model: PreTrainedModel
    if family == "qwen2_5_vl":
        model = Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation=attention)
    else:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        elif family == "qwen2_5_vl" and "visual" not in name:
            parameter.data.normal_(0.0, 0.25, generator=generator)
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = None
    return model.eval()


@functools.cache
def target(family: str, attention: str = "sdpa", seed: int = 0) -> PreTrainedModel:
    """The session's shared target of a family; tests must leave it as it is (build one of your own otherwise)."""
    return build(family, attention, seed)


@functools.cache
def dflash(family: str, attention: str = "sdpa", block_size: int = 8) -> Any:
    """A DFlash drafter of random weights for a family."""
    from hf_treespec.drafters.dflash import DFlashConfig, DFlashDrafter

    torch.manual_seed(11)
    config = DFlashConfig.for_target(
        target(family, attention).config,
        num_hidden_layers=2,
        block_size=block_size,
        mask_token_id=3,
        target_layer_ids=[0, 2],
        initializer_range=0.2,
    )
    return DFlashDrafter(config).eval()


@functools.cache
def treeflash(family: str, attention: str = "sdpa", **options: Any) -> Any:
    """A TreeFlash drafter on the family's DFlash drafter; its random head changes most distributions."""
    from hf_treespec.drafters.treeflash import TreeFlashDrafter

    drafter = TreeFlashDrafter.from_dflash(dflash(family, attention), **{"num_parents": 5, **options})
    generator = torch.Generator().manual_seed(12)
    drafter.ar_approximation.d.weight.data.normal_(0.0, 0.5, generator=generator)
    return drafter


def prompt(length: int = 9, seed: int = 0) -> dict[str, torch.Tensor]:
    """Inputs of one row of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (1, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def batch(lengths: tuple[int, ...] = BATCH_LENGTHS, seed: int = 0) -> dict[str, torch.Tensor]:
    """Left-padded inputs of several rows of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((len(lengths), max(lengths)), PAD, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(2, VOCAB, (length,), generator=generator)
        mask[row, -length:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The decoder layers of a target, text tower of a multimodal one."""
    decoder = model.get_decoder()
    return decoder.layers if hasattr(decoder, "layers") else decoder.language_model.layers


def hook_count(model: PreTrainedModel) -> int:
    """Hooks of every kind registered on any module of a target, but for those of transformers itself.

    A model that was once asked for hidden states or attentions keeps the hooks that capture them.
    """
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [hook for module in model.modules() for kind in kinds for hook in getattr(module, kind).values()]
    return sum(not (getattr(hook, "__module__", None) or "").startswith("transformers.") for hook in hooks)


transformers.logging.set_verbosity_error()
