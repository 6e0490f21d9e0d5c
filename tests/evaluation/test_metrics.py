"""The metrics of the `evaluate` library, without a network."""

from __future__ import annotations

import socket
import sys

import pytest

from hf_treespec.evaluation import metrics


def test_without_the_library(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "evaluate", None)
    monkeypatch.delitem(sys.modules, "hf_treespec.evaluation.metrics.token_match", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'hf-treespec\[eval\]'"):
        metrics.TokenMatch  # noqa: B018
    with pytest.raises(AttributeError):
        metrics.Nothing  # noqa: B018


class TestComputing:
    @pytest.fixture(autouse=True)
    def _offline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("evaluate")

        def refuse(*args, **kwargs):
            raise AssertionError("a metric reached for the network")

        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)

    def test_acceptance_length(self, tmp_path):
        result = metrics.AcceptanceLength(cache_dir=str(tmp_path)).compute(committed=[10, 10, 0], rounds=[2, 8, 0])
        assert result == {"acceptance_length": 2.0, "tau_per_response": (5 + 1.25) / 2}

    def test_speedup(self, tmp_path):
        result = metrics.Speedup(cache_dir=str(tmp_path)).compute(
            seconds=[1.0, 1.0], tokens=[10, 10], plain_seconds=[4.0, 2.0], plain_tokens=[10, 10]
        )
        assert result["speedup"] == pytest.approx(3.0)
        assert result["speedup_ci95"] == pytest.approx((2.0, 4.0))

    def test_token_match(self, tmp_path):
        result = metrics.TokenMatch(cache_dir=str(tmp_path)).compute(
            predictions=[[1, 2, 3], [1, 2, 4], [1, 2]], references=[[1, 2, 3], [1, 2, 3], [1, 2, 3]]
        )
        assert result["token_match"] == pytest.approx(1 / 3)
        assert result["common_prefix"] == pytest.approx((3 + 2 + 2) / 3)

    def test_total_variation(self, tmp_path):
        result = metrics.TotalVariation(cache_dir=str(tmp_path)).compute(
            predictions=[[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]],
            references=[[0.5, 0.5], [0.0, 1.0], [0.75, 0.25]],
            depths=[1, 2, 1],
        )
        assert result == {"total_variation": pytest.approx(0.5), "by_depth": {1: 0.25, 2: 1.0}}

    def test_top_k_coverage(self, tmp_path):
        slots = {"predictions": [[4, 7, 9], [1, 2, 3]], "references": [7, 3], "depths": [1, 2]}
        for k, by_depth in ((1, {1: 0.0, 2: 0.0}), (2, {1: 1.0, 2: 0.0}), (3, {1: 1.0, 2: 1.0})):
            result = metrics.TopKCoverage(cache_dir=str(tmp_path)).compute(**slots, k=k)
            assert result == {"coverage": sum(by_depth.values()) / 2, "by_depth": by_depth}

    def test_child_accuracy(self, tmp_path):
        result = metrics.ChildAccuracy(cache_dir=str(tmp_path)).compute(
            predictions=[5, 6, -1], references=[5, 7, 8], on_spine=[True, True, False]
        )
        assert result == {"on_spine": 0.5, "on_spine_nodes": 2, "off_spine": 0.0, "off_spine_nodes": 1}
        nothing = metrics.ChildAccuracy(cache_dir=str(tmp_path)).compute(
            predictions=[5], references=[5], on_spine=[True]
        )
        assert nothing["off_spine"] is None
