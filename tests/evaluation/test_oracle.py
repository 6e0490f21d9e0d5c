"""The oracle does not see what it is scored on."""

from __future__ import annotations

import numpy as np
import pytest
from made_up import arm, sample, section

from hf_treespec.evaluation.oracle import cross_fitted_budgets
from hf_treespec.evaluation.results import summarise_arm


def lucky(prompt: int, winner: str, arms: tuple[str, ...] = ("tree_4", "tree_8")):
    """On this prompt one arm is twice as fast as plain decoding, and the others half as fast."""
    return sample(prompt, plain=arm(2.0), **{name: arm(1.0 if name == winner else 4.0) for name in arms})


def test_luck_on_the_scored_half_counts_for_nothing():
    """Each half has its own winner by luck: chosen on the scored half the oracle would seem 2× as fast."""
    samples = [lucky(prompt, "tree_4" if prompt % 2 == 0 else "tree_8") for prompt in range(8)]
    assert cross_fitted_budgets(samples) == {prompt: "tree-8" if prompt % 2 == 0 else "tree-4" for prompt in range(8)}
    assert summarise_arm(section(*samples), "oracle")["speedup"] == pytest.approx(0.5)


def test_pure_noise_gives_no_lead():
    """Many arms that are all as fast as plain decoding: the best of them in hindsight is not."""
    generator = np.random.default_rng(0)
    names = tuple(f"tree_{nodes}" for nodes in range(1, 21))
    samples = [
        sample(prompt, plain=arm(1.0), **{name: arm(generator.uniform(0.2, 1.8)) for name in names})
        for prompt in range(40)
    ]
    rows = {name: summarise_arm(section(*samples), name.replace("_", "-"))["speedup"] for name in names}
    oracle = summarise_arm(section(*samples), "oracle")["speedup"]
    assert max(rows.values()) > 1.12
    assert oracle == pytest.approx(1.0, abs=0.1)
    assert oracle < max(rows.values()) - 0.05


def test_a_real_winner_is_found():
    row = summarise_arm(section(*(lucky(prompt, "tree_8") for prompt in range(6))), "oracle")
    assert row["speedup"] == pytest.approx(2.0)
    assert row["oracle_budgets"] == [8]
    assert row["greedy_match"] == 1.0


def test_turns_of_a_prompt_stay_together():
    samples = [lucky(prompt, "tree_4" if prompt < 2 else "tree_8") for prompt in (0, 0, 1, 2, 2, 3)]
    chosen = cross_fitted_budgets(samples)
    assert chosen is not None
    assert chosen.keys() == {0, 1, 2, 3}


def test_one_prompt_is_too_few():
    row = summarise_arm(section(lucky(0, "tree_4")), "oracle")
    assert "two prompts" in row["skipped"]
    assert row["speedup"] is None
    row = summarise_arm(section(sample(0, plain=arm(1.0)), sample(1, plain=arm(1.0))), "oracle")
    assert "tree-N" in row["skipped"]
