"""The controller on simulated machines whose optimum is known, and the rule it follows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import (
    DENSE,
    MIXTURE,
    Curve,
    Drafter,
    Machine,
    Run,
    best_rates,
    cliff,
    cpu,
    flat,
    mixture,
    simulate,
    simulate_calls,
)

from hf_treespec.budget import (
    BastionPolicy,
    BudgetController,
    Calibration,
    FixedBudget,
    ForwardKind,
    LatencyModel,
    LatencyPoint,
    RoundRecord,
    best_prefix,
    best_rate,
)
from hf_treespec.budget.pace import Pace

HONEST, OVERCONFIDENT, POOR = Drafter(), Drafter(honesty=0.8), Drafter(honesty=0.02)
#: Curve, milliseconds of a draft, workload.
MACHINES = {
    "flat": (flat, 1.5, DENSE),
    "cpu": (cpu, 20.0, DENSE),
    "cliff": (cliff, 2.0, DENSE),
    "mixture": (mixture, 1.5, MIXTURE),
}
CONTEXT = 512


def long_run(policy: BudgetController, machine: Machine, drafter: Drafter, seed: int = 1, rounds: int = 700) -> Run:
    return simulate(policy, machine, drafter, rounds, context=CONTEXT, seed=seed, grows=False)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("drafter", [HONEST, OVERCONFIDENT, POOR], ids=["honest", "overconfident", "poor"])
def test_the_rate_is_within_three_percent_of_the_best(name: str, drafter: Drafter) -> None:
    curve, draft_ms, workload = MACHINES[name]
    machine = Machine(curve, draft_ms)
    best = best_rates(machine, drafter, CONTEXT)
    rates = [
        long_run(BudgetController(LatencyModel(workload)), machine, drafter, seed).rate(100) for seed in (1, 2, 3, 4)
    ]
    assert np.mean(rates) >= 0.97 * best["adaptive"]
    assert np.mean(rates) >= 0.97 * best["fixed"]


def test_choosing_round_by_round_beats_any_fixed_number() -> None:
    curve, draft_ms, workload = MACHINES["mixture"]
    machine = Machine(curve, draft_ms)
    run = long_run(BudgetController(LatencyModel(workload)), machine, HONEST)
    assert run.rate(100) > 1.03 * best_rates(machine, HONEST, CONTEXT)["fixed"]


def slow_and_quick(turn: int) -> float:
    """A machine whose speed comes and goes by 30 %, in a hundred rounds."""
    return math.exp(0.3 * math.sin(turn / 50 * math.pi))


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_that_wanders_is_no_other_machine(name: str) -> None:
    curve, draft_ms, workload = MACHINES[name]
    wandering, steady = Machine(curve, draft_ms, drift=slow_and_quick), Machine(curve, draft_ms)
    rates = []
    for seed in (1, 2, 3, 4):
        run = long_run(BudgetController(LatencyModel(workload)), wandering, HONEST, seed)
        spent = [ms / slow_and_quick(turn) for turn, ms in enumerate(run.ms)]
        rates.append(sum(run.tokens[100:]) / sum(spent[100:]))
    assert np.mean(rates) >= 0.97 * best_rates(steady, HONEST, CONTEXT)["adaptive"]


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_that_warms_up_size_by_size_is_no_other_machine(name: str) -> None:
    curve, draft_ms, workload = MACHINES[name]
    machine, rates = Machine(curve, draft_ms, cold=1.25), []
    for seed in (1, 2, 3, 4):
        rates.append(long_run(BudgetController(LatencyModel(workload)), machine, HONEST, seed).rate(100))
        machine.seen.clear()
    assert np.mean(rates) >= 0.97 * best_rates(machine, HONEST, CONTEXT)["adaptive"]


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_machine_that_drifts_is_followed(factor: float) -> None:
    machine = Machine(cliff, 2.0, drift=lambda turn: factor if turn >= 300 else 1.0)
    run = long_run(BudgetController(LatencyModel(DENSE)), machine, HONEST, rounds=700)
    best = best_rates(machine, HONEST, CONTEXT, turn=300)
    assert run.rate(350) >= 0.97 * best["adaptive"]


def test_a_machine_whose_shape_changes_is_followed() -> None:
    def steeper(rows: np.ndarray, context: int) -> np.ndarray:
        return 12.0 + 0.6 * rows

    controller, machine = BudgetController(LatencyModel(DENSE)), Machine(steeper, 1.5)
    long_run(controller, Machine(flat, 1.5), HONEST, rounds=200)
    run = long_run(controller, machine, HONEST, rounds=700)
    # What is known of sizes not measured since has to be disproved first, by a look now and then.
    assert run.rate(500) >= 0.9 * best_rates(machine, HONEST, CONTEXT)["adaptive"]


def rows_beside_each_other(batch: int, row_ms: float) -> Machine:
    return Machine(lambda rows, context: 10.0 + row_ms * batch * rows, 4.0)


@pytest.mark.parametrize("batch", [2, 8])
@pytest.mark.parametrize("row_ms", [0.02, 0.15, 0.4], ids=["flat", "between", "steep"])
def test_calls_of_several_rows_end_as_soon_as_any_fixed_number_lets_them(batch: int, row_ms: float) -> None:
    machine = rows_beside_each_other(batch, row_ms)
    fixed = [
        np.mean(simulate_calls(FixedBudget(nodes), machine, OVERCONFIDENT, 30, batch)) for nodes in (1, 4, 8, 16, 32)
    ]
    spent = simulate_calls(BudgetController(LatencyModel(DENSE)), machine, OVERCONFIDENT, 40, batch)
    assert np.mean(spent[10:]) <= min(fixed) / 0.96


class MeanRow(BudgetController):
    """Goes by the average row, as if calls did not have to wait for their slowest."""

    def choose(
        self,
        scores: torch.Tensor,
        depths: torch.Tensor | None = None,
        leads: Sequence[int] | None = None,
        riding: bool = False,
    ) -> int:
        return super().choose(scores.mean(0, keepdim=True), None if depths is None else depths[:1])

    def record(self, record: RoundRecord) -> None:
        super().record(replace(record, progress=round(record.tokens / record.live)))


def test_going_by_the_average_row_is_slower_than_plain_decoding() -> None:
    """The negative control: what keeps the bound above is that the slowest row counts."""
    machine = rows_beside_each_other(8, 0.15)
    plain, mean = (
        np.mean(simulate_calls(policy, machine, OVERCONFIDENT, 30, 8)[10:])
        for policy in (FixedBudget(1), MeanRow(LatencyModel(DENSE)))
    )
    assert mean > 1.05 * plain


@pytest.mark.parametrize("exponent", [0.0, 1.3])
def test_a_wrong_latency_model_fails_the_bound(exponent: float) -> None:
    """The negative control: what keeps the bound above is the measuring."""
    wrong = LatencyModel(online=False)
    wrong.fit([LatencyPoint(n, CONTEXT, 1, 80.0 * n**exponent) for n in (1, 2, 4, 8, 16, 32, 64)])
    machine = Machine(cpu, 20.0) if exponent == 0 else Machine(flat, 1.5)
    run = long_run(BudgetController(wrong), machine, HONEST)
    assert run.rate(100) < 0.9 * best_rates(machine, HONEST, CONTEXT)["adaptive"]


def test_moving_averages_alone_and_fits_alone() -> None:
    machine = Machine(cliff, 2.0)
    best = best_rates(machine, HONEST, CONTEXT)["adaptive"]
    assert long_run(BudgetController(None), machine, HONEST).rate(100) >= 0.97 * best
    static = BudgetController(LatencyModel(DENSE, online=False))
    before_drift = long_run(static, machine, HONEST).rate(100)
    assert 0.8 * best < before_drift <= 1.001 * best


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_poor_drafter_costs_little_and_the_reason_is_told(name: str, seed: int) -> None:
    curve, draft_ms, workload = MACHINES[name]
    machine = Machine(curve, draft_ms)
    cold = BudgetController(LatencyModel(workload))
    run = simulate(cold, machine, POOR, tokens=256, seed=seed)
    plain = simulate(FixedBudget(1), machine, POOR, tokens=256).rate()
    assert run.rate() >= 0.85 * plain
    told = [reason for reason in run.reasons if reason.startswith("does not pay")]
    assert told
    assert "tokens a drafted round" in told[-1]
    assert told[-1].count(" ms ") == 3
    warm = BudgetController.from_profile(json.loads(json.dumps(cold.profile(), allow_nan=False)), workload)
    assert not warm.calibrating
    assert simulate(warm, machine, POOR, tokens=256, seed=seed + 9).rate() >= 0.95 * plain


def narrow(rows: np.ndarray, context: int) -> np.ndarray:
    """A small model on a CPU: every row costs."""
    return 10.5 + 0.45 * (rows - 1) + 0.001 * context


class Mixed(BudgetController):
    """Negative control: takes rounds with riding rows for others."""

    def record(self, record: RoundRecord) -> None:
        super().record(replace(record, kind=ForwardKind()))


def test_riding_rows_are_no_slower_machine() -> None:
    """While every round drafts, what a plain one takes stays known; else T(N) pays for rows that are T(1)'s, too."""
    machine = Machine(narrow, 1.0, riders=lambda rows: 4.0 + 0.3 * np.minimum(rows, 8))
    best, plain = best_rates(machine, HONEST, CONTEXT)["adaptive"], float(machine.verify_ms(1, CONTEXT))
    found = {}
    for policy in (BudgetController, Mixed):
        controller = policy(LatencyModel(replace(DENSE, riding_per_node=4.0)))
        rate = long_run(controller, machine, HONEST, rounds=400).rate(100)
        found[policy] = rate / best, controller.latency.predict(1, CONTEXT) / plain
    assert found[BudgetController] == (pytest.approx(1, abs=0.03), pytest.approx(1, abs=0.07))
    assert found[Mixed][0] < 0.9
    assert found[Mixed][1] > 1.2


