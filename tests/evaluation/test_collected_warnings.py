"""Warnings are told once for each arm that is measured; a call of `generate` on its own warns as ever."""

from __future__ import annotations

import logging

import pytest
from pairs import PROMPT, build_pair
from transformers.utils import logging as transformers_logging

from hf_treespec.decoding import rounds
from hf_treespec.evaluation import benchmark as module
from hf_treespec.evaluation.benchmark import Benchmark, Settings
from hf_treespec.evaluation.collected_warnings import CollectedWarnings
from hf_treespec.evaluation.prompt_sets import PromptSet
from hf_treespec.evaluation.timing import TimedCall, timed_generate

logger = transformers_logging.get_logger(rounds.__name__)


def test_the_last_of_each_kind_is_told_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    found = CollectedWarnings()
    for arm, cost in (("auto", 1.5), ("chain", 3), ("auto", 2.25)):
        with found.of(arm):
            logger.warning(f"Drafting does not pay: {cost} ms.")
    with found.of("auto"):
        logger.warning("Something else.")
    assert found.lines() == [
        "auto: Drafting does not pay: 2.25 ms. The last of 2 such warnings.",
        "auto: Something else.",
        "chain: Drafting does not pay: 3 ms.",
    ]
    assert not caplog.records


def test_everything_else_is_shown_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    found = CollectedWarnings()
    with found.of("auto"):
        logger.error("an error")
        logging.getLogger("another.package").warning("not ours")
    logger.warning("a user's own call")
    assert found.lines() == []
    assert [record.message for record in caplog.records] == ["an error", "not ours", "a user's own call"]


def test_a_benchmark_collects_them_by_arm(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def generate(*args, **options) -> TimedCall:
        if options.get("assistant_model") is not None:
            logger.warning("Drafting does not pay.")
        return timed_generate(*args, **options)

    monkeypatch.setattr(module, "timed_generate", generate)
    texts = PromptSet("code", ((PROMPT,),), chat=False)
    bench = Benchmark(*build_pair(), [texts], ["chain"], Settings(4, 2))
    bench.run()
    # Two repeats, and once when warming up.
    assert bench.warnings.lines() == ["chain: Drafting does not pay. The last of 3 such warnings."]
    assert not [record for record in caplog.records if record.name == logger.name]
