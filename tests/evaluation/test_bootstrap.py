"""Speed-ups by hand, and intervals that hold what they promise."""

from __future__ import annotations

import numpy as np
import pytest

from hf_treespec.evaluation.bootstrap import paired_speedup


def test_the_ratio_is_of_pooled_times_per_token():
    value, interval = paired_speedup([4.0, 2.0], [10, 10], [1.0, 1.0], [10, 10])
    assert value == pytest.approx(3.0)  # not the mean of 4 and 2 weighted otherwise, and not of times without tokens
    assert interval is not None
    assert interval[0] == pytest.approx(2.0)
    assert interval[1] == pytest.approx(4.0)


def test_other_numbers_of_tokens_are_other_work():
    assert paired_speedup([4.0], [40], [1.0], [20]).value == pytest.approx(2.0)


def test_one_prompt_has_no_interval():
    assert paired_speedup([4.0], [10], [2.0], [10]) == (2.0, None)


@pytest.mark.parametrize("column", range(4))
def test_nothing_decoded_has_no_speedup(column: int):
    columns = [[1.0], [5], [1.0], [5]]
    columns[column] = [0]
    if column == 0:
        assert paired_speedup(*columns).value == 0.0
    else:
        assert paired_speedup(*columns) == (None, None)


def test_what_is_common_to_a_prompt_cancels():
    """Prompts of very different lengths, each answered exactly twice as fast: the interval is a point."""
    plain = np.array([1.0, 10.0, 100.0])
    value, interval = paired_speedup(plain, [10, 100, 1000], plain / 2, [10, 100, 1000])
    assert value == pytest.approx(2.0)
    assert interval == pytest.approx((2.0, 2.0))


def test_the_seed_settles_the_interval():
    generator = np.random.default_rng(5)
    columns = (generator.random(9) + 1, [10] * 9, generator.random(9) + 1, [10] * 9)
    assert paired_speedup(*columns, seed=1) == paired_speedup(*columns, seed=1)
    assert paired_speedup(*columns, seed=1) != paired_speedup(*columns, seed=2)


def test_coverage():
    """Of many made-up benchmarks whose true speed-up is known, about 95 % have it in their interval."""
    generator = np.random.default_rng(0)
    runs, prompts, truth, covered = 300, 30, 2.5, 0
    for run in range(runs):
        tokens = generator.integers(50, 250, prompts)
        plain = tokens * generator.gamma(20, 1 / 20, prompts)
        speeds = truth * generator.gamma(15, 1 / 15, prompts)
        # Time per token of the arm is 1 / truth on average by construction.
        arm = tokens / truth * (speeds / truth)
        interval = paired_speedup(plain, tokens, arm, tokens, seed=run, resamples=400).interval
        assert interval is not None
        covered += interval[0] <= truth <= interval[1]
    assert 0.89 <= covered / runs <= 0.99