def test_a_pause_is_learned_from_as_round_by_round() -> None:
    """Plain rounds taken together leave the controller where single ones do; one that was held up moves nothing."""
    together, apart = BudgetController(LatencyModel(DENSE)), BudgetController(LatencyModel(DENSE))
    rounds = []
    for controller in (together, apart):
        while not controller._pace().paused:
            simulate(controller, Machine(cpu, 20.0), POOR, 8, context=CONTEXT, grows=False)
        controller._pace().left = 128
    draw = np.random.default_rng(0)
    for turn in range(64):
        ms = 98.0 * math.exp(0.03 * draw.standard_normal()) * (6.0 if turn % 16 == 7 else 1.0)
        rounds.append(RoundRecord(1, False, 1, 1, CONTEXT, 0.0, ms, 0.4, 1, 1, [0.0], [0]))
    for start in range(0, 64, 16):
        together.record_all(rounds[start : start + 16])
    for record in rounds:
        apart.record(record)
    assert together._pace().left == apart._pace().left == 64
    for of in (lambda c: c.latency.predict(1, CONTEXT), lambda c: c._pace().plain_other, lambda c: c.rate):
        assert of(together) == pytest.approx(of(apart), rel=0.05)
    assert together.latency.predict(1, CONTEXT) == pytest.approx(98.0, rel=0.03)


