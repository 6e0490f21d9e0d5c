"""Turns the configuration of a published TreeFlash checkpoint into this package's fields.

It is z-lab's DFlash dialect with a `treeflash_config` beside the `dflash_config`. Tensors need no conversion: their
names are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dflash import convert_dflash

_MODEL_TYPE = "treespec_treeflash"


def is_published(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is written in the published dialect."""
    return config.get("model_type") != _MODEL_TYPE and "treeflash_config" in config


def convert_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `TreeFlashConfig` from a published `config.json`.

    The tree size found there (`candidate_tokens`) is left out: how many nodes pay is a matter of the machine.

    Raises:
        ValueError: A field without which no drafter can be built is absent, or a form is not supported.
    """
    nested: Mapping[str, Any] = config.get("treeflash_config") or {}
    fields = convert_dflash.convert_config(config)
    fields["model_type"] = _MODEL_TYPE
    fields["ar_approximation"] = nested.get("ar_approximation")
    parents = nested.get("m_initial_token_embds", config.get("m_initial_token_embds"))
    if parents is not None:
        fields["num_parents"] = parents
        fields["head_candidates"] = max(64, parents)
    return fields
