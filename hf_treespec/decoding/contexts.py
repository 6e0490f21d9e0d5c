"""Draft contexts between calls: a conversation that goes on from a returned cache drafts with all it has seen."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from transformers import Cache
from transformers.utils import logging

from ..drafters.base import BlockDrafter, DraftSession

logger = logging.get_logger(__name__)


@dataclass
class _Context:
    session: DraftSession
    #: The drafter's weights, which views of it (`with_options`) have in common.
    weights: weakref.ref[torch.nn.Module]
    #: Cached columns of each row that the session has not seen: padding, or what came before drafting began.
    unseen: list[int]
    #: Whether its tensors may only be written in inference mode.
    inference: bool


_CONTEXTS: weakref.WeakKeyDictionary[Cache, _Context] = weakref.WeakKeyDictionary()


def remember(cache: Cache, session: DraftSession, drafter: BlockDrafter, columns: list[int]) -> None:
    """Keeps a session for as long as its cache lives.

    Args:
        columns: Cached columns of each row.
    """
    unseen = [total - seen for total, seen in zip(columns, session.lengths, strict=True)]
    _CONTEXTS[cache] = _Context(session, weakref.ref(drafter.weights), unseen, torch.is_inference_mode_enabled())


def recall(cache: Cache, drafter: BlockDrafter, batch_size: int) -> DraftSession | None:
    """The session that belongs to a cache the caller goes on from, cropped as the cache was; None if there is none."""
    columns = int(cache.get_seq_length())
    if columns == 0:
        return None
    context = _CONTEXTS.pop(cache, None)
    if context is None or context.weights() is not drafter.weights or len(context.unseen) != batch_size:
        logger.warning_once(
            "The draft context starts at the new tokens: nothing is known of what the cache already holds."
        )
        return None
    if context.inference and not torch.is_inference_mode_enabled():
        logger.warning_once("The draft context starts at the new tokens: what is known was made in inference mode.")
        return None
    wanted = [max(0, columns - unseen) for unseen in context.unseen]
    if any(seen < want for seen, want in zip(context.session.lengths, wanted, strict=True)):
        logger.warning_once("The draft context starts at the new tokens: the cache was extended without the drafter.")
        return None
    context.session.rollback(wanted)
    return context.session
