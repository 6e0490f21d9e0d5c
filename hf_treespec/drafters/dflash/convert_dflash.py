"""Turns the configuration of a z-lab DFlash checkpoint into this package's fields.

Tensors need no conversion: their names are the same. Two generations of the format exist: `block_size` at the top
level or inside `dflash_config`, and `rope_theta` with `rope_scaling` or one `rope_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..rope import read_rope

ARCHITECTURE = "DFlashDraftModel"

_SAME = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "attention_bias",
    "attention_dropout",
    "layer_types",
    "num_target_layers",
    "vocab_size",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "dtype",
    "torch_dtype",
)


def is_zlab(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is written in z-lab's dialect."""
    return config.get("model_type") != "treespec_dflash" and (
        ARCHITECTURE in (config.get("architectures") or ()) or "dflash_config" in config
    )


def convert_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `DFlashConfig` from a z-lab `config.json`.

    Raises:
        ValueError: A field without which no drafter can be built is absent, or a form is not supported.
    """
    nested: Mapping[str, Any] = config.get("dflash_config") or {}

    def field(name: str, default: Any = None) -> Any:
        return nested[name] if name in nested else config.get(name, default)

    absent = [name for name in ("block_size", "mask_token_id", "target_layer_ids") if field(name) is None]
    if absent:
        raise ValueError(f"the DFlash config.json lacks {absent} (looked at the top level and in dflash_config).")
    fields = {name: config[name] for name in _SAME if config.get(name) is not None}
    fields |= {name: field(name) for name in ("block_size", "mask_token_id", "target_layer_ids")}
    fields["model_type"] = "treespec_dflash"
    # The published code rotates whole heads; a partial_rotary_factor there is the target's, copied with its fields.
    fields["rope_parameters"] = read_rope(config)
    fields["rope_parameters"].pop("partial_rotary_factor", None)
    fields["target_hidden_size"] = field("target_hidden_size")
    fields["draft_window"] = field("draft_window")
    fields["is_causal"] = bool(field("causal_head", field("is_causal", False)))
    if config.get("use_sliding_window") and not fields.get("layer_types"):
        # As Qwen3's own configuration reads them.
        first = config.get("max_window_layers", 28)
        fields["layer_types"] = [
            "sliding_attention" if layer >= first else "full_attention" for layer in range(config["num_hidden_layers"])
        ]
    if "sliding_attention" in (fields.get("layer_types") or ()):
        fields["sliding_window"] = field("sliding_window")
    return fields
