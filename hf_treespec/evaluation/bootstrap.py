"""Speed-up over some prompts with its interval, by a bootstrap that keeps each prompt's two measurements together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 5000


class Speedup(NamedTuple):
    """A ratio of times per token; None where it is not defined.

    Attributes:
        value: Over all prompts.
        interval: Its 95 % interval; None for fewer than two prompts.
    """

    value: float | None
    interval: tuple[float, float] | None


def paired_speedup(
    plain_seconds: ArrayLike,
    plain_tokens: ArrayLike,
    seconds: ArrayLike,
    tokens: ArrayLike,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Speedup:
    """Plain decoding's time per token over another arm's, both pooled over prompts.

    The interval is the percentile one over resampled prompts (Efron and Tibshirani, 1993, chapter 13): a prompt is
    drawn with both its measurements, so what makes it hard for both cancels.

    Args:
        plain_seconds: Plain decoding's time on each prompt, `[P]`.
        plain_tokens: Tokens it generated in them, `[P]`.
        seconds: The arm's time, `[P]`.
        tokens: The arm's tokens, `[P]`.
        seed: Of the resampling.
        resamples: Number of resamples.
    """
    columns = np.stack([np.asarray(column, dtype=float) for column in (plain_seconds, plain_tokens, seconds, tokens)])
    value = float(_ratio(columns.sum(axis=1)))
    if not np.isfinite(value):
        return Speedup(None, None)
    count = columns.shape[1]
    if count < 2:
        return Speedup(value, None)
    draws = np.random.default_rng(seed).integers(0, count, (resamples, count))
    ratios = _ratio(columns[:, draws].sum(axis=2))
    low, high = np.percentile(ratios[np.isfinite(ratios)], [2.5, 97.5])
    return Speedup(value, (float(low), float(high)))


def _ratio(sums: np.ndarray) -> np.ndarray:
    """Speed-ups of sums `[4, ...]`, in the order of `paired_speedup`'s arguments; not finite where undefined."""
    plain_seconds, plain_tokens, seconds, tokens = sums
    with np.errstate(divide="ignore", invalid="ignore"):
        # An arm that generated nothing has no time per token, however little time that took.
        return np.where(tokens > 0, (plain_seconds / plain_tokens) / (seconds / tokens), np.nan)
