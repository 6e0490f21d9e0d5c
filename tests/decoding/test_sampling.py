"""Draws that may be made out of order, and what they leave of the generator."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from hf_treespec.decoding import sampling
from hf_treespec.decoding.sampling import Picker, StepNoise, multinomial_is_exponential_race, row_wise, scores_only

CPU = torch.device("cpu")


def draws_of_plain_decoding(scores: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What plain `generate` draws from scores `[steps, B, V]`, and the generator's state afterwards."""
    torch.manual_seed(seed)
    tokens = [torch.multinomial(step.softmax(-1), 1).squeeze(1) for step in scores]
    return torch.stack(tokens), torch.get_rng_state()


@pytest.mark.parametrize("vocab", [5, 97, 4096])
@pytest.mark.parametrize("batch", [1, 3])
def test_picks_in_any_order_are_plain_draws(batch: int, vocab: int) -> None:
    scores = torch.randn(12, batch, vocab, generator=torch.Generator().manual_seed(vocab))
    expected, state = draws_of_plain_decoding(scores, 3)
    torch.manual_seed(3)
    picker = Picker(True, batch, CPU)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1)).tolist()
    for step in order:
        for row in range(batch):
            assert picker.pick(scores[step, [row]], step, [row]).item() == expected[step, row]
    picker.finish(12)
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_that_was_dropped_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain = [torch.empty(2, 50).exponential_() for _ in range(9)]
    monkeypatch.setattr(sampling, "_NOISE_BYTES", 1)
    torch.manual_seed(0)
    noise = StepNoise(2, CPU)
    noise.of(8, 50)
    after = torch.get_rng_state()
    assert len(noise._kept) == 2
    assert all(torch.equal(noise.of(step, 50), plain[step]) for step in (0, 5, 8, 3))
    assert torch.equal(torch.get_rng_state(), after)


def test_generator_is_rewound_past_noise_nobody_needed() -> None:
    scores = torch.randn(4, 1, 31)
    _, state = draws_of_plain_decoding(scores, 7)
    torch.manual_seed(7)
    picker = Picker(True, 1, CPU)
    picker.pick(scores[0], 9)
    picker.finish(4)
    assert torch.equal(torch.get_rng_state(), state)


def test_all_nodes_at_once_are_the_same_picks() -> None:
    scores = torch.randn(2, 5, 40)
    depths = torch.tensor([[0, 1, 1, 2, 0], [0, 1, 2, 3, 3]])
    first = [4, 1]
    torch.manual_seed(5)
    at_once = Picker(True, 2, CPU).pick_nodes(scores, depths, first, 3)
    torch.manual_seed(5)
    picker = Picker(True, 2, CPU)
    for row in range(2):
        for node in range(5):
            step = first[row] + int(depths[row, node])
            assert picker.pick(scores[row, [node]], step, [row]).item() == at_once[row, node]


def test_greedy_takes_the_first_of_equals() -> None:
    scores = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert Picker(False, 1, CPU).pick(scores, 0).tolist() == [1]


def test_race_check_leaves_the_global_generator_alone() -> None:
    multinomial_is_exponential_race.cache_clear()
    before = torch.get_rng_state()
    assert multinomial_is_exponential_race("cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_without_the_race_one_row_draws_lazily_and_a_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "multinomial_is_exponential_race", lambda device: False)
    scores = torch.randn(6, 1, 20)
    expected, state = draws_of_plain_decoding(scores, 2)
    torch.manual_seed(2)
    picker = Picker(True, 1, CPU)
    assert not picker.replays
    assert [picker.pick(scores[step], step).item() for step in range(6)] == expected.squeeze(1).tolist()
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match="batch size 3"):
        Picker(True, 3, CPU)


def test_processors_are_sorted_by_what_they_read() -> None:
    class Subclass(TemperatureLogitsWarper):
        """May read anything."""

    temperature, penalty = TemperatureLogitsWarper(0.7), RepetitionPenaltyLogitsProcessor(1.2)
    assert scores_only(LogitsProcessorList([temperature]))
    assert not scores_only(LogitsProcessorList([temperature, penalty]))
    assert row_wise(LogitsProcessorList([temperature, penalty]))
    assert not row_wise(LogitsProcessorList([Subclass(0.7)]))
