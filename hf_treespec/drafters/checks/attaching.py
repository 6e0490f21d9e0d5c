"""Holding a pair to its rules when a drafter is attached, once as long as nothing changes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..base import BlockDrafter
from .findings import Finding, Status

logger = logging.get_logger(__package__)

#: What a pair was like when it was last found to fit, by the drafter's weights and then by target.
_CHECKED: weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[PreTrainedModel, Any]] = (
    weakref.WeakKeyDictionary()
)


def examine(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """What each rule of the drafter's family finds, in order."""
    for rule in drafter.rules:
        yield from rule(drafter, target)


def check(drafter: BlockDrafter, target: PreTrainedModel) -> None:
    """Holds a pair to the rules of the drafter's family; a pair that fitted once costs nothing the next time.

    Raises:
        ValueError: A rule is broken; the message says the values found, the ones wanted and the fix.
    """
    if isinstance(target, BlockDrafter):
        raise ValueError(
            f"The target is the model that a drafter drafts for, and {type(target).__name__} is a drafter "
            "itself. Give the causal LM that it was trained for."
        )
    seen = _CHECKED.setdefault(drafter.weights, weakref.WeakKeyDictionary())
    state = _state(drafter, target)
    if seen.get(target) == state:
        return
    slow = []
    for finding in examine(drafter, target):
        if finding.status is Status.wrong:
            raise ValueError(str(finding))
        if finding.status is Status.slow:
            slow.append(f"{finding.rule}: {finding}")
    if slow:
        logger.warning(f"This drafter may be slow for this target; no token changes. {' '.join(slow)}")
    seen[target] = state


def _state(drafter: BlockDrafter, target: PreTrainedModel) -> tuple[Any, ...]:
    """What a verdict depends on, as far as it can change under the same two objects."""
    borrowed = (target.get_input_embeddings(), target.get_output_embeddings())
    weights = [getattr(module, "weight", None) for module in borrowed]
    return (
        dict(vars(drafter.config)),
        drafter.dtype,
        *((id(weight), weight.shape, weight.dtype) for weight in weights if weight is not None),
        target.config.get_text_config().vocab_size,
    )
