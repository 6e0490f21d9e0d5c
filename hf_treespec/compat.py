"""The few differences between transformers versions, in one place."""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import parse
from transformers import Cache

TRANSFORMERS = parse(transformers.__version__)

#: Name of the cache among the model's keyword arguments and outputs.
CACHE_KEYWORD = "cache" if TRANSFORMERS >= parse("5.24.0.dev0") else "past_key_values"


def cache_of(model_kwargs: dict[str, Any]) -> Cache | None:
    """The cache among a model's keyword arguments, under whichever name this version uses."""
    return model_kwargs.get(CACHE_KEYWORD)
