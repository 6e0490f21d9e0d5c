"""Turns the configuration of a z-lab DFlash checkpoint into this package's fields.

JetSpec's checkpoints are of this dialect, with `causal_head` for a block that attends causally. Two generations of the
format exist: `block_size` at the top level or inside `dflash_config`, and `rope_theta` with `rope_scaling` or one
`rope_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig, Qwen3Config

from ..rope import read_rope

ARCHITECTURE = "DFlashDraftModel"

_OF_A_DECODER = (
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
    "vocab_size",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)


_SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")


def is_zlab(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is written in z-lab's dialect."""
    return config.get("model_type") != "treespec_dflash" and (
        ARCHITECTURE in (config.get("architectures") or ()) or "dflash_config" in config
    )


def decoder_fields(config: Mapping[str, Any], family: type[PreTrainedConfig] = Qwen3Config) -> dict[str, Any]:
    """Fields of the draft layers; those absent have the defaults of the configuration class that wrote the file."""
    windows = ("use_sliding_window", "sliding_window", "max_window_layers")
    known = family(**{name: config[name] for name in (*_OF_A_DECODER, *windows) if name in config})
    found = {name: getattr(known, name, None) for name in _OF_A_DECODER}
    return {name: value for name, value in found.items() if value is not None}


def refuse_tensors(tensor_names: frozenset[str]) -> None:
    """Refuses by name what has the layout of a DFlash drafter but other layers.

    Raises:
        ValueError: There are tensors of projections that a draft layer has not.
    """
    for part, what in {"qkv_proj": "fused projections", "g_proj": "gates of attention"}.items():
        found = sorted(name for name in tensor_names if f".{part}." in name)
        if found:
            raise ValueError(
                f"the checkpoint has {what} ({found[0]} and {len(found) - 1} more), as drafters for Laguna have; this "
                "package's draft layers have not. Use a drafter with separate q_proj, k_proj and v_proj."
            )


def convert_config(config: Mapping[str, Any], tensor_names: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Fields of `DFlashConfig` from a z-lab `config.json` and the names of the tensors beside it.

    Raises:
        ValueError: A field without which no drafter can be built is absent, or a form is not supported.
    """
    refuse_tensors(tensor_names)
    nested: Mapping[str, Any] = config.get("dflash_config") or {}

    def field(name: str, default: Any = None) -> Any:
        return nested[name] if name in nested else config.get(name, default)

    absent = [name for name in ("block_size", "mask_token_id", "target_layer_ids") if field(name) is None]
    if absent:
        raise ValueError(f"the DFlash config.json lacks {absent} (looked at the top level and in dflash_config).")
    fields = decoder_fields(config)
    fields |= {name: config[name] for name in ("num_target_layers", "dtype", "torch_dtype") if config.get(name)}
    fields |= {name: field(name) for name in ("block_size", "mask_token_id", "target_layer_ids")}
    fields["model_type"] = "treespec_dflash"
    # The published code rotates whole heads; a partial_rotary_factor there is the target's, copied with its fields.
    fields["rope_parameters"] = read_rope(config)
    fields["rope_parameters"].pop("partial_rotary_factor", None)
    fields["target_hidden_size"] = field("target_hidden_size")
    fields["feature_adapter"] = "hidden_dim_adapter.proj.weight" in tensor_names
    fields["draft_window"] = field("draft_window")
    kinds = fields.get("layer_types") or ["full_attention"] * fields["num_hidden_layers"]
    # Unless the file says otherwise, sliding layers attend causally within the block and full ones do not.
    causal = field("causal_head", field("is_causal"))
    fields["is_causal"] = [kind == "sliding_attention" if causal is None else bool(causal) for kind in kinds]
    if "sliding_attention" in kinds:
        fields["sliding_window"] = field("sliding_window")
    # What is not stated is as the target has it: the code that the first checkpoints came with called its modules.
    fields |= {name: field(name) for name in _SCALES}
    fields["own_embedding"] = "embed_tokens.weight" in tensor_names
    fields["own_head"] = "lm_head.weight" in tensor_names
    return fields