def test_another_way_to_draft_has_its_own_durations() -> None:
    pace = Pace()
    for riding, draft_ms in ((True, 1.0), (False, 9.0)):
        kind = ForwardKind(riding=riding)
        for _ in range(40):
            pace.time(RoundRecord(8, True, 1, 1, CONTEXT, draft_ms, 20.0, 0.3, 2, 2, [1.0], [1], kind))
        assert pace.fixed_ms == pytest.approx(draft_ms + 0.3, rel=0.03)
    again = Pace.from_dict(json.loads(json.dumps(pace.durations())))
    assert (again.riding, again.fixed_ms) == (False, pace.fixed_ms)


def test_trials_of_another_way_to_draft_teach_nothing_of_the_machine() -> None:
    controller = BudgetController(LatencyModel(DENSE))
    long_run(controller, Machine(cpu, 4.0), HONEST, rounds=100)
    before, accepted = controller.profile(), controller.acceptance.factors()
    scores = torch.from_numpy(HONEST.scores[:1, :16])
    for trial in (True, False):
        nodes = controller.choose(scores, torch.from_numpy(HONEST.depths[:1, :16]))
        times = {"draft_ms": 90.0, "verify_ms": 400.0, "other_ms": 9.0}
        tree = {"nodes": nodes, "drafted": True, "batch": 1, "live": 1, "context": CONTEXT, "tokens": 2, "progress": 2}
        controller.record(RoundRecord(**tree, **times, promised=[1.0, 0.5], accepted=[1, 1], trial=trial))
        assert (controller.profile() == before) == trial
    assert controller.acceptance.factors() != accepted


