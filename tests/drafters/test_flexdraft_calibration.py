"""The calibration of drafted logits by the bonus token, by itself and on a DFlash backbone."""

from __future__ import annotations

import pytest
import torch
from dflash_models import fused_features, state, tiny_drafter, tiny_target
from torch.nn import functional as F

from hf_treespec.drafters.flexdraft import BonusCalibration

WIDTH, VOCAB, RANK, DEPTHS = 6, 11, 4, 3


def calibration() -> BonusCalibration:
    torch.manual_seed(0)
    return BonusCalibration(WIDTH, VOCAB, RANK)


def written_out(network: BonusCalibration, bonus: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The bias of one state as the paper writes it."""
    first, _, last = network
    return last.weight @ F.silu(first.weight @ torch.cat([bonus, hidden]) + first.bias) + last.bias


def test_the_bias_is_that_of_bonus_and_state_side_by_side() -> None:
    network, bonus, hidden = calibration(), torch.randn(2, 1, WIDTH), torch.randn(2, DEPTHS, WIDTH)
    bias = network(bonus, hidden)
    assert bias.shape == (2, DEPTHS, VOCAB)
    for row in range(2):
        for depth in range(DEPTHS):
            torch.testing.assert_close(bias[row, depth], written_out(network, bonus[row, 0], hidden[row, depth]))


def test_as_a_logits_processor_it_adds_the_bias_of_each_depth() -> None:
    network, bonus, hidden = calibration(), torch.randn(WIDTH), torch.randn(DEPTHS, WIDTH)
    processor = network.bind(hidden, bonus)
    scores = torch.randn(2 * DEPTHS, VOCAB)
    calibrated = processor(torch.zeros(2 * DEPTHS, 1, dtype=torch.long), scores)
    for row in range(2 * DEPTHS):
        torch.testing.assert_close(calibrated[row] - scores[row], written_out(network, bonus, hidden[row // 2]))
    with pytest.raises(ValueError, match="no multiple of the 3 depths"):
        processor(torch.zeros(4, 1, dtype=torch.long), scores[:4])


def test_silenced_it_changes_nothing() -> None:
    network, scores = calibration(), torch.randn(DEPTHS, VOCAB)
    network.silence()
    processor = network.bind(torch.randn(DEPTHS, WIDTH), torch.randn(WIDTH))
    assert torch.equal(processor(torch.zeros(DEPTHS, 1, dtype=torch.long), scores), scores)


def test_it_calibrates_a_dflash_drafter() -> None:
    """All it reads is the states of the head and the anchor's embedding, and it learns from them."""
    model = tiny_target()
    session = tiny_drafter(model).start(model, 1, 64)
    tokens = torch.arange(12)[None]
    drafted = state(tokens, fused_features(session, model, tokens), 0, 9)
    hidden = session.draft(drafted)[0, 1:].clone()
    bonus = session.modules.embed(drafted.anchors, hidden.dtype)[0].detach().clone()
    scores = session.modules.logits(hidden).detach().clone()
    network = BonusCalibration(hidden.shape[-1], scores.shape[-1], RANK)
    network.silence()
    wanted = torch.full((len(hidden),), 7)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(scores + network(bonus, hidden), wanted).backward()
        optimizer.step()
    calibrated = network.bind(hidden, bonus)(wanted[:, None], scores)
    assert torch.equal(calibrated.argmax(-1), wanted)
    assert not torch.equal(scores.argmax(-1), wanted)
