"""Budget policies in the loop: what they are asked and told, what a plain round keeps, what outlives a call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters.flexdraft_models import Guide, guided, tiny_flexdraft
from models import batch, dflash, prompt, target
from parity import GREEDY, SAMPLED, compare, eos_tokens, run
from transformers import DynamicCache

from hf_treespec import TreeSpecConfig
from hf_treespec.attention import interface
from hf_treespec.budget import BudgetController, BudgetPolicy, FixedBudget, ProfileStore, RoundRecord
from hf_treespec.configuration import POLICIES
from hf_treespec.decoding import budgets, rounds
from hf_treespec.drafters.flexdraft import session
from hf_treespec.drafters.flexdraft.modes import Mode, ModeCosts


class Scripted(BudgetPolicy):
    """Drafts and verifies as a list says, over and over, and keeps the records."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.limit = script, max(script)
        self.records: list[RoundRecord] = []
        self.leads: list[Sequence[int] | None] = []
        self.told_of_riding: set[bool] = set()
        self.asked = 0

    def should_draft(self) -> bool:
        self.reason = f"step {self.asked}"
        self.asked += 1
        return self.script[(self.asked - 1) % len(self.script)] > 1

    def choose(
        self,
        scores: torch.Tensor,
        depths: torch.Tensor | None = None,
        leads: Sequence[int] | None = None,
        riding: bool = False,
    ) -> int:
        assert depths is not None
        assert scores.shape == depths.shape
        assert bool((scores[:, 0] == 1).all())
        self.leads.append(leads)
        self.told_of_riding.add(riding)
        return min(self.script[(self.asked - 1) % len(self.script)], scores.shape[1])

    def record(self, record: RoundRecord) -> None:
        self.records.append(record)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(script: list[int]) -> Scripted:
        policy = Scripted(script)

        @contextmanager
        def lend(*arguments: Any) -> Iterator[BudgetPolicy]:
            yield policy

        monkeypatch.setattr(rounds, "lend_policy", lend)
        return policy

    return install


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_TREESPEC_PROFILES", str(tmp_path))
    monkeypatch.setattr(budgets, "_saved", {})
    return tmp_path


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_changes_no_token(policy: str, rows: int, mode: dict[str, Any], profiles: Path) -> None:
    inputs = prompt() if rows == 1 else batch(seed=3)
    options = {"decoding": {"budget": policy, "max_budget": 16}, "max_new_tokens": 40, **mode}
    *_, view = compare(target("qwen3"), inputs, seed=4, **options)
    assert sum(view.last_report.reasons.values()) == view.last_report.rounds


@pytest.mark.parametrize("script", [[1, 1, 1, 9], [6, 1], [1] * 40 + [8]], ids=["retries", "in turn", "late"])
@pytest.mark.parametrize("rows", [1, 4])
def test_plain_rounds_keep_the_context_whole(script: list[int], rows: int, scripted: Any) -> None:
    # The rigged session itself checks that every committed position's feature arrives, once and in order.
    policy = scripted(script)
    inputs = prompt() if rows == 1 else batch(seed=3)
    *_, view = compare(target("qwen3"), inputs, kind="half", max_new_tokens=60, **GREEDY)
    report = view.last_report
    assert report.plain_rounds > 0
    assert report.drafted_rounds > 0
    assert report.nodes_history == [record.nodes for record in policy.records]
    if rows == 1:
        assert sum(count for why, count in report.reasons.items() if why.startswith("step")) == policy.asked