def test_a_pause_is_learned_from_many_rounds_at_a_time_but_never_past_a_probe() -> None:
    controller = BudgetController(LatencyModel(DENSE))
    long_run(controller, Machine(cpu, 4.0), POOR, rounds=400)
    pace = controller._pace()
    assert pace.paused
    for left in (0, 1, 5, 100):
        pace.left = left
        assert controller.patience == min(max(left, 1), 16)


def test_probes_grow_rare() -> None:
    controller = BudgetController(LatencyModel(DENSE))
    run = long_run(controller, Machine(cpu, 20.0), POOR, rounds=900)
    probes = np.flatnonzero(np.array(run.nodes) > 1)[-5:]
    assert (np.diff(probes) >= 100).sum() >= 2
    assert (np.diff(probes) <= 130).all()


def test_a_drafter_that_becomes_good_is_taken_up_again() -> None:
    machine = Machine(flat, 1.5)
    controller = BudgetController(LatencyModel(DENSE))
    run = simulate(controller, machine, lambda turn: POOR if turn < 300 else HONEST, 900, context=CONTEXT, grows=False)
    assert np.mean(np.array(run.nodes[200:300]) == 1) > 0.9
    assert np.mean(np.array(run.nodes[600:]) > 1) > 0.95
    assert run.rate(700) >= 0.97 * best_rates(machine, HONEST, CONTEXT)["adaptive"]


def test_a_drafter_that_becomes_poor_is_left() -> None:
    machine = Machine(flat, 1.5)
    controller = BudgetController(LatencyModel(DENSE))
    long_run(controller, machine, HONEST, rounds=200)
    run = long_run(controller, machine, POOR, rounds=300)
    assert np.mean(np.array(run.nodes[150:]) == 1) > 0.9
    assert run.rate() >= 0.94 * best_rates(machine, POOR, CONTEXT)["plain"]


def test_a_second_process_starts_where_the_first_ended() -> None:
    machine, cold = Machine(cliff, 2.0), BudgetController(LatencyModel(DENSE))
    long_run(cold, machine, HONEST, rounds=300)
    warm = BudgetController.from_profile(json.loads(json.dumps(cold.profile(), allow_nan=False)), DENSE)
    assert "calibrating" not in (run := long_run(warm, machine, HONEST, rounds=40)).reasons
    assert run.rate() >= 0.97 * best_rates(machine, HONEST, CONTEXT)["adaptive"]


@pytest.mark.parametrize(
    "profile",
    [{}, {"latency": {}}, {"latency": {"peak": [1, 1], "drift": "x", "modes": []}}, {"latency": None}],
    ids=str,
)
def test_a_profile_that_makes_no_sense_is_measured_again(profile: dict, caplog: pytest.LogCaptureFixture) -> None:
    assert BudgetController.from_profile(profile, DENSE).calibrating
    assert "makes no sense" in caplog.text


