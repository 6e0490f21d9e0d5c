"""Calibrating ahead of use, and checking the predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models import dflash, target
from pairs import build_pair, save_pair
from typer.testing import CliRunner

from hf_treespec.cli import app
from hf_treespec.decoding import budgets
from hf_treespec.evaluation.calibration import LEAST_REPEATS, Check, calibrate, check


@pytest.fixture(autouse=True)
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_TREESPEC_PROFILES", str(tmp_path / "profiles"))
    budgets.forget(dflash("qwen3"))
    return tmp_path / "profiles"


def test_calibration_stores_a_profile_and_again_replaces_it(profiles: Path) -> None:
    model, drafter = target("qwen3"), dflash("qwen3").with_options(max_budget=4)
    path = calibrate(model, drafter)
    assert path.parent == profiles
    first = json.loads(path.read_text())
    calibrate(model, drafter)
    assert json.loads(path.read_text())["created"] == first["created"]
    calibrate(model, drafter, again=True)
    assert json.loads(path.read_text())["created"] > first["created"]


def test_rows_that_a_drafter_cannot_fill_are_not_reported() -> None:
    # One depth over 97 tokens gives a tree of 98 nodes at most.
    model, drafter = target("qwen3"), dflash("qwen3").with_options(depth=1, max_budget=128)
    calibrate(model, drafter)
    (found,) = check(model, drafter, (16,), repeats=3)
    assert {item.rows for item in found} == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96}
    assert all(item.measured_ms > 0 for item in found)


def test_predictions_stand_beside_measurements() -> None:
    model, drafter = target("qwen3"), dflash("qwen3").with_options(max_budget=8)
    calibrate(model, drafter)
    short, long = check(model, drafter, (16, 200), repeats=3)
    assert {item.context for item in short} == {16}
    assert {item.context for item in long} == {200}
    assert Check(16, 4, predicted_ms=3.0, measured_ms=2.0).error == pytest.approx(0.5)


def test_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model, drafter = save_pair(build_pair(), tmp_path)
    plots = tmp_path / "figures"
    arguments = ["--target", model, "--drafter", drafter, "--contexts", "16,40", "--repeats", "3"]
    arguments += ["--max-budget", "8", "--plots", str(plots)]
    result = CliRunner().invoke(app, ["calibrate", *arguments])
    assert result.exit_code == 0, result.output
    assert "Median error" in result.output
    assert (plots / "verification.png").read_bytes().startswith(b"\x89PNG")


def test_a_median_needs_three_forwards() -> None:
    result = CliRunner().invoke(app, ["calibrate", "--repeats", "1"])
    assert result.exit_code == 2
    assert "--repeats" in result.output
    assert str(LEAST_REPEATS) in result.output
    with pytest.raises(ValueError, match="at least 3"):
        next(check(target("qwen3"), dflash("qwen3"), (16,), repeats=LEAST_REPEATS - 1))


def test_only_rows_that_may_be_verified_are_listed() -> None:
    model, drafter = target("qwen3"), dflash("qwen3").with_options(max_budget=4)
    calibrate(model, drafter)
    (found,) = check(model, drafter, (16,), repeats=3)
    assert [item.rows for item in found] == [1, 2, 3, 4]


@pytest.mark.parametrize("contexts", ["", "0", "many", "64,-1"])
def test_contexts_that_mean_nothing(contexts: str) -> None:
    result = CliRunner().invoke(app, ["calibrate", "--contexts", contexts])
    assert result.exit_code == 2
    assert "--contexts" in result.output
