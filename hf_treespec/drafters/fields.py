"""What values the fields of a drafter's configuration may have."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers.activations import ACT2FN


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    Attributes:
        name: What such a value is called.
        holds: Whether a value is one.
    """

    name: str
    holds: Callable[[Any], bool]

    def or_none(self) -> Kind:
        """The same, or no value."""
        return Kind(f"{self.name}, or None", lambda value: value is None or self.holds(value))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _are_layers(value: Any) -> bool:
    ids = value if isinstance(value, list) else []
    return bool(ids) and all(_is_whole(layer) and layer >= 0 for layer in ids) and len(set(ids)) == len(ids)


COUNT = Kind("a positive whole number", lambda value: _is_whole(value) and value > 0)
POSITIVE = Kind("a positive number", lambda value: _is_number(value) and value > 0)
SHARE = Kind("a number above 0 and at most 1", lambda value: _is_number(value) and 0 < value <= 1)
NOT_NEGATIVE = Kind("a number of at least 0", lambda value: _is_number(value) and value >= 0)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TOKEN = Kind("a token id, a whole number of at least 0", lambda value: _is_whole(value) and value >= 0)
#: Special tokens; some models write -1 for one that they do not have.
TOKENS = Kind(
    "a token id or a list of them",
    lambda value: all(_is_whole(token) for token in (value if isinstance(value, list) else [value])),
)
ACTIVATION = Kind(
    "the name of an activation function of transformers, such as 'silu'",
    lambda value: isinstance(value, str) and value in ACT2FN,
)
LAYERS = Kind("a list of at least one decoder layer, counted from 0, none twice", _are_layers)


def check_fields(fields: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    """Checks that the fields of a configuration that have a kind are of it.

    Raises:
        ValueError: One has not.
    """
    for name, kind in kinds.items():
        if not kind.holds(fields[name]):
            raise ValueError(f"{name} is {reprlib.repr(fields[name])}; it is {kind.name}.")