# Calibration


def calibrate(curve: dict[int, float], largest: int = 64, surrogate: Sequence[float] = ()) -> list[int]:
    """Sizes in the order in which they are measured."""
    calibration, order = Calibration(largest), []
    while (size := calibration.size) is not None:
        order.append(size)
        calibration.record(LatencyPoint(size, 100, 1, curve[size]), surrogate)
    return order


def test_every_size_is_measured_twice_small_and_large_mixed() -> None:
    order = calibrate({n: 10 + n / 8 for n in (1, 2, 4, 8, 16, 32, 64)})
    assert sorted(order) == sorted(2 * [1, 2, 4, 8, 16, 32, 64])
    assert max(order[:4]) > 4 > min(order[:4])
    assert sorted(calibrate(dict.fromkeys((1, 2, 4, 8), 10.0), largest=12)) == [1, 1, 2, 2, 4, 4, 8, 8]


def test_a_first_forward_that_warms_up_does_not_count() -> None:
    calibration, seen = Calibration(64), set()
    while (size := calibration.size) is not None:
        slow = 1.0 if size in seen else 5.0
        seen.add(size)
        calibration.record(LatencyPoint(size, 100, 1, slow * (10 + size / 8)))
    assert len(calibration.points) == len(seen) == 7
    assert all(point.ms == 10 + point.rows / 8 for point in calibration.points)


def test_hopeless_sizes_are_left_out() -> None:
    steep = {n: 10.0 * n for n in (1, 2, 4, 8, 16, 32, 64)}
    assert max(calibrate(steep, surrogate=[1.5] * 64)) <= 16
    assert 64 in calibrate({n: 10 + n / 8 for n in steep}, surrogate=[1.5] * 64)


def test_shorter_trees_end_a_calibration_too() -> None:
    small = Drafter(nodes=5)
    controller = BudgetController(LatencyModel(DENSE))
    run = long_run(controller, Machine(flat, 1.5), small, rounds=40)
    assert not controller.calibrating
    assert max(run.nodes) == 5


# The rule


surrogates = st.lists(st.floats(0, 1), min_size=1, max_size=64).map(
    lambda gains: np.cumsum([1.0, *sorted(gains, reverse=True)])
)
rates = st.floats(1e-4, 1.0)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    surrogate = draw(surrogates)
    steps = draw(st.lists(st.floats(0, 20), min_size=len(surrogate), max_size=len(surrogate)))
    return surrogate, 1.0 + np.cumsum(steps)


@settings(max_examples=100, deadline=None)
@given(case=rounds(), rate=rates)
def test_no_other_prefix_is_better(case: tuple[np.ndarray, np.ndarray], rate: float) -> None:
    surrogate, verify_ms = case
    chosen = best_prefix(surrogate, verify_ms, rate)
    assert all(
        surrogate[chosen - 1] - rate * verify_ms[chosen - 1] >= surrogate[n] - rate * verify_ms[n]
        for n in range(len(surrogate))
    )


@settings(max_examples=100, deadline=None)
@given(case=rounds(), rate=rates, more=st.floats(1.0, 10.0))
def test_dearer_time_verifies_no_more(case: tuple[np.ndarray, np.ndarray], rate: float, more: float) -> None:
    surrogate, verify_ms = case
    least, other = best_prefix(surrogate, verify_ms, rate), best_prefix(surrogate, verify_ms, rate * more)
    gain = surrogate[other - 1] - surrogate[least - 1]
    assert other <= least or gain <= 1e-9  # rounding may break a tie


