"""The rules of positions: rotary frequencies, windows, and how far a drafter was trained to look."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..base import BlockDrafter
from ..rope import describe_rope, stretching, target_ropes
from .findings import Finding, Status, fits, text_config

logger = logging.get_logger(__package__)

#: Window to suggest to drafters of long contexts: what published ones with windows have.
_LONGEST_WINDOW = 2048
#: Relative error of rotary frequencies that float32 arithmetic explains.
_ROUNDING = 1e-4
#: Drafters whose user has been told that a call goes beyond the trained positions.
_TOLD_LENGTH: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def rotary_embedding(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """The drafter rotates by the frequencies its configuration states, and these are the target's.

    A drafter has attention of its own, so other frequencies than the target's can be right: those it was trained
    with. But published ones are trained with the target's, and a base or a stretching that differs is how a field that
    was lost on the way looks.
    """
    rule, config = "rotary embedding", drafter.config
    own = config.rope_parameters
    problems = list(_honours(rule, own, config.head_dim, getattr(drafter, "rotary_emb", None)))
    ropes = target_ropes(text_config(target))
    same_base = [rope for rope in ropes if rope["rope_theta"] == own["rope_theta"]]
    if ropes and not same_base:
        problems.append(
            Finding(
                rule,
                Status.slow,
                f"the drafter's rope_theta is {own['rope_theta']:,.0f}, the target's "
                f"{' and '.join(format(rope['rope_theta'], ',.0f') for rope in ropes)}",
                "drafters are trained with their target's, as a rule",
                "If its config.json lost the field, restore rope_theta there; nothing to do if it was trained so.",
            )
        )
    elif ropes and not any(stretching(rope) == stretching(own) for rope in same_base):
        problems.append(
            Finding(
                rule,
                Status.slow,
                f"the drafter rotates with {describe_rope(own)}, the target with {describe_rope(same_base[0])}",
                "drafters are trained with their target's frequencies, as a rule",
                "If its config.json lost rope_parameters, restore them there; if the target was stretched for longer "
                "texts since, limit the drafter with draft_window.",
            )
        )
    yield from problems or [fits(rule, describe_rope(own))]


def _honours(rule: str, own: dict[str, Any], head_dim: int, module: nn.Module | None) -> Iterator[Finding]:
    """Whether a drafter's rotary module has the frequencies that the configuration states."""
    inverse = getattr(module, "inv_freq", None)
    if module is None or inverse is None or inverse.is_meta:
        return
    partial = own.get("partial_rotary_factor") or 1.0
    if 2 * len(inverse) != int(partial * head_dim):
        yield Finding(
            rule,
            Status.slow,
            f"the drafter's config.json states partial_rotary_factor {partial:g}, and {2 * len(inverse)} of "
            f"{head_dim} channels are rotated",
            "it must be trained and run the same way",
            "If it was trained by code that rotates whole heads, as the published does, remove the field.",
        )
        return
    exact = type(module)(module.config).inv_freq
    error = float((inverse.float().cpu() / exact.cpu() - 1).abs().max())
    if error > _ROUNDING:
        yield Finding(
            rule,
            Status.slow,
            f"the drafter's rotary frequencies are off by up to {error:.1%}",
            "they must be those of its config.json, in float32",
            "Something has rounded or replaced rotary_emb.inv_freq: load the drafter anew, with from_pretrained.",
        )


def attention_windows(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """A window that the configuration names is one that some layer has."""
    config, rule = drafter.config, "windows"
    windows = [config.layer_window(layer) for layer in range(config.num_hidden_layers)]
    if config.sliding_window and not any(windows):
        yield Finding(
            rule,
            Status.slow,
            f"the drafter's sliding_window is {config.sliding_window}, and no layer in layer_types is sliding",
            "a window that was trained with must be drafted with",
            "Correct layer_types in the drafter's config.json, or set draft_window.",
        )
        return
    yield fits(rule, describe_windows(windows))


def describe_windows(windows: list[int | None]) -> str:
    """How far layers look back, such as `2048 ×4, all ×1`."""
    groups = [(window, len(list(group))) for window, group in itertools.groupby(windows)]
    return ", ".join(f"{'all' if window is None else window} ×{count}" for window, count in groups)


def check_length(drafter: BlockDrafter, length: int, window: int | None) -> None:
    """Warns, once for a drafter, where a call may go beyond the positions that it was trained at.

    Acceptance collapses there, unless every layer looks back no further than a window.

    Args:
        length: Positions that the call may reach.
        window: The call's `draft_window`.
    """
    config, weights = drafter.config, drafter.weights
    trained = getattr(config, "max_position_embeddings", None)
    if window or trained is None or length <= trained or weights in _TOLD_LENGTH:
        return
    if all(config.layer_window(layer) for layer in range(config.num_hidden_layers)):
        return
    _TOLD_LENGTH.add(weights)
    logger.warning(
        f"This call may reach {length} positions, and the drafter was trained for at most {trained} "
        "(max_position_embeddings). Beyond them few drafts are accepted: limit how far it looks back, such as by "
        f"drafter.with_options(draft_window={min(trained, _LONGEST_WINDOW)})."
    )
