"""Training a TreeFlash head: the same numbers as when it drafts, frozen parts, and resuming."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "drafters"))

from dflash_models import BLOCK, VOCAB, fused_features, state, tiny_drafter, tiny_target
from test_dflash_training import PROMPT, texts

from hf_treespec.drafters.treeflash import TreeFlashDrafter
from hf_treespec.training.teacher import teacher_forward
from hf_treespec.training.treeflash import TreeFlashObjective, train_treeflash


def tiny_treeflash(**options: Any) -> TreeFlashDrafter:
    torch.manual_seed(5)
    return TreeFlashDrafter.from_dflash(tiny_drafter(tiny_target()), num_parents=4, num_candidates=None, **options)


def train(drafter: TreeFlashDrafter, folder: Path, **overrides: Any) -> dict[str, float]:
    written = texts(6).numpy()
    settings: dict[str, Any] = {
        "prompt_length": PROMPT,
        "anchors": 8,
        "batch_size": 2,
        "max_steps": 6,
        "save_steps": 3,
        "tree_nodes": (4,),
        "learning_rate": 1e-2,
    }
    return train_treeflash(drafter, tiny_target(), written[:4], written[4:], folder, **{**settings, **overrides})


def test_training_logits_are_those_of_the_second_stage():
    """Teacher forcing asks for a row of the table that drafting looks up, where the text is among the M best."""
    target, drafter = tiny_target(), tiny_treeflash()
    drafter.ar_approximation.d.weight.data.normal_(0.0, 0.5)
    tokens = texts(3)
    objective = TreeFlashObjective(drafter, target)
    anchors = torch.arange(4, 20).expand(3, -1)
    features, _ = teacher_forward(target, tokens, drafter.config.target_layer_ids)
    trained = objective.borrowed.logits(objective.drafted(tokens, features, anchors)).log_softmax(-1)
    compared = 0
    for row in range(3):
        alone = tokens[row : row + 1]
        for index, anchor in enumerate(anchors[row].tolist()):
            session = drafter.start(target, 1, 64)
            fused = fused_features(session, target, alone)
            lattice = session.propose(state(alone, fused, 0, anchor, width=VOCAB))
            slot = 0
            for depth in range(BLOCK - 1):
                order = lattice.tokens[0, depth, slot]
                wanted = trained[row, index, depth][order]
                torch.testing.assert_close(lattice.log_probs[0, depth, slot], wanted, atol=5e-5, rtol=1e-4)
                compared += depth > 0
                rank = int((order == alone[0, anchor + depth + 1]).nonzero()[0, 0])
                slot = int(lattice.next_slot[0, depth, slot, rank])
                if slot < 0:
                    break
    assert compared >= 5


@pytest.mark.parametrize("freeze", [True, False])
def test_what_is_frozen_stays(tmp_path: Path, freeze: bool):
    drafter, target = tiny_treeflash(), tiny_target()
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    of_target = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    metrics = train(drafter, tmp_path, freeze_backbone=freeze)
    changed = {name for name, tensor in drafter.state_dict().items() if not torch.equal(tensor, before[name])}
    assert "ar_approximation.d.weight" in changed
    assert any(name.startswith("model.") for name in changed) is not freeze
    assert all(torch.equal(tensor, of_target[name]) for name, tensor in tiny_target().state_dict().items())
    assert metrics["train_tokens_per_second"] > 0
    assert metrics["peak_memory_bytes"] > 1 << 20


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_the_head_learns_what_slots_cannot_know(tmp_path: Path, loss: str):
    drafter = tiny_treeflash()
    tokens = texts(4)
    objective = TreeFlashObjective(drafter, tiny_target(), loss=loss)
    anchors = torch.arange(1, tokens.shape[1] - BLOCK + 1).expand(4, -1)
    before = float(objective.loss_at(tokens, anchors))
    train(drafter, tmp_path, loss=loss, max_steps=40, save_steps=100, anchors=27)
    assert float(objective.loss_at(tokens, anchors)) < 0.9 * before


def test_resuming_is_going_on(tmp_path: Path):
    """A run cut after its first checkpoint and started again ends with the same bits."""
    whole = tiny_treeflash()
    train(whole, tmp_path / "whole")
    train(tiny_treeflash(), tmp_path / "cut")
    for file in sorted((tmp_path / "cut" / "checkpoint-6").rglob("*"), reverse=True):
        file.unlink()
    (tmp_path / "cut" / "checkpoint-6").rmdir()
    torch.manual_seed(99)
    resumed = TreeFlashDrafter(whole.config)
    train(resumed, tmp_path / "cut")
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