@settings(max_examples=100, deadline=None)
@given(case=rounds(), fixed=st.floats(0, 50), more=st.floats(0, 50))
def test_dearer_drafts_verify_no_less(case: tuple[np.ndarray, np.ndarray], fixed: float, more: float) -> None:
    surrogate, verify_ms = case
    low, high = best_rate(surrogate, verify_ms, fixed + more), best_rate(surrogate, verify_ms, fixed)
    assert low <= high
    cheap, dear = best_prefix(surrogate, verify_ms, high), best_prefix(surrogate, verify_ms, low)
    assert dear >= cheap or surrogate[cheap - 1] - surrogate[dear - 1] <= 1e-9


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_surrogate_is_concave_and_the_choice_a_prefix(seed: int) -> None:
    drafter = Drafter(seed, trees=2)
    gains = np.diff(drafter.scores.cumsum(1), axis=1)
    assert (np.diff(gains, axis=1) <= 1e-6).all()
    model = LatencyModel(DENSE)
    model.fit([LatencyPoint(n, 128, 1, float(cliff(np.array(float(n)), 128))) for n in (1, 2, 4, 8, 16, 32, 64)])
    controller = BudgetController(model, largest=48)
    scores, depths = torch.from_numpy(drafter.scores), torch.from_numpy(drafter.depths)
    assert controller.should_draft()
    chosen = controller.choose(scores, depths)
    assert 1 <= chosen <= 48
    assert chosen == controller.choose(scores, depths)
    parents = drafter.parents[:, :chosen]
    assert (parents < np.arange(chosen)).all()


def test_decisions_change_only_with_records() -> None:
    controller = BudgetController(LatencyModel(DENSE))
    long_run(controller, Machine(cpu, 20.0), POOR, rounds=60)
    assert len({controller.should_draft() for _ in range(200)}) == 1


def test_trees_are_expanded_as_far_as_pays() -> None:
    model = LatencyModel(DENSE)
    model.fit([LatencyPoint(n, 128, 1, 10.0 + 2.0 * n) for n in (1, 2, 4, 8, 16, 32, 64)])
    controller = BudgetController(model)
    assert controller.largest() == 64
    long_run(controller, Machine(lambda rows, context: 10 + 2 * rows, 1.0), HONEST, rounds=60)
    assert 8 <= controller.largest() <= 32


# BASTION


def offline(curve: Curve) -> LatencyModel:
    model = LatencyModel(online=False)
    model.fit([LatencyPoint(n, CONTEXT, 1, float(curve(np.array(float(n)), CONTEXT))) for n in range(1, 129)])
    return model


def test_rows_that_stop_are_not_behind() -> None:
    """What a stopping rule cut short says as little about rows falling behind as about the drafter."""
    controller = BudgetController(offline(flat))
    controller.begin(CONTEXT, 2)
    scores = torch.tensor([[1.0, 0.9, 0.8]]).expand(2, -1)
    for promised in ([], [2.0, 1.8, 1.6]):
        assert controller.should_draft()
        controller.choose(scores, torch.tensor([[0, 1, 2]]).expand(2, -1), [0, 0])
        lag = controller._pace().lag
        times = {"context": CONTEXT, "draft_ms": 1.0, "verify_ms": 1.0, "other_ms": 1.0}
        accepted = [2, 0, 0][: len(promised)]
        controller.record(
            RoundRecord(3, True, 2, 2, tokens=2, progress=1, promised=promised, accepted=accepted, **times)
        )
        assert (controller._pace().lag < lag) == bool(promised)


def test_bastion_stops_where_its_estimate_falls_and_truncates_down() -> None:
    drafter, model = Drafter(5, nodes=128), offline(cpu)
    policy = BastionPolicy(model, largest=128)
    record = RoundRecord(32, True, 1, 1, CONTEXT, 20.0, 300.0, 5.0, 3, 3, [1.0, 0.8], [1, 1])
    policy.record(record)
    verify_ms = model.curve(128, CONTEXT)
    for tree in range(20):
        surrogate = drafter.scores[tree].astype(float).cumsum()
        estimate = surrogate / (25.0 + verify_ms)
        falls = np.flatnonzero(np.diff(estimate[31:]) <= 0)
        stop = 32 + (int(falls[0]) if len(falls) else 128 - 32)
        assert policy.choose(torch.from_numpy(drafter.scores[tree : tree + 1])) == stop // 32 * 32
    assert policy.choose(torch.ones(1, 20)) == 20


