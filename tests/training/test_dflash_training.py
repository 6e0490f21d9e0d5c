"""Training a DFlash drafter: the loss, the data, the measured acceptance, and resuming."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "drafters"))

from dflash_models import BLOCK, VOCAB, fused_features, state, tiny_drafter, tiny_target

from hf_treespec.drafters.dflash import DFlashDrafter
from hf_treespec.drafters.treeflash import TreeFlashDrafter
from hf_treespec.training import continuations as continuations_module
from hf_treespec.training import losses
from hf_treespec.training.acceptance import acceptance_lengths
from hf_treespec.training.blocks import sample_anchors
from hf_treespec.training.continuations import load_continuations, sample_continuations, write_continuations
from hf_treespec.training.dflash import initialise_from_target, train_dflash
from hf_treespec.training.distillation import DistillationObjective
from hf_treespec.training.teacher import teacher_forward
from hf_treespec.trees.expansion import expand

LENGTH, PROMPT = 32, 8


def texts(rows: int, length: int = LENGTH) -> torch.Tensor:
    prompts = torch.randint(0, VOCAB, (rows, PROMPT), generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(4)
    return sample_continuations(tiny_target(), prompts, length - PROMPT, temperature=0.4, generator=generator)


def train(drafter: DFlashDrafter, folder: Path, **overrides: Any) -> dict[str, float]:
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
    return train_dflash(drafter, tiny_target(), written[:4], written[4:], folder, **{**settings, **overrides})


@pytest.mark.parametrize("kind", ["kl", "ce"])
@pytest.mark.parametrize("chunk", [1, 7 * VOCAB, 1 << 20])
def test_the_chunked_loss_is_the_plain_one(monkeypatch: pytest.MonkeyPatch, kind: str, chunk: int):
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    head = torch.nn.Linear(8, VOCAB)
    hidden = torch.randn(20, 8, requires_grad=True)
    other = hidden.detach().clone().requires_grad_()
    teacher, labels, weights = torch.randn(20, 8), torch.randint(0, VOCAB, (20,)), torch.rand(20)
    settings = {"kind": kind, "temperature": 0.7, "vocab_size": VOCAB}
    loss = losses.distillation_loss(hidden, teacher, labels, weights, head, head, **settings)
    log_q = head(other).log_softmax(-1)
    wanted = (head(teacher) / 0.7).softmax(-1) if kind == "kl" else torch.nn.functional.one_hot(labels, VOCAB)
    plain = (-(wanted * log_q).sum(-1) * weights).sum() / weights.sum()
    torch.testing.assert_close(loss, plain)
    (3 * loss).backward()
    (3 * plain).backward()
    torch.testing.assert_close(hidden.grad, other.grad)


def test_an_unknown_loss_is_refused():
    with pytest.raises(ValueError, match="'mse'"):
        losses.distillation_loss(
            *[torch.zeros(1, 1)] * 4, *[torch.nn.Identity()] * 2, kind="mse", temperature=1, vocab_size=1
        )


def test_anchors_leave_room_for_context_and_block():
    torch.manual_seed(0)
    anchors = torch.cat([sample_anchors(4, 12, 4, 3) for _ in range(50)])
    assert (anchors[:, 1:] > anchors[:, :-1]).all()
    assert sorted(set(anchors.flatten().tolist())) == list(range(1, 8))
    assert sample_anchors(2, 12, 4, 99).tolist() == [[1, 2, 3, 4, 5, 6, 7]] * 2


def test_the_teacher_gives_layer_outputs():
    target = tiny_target()
    tokens = texts(2)
    features, hidden = teacher_forward(target, tokens, [3, 1])
    states = target(tokens, output_hidden_states=True)
    assert torch.equal(features, torch.cat([states.hidden_states[4], states.hidden_states[2]], dim=-1))
    torch.testing.assert_close(target.lm_head(hidden), states.logits)
    hooks = [len(module._forward_hooks) for module in target.modules()]
    teacher_forward(target, tokens, [3, 1])
    assert [len(module._forward_hooks) for module in target.modules()] == hooks


def test_the_loss_compares_slots_with_the_positions_they_draft():
    """Hand-computed from single blocks: slot k of the anchor at p faces the target after position p+k−1."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    tokens = texts(1)
    objective = DistillationObjective(drafter, target, temperature=0.6, gamma=2.0)
    session = drafter.start(target, 1, 64)
    features = fused_features(session, target, tokens)
    logits = target(tokens).logits
    total = mass = 0.0
    for anchor in (3, 9, 20):
        fresh = drafter.start(target, 1, 64)
        drafted = fresh.modules.logits(fresh.draft(state(tokens, features, 0, anchor)))[0, 1:].log_softmax(-1)
        for slot in range(1, BLOCK):
            wanted = (logits[0, anchor + slot - 1] / 0.6).softmax(-1)
            weight = float(np.exp(-(slot - 1) / 2.0))
            total += weight * float(-(wanted * drafted[slot - 1]).sum())
            mass += weight
    loss = objective.loss_at(tokens, torch.tensor([[3, 9, 20]]))
    assert loss.item() == pytest.approx(total / mass, rel=1e-5)


