"""Turns the configuration of a speculators DFlash checkpoint into this package's fields.

The library behind vLLM's published drafters (`RedHatAI/*-speculator.dflash`). It nests the layers' configuration, may
have a head of a reduced vocabulary of its own, and counts feature layers as `hidden_states` does, where 0 is the
embedding's output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, Qwen3Config

from ..fields import LAYERS, check_fields
from ..rope import read_rope
from .convert_dflash import decoder_fields, refuse_tensors


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of a speculators DFlash drafter."""
    return config.get("speculators_model_type") == "dflash"


def convert_config(config: Mapping[str, Any], tensor_names: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Fields of `DFlashConfig` from a speculators `config.json` and the names of the tensors beside it.

    Raises:
        ValueError: A field without which no drafter can be built is absent, or a form is not supported.
    """
    refuse_tensors(tensor_names)
    layers: Mapping[str, Any] = config.get("transformer_layer_config") or {}
    wanted = ("transformer_layer_config", "aux_hidden_state_layer_ids", "mask_token_id", "block_size")
    absent = [name for name in wanted if config.get(name) is None]
    if absent:
        raise ValueError(f"the speculators config.json lacks {absent}.")
    features = list(config["aux_hidden_state_layer_ids"])
    check_fields({"aux_hidden_state_layer_ids": features}, {"aux_hidden_state_layer_ids": LAYERS})
    if min(features) < 1:
        raise ValueError(
            f"aux_hidden_state_layer_ids is {features}: 0 is the output of the target's embedding, which is no "
            "decoder layer. A DFlash drafter takes features of decoder layers only, ids from 1 on."
        )
    family = CONFIG_MAPPING[layers["model_type"]] if layers.get("model_type") in CONFIG_MAPPING else Qwen3Config
    fields = decoder_fields(layers, family)
    fields |= {name: config[name] for name in ("block_size", "mask_token_id")}
    fields["model_type"] = "treespec_dflash"
    fields["dtype"] = config.get("dtype") or config.get("torch_dtype") or layers.get("dtype")
    # Where layer types differ, the published code takes the sliding ones' for all; it rotates whole heads.
    rope = layers.get("rope_parameters") or {}
    fields["rope_parameters"] = read_rope({**layers, "rope_parameters": rope.get("sliding_attention", rope)})
    fields["rope_parameters"].pop("partial_rotary_factor", None)
    fields["target_layer_ids"] = [layer - 1 for layer in features]
    fields["target_hidden_size"] = config.get("target_hidden_size")
    fields["sample_from_anchor"] = bool(config.get("sample_from_anchor", False))
    kinds = fields.get("layer_types") or ["full_attention"] * fields["num_hidden_layers"]
    if "sliding_attention" in kinds:
        fields["sliding_window"] = layers.get("sliding_window")
    fields["window_from"] = "anchor"
    causal = not config.get("sliding_window_non_causal", False)
    fields["is_causal"] = [causal and kind == "sliding_attention" for kind in kinds]
    fields["own_embedding"] = "embed_tokens.weight" in tensor_names
    # The head of a reduced vocabulary is the drafter's in any case; that of a whole one only where it is shipped.
    draft = config.get("draft_vocab_size")
    reduced = draft is not None and (draft != fields["vocab_size"] or "d2t" in tensor_names)
    fields["draft_vocab_size"] = draft if reduced else None
    fields["own_head"] = reduced or "lm_head.weight" in tensor_names
    # Drafters are trained on the rows of the target's embedding and head, whatever the target does round them.
    fields |= {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": 0.0}
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    fields["target_name_or_path"] = verifier.get("name_or_path")
    return fields
