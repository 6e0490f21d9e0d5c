"""What is said of made-up measurements: JSON, tables, CSV."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from made_up import arm, report, sample, section
from rich.console import Console

from hf_treespec.evaluation.measurement import pool
from hf_treespec.evaluation.results import (
    ARM_KEYS,
    CSV_COLUMNS,
    append_csv,
    check_csv,
    identical,
    section_table,
    summarise_arm,
)
from hf_treespec.evaluation.verification import Difference


def two_prompts():
    return section(
        sample(0, plain=arm(4.0, 4.0, 9.0), tree_8=arm(1.0, 1.0, 0.0, reports=(report(2, 10, 16),))),
        sample(1, plain=arm(2.0, 2.0, 9.0), tree_8=arm(1.0, 1.0, 9.0, reports=(report(8, 10, 56),))),
    )


def test_an_arm():
    row = summarise_arm(two_prompts(), "tree-8")
    assert set(row) == set(ARM_KEYS)
    assert row["speedup"] == pytest.approx(3.0)
    assert row["speedup_ci95"] == pytest.approx([2.0, 4.0])
    assert row["end_to_end_speedup"] == pytest.approx(8 / 4)
    assert row["tokens_per_second"] == pytest.approx(20 / 2)
    assert row["acceptance_length"] == pytest.approx(20 / 10)
    assert row["tau_untruncated"] == pytest.approx(18 / 8)
    assert row["tau_per_response"] == pytest.approx((5 + 1.25) / 2)
    assert row["tokens_per_forward"] == pytest.approx(22 / 12)
    assert row["mean_nodes"] == pytest.approx(72 / 10)
    assert row["ms_per_round"]["verify"] == pytest.approx(100.0)
    assert row["ms_per_round"]["other"] == pytest.approx(100.0)
    assert (row["greedy_match"], row["ties"], row["mismatches"]) == (1.0, 0, 0)
    assert row["peak_bytes"] is None
    assert row["skipped"] is None


def test_plain_is_one():
    row = summarise_arm(two_prompts(), "plain")
    assert row["speedup"] == 1.0
    assert row["speedup_ci95"] == [1.0, 1.0]
    assert row["tokens_per_forward"] == 1.0
    assert row["acceptance_length"] is None
    assert row["ms_per_round"] == {}


def test_arms_are_held_against_the_one_that_decides():
    """Prompts of which one is ten times as hard, for both arms alike: the pairs say what the speed-ups cannot."""
    found = section(
        *(
            sample(prompt, plain=arm(4.0), tree_8=arm(hard), auto=arm(0.8 * hard))
            for prompt, hard in enumerate((1, 10))
        )
    )
    row = summarise_arm(found, "tree-8")
    assert row["auto_over"] == pytest.approx(1.25)
    assert row["auto_over_ci95"] == pytest.approx([1.25, 1.25])
    assert summarise_arm(found, "auto")["auto_over"] == 1.0
    assert summarise_arm(found, "plain")["auto_over"] == pytest.approx(8 / 8.8)
    console = Console(file=io.StringIO(), width=160, record=True)
    part = {"prompts": 2, "requests": 2, "tokens": 22, "repeated_4grams": 0.0, "notes": []}
    console.print(section_table(console, "made up", part | {"arms": [row]}))
    assert "1.25 (1.25–1.25)" in console.export_text()


def test_turns_are_summed_before_prompts_are_resampled():
    """Two turns of one prompt are one draw: there is nothing to resample."""
    turns = section(sample(0, plain=arm(4.0), chain=arm(1.0)), sample(0, plain=arm(2.0), chain=arm(1.0)))
    row = summarise_arm(turns, "chain")
    assert row["speedup"] == pytest.approx(3.0)
    assert row["speedup_ci95"] is None


def test_transformers_own_loops_are_counted_by_their_forwards():
    found = section(sample(0, plain=arm(1.0), lookup=arm(1.0, forwards=4), stock_chain=arm(1.0, forwards=6)))
    lookup, stock = summarise_arm(found, "lookup"), summarise_arm(found, "stock-chain")
    assert lookup["tokens_per_forward"] == pytest.approx(11 / 4)
    assert lookup["acceptance_length"] is None
    assert stock["acceptance_length"] == pytest.approx(10 / 5)


def test_differences_are_counted_by_kind():
    tie = Difference(0, 3, 1, 2, gap=1e-6, margin=1e-6, tolerance=1e-4)
    bug = Difference(0, 3, 1, 2, gap=1.0, margin=1.0, tolerance=1e-4)
    found = section(*(sample(prompt, plain=arm(1.0), chain=arm(1.0)) for prompt in range(4)))
    found.started[1].differences["chain"] = (tie,)
    found.started[2].differences["chain"] = (bug,)
    row = summarise_arm(found, "chain")
    assert (row["greedy_match"], row["ties"], row["mismatches"]) == (0.5, 1, 1)
    for started in found.started:
        del started.differences["chain"]
    row = summarise_arm(found, "chain")
    assert (row["greedy_match"], row["ties"], row["mismatches"]) == (None, None, None)


def test_what_was_skipped_says_why():
    found = two_prompts()
    found.skipped["bastion"] = "no such thing"
    row = summarise_arm(found, "bastion")
    assert set(row) == set(ARM_KEYS)
    assert row["skipped"] == "no such thing"
    assert row["speedup"] is None
    assert "nothing was measured" in summarise_arm(section(), "plain")["skipped"]


def test_pooled_reports_add_up():
    total = pool([report(2, 10, 16), report(8, 10, 56)])
    assert (total.rounds, total.committed, total.nodes) == (10, 20, 72)
    assert total.row_committed == [(10, 2), (10, 8)]
    assert pool([]).acceptance_length == 0.0


def results(speedup: float | None = 2.0, **changes: Any) -> dict[str, Any]:
    rows = [summarise_arm(two_prompts(), name) for name in ("plain", "tree-8")]
    found = two_prompts()
    found.skipped["auto"] = "[not yet]"
    rows.append(summarise_arm(found, "auto"))
    part = {"prompts": 2, "requests": 2, "tokens": 22, "repeated_4grams": 0.5, "notes": ["a note"], "arms": rows}
    return {
        "environment": {"date": "2026-01-01", "commit": None, "target": "t", "drafter": "d", "temperature": 0.0},
        "partial": False,
        "datasets": [{"dataset": "made up", **part}],
        "batches": [{"batch": 4, **part}],
    } | changes


def test_tables_show_everything():
    console = Console(file=io.StringIO(), width=140, record=True)
    console.print(section_table(console, "made up", results()["datasets"][0]))
    text = console.export_text()
    for expected in ("3.00×", "2.00–4.00", "tree-8", "100%", "auto skipped: [not yet]", "a note", "50% of the text's"):
        assert expected in text
    rows = results()["datasets"][0]
    rows["arms"][1]["mismatches"] = 2
    rows["arms"][1]["peak_bytes"] = 3_000_000_000
    console.print(section_table(console, "made up", rows))
    text = console.export_text()
    assert "2 differ" in text
    assert "3.0" in text


@pytest.mark.parametrize("width", [50, 80, 100])
def test_what_matters_most_survives_a_narrow_terminal(width: int):
    console = Console(file=io.StringIO(), width=width, record=True)
    found = results()["datasets"][0]
    found["arms"] += [{**found["arms"][1], "arm": "marginal-128", "peak_bytes": 3_000_000_000}]
    console.print(section_table(console, "made up", found))
    text = console.export_text()
    for expected in ("tree-8", "marginal-128", "speed-up", "3.00×", "τ", "2.00", "tok/s", "10"):
        assert expected in text
    assert "…" not in text
    assert "nodes" in text
    assert ("2.00–4.00" in text) == (width >= 80)
    assert ("tok/forward" in text.split("also shows")[0]) == (width > 110)


def test_csv_appends(tmp_path: Path):
    path = tmp_path / "runs.csv"
    append_csv(results(), path)
    append_csv(results(partial=True), path)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert len(rows) == 12
    assert [row["partial"] for row in rows[::6]] == ["False", "True"]
    tree = rows[1]
    assert (tree["dataset"], tree["batch"], tree["arm"], tree["target"]) == ("made up", "1", "tree-8", "t")
    assert float(tree["speedup"]) == pytest.approx(3.0)
    assert (float(tree["speedup_low"]), float(tree["speedup_high"])) == pytest.approx((2.0, 4.0))
    assert (tree["auto_over"], tree["auto_over_low"]) == ("", "")
    assert rows[4]["batch"] == "4"
    assert rows[2]["skipped"] == "[not yet]"


def test_csv_of_other_columns_is_left_alone(tmp_path: Path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="other columns"):
        check_csv(path)
    with pytest.raises(ValueError, match="other columns"):
        append_csv(results(), path)
    assert path.read_text() == "a,b\n1,2\n"
    check_csv(tmp_path / "new.csv")


class Ours:
    exact, drafter = True, object()


def test_only_this_librarys_arms_are_held_to_equality():
    found = results()
    assert identical(found, {"tree-8": Ours()})
    found["batches"][0]["arms"][1]["mismatches"] = 1
    assert not identical(found, {"tree-8": Ours()})
    assert identical(found, {"plain": Ours()})
