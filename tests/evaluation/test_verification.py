"""The comparison with plain decoding finds what is wrong, and calls only ties ties."""

from __future__ import annotations

import functools
from collections.abc import Callable

import models
import pytest
import torch
from pairs import VOCAB, Pair, build_pair

from hf_treespec.evaluation import verify
from hf_treespec.evaluation.verification import first_differences

GREEDY = {"do_sample": False, "max_new_tokens": 12}
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 0, "max_new_tokens": 12}


@functools.cache
def pair() -> Pair:
    return build_pair()


def tamper(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Changes what assisted calls of the target return, and only those."""
    kind = type(pair()[0])
    original = kind.generate

    def generate(self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        return change(output.clone()) if kwargs.get("assistant_model") is not None else output

    monkeypatch.setattr(kind, "generate", generate)


def put(row: int, column: int, token: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(output: torch.Tensor) -> torch.Tensor:
        output[row, column] = token
        return output

    return change


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("inputs", [models.prompt(), models.batch()], ids=["one row", "batch"])
def test_identical(options, inputs):
    target, drafter, _ = pair()
    state = torch.get_rng_state()
    result = verify(target, drafter, inputs, seed=3, **options)
    assert result.identical
    assert result.passed
    assert result.new_tokens == 12
    assert torch.equal(result.plain, result.assisted)
    assert result.report is not None
    assert result.report.tokens == 12 * len(inputs["input_ids"])
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator moved"


def test_seeds_matter():
    target, drafter, _ = pair()
    outputs = [verify(target, drafter, models.prompt(), seed=seed, **SAMPLED).plain for seed in (0, 1)]
    assert not torch.equal(*outputs)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("position", [0, 1, 7, 11])
def test_another_token_is_a_bug(monkeypatch, options, position):
    target, drafter, _ = pair()
    inputs = models.batch()
    length = inputs["input_ids"].shape[1]
    expected = int(verify(target, drafter, inputs, seed=position, **options).plain[2, length + position])
    other = (expected + 1) % VOCAB
    tamper(monkeypatch, put(2, length + position, other))
    result = verify(target, drafter, inputs, seed=position, **options)
    assert not result.identical
    assert not result.passed
    (difference,) = result.differences
    assert (difference.row, difference.position) == (2, position)
    assert (difference.expected, difference.actual) == (expected, other)
    assert difference.verdict == "bug"
    # The scores that decide must put plain decoding's own token first, also where noise decides.
    assert 0 < difference.gap <= difference.margin


def test_runner_up_is_judged_by_the_gap(monkeypatch):
    target, drafter, _ = pair()
    inputs, options = models.prompt(), {**GREEDY, "repetition_penalty": 1.3}
    plain = target.generate(**inputs, **options, return_dict_in_generate=True, output_scores=True)
    position, length = 5, inputs["input_ids"].shape[1]
    best = plain.scores[position][0].topk(2)
    gap = (best.values[0] - best.values[1]).item()
    tamper(monkeypatch, put(0, length + position, int(best.indices[1])))
    for tolerance, verdict in ((gap * 1.01, "tie"), (gap * 0.99, "bug")):
        result = verify(target, drafter, inputs, tolerance=tolerance, **options)
        (difference,) = result.differences
        assert difference.gap == pytest.approx(gap)
        assert difference.margin == pytest.approx(gap)
        assert difference.verdict == verdict
        assert result.passed == (verdict == "tie")


def test_a_close_runner_up_excuses_no_third_token(monkeypatch):
    target, drafter, _ = pair()
    inputs = models.prompt()
    plain = target.generate(**inputs, **GREEDY, return_dict_in_generate=True, output_scores=True)
    best = plain.scores[4][0].topk(3)
    lead, third = (best.values[0] - best.values[1:]).tolist()
    tamper(monkeypatch, put(0, inputs["input_ids"].shape[1] + 4, int(best.indices[2])))
    (difference,) = verify(target, drafter, inputs, tolerance=(lead + third) / 2, **GREEDY).differences
    assert difference.verdict == "bug"


@pytest.mark.parametrize("extra", [-1, 1])
def test_another_length_is_a_bug(monkeypatch, extra):
    target, drafter, _ = pair()

    def change(output: torch.Tensor) -> torch.Tensor:
        return output[:, :extra] if extra < 0 else torch.nn.functional.pad(output, (0, extra), value=7)

    tamper(monkeypatch, change)
    (difference,) = verify(target, drafter, models.prompt(), tolerance=1e9, **GREEDY).differences
    assert difference.position == 12 + min(extra, 0)
    assert (difference.actual is None) == (extra < 0)
    assert (difference.expected is None) == (extra > 0)
    assert difference.verdict == "bug"


def test_first_differences():
    expected = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    actual = torch.tensor([[1, 2, 3], [4, 0, 0], [7, 8, 0]])
    assert first_differences(expected, expected) == []
    assert first_differences(expected, actual) == [(1, 1), (2, 2)]
    assert first_differences(expected, actual[:, :2]) == [(0, 2), (1, 1), (2, 2)]
