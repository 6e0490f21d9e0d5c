"""Means of values that belong to depths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


def mean_by_depth(values: Sequence[float], depths: Sequence[int]) -> dict[int, float]:
    """Mean of the values of each depth, in rising order of depth."""
    found: dict[int, list[float]] = defaultdict(list)
    for value, depth in zip(values, depths, strict=True):
        found[depth].append(value)
    return {depth: sum(found[depth]) / len(found[depth]) for depth in sorted(found)}
