"""The fixed budget that would have been best, without the luck of having been chosen on what it is scored on."""

from __future__ import annotations

from collections.abc import Sequence

from .arms import tree_nodes
from .benchmark import Sample
from .measurement import tokens_per_second


def cross_fitted_budgets(samples: Sequence[Sample]) -> dict[int, str] | None:
    """For every prompt, the `tree-N` arm that was fastest on the other half of the prompts.

    Prompts stand on either side in turn. Scored so, both halves together say what one well-chosen N gives: the best of
    many arms on the very prompts it is scored on would owe a part of its lead to noise.

    Returns:
        Arms by prompt; None for fewer than two prompts or without such arms.
    """
    prompts = list(dict.fromkeys(sample.prompt for sample in samples))
    arms = [name for name in (samples[0].arms if samples else ()) if tree_nodes(name) is not None]
    if len(prompts) < 2 or not arms:
        return None
    halves = (frozenset(prompts[::2]), frozenset(prompts[1::2]))

    def best(half: frozenset[int]) -> str:
        chosen_on = [sample for sample in samples if sample.prompt in half]
        return max(arms, key=lambda arm: tokens_per_second(sample.arms[arm] for sample in chosen_on) or 0.0)

    fastest = [best(half) for half in halves]
    return {prompt: fastest[1] if prompt in halves[0] else fastest[0] for prompt in prompts}
