"""Turns the configuration of a DeepSpec checkpoint without a Markov head into this package's fields.

DeepSpec writes its DFlash baselines (`deepseek-ai/dflash_*`) as DSpark models of rank 0: fields at the top level, an
embedding and a head of their own, and a prediction from every row of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .convert_dflash import convert_config as convert_zlab
from .convert_dflash import refuse_tensors

ARCHITECTURE = "Qwen3DSparkModel"


def is_deepspec(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of a DeepSpec drafter with Qwen3 layers."""
    return ARCHITECTURE in (config.get("architectures") or ())


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why a drafter with a Markov or a confidence head (DSpark), of DeepSpec or speculators, is refused; else None."""
    found = {name: config.get(name) for name in ("markov_rank", "enable_confidence_head") if config.get(name)}
    if not found or not (is_deepspec(config) or config.get("speculators_model_type") == "dspark"):
        return None
    return (
        f"this is a DSpark drafter ({found}), whose Markov and confidence heads are not supported. DFlash drafters of "
        "the same sources have neither."
    )


def convert_config(config: Mapping[str, Any], tensor_names: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Fields of `DFlashConfig` from a DeepSpec `config.json` and the names of the tensors beside it.

    Raises:
        ValueError: A field without which no drafter can be built is absent, or it has a Markov or confidence head.
    """
    refuse_tensors(tensor_names)
    reason = refusal(config)
    if reason is not None:
        raise ValueError(reason)
    fields = convert_zlab(config, tensor_names)
    fields["is_causal"] = False
    fields["sample_from_anchor"] = True
    return fields
