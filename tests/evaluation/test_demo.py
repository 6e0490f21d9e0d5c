"""The demo's arithmetic on made-up measurements; the demo itself runs in test_cli.py."""

from __future__ import annotations

import functools
import os

import pytest
import torch
from models import prompt, target
from rich.console import Console

from hf_treespec import embedded
from hf_treespec.decoding.report import GenerationReport
from hf_treespec.evaluation.demo import REGIMES, ArmResult, PromptResult, prompt_table, repeated_ngrams, summarise
from hf_treespec.evaluation.demo_prompts import PROMPTS, SEEDS
from hf_treespec.evaluation.encoding import encode_text
from hf_treespec.evaluation.environment import usable_cores
from hf_treespec.evaluation.measurement import REPETITION_LIMIT
from hf_treespec.evaluation.timing import TimedCall, timed_generate

embedded_pair = functools.cache(embedded.load)


def arm(seconds: list[float], tokens: int = 11, rounds: int = 0, committed: int = 0) -> ArmResult:
    calls = [TimedCall(torch.arange(tokens)[None], tokens, 1 + time, time, tokens - 1) for time in seconds]
    report = GenerationReport(
        rounds=rounds,
        pairs=rounds,
        committed=committed,
        target_forwards=rounds + 1,
        stage_seconds={"verify": 0.5},
        decode_seconds=1.0,
    )
    return ArmResult(calls, [report for _ in seconds])


def result(name: str, plain: float, tree: float, rounds: int, committed: int) -> PromptResult:
    arms = {
        "plain": arm([plain, plain, 9.0]),
        "tree": arm([tree, tree, 0.0], rounds=rounds, committed=committed),
        "chain": arm([tree * 2] * 3, rounds=rounds, committed=committed),
        "lookup": arm([plain * 2] * 3),
    }
    return PromptResult(name, arms, 0.0)


def test_summary():
    summary = summarise([result("a", 4.0, 1.0, 2, 10), result("b", 2.0, 1.0, 8, 10)])
    assert summary["identical"] is True
    assert summary["plain_tokens_per_second"] == pytest.approx(20 / 6)
    assert summary["tokens_per_second"] == pytest.approx(20 / 2)
    assert summary["speedup"] == pytest.approx(3.0)
    assert summary["chain_speedup"] == pytest.approx(1.5)
    assert summary["lookup_speedup"] == pytest.approx(0.5)
    assert summary["end_to_end_speedup"] == pytest.approx(8 / 4)
    assert summary["acceptance_length"] == pytest.approx(2.0)  # pooled over rounds: 20 tokens in 10
    assert summary["target_forwards"] == 12
    assert summary["stage_ms"]["verify"] == pytest.approx(1e3 * (0.5 + 0.5) / 10)
    assert summary["stage_ms"]["other"] == pytest.approx(1e3 * (0.5 + 0.5) / 10)


@pytest.mark.parametrize("name", ["tree", "chain"])
def test_one_different_call_is_not_identical(name):
    changed = result("a", 1.0, 1.0, 1, 1)
    calls = changed.arms[name].calls
    calls[2] = TimedCall(calls[2].sequence + 1, 11, 1.0, 1.0, 10)
    assert summarise([changed])["identical"] is False


@pytest.mark.parametrize("width", [80, 200])
def test_no_column_is_cut(width: int):
    console = Console(width=width)
    looping = result("interval arithmetic and more", 4.0, 1.0, 2, 10)
    looping.repeated_4grams = 0.5
    with console.capture() as captured:
        console.print(prompt_table(console, "sampled", [result("a", 2.0, 1.0, 8, 10), looping]))
    text = captured.get()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert all(word in text for word in ("identical", "speed-up", "plain", "4.00×", "forwards"))
    assert ("a wider terminal also shows" in text) == (width == 80)
    assert "looping text is easy to draft: interval arithmetic and more" in " ".join(text.split())


def test_nothing_decoded_has_no_speed():
    ended = result("a", 1.0, 1.0, 0, 0)
    ended.arms["plain"] = arm([0.0], tokens=1)
    summary = summarise([ended])
    assert summary["speedup"] is None
    assert summary["acceptance_length"] is None


def test_repeated_ngrams():
    assert repeated_ngrams([1, 2, 3, 4, 5]) == 0.0
    assert repeated_ngrams([1, 2, 1, 2, 1, 2]) == pytest.approx(1 / 3)
    assert repeated_ngrams([1, 2]) == 0.0


def test_clock_leaves_the_first_token_out():
    model = target("qwen3")
    call = timed_generate(model, prompt(), seed=0, do_sample=True, top_k=0, max_new_tokens=6)
    assert call.new_tokens == 6
    assert call.decode_tokens == 5
    assert 0 < call.decode_seconds < call.seconds
    torch.manual_seed(0)
    assert torch.equal(call.sequence, model.generate(**prompt(), do_sample=True, top_k=0, max_new_tokens=6))


def test_usable_cores_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert usable_cores() == 1
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores() == 8


def test_prompts_are_the_beginnings_of_files():
    assert len(PROMPTS) >= 14
    assert len(set(PROMPTS.values())) == len(PROMPTS)
    for text in PROMPTS.values():
        assert text.endswith("\n")
        assert text.isascii()
    assert list(SEEDS) == list(PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_go_on_without_looping(name: str):
    target, _, tokenizer = embedded_pair()
    inputs = encode_text(tokenizer, PROMPTS[name])
    torch.manual_seed(SEEDS[name])
    output = target.generate(**inputs, **REGIMES["sampled"], max_new_tokens=128)
    continuation = output[0, inputs["input_ids"].shape[1] :].tolist()
    assert len(continuation) == 128
    assert repeated_ngrams(continuation) <= REPETITION_LIMIT
