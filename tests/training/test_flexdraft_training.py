"""Training a FlexDraft drafter: what each part trains, resuming, and that its measure is what decoding accepts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "drafters"))

from flexdraft_models import BLOCK, dense_draft, tiny_flexdraft
from models import VOCAB, build, hook_count, target

from hf_treespec.drafters.flexdraft import FlexDraftDrafter
from hf_treespec.training import flexdraft
from hf_treespec.training.checkpoints import last_checkpoint
from hf_treespec.training.continuations import sample_continuations
from hf_treespec.training.flexdraft import (
    FlexDraftObjective,
    fingerprint,
    initialise_from_text,
    train_flexdraft,
)
from hf_treespec.training.lattices import lattices_along
from hf_treespec.training.losses import calibration_loss, distillation_loss

LENGTH, PROMPT = 28, 8


def texts(rows: int) -> torch.Tensor:
    prompts = torch.randint(2, VOCAB, (rows, PROMPT), generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(4)
    return sample_continuations(target("qwen3"), prompts, LENGTH - PROMPT, temperature=0.4, generator=generator)


def fresh_drafter() -> FlexDraftDrafter:
    torch.manual_seed(5)
    return FlexDraftDrafter.from_target(target("qwen3"), 2, block_size=BLOCK, calibration_rank=5)


def train(drafter: FlexDraftDrafter, folder: Path, **overrides: Any) -> dict[str, float]:
    written = texts(6).numpy()
    settings: dict[str, Any] = {
        "prompt_length": PROMPT,
        "anchors": 5,
        "batch_size": 2,
        "max_steps": 4,
        "calibration_steps": 4,
        "save_steps": 2,
        "tree_nodes": (4,),
        "learning_rate": 1e-2,
    }
    return train_flexdraft(drafter, target("qwen3"), written[:4], written[4:], folder, **{**settings, **overrides})


def weights(drafter: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in drafter.state_dict().items()}


def changed(drafter: torch.nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in drafter.state_dict().items() if not torch.equal(tensor, before[name])}


def test_each_part_trains_its_own_tensors_and_the_target_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, drafter = target("qwen3"), fresh_drafter()
    before, target_before = weights(drafter), fingerprint(model)
    monkeypatch.setattr(flexdraft, "PARTS", ("attention",))
    train(drafter, tmp_path / "attention alone")
    calibration = {name for name in before if name.startswith("anchor_bias_mlp")}
    assert changed(drafter, before) == before.keys() - calibration
    halfway = weights(drafter)
    monkeypatch.setattr(flexdraft, "PARTS", ("calibration",))
    metrics = train(drafter, tmp_path / "calibration alone")
    assert changed(drafter, halfway) == calibration
    assert fingerprint(model) == target_before
    assert hook_count(model) == 0
    assert all(parameter.requires_grad for parameter in drafter.parameters())
    assert {"eval_tau_chain", "eval_tau_tree_4"} <= metrics.keys()


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole, stopped = fresh_drafter(), fresh_drafter()
    figures = train(whole, tmp_path / "whole")
    assert {"eval_attention_tau_chain", "eval_tau_chain"} <= figures.keys()

    class Stop(Exception):
        pass

    objective = FlexDraftObjective.forward
    calls = 0

    def failing(self: FlexDraftObjective, input_ids: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise Stop
        return objective(self, input_ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlexDraftObjective, "forward", failing)
        with pytest.raises(Stop):
            train(stopped, tmp_path / "stopped")
    checkpoint = last_checkpoint(tmp_path / "stopped" / "calibration")
    assert checkpoint is not None
    assert checkpoint.endswith("checkpoint-2")
    resumed = fresh_drafter()
    train(resumed, tmp_path / "stopped")
    assert not changed(resumed, weights(whole))


def test_a_finished_run_is_not_trained_on(tmp_path: Path) -> None:
    first, again = fresh_drafter(), fresh_drafter()
    # Within an epoch, whose next batch a resumed run would take.
    figures = [train(drafter, tmp_path, max_steps=3, calibration_steps=3) for drafter in (first, again)]
    assert not changed(again, weights(first))
    assert figures[0]["eval_tau_chain"] == figures[1]["eval_tau_chain"]
    assert str(last_checkpoint(tmp_path / "attention")).endswith("checkpoint-3")


def test_measured_drafts_are_what_decoding_drafts() -> None:
    model, tokens = target("qwen3"), texts(2)
    drafter = tiny_flexdraft(model)
    found = list(lattices_along(drafter, model, tokens, PROMPT, width=VOCAB, stride=5, chains=True))
    assert [anchor for anchor, _, _ in found] == [8, 13, 18]
    for anchor, lattice, chain in found:
        assert chain is not None
        for row in range(2):
            expected = dense_draft(model, drafter, tokens[row, : anchor + 1].tolist()).log_softmax(-1)
            best = expected.sort(-1, descending=True)
            torch.testing.assert_close(lattice.log_probs[row, :, 0], best.values, atol=1e-4, rtol=0)
            assert torch.equal(chain.tokens[row, :, 0, 0], best.indices[:, 0])


@pytest.mark.parametrize("kind", ["kl", "ce"])
def test_the_loss_of_a_bias_in_chunks_is_that_of_everything_at_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("qwen3").requires_grad_(False)
    head = model.get_output_embeddings()
    torch.manual_seed(0)
    hidden, teacher, bias = torch.randn(7, 64), torch.randn(7, 64), torch.randn(7, VOCAB, requires_grad=True)
    labels, weights_of_rows = torch.randint(0, VOCAB, (7,)), torch.rand(7)
    logits = head(hidden) + bias
    if kind == "ce":
        rows = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    else:
        rows = logits.logsumexp(-1) - ((head(teacher) / 0.7).softmax(-1) * logits).sum(-1)
    expected = (rows * weights_of_rows).sum() / weights_of_rows.sum()
    (gradient,) = torch.autograd.grad(expected, bias)
    options: dict[str, Any] = {"kind": kind, "temperature": 0.7, "vocab_size": VOCAB}
    monkeypatch.setattr("hf_treespec.training.losses._CHUNK_ELEMENTS", 3 * VOCAB)
    found = calibration_loss(hidden, lambda rows: bias[rows], teacher, labels, weights_of_rows, head, **options)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, bias)[0], gradient)
    silent = calibration_loss(hidden, lambda rows: 0 * bias[rows], teacher, labels, weights_of_rows, head, **options)
    torch.testing.assert_close(
        silent, distillation_loss(hidden, teacher, labels, weights_of_rows, head, head, **options)
    )


def test_blocks_are_learnt() -> None:
    """The loss of one text's blocks falls, first by the projections, then by the calibration."""
    model, drafter, tokens = target("qwen3"), fresh_drafter(), texts(2)
    anchors = torch.tensor([[2, 6, 9, 14, 20]]).expand(2, -1)
    losses = []
    for part in flexdraft.PARTS:
        objective = FlexDraftObjective(drafter, model, part=part, temperature=0.4)
        optimizer = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(12):
            optimizer.zero_grad()
            loss = objective.loss_at(tokens, anchors)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[11] < 0.7 * losses[0]
    assert losses[-1] < 0.95 * losses[12]


def test_a_drafter_without_calibration_has_none_to_train() -> None:
    drafter = FlexDraftDrafter.from_target(target("qwen3"), 2, calibration_rank=None)
    with pytest.raises(ValueError, match="calibration_rank is None"):
        FlexDraftObjective(drafter, target("qwen3"), part="calibration")


def test_a_fresh_drafter_takes_its_scales_from_text() -> None:
    drafter, model, written = fresh_drafter(), target("qwen3"), texts(3)
    bonus, hidden = drafter.anchor_bias_mlp[0].weight.detach().clone().chunk(2, 1)
    hooks = hook_count(model)
    initialise_from_text(drafter, model, written.numpy())
    assert hook_count(model) == hooks
    states = model(written, output_hidden_states=True).hidden_states
    entering = states[drafter.config.split_layer]
    assert torch.allclose(drafter.mask_embedding, entering[:, 1:].mean((0, 1)), atol=1e-6)
    ratio = states[-1][:, 1:].square().mean().sqrt() / states[0].square().mean().sqrt()
    assert torch.allclose(drafter.anchor_bias_mlp[0].weight, torch.cat([bonus * ratio, hidden], 1), rtol=1e-4)
