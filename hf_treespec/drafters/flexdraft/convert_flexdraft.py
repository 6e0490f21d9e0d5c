"""Turns the configuration of a released FlexDraft checkpoint into this package's fields.

Tensors need no conversion: their names are the same. A release also holds tensors that drafting never reads, those of
`UNUSED_TENSORS`; they are left unread here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MODEL_TYPE = "treespec_flexdraft"
_SAME = ("hidden_size", "vocab_size", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id")

#: Patterns of the tensors that a release declares and drafting does not use: the layers' MLPs and norms and the final
#: norm, for which mask rows take the target's.
UNUSED_TENSORS = (r"^layers\.\d+\.mlp\.", r"^layers\.\d+\.(input|post_attention)_layernorm\.", r"^norm\.weight$")


def is_released(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is written in the released dialect."""
    return config.get("model_type") != _MODEL_TYPE and "flexdraft_config" in config


def convert_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `FlexDraftConfig` from a released `config.json`, a Qwen3 configuration with a `flexdraft_config`.

    The layers are those of `target_layer_ids`, never derived: the formula DFlash spreads its feature layers by would
    name other ones.

    Raises:
        ValueError: A field without which no drafter can be built is absent.
    """
    nested: Mapping[str, Any] = config.get("flexdraft_config") or {}

    def field(name: str, default: Any = None) -> Any:
        return nested[name] if name in nested else config.get(name, default)

    absent = [name for name in ("block_size", "target_layer_ids") if field(name) is None]
    if absent:
        raise ValueError(
            f"the FlexDraft config.json lacks {absent} (looked at the top level and in flexdraft_config)."
        )
    fields = {name: config[name] for name in _SAME if config.get(name) is not None}
    for name in ("dtype", "torch_dtype"):
        if config.get(name) is not None:
            fields[name] = config[name]
    fields |= {
        "model_type": _MODEL_TYPE,
        "block_size": field("block_size"),
        "target_layer_ids": list(field("target_layer_ids")),
        "num_target_layers": field("num_target_layers"),
        "calibration_rank": field("anchor_bias_rank", 256) if field("enable_anchor_bias_logits", True) else None,
        "attention_layouts": [_qwen3_layout(config)],
    }
    return fields


def _qwen3_layout(config: Mapping[str, Any]) -> dict[str, dict[str, list[int]]]:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or width // heads
    queries, shared = heads * head_dim, config.get("num_key_value_heads", heads) * head_dim
    layout: dict[str, dict[str, list[int]]] = {
        "q_proj": {"weight": [queries, width]},
        "k_proj": {"weight": [shared, width]},
        "v_proj": {"weight": [shared, width]},
        "o_proj": {"weight": [width, queries]},
    }
    if config.get("attention_bias"):
        for shapes in layout.values():
            shapes["bias"] = shapes["weight"][:1]
    layout["q_norm"] = {"weight": [head_dim]}
    layout["k_norm"] = {"weight": [head_dim]}
    return layout
