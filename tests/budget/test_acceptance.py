"""What is learned of a drafter, fed with rounds whose acceptance is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from machines import Drafter, Machine, flat, simulate

from hf_treespec.budget import BudgetController, CalibratedAcceptance, FixedBudget, RoundRecord

DEPTHS = [0, 1, 1, 2, 3, 7]
SCORES = [1.0, 0.5, 0.4, 0.3, 0.2, 0.1]


def feed(acceptance: CalibratedAcceptance, truth: list[float], rounds: int, seed: int = 0, rows: int = 1) -> None:
    """Rounds that promise 0.8 a depth, of which `truth` comes true."""
    draw = np.random.default_rng(seed)
    for _ in range(rounds):
        reached = [rows]
        for share in truth:
            reached.append(int(draw.binomial(reached[-1], 0.8 * share)))
        acceptance.record([rows * 0.8**d for d in range(len(reached))], reached)


def test_nothing_known_changes_nothing() -> None:
    assert CalibratedAcceptance().correct(SCORES, DEPTHS) == SCORES


def test_depths_are_learned() -> None:
    acceptance = CalibratedAcceptance()
    feed(acceptance, [0.9, 0.5], 600)
    assert acceptance.factors()[1:] == pytest.approx([0.9, 0.45], rel=0.15)
    corrected = acceptance.correct(SCORES, DEPTHS)
    assert corrected[0] == 1
    # Deeper than ever seen is as the deepest.
    assert corrected[3:] == pytest.approx([acceptance.factors()[2] * score for score in SCORES[3:]])


def test_promises_may_be_too_low_but_nothing_is_surer_than_certain() -> None:
    acceptance = CalibratedAcceptance()
    for _ in range(100):
        acceptance.record([1.0, 0.5], [1, 1])
    assert acceptance.factors()[1] > 1.8
    assert acceptance.correct([1.0, 0.9], [0, 1]) == [1.0, 1.0]


def test_few_rounds_do_not_swing_it() -> None:
    acceptance = CalibratedAcceptance()
    feed(acceptance, [1.0, 1.0], 300)
    before = acceptance.factors()
    for _ in range(3):
        acceptance.record([1.0, 0.8, 0.64], [1, 0, 0])
    np.testing.assert_allclose(acceptance.factors(), before, rtol=0.05)


@pytest.mark.parametrize(("first", "then"), [(1.0, 0.05), (0.05, 1.0)])
def test_another_drafter_is_noticed_in_tens_of_rounds(first: float, then: float) -> None:
    acceptance = CalibratedAcceptance()
    feed(acceptance, [first] * 4, 400)
    feed(acceptance, [then] * 4, 60, seed=1)
    assert acceptance.factors()[1] == pytest.approx(then, abs=0.25)


def test_dummies_stay_nothing() -> None:
    assert CalibratedAcceptance().correct([1.0, 0.0], [0, 0]) == [1.0, 0.0]


def test_reliability_and_correlation() -> None:
    acceptance = CalibratedAcceptance()
    assert acceptance.reliability() == []
    assert math.isnan(acceptance.correlation())
    feed(acceptance, [0.5], 400)
    (table,) = acceptance.reliability()
    assert table.promised == pytest.approx(0.8)
    assert table.accepted == pytest.approx(0.4, abs=0.06)
    assert table.count == 400
    controller = BudgetController()
    simulate(controller, Machine(flat, 1.0), Drafter(3), rounds=300)
    assert 0.3 < controller.acceptance.correlation() < 1
    for item in controller.acceptance.reliability():
        assert item.accepted == pytest.approx(item.promised, abs=4 * (0.25 / item.count) ** 0.5 + 0.02)


def test_what_is_expected_comes() -> None:
    acceptance = CalibratedAcceptance()
    assert math.isnan(acceptance.foresight())
    feed(acceptance, [0.5, 0.4], 20)
    assert acceptance.foresight() < 0.95  # promises were believed at first
    feed(acceptance, [0.5, 0.4], 600)
    assert acceptance.foresight() == pytest.approx(1.0, abs=0.05)


def test_a_fixed_budget_is_fixed() -> None:
    policy = FixedBudget(8)
    assert (policy.should_draft(), policy.largest(), policy.limit, policy.reason) == (True, 8, 8, "fixed")
    assert policy.choose(torch.ones(1, 20)) == 8
    assert policy.choose(torch.ones(1, 5), torch.zeros(1, 5).long()) == 5
    policy.record(RoundRecord(8, True, 1, 1, 10, 1.0, 10.0, 0.1, 3, 3, [1.0, 1.5], [1, 1]))
    assert not FixedBudget(1).should_draft()