@pytest.mark.parametrize("rows", [1, 4])
def test_what_a_policy_is_told(rows: int, scripted: Any) -> None:
    policy = scripted([12, 1, 5])
    inputs = prompt() if rows == 1 else batch(seed=3)
    *_, view = compare(target("qwen3"), inputs, kind="half", max_new_tokens=30, **SAMPLED)
    report, records = view.last_report, policy.records
    assert len(records) == report.rounds
    # The prefill gives every row its first token.
    assert sum(record.tokens for record in records) + rows == report.tokens
    # A row that stops early leaves the others to be waited for, so none comes on more than the call is long.
    assert 29 <= sum(record.progress for record in records) <= report.tokens
    for leads in policy.leads:
        assert leads is not None
        assert min(leads) == 0
    assert any(leads and max(leads) > 0 for leads in policy.leads) == (rows > 1)
    context = inputs["input_ids"].shape[1]
    for record in records:
        assert 1 <= record.progress <= record.tokens
        assert record.batch == rows
        assert record.verify_ms > 0
        assert record.other_ms > 0
        assert (record.draft_ms > 0) == record.drafted
        assert record.context >= context
        context = record.context
        if record.promised:
            assert record.drafted
            assert record.promised[0] == pytest.approx(record.live)
            assert record.accepted[0] == record.live
            assert record.accepted == sorted(record.accepted, reverse=True)
            assert sum(record.promised) <= record.live * record.nodes + 1e-3
    assert any(record.promised for record in records)


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_records_say_whether_rows_rode_along(mode: str, scripted: Any) -> None:
    policy, model = scripted([6, 6, 1]), target("qwen3")
    view = guided(tiny_flexdraft(model), Guide(), flex_mode=mode)
    run(model, prompt(), max_new_tokens=24, assistant_model=view, **GREEDY)
    rode = {drafted: {r.kind.riding for r in policy.records if r.drafted == drafted} for drafted in (True, False)}
    assert rode == {True: {mode == "parallel"}, False: {False}}
    assert policy.told_of_riding == {mode == "parallel"}


class _Costs(ModeCosts):
    """Prefers the parallel mode and tries the other in every sixth round."""

    def choose(self) -> Mode:
        self._rounds += 1
        return "parallel" if self._rounds % 6 else "sequential"

    def prefers(self, mode: Mode) -> bool:
        return mode == "parallel"


