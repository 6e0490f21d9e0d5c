"""Turns the configuration of a published DFlash 2 checkpoint into this package's fields.

It is z-lab's second DFlash dialect under the architecture `DFlash2DraftModel`, with seven more fields in
`dflash_config`; the public loaders (PyPI `dflash` 0.1.0, vllm-project/vllm#52816) read the same ones. Tensors need no
conversion: their names are the same.

What a checkpoint leaves out has the meaning it has there: no scale is 1, no soft cap is none, and without `is_causal`
sliding layers are causal and full ones not, as in all of z-lab's dialect. `z-lab/Qwen3.8-27B-DFlash2` (blocks of 8)
states none of the three scales, `z-lab/Muse-Glimmer-30B-DFlash2` (blocks of 16) the multiplier and the soft cap; both
have five sliding layers of window 2048 and `is_causal` false.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dflash import convert_dflash

ARCHITECTURE = "DFlash2DraftModel"

_MODEL_TYPE = "treespec_dflash2"
_SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_SCALES = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": 0.0}
_OF_DFLASH = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "target_hidden_size",
    "sliding_window",
    "draft_window",
    "is_causal",
    "causal_head",
)


def is_published(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is written in the published dialect."""
    nested = config.get("dflash_config") or {}
    return config.get("model_type") != _MODEL_TYPE and (
        ARCHITECTURE in (config.get("architectures") or ()) or "selector_rank" in nested
    )


def convert_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `DFlash2Config` from a published `config.json`.

    Raises:
        ValueError: A field without which no drafter can be built is absent, one is unknown, or a form is not
            supported.
    """
    nested: Mapping[str, Any] = config.get("dflash_config") or {}

    def field(name: str, default: Any = None) -> Any:
        value = nested.get(name, config.get(name))
        return default if value is None else value

    absent = [name for name in (*_SIZES, "vocab_size") if field(name) is None]
    if absent:
        raise ValueError(f"the DFlash 2 config.json lacks {absent} (looked at the top level and in dflash_config).")
    unknown = sorted(set(nested) - {*_SIZES, *_SCALES, *_OF_DFLASH})
    if unknown:
        raise ValueError(
            f"dflash_config holds {unknown}, which this package does not know: they may change what the drafter "
            "computes. Remove them from the config.json if they do not."
        )
    fields = convert_dflash.convert_config(config)
    fields |= {name: field(name) for name in (*_SIZES, "vocab_size")}
    fields |= {name: float(field(name, default)) for name, default in _SCALES.items()}
    fields["model_type"] = _MODEL_TYPE
    return fields