def test_bastion_measures_first_where_it_must() -> None:
    policy = BastionPolicy(LatencyModel(DENSE, online=False))
    run = simulate(policy, Machine(flat, 1.5), HONEST, 40, context=CONTEXT, grows=False)
    assert set(run.reasons) == {"calibrating", "best"}
    assert set(run.nodes[12:]) <= {32, 64}
    best = best_rates(Machine(flat, 1.5), HONEST, CONTEXT)["adaptive"]
    assert run.rate(12) > 0.9 * best


def test_a_summary_says_what_is_known() -> None:
    controller = BudgetController(LatencyModel(DENSE), 32)
    assert controller.summary()["calibrating"]
    assert "verify_ms" not in controller.summary()
    simulate(controller, Machine(flat, 1.5), HONEST, 200, context=CONTEXT, seed=3, grows=False)
    summary = json.loads(json.dumps(controller.summary()))
    assert not summary["calibrating"]
    curve = controller.latency.curve(32, CONTEXT)
    assert list(summary["verify_ms"]) == ["1", "2", "4", "8", "16", "32"]
    assert summary["verify_ms"]["16"] == pytest.approx(curve[15], rel=0.02)
    assert summary["draft_ms"] == pytest.approx(1.5, rel=0.1)
    assert -1 <= summary["correlation"] <= 1
    assert summary["accepted_over_expected"] == pytest.approx(1.0, abs=0.1)
    assert all(0 <= promised <= 1 and count > 0 for promised, _, count in summary["reliability"])


def test_a_profile_holds_nothing_of_the_weights() -> None:
    controller = BudgetController(LatencyModel(DENSE), 32)
    simulate(controller, Machine(flat, 1.5), POOR, 200, context=CONTEXT, seed=3, grows=False)
    assert controller.verdict
    started = BudgetController.from_profile(controller.profile(), DENSE, 32)
    assert not started.calibrating
    assert started.verdict == ""
    assert started.acceptance.factors() == BudgetController(None).acceptance.factors()
    started.begin(CONTEXT, 1)
    assert started.rate == pytest.approx(1 / (started.latency.predict(1, CONTEXT) + 0.3), rel=0.1)


@pytest.mark.parametrize("factor", [0.7, 1.4], ids=["quicker", "slower"])
def test_the_quicker_attention_is_taken(factor: float) -> None:
    controller = BudgetController(LatencyModel(DENSE), 32, splits=(False, True))
    machine, rng, drafted = Machine(flat, 1.5), np.random.default_rng(0), []
    controller.begin(CONTEXT, 1)
    scores = torch.tensor([[0.8**depth for depth in range(32)]])
    for turn in range(60):
        nodes = controller.choose(scores, torch.arange(32)[None]) if controller.should_draft() else 1
        ms = float(machine.verify_ms(nodes, CONTEXT)) * (factor if controller.split else 1.0)
        ms *= 1 + 0.01 * rng.standard_normal()
        if turn >= 20 and nodes > 1:
            drafted.append(controller.split)
        kind = ForwardKind(bool(controller.split))
        controller.record(RoundRecord(nodes, nodes > 1, 1, 1, CONTEXT, 1.5 * (nodes > 1), ms, 0.3, 1, 1, [], [], kind))
    assert not controller.calibrating
    assert drafted == [factor < 1] * len(drafted)
    assert len(drafted) > 10


def test_one_kind_of_attention_is_not_compared() -> None:
    calibration = Calibration(32)
    while (size := calibration.size) is not None:
        assert calibration.split is False
        ms = float(flat(np.array(size), CONTEXT))
        calibration.record(LatencyPoint(size, CONTEXT, 1, ms, ForwardKind(calibration.split)))
    assert {point.kind.split for point in calibration.points} == {False}