def test_the_target_is_frozen_and_not_saved():
    target = tiny_target()
    drafter = initialise_from_target(tiny_drafter(target), target)
    objective = DistillationObjective(drafter, target)
    assert torch.equal(drafter.norm.weight, target.model.norm.weight)
    assert set(objective.state_dict()) == {f"drafter.{name}" for name in drafter.state_dict()}
    objective(texts(2))["loss"].backward()
    assert all(parameter.grad is None for parameter in target.parameters())
    assert all(parameter.grad is not None for parameter in drafter.parameters())


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_training_learns_a_small_set(tmp_path: Path, loss: str):
    drafter = tiny_drafter(tiny_target(), initializer_range=0.05)
    tokens = texts(4)
    objective = DistillationObjective(drafter, tiny_target(), loss=loss)
    anchors = torch.arange(1, LENGTH - BLOCK + 1).expand(4, -1)
    before = float(objective.loss_at(tokens, anchors))
    train(drafter, tmp_path, loss=loss, max_steps=60, save_steps=100, anchors=27)
    after = float(objective.loss_at(tokens, anchors))
    assert after < 0.8 * before


def test_resuming_is_going_on(tmp_path: Path):
    """A run cut after its first checkpoint and started again ends with the same bits."""
    whole = tiny_drafter(tiny_target())
    metrics = train(whole, tmp_path / "whole")
    cut = tiny_drafter(tiny_target())
    train(cut, tmp_path / "cut")
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), cut.state_dict().values(), strict=True))
    for file in sorted((tmp_path / "cut" / "checkpoint-6").rglob("*"), reverse=True):
        file.unlink()
    (tmp_path / "cut" / "checkpoint-6").rmdir()
    torch.manual_seed(99)
    resumed = DFlashDrafter(whole.config)
    again = train(resumed, tmp_path / "cut")
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    assert {k: again[k] for k in again if k.startswith("eval_tau")} == {
        k: metrics[k] for k in metrics if k.startswith("eval_tau")
    }


@pytest.mark.parametrize("look_back", [False, True], ids=["dflash", "treeflash"])
def test_acceptance_is_that_of_decoding(look_back: bool):
    """τ equals a walk along the text, round by round, with a session drafting."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    if look_back:
        drafter = TreeFlashDrafter.from_dflash(drafter, num_parents=3)
        torch.manual_seed(6)
        for parameter in drafter.ar_approximation.parameters():
            parameter.data.normal_(0.0, 0.2)
    train_tokens = texts(3, 60)
    found = acceptance_lengths(drafter, target, train_tokens, PROMPT, tree_nodes=(4, 12))
    for nodes, name in ((0, "tau_chain"), (4, "tau_tree_4"), (12, "tau_tree_12")):
        rounds = committed = 0
        for row in train_tokens:
            tokens = row[None]
            session = drafter.start(target, 1, 64)
            features = fused_features(session, target, tokens)
            done, anchor = 0, PROMPT
            while anchor + BLOCK <= tokens.shape[1]:
                lattice = session.propose(state(tokens, features, done, anchor, width=12 if nodes else 1))
                (children,) = expand(lattice, tokens[:, anchor], nodes or BLOCK).children()
                node, step = 0, 1
                while step < BLOCK and (child := children.get((node, int(row[anchor + step])))) is not None:
                    node, step = child, step + 1
                rounds, committed = rounds + 1, committed + step
                done, anchor = anchor, anchor + step
        assert found[name] == pytest.approx(committed / rounds)
    assert found["tau_chain"] <= found["tau_tree_12"]
    assert found["tau_tree_4"] <= found["tau_tree_12"]
    assert found["tau_tree_12"] > 1


@pytest.mark.parametrize("sliding", [False, True])
def test_cached_sampling_is_sampling(sliding: bool):
    """The roomy cache changes nothing: the same draws from whole forwards give the same tokens."""
    layers = ["sliding_attention", "full_attention"] * 3
    fields = {"layer_types": layers, "use_sliding_window": True, "sliding_window": 6} if sliding else {}
    target = tiny_target(**fields)
    prompts = torch.randint(0, VOCAB, (3, PROMPT), generator=torch.Generator().manual_seed(3))
    sampled = sample_continuations(target, prompts, 20, temperature=0.8, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(7)
    tokens = prompts
    with torch.no_grad():
        for _ in range(20):
            logits = target(tokens, use_cache=False).logits[:, -1]
            tokens = torch.cat([tokens, torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator)], dim=1)
    assert torch.equal(sampled, tokens)


def test_continuations_go_on_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stream = np.random.default_rng(0).integers(0, VOCAB, 500).astype(np.uint16)
    settings: dict[str, Any] = {"sequences": 5, "prompt_length": 6, "new_tokens": 4, "batch_size": 2}
    whole = write_continuations(tiny_target(), stream, tmp_path, **settings)
    assert whole.shape == (5, 10)
    assert whole.dtype == np.uint16
    windows = np.lib.stride_tricks.sliding_window_view(stream, 6)
    assert all((windows == row[:6]).all(1).any() for row in whole)
    assert len({row.tobytes() for row in whole}) == 5
    (tmp_path / "00001.npy").unlink()
    calls = []
    sample = continuations_module.sample_continuations
    monkeypatch.setattr(
        continuations_module, "sample_continuations", lambda *a, **k: calls.append(len(a[1])) or sample(*a, **k)
    )
    assert np.array_equal(write_continuations(tiny_target(), stream, tmp_path, **settings), whole)
    assert calls == [2]
    assert np.array_equal(load_continuations(tmp_path), whole)