def test_a_trial_and_the_round_drafted_in_it_are_trials(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, model = scripted([6]), target("qwen3")
    monkeypatch.setattr(session, "costs_of", lambda *arguments: _Costs("parallel"))
    view = guided(tiny_flexdraft(model), Guide(), flex_mode="auto")
    run(model, prompt(), max_new_tokens=24, assistant_model=view, **GREEDY)
    drafted = [record for record in policy.records if record.drafted]
    assert len(drafted) > 14
    for turn, record in enumerate(drafted, 1):
        assert record.kind.riding == (turn % 6 != 0)
        assert record.trial == (turn % 6 == 0 or (turn > 6 and turn % 6 == 1))


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("rows", [1, 4])
def test_kinds_of_attention_change_no_token(
    family: str, rows: int, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = scripted([12])
    calls = {"split": 0, "dense": 0}
    for kind, name in (("split", "tree_attention_forward"), ("dense", "_grouped_sdpa")):
        original = getattr(interface, name)

        def counted(*args: Any, kind: str = kind, original: Any = original, **kwargs: Any) -> Any:
            calls[kind] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(interface, name, counted)
    monkeypatch.setattr(Scripted, "split", property(lambda self: self.asked % 2 == 0))
    inputs = prompt() if rows == 1 else batch(seed=3)
    compare(target(family), inputs, kind="half", max_new_tokens=30, **GREEDY)
    assert {record.kind.split for record in policy.records} == {True, False}
    assert calls["split"] > 0
    assert calls["dense"] > 0


def test_the_reason_is_that_of_the_choice(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = scripted([8])
    choose = policy.choose

    def explained(*arguments: Any) -> int:
        policy.reason = "said while choosing"
        return choose(*arguments)

    monkeypatch.setattr(policy, "choose", explained)
    *_, view = compare(target("qwen3"), prompt(), kind="half", max_new_tokens=20, **GREEDY)
    assert view.last_report.reasons["said while choosing"] == view.last_report.drafted_rounds


def test_a_walk_cut_short_teaches_nothing(scripted: Any) -> None:
    policy = scripted([8])
    compare(target("qwen3"), prompt(), kind="perfect", max_new_tokens=20, **GREEDY)
    assert policy.records[0].promised
    assert not policy.records[-1].promised


def test_a_row_that_stops_holds_nobody_up(scripted: Any) -> None:
    """Where the slowest row ends a round early, the round is worth what the rows that go on came on by."""
    policy, inputs = scripted([12]), batch(seed=3)
    options = {"max_new_tokens": 30, **GREEDY}
    plain = run(target("qwen3"), inputs, **options).sequences
    start = inputs["input_ids"].shape[1]
    eos = eos_tokens(plain, start, 30)
    ends = [next((at for at, token in enumerate(row) if token in eos), 29) for row in plain[:, start:].tolist()]
    decoding = {"shape": "chain"}
    compare(target("qwen3"), inputs, kind="perfect", decoding=decoding, eos=eos, eos_token_id=eos, **options)
    assert len(set(ends)) > 2
    # All advance alike until they end, so what a round comes on by is what the last row does.
    assert sum(record.progress for record in policy.records) == max(ends)


def test_later_calls_go_on_where_earlier_ones_stopped(profiles: Path) -> None:
    drafter = dflash("qwen3").with_options(max_budget=8)
    budgets._AT_REST.pop(drafter.weights, None)
    run(target("qwen3"), prompt(), assistant_model=drafter, max_new_tokens=60, **GREEDY)
    assert drafter.last_report.reasons["calibrating"] >= 4
    run(target("qwen3"), prompt(), assistant_model=drafter.with_options(depth=3), max_new_tokens=60, **GREEDY)
    run(target("qwen3"), prompt(), assistant_model=drafter, max_new_tokens=60, **GREEDY)
    assert "calibrating" not in drafter.last_report.reasons
    assert drafter.last_report.budget["policy"] == "auto"


_SECOND = """
import sys; sys.path.insert(0, {tests!r})
from models import dflash, prompt, target
drafter = dflash("qwen3").with_options(max_budget=8)
target("qwen3").generate(**prompt(), assistant_model=drafter, max_new_tokens=60, do_sample=False)
import json; print(json.dumps(drafter.last_report.reasons))
"""


def test_a_second_process_starts_from_the_profile(profiles: Path) -> None:
    program = _SECOND.format(tests=str(Path(__file__).parents[1]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    told = []
    for _ in range(2):
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
        told.append(json.loads(ended.stdout.splitlines()[-1]))
    assert "calibrating" in told[0]
    assert "calibrating" not in told[1]
    (file,) = profiles.glob("*.json")
    content = json.loads(file.read_text())
    assert content["key"]["threads"] == 1
    assert content["profile"]["latency"]["kinds"]


def test_a_profile_says_nothing_about_weights(profiles: Path) -> None:
    drafter = dflash("qwen3")
    cache = DynamicCache()
    with budgets.lend_policy(TreeSpecConfig(max_budget=8), target("qwen3"), drafter, cache) as policy:
        assert isinstance(policy, BudgetController)
        stored = policy.profile()
    assert "acceptance" not in stored
    assert "paused" not in json.dumps(stored)


def test_calls_at_the_same_time_have_their_own_policies(profiles: Path) -> None:
    drafter, model = dflash("qwen3"), target("qwen3")
    arguments = (TreeSpecConfig(), model, drafter, DynamicCache())
    with budgets.lend_policy(*arguments) as one, budgets.lend_policy(*arguments) as other:
        assert one is not other
    with budgets.lend_policy(*arguments) as again:
        assert again in (one, other)
    with budgets.lend_policy(TreeSpecConfig(budget=5), *arguments[1:]) as fixed:
        assert isinstance(fixed, FixedBudget)


def test_profiles_are_keyed_by_what_latency_depends_on(profiles: Path) -> None:
    cache = DynamicCache()
    key = budgets.profile_key(target("qwen3"), dflash("qwen3"), cache)
    others = [
        budgets.profile_key(target("llama"), dflash("qwen3"), cache),
        budgets.profile_key(target("qwen3", "eager"), dflash("qwen3"), cache),
        budgets.profile_key(target("qwen3"), dflash("qwen3", block_size=4), cache),
    ]
    assert len({key, *others}) == 4
    assert len({item.file_name for item in (key, *others)}) == 4
    assert ProfileStore().folder == profiles


def test_a_drafter_that_does_not_pay_is_named_once(
    scripted: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one warning however many calls it holds for, until drafting has paid again; every report says it."""
    scripted([4, 1])

    def warnings(verdict: str) -> int:
        monkeypatch.setattr(Scripted, "verdict", verdict)
        caplog.clear()
        *_, view = compare(target("qwen3"), prompt(), max_new_tokens=12, **GREEDY)
        assert view.last_report.reason == (verdict or None)
        # A record that propagates is captured twice.
        return len({record.created for record in caplog.records if "does not pay" in record.getMessage()})

    rounds.logger.addHandler(caplog.handler)
    try:
        told = [warnings(verdict) for verdict in ("does not pay: 1", "does not pay: 2", "", "does not pay: 3")]
    finally:
        rounds.logger.removeHandler(caplog.handler)
    assert told == [1, 0, 0, 1]


@pytest.mark.parametrize("budget", [0, -3, 2.5, True, "fast", None, 4097])
def test_budgets_that_mean_nothing(budget: Any) -> None:
    with pytest.raises(ValueError, match="budget"):
        TreeSpecConfig(budget=budget)
