"""Rotary embeddings as configurations state them, in the old form and in the new one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .fields import POSITIVE

#: Kinds whose frequencies depend on the length the model was trained at before they were stretched.
_WITH_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
#: Kinds whose frequencies a drafter can share with its target: they do not follow the length of a forward.
_FIXED = ("default", "linear", "llama3", "yarn")
#: Fields that a drafter has no use for: its positions are one number, and it rotates whole heads.
_OF_THE_TARGET = ("partial_rotary_factor", "mrope_section", "mrope_interleaved", "type")


def read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `rope_parameters` that a drafter's `config.json` states.

    Either one `rope_parameters`, or `rope_theta`, `partial_rotary_factor` and `rope_scaling` beside each other; both
    give the same frequencies.

    Raises:
        ValueError: The base is missing, which would cost acceptance silently if it were guessed, or the parameters
            differ between layer types.
    """
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError("rope_parameters differ between layer types; a DFlash drafter has one rotary embedding.")
    kind = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or kind or "default"
    for name in ("rope_theta", "partial_rotary_factor"):
        if rope.get(name) is None and config.get(name) is not None:
            rope[name] = config[name]
    if rope.get("rope_theta") is None:
        raise ValueError(
            "the drafter's config.json states no rope_theta, at the top level or in rope_parameters, and a guessed "
            "base would cost acceptance silently. Add the one it was trained with, as a rule its target's."
        )
    if rope["rope_type"] in _WITH_ORIGINAL_LENGTH and rope.get("original_max_position_embeddings") is None:
        length = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
        if length is not None:
            rope["original_max_position_embeddings"] = length
    return rope


def check_rope(rope: Mapping[str, Any]) -> None:
    """Checks that a drafter's `rope_parameters` name a rotary embedding that there is, and its base.

    Raises:
        ValueError: They do not.
    """
    kinds = ["default", *ROPE_INIT_FUNCTIONS]
    if rope.get("rope_type", "default") not in kinds:
        raise ValueError(
            f"rope_parameters has the rope_type {rope['rope_type']!r}; it is one of {sorted(set(kinds))}."
        )
    if not POSITIVE.holds(rope.get("rope_theta")):
        raise ValueError(f"rope_parameters has the rope_theta {rope.get('rope_theta')!r}; it is {POSITIVE.name}.")


def target_ropes(text_config: Any) -> list[dict[str, Any]]:
    """The `rope_parameters` of a target's layers, those of full attention first; empty where it has none."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    nested = {name: value for name, value in rope.items() if isinstance(value, Mapping)}
    if not nested:
        return [dict(rope)] if rope.get("rope_theta") is not None else []
    return [dict(nested[name]) for name in sorted(nested) if nested[name].get("rope_theta") is not None]


def rope_for_target(text_config: Any) -> dict[str, Any]:
    """The `rope_parameters` of a new drafter: the target's own frequencies, stretched as they are there."""
    ropes = target_ropes(text_config)
    if not ropes:
        return {"rope_type": "default", "rope_theta": 10_000.0}
    rope = {name: value for name, value in ropes[0].items() if name not in _OF_THE_TARGET}
    if rope.get("rope_type", "default") not in _FIXED:
        rope = {"rope_theta": rope["rope_theta"]}
    return {**rope, "rope_type": rope.get("rope_type", "default"), "rope_theta": float(rope["rope_theta"])}


def stretching(rope: Mapping[str, Any]) -> dict[str, Any]:
    """What a rotary embedding does to the frequencies of its base: its kind and that kind's numbers."""
    kept = {name: value for name, value in rope.items() if name not in (*_OF_THE_TARGET, "rope_theta")}
    kept.setdefault("rope_type", "default")
    return {"rope_type": "default"} if kept["rope_type"] == "default" else kept


def describe_rope(rope: Mapping[str, Any]) -> str:
    """A rotary embedding in a few words, such as `base 1,000,000, yarn × 4`."""
    kind, factor = rope.get("rope_type", "default"), rope.get("factor")
    stretched = "" if kind == "default" else f", {kind}" + (f" × {factor:g}" if factor else "")
    return f"base {rope['rope_theta']:,.0f}{stretched}"
