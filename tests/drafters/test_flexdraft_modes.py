"""The choice between drafting in the verification forward and after it, on machines that are made up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from torch import nn

from hf_treespec.drafters.flexdraft.modes import Mode, ModeCosts, costs_of
from hf_treespec.drafters.flexdraft.options import FlexDraftOptions


def chosen(costs: ModeCosts, rounds: int, cost: Callable[[Mode, int], float]) -> list[Mode]:
    modes = []
    for turn in range(rounds):
        mode = costs.choose()
        costs.record(mode, cost(mode, turn))
        modes.append(mode)
    return modes


@pytest.mark.parametrize("guess", ["parallel", "sequential"])
@pytest.mark.parametrize("cheap", ["parallel", "sequential"])
def test_the_cheaper_mode_is_taken_whatever_the_guess(guess: Mode, cheap: Mode) -> None:
    modes = chosen(ModeCosts(guess), 200, lambda mode, turn: 1.0 if mode == cheap else 1.2)
    assert modes[0] == guess
    assert Counter(modes)[cheap] >= 185


def test_a_round_that_was_held_up_does_not_turn_the_choice() -> None:
    modes = chosen(
        ModeCosts("parallel"), 100, lambda mode, turn: 50.0 if turn % 10 == 7 else float(mode != "parallel")
    )
    assert Counter(modes)["parallel"] >= 90


def test_a_mode_is_preferred_once_both_are_known() -> None:
    costs = ModeCosts("parallel")
    preferred = []
    for _ in range(30):
        mode = costs.choose()
        preferred.append(costs.prefers(mode))
        costs.record(mode, 1.0 if mode == "sequential" else 2.0)
    assert preferred == [False] * 6 + [True] * 17 + [False] + [True] * 6


def test_the_choice_follows_a_machine_that_changes() -> None:
    costs = ModeCosts("parallel")
    chosen(costs, 60, lambda mode, turn: 1.0 if mode == "parallel" else 2.0)
    modes = chosen(costs, 120, lambda mode, turn: 3.0 if mode == "parallel" else 2.0)
    assert Counter(modes[-60:])["sequential"] >= 55


def test_what_was_learned_stays_with_the_drafter_and_its_circumstances() -> None:
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    found = costs_of(one, (1,), "parallel")
    assert costs_of(one, (1,), "sequential") is found
    assert costs_of(one, (2,), "parallel") is not found
    assert costs_of(other, (1,), "parallel") is not found


@pytest.mark.parametrize(
    ("mode", "batch", "expected"),
    [
        ("auto", 2, "parallel"),
        ("auto", 3, "sequential"),
        ("batch", 2, "parallel"),
        ("batch", 3, "sequential"),
        ("parallel", 3, "parallel"),
        ("sequential", 1, "sequential"),
    ],
)
def test_the_mode_before_anything_is_measured(mode: str, batch: int, expected: str) -> None:
    assert FlexDraftOptions().with_options(flex_mode=mode).mode(batch) == expected


def test_without_a_largest_batch_all_are_drafted_for_in_parallel() -> None:
    assert FlexDraftOptions(flex_mode="batch", flex_parallel_batch=None).mode(64) == "parallel"
