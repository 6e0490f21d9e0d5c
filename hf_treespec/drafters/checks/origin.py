"""The rule of origin: the target a drafter was trained for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from transformers import PreTrainedModel

from ...sources import is_hub_id
from ..base import BlockDrafter
from .findings import Finding, Status, fits

#: Parts of a model's name that say how it is stored, not what it is.
_STORAGE = re.compile(
    r"[-_.](awq|gptq|gguf|bnb|hf|mlx|nf4|fp8|fp16|bf16|int4|int8|[48]bit|mxfp4|nvfp4|w\d+a\d+|dynamic|quantized)\b"
)


def trained_target(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """The target is the one whose name the drafter's configuration records, where both are known."""
    rule = "trained for"
    recorded = getattr(drafter.config, "target_name_or_path", None)
    name = getattr(target.config, "_name_or_path", "") or ""
    if not recorded or not is_hub_id(name):
        yield Finding(rule, Status.unchecked, recorded or "not recorded")
    elif model_name(recorded) == model_name(name):
        yield fits(rule, recorded)
    else:
        yield Finding(
            rule,
            Status.slow,
            f"the drafter was trained for {recorded}, the target is {name}",
            "acceptance is best with the target it was trained for",
            "Nothing to do if this is a fine-tune of it.",
        )


def model_name(name: str) -> str:
    """What a model is called, whoever uploaded it and however it is quantised."""
    bare = name.rstrip("/").rpartition("/")[2].lower()
    while (shorter := _STORAGE.sub("", bare)) != bare:
        bare = shorter
    return bare
