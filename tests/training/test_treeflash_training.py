"""Training a TreeFlash head: teacher forcing, what is frozen, resuming, and a killed run."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "drafters"))

from dflash_models import BLOCK, VOCAB, fused_features, state, tiny_drafter, tiny_target

from hf_treespec.drafters.treeflash import TreeFlashDrafter
from hf_treespec.training.blocks import block_states, draft_blocks
from hf_treespec.training.checkpoints import last_checkpoint
from hf_treespec.training.continuations import sample_continuations
from hf_treespec.training.distillation import slot_weights
from hf_treespec.training.teacher import teacher_forward
from hf_treespec.training.treeflash import TreeFlashObjective, train_treeflash

LENGTH, PROMPT = 32, 8


def texts(rows: int, length: int = LENGTH) -> torch.Tensor:
    prompts = torch.randint(0, VOCAB, (rows, PROMPT), generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(4)
    return sample_continuations(tiny_target(), prompts, length - PROMPT, temperature=0.4, generator=generator)


def fresh_drafter() -> TreeFlashDrafter:
    torch.manual_seed(5)
    return TreeFlashDrafter.from_dflash(tiny_drafter(tiny_target()))


def trained_drafter() -> TreeFlashDrafter:
    """A head whose corrections are large."""
    drafter = fresh_drafter()
    torch.manual_seed(6)
    for parameter in drafter.ar_approximation.parameters():
        parameter.data.normal_(0.0, 0.5)
    return drafter.eval()


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


def weights(drafter: TreeFlashDrafter) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in drafter.state_dict().items()}


def test_forced_rows_are_the_sessions_second_stage():
    """Log-probabilities of training equal the lattice's, in the parent slot that holds the text's previous token."""
    target = tiny_target()
    drafter = trained_drafter()
    drafter.config.num_parents = VOCAB  # every token is a parent, so every text has its slot
    tokens = texts(2)
    session = drafter.start(target, 2, 64)
    features = fused_features(session, target, tokens)
    raw, _ = teacher_forward(target, tokens, session.feature_layers)
    anchors = [4, 11, 20]
    forced = draft_blocks(drafter, session.modules, tokens, raw, torch.tensor(anchors).expand(2, -1))
    log_probs = session.modules.logits(forced).log_softmax(-1)
    for index, anchor in enumerate(anchors):
        lattice = drafter.start(target, 2, 64).propose(state(tokens, features, 0, anchor, width=VOCAB))
        for row in range(2):
            slot = 0
            for depth in range(BLOCK - 1):
                offers = lattice.tokens[row, depth, slot]
                expected = log_probs[row, index, depth, offers]
                torch.testing.assert_close(lattice.log_probs[row, depth, slot], expected, atol=1e-4, rtol=1e-4)
                taken = (offers == tokens[row, anchor + depth + 1]).nonzero()[0, 0]
                slot = int(lattice.next_slot[row, depth, slot, taken])


def test_the_previous_token_is_the_texts_own():
    target, drafter = tiny_target(), trained_drafter()
    tokens = texts(1)
    session = drafter.start(target, 1, 64)
    raw, _ = teacher_forward(target, tokens, session.feature_layers)
    anchors = torch.tensor([[9]])
    forced = draft_blocks(drafter, session.modules, tokens, raw, anchors)
    states = block_states(drafter, session.modules, tokens, raw, anchors)
    for slot in range(BLOCK - 1):
        previous = target.get_input_embeddings()(tokens[:, 9 + slot])
        wanted = drafter.norm(drafter.correct(previous, states[:, 0, slot]))
        torch.testing.assert_close(forced[:, 0, slot], wanted)


def test_only_the_head_learns(tmp_path: Path):
    target, drafter = tiny_target(), fresh_drafter()
    before, target_before = weights(drafter), {n: t.clone() for n, t in target.state_dict().items()}
    objective = TreeFlashObjective(drafter, target)
    tokens = texts(2)
    raw, _ = teacher_forward(target, tokens, drafter.config.target_layer_ids)
    assert not block_states(drafter, objective.borrowed, tokens, raw, torch.tensor([[4], [9]])).requires_grad
    train(drafter, tmp_path)
    changed = {name for name, tensor in drafter.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all(name.startswith("ar_approximation.") for name in changed)
    assert all(parameter.requires_grad for parameter in drafter.parameters())
    assert all(torch.equal(tensor, target_before[name]) for name, tensor in target.state_dict().items())


@pytest.mark.parametrize(
    "options",
    [{"loss": "ce"}, {"gamma": None}, {"freeze_backbone": False}],
    ids=["cross-entropy", "no scaling", "whole drafter"],
)
def test_ablations_run(tmp_path: Path, options: dict[str, Any]):
    drafter = fresh_drafter()
    before = weights(drafter)
    metrics = train(drafter, tmp_path, max_steps=2, save_steps=2, **options)
    assert {"eval_tau_chain", "eval_tau_tree_4", "eval_tvd", "train_tokens_per_second"} <= metrics.keys()
    backbone = any(not torch.equal(t, before[n]) for n, t in drafter.state_dict().items() if "layers" in n)
    assert backbone == (options.get("freeze_backbone") is False)


def test_early_tokens_weigh_most_unless_told_otherwise():
    assert slot_weights(7, "paper")[0] == 1.0
    assert slot_weights(7, "paper")[4] == pytest.approx(2.718281828**-1)
    assert slot_weights(3, 2.0) == pytest.approx([1.0, 0.60653066, 0.36787944])
    assert slot_weights(3, None) == [1.0, 1.0, 1.0]


def test_a_drafter_without_a_head_is_refused():
    drafter = TreeFlashDrafter.from_dflash(tiny_drafter(tiny_target()), ar_approximation=None)
    with pytest.raises(ValueError, match="no head to train"):
        TreeFlashObjective(drafter, tiny_target())


def test_resuming_is_going_on(tmp_path: Path):
    """A run whose last checkpoint was cut short goes on from the one before and ends with the same bits."""
    whole = fresh_drafter()
    metrics = train(whole, tmp_path)
    (tmp_path / "checkpoint-6" / "trainer_state.json").write_text('{"epoch": ')
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-3")
    torch.manual_seed(99)
    resumed = fresh_drafter()
    again = train(resumed, tmp_path)
    assert all(torch.equal(tensor, resumed.state_dict()[name]) for name, tensor in whole.state_dict().items())
    measured = [name for name in metrics if name.startswith("eval_t")]
    assert {name: again[name] for name in measured} == {name: metrics[name] for name in measured}


@pytest.mark.slow
def test_a_killed_run_loses_at_most_one_interval(tmp_path: Path):
    killed, steps = tmp_path / "killed", {"max_steps": 60, "save_steps": 5}
    script = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}\n"
        "from pathlib import Path\n"
        "import torch; torch.set_num_threads(1)\n"
        "from test_treeflash_training import fresh_drafter, train\n"
        f"train(fresh_drafter(), Path({str(killed)!r}), **{steps!r})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while last_checkpoint(killed) is None:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    complete = last_checkpoint(killed)
    assert complete is not None
    begun = [int(path.name.removeprefix("checkpoint-")) for path in killed.glob("checkpoint-*")]
    assert max(begun) - int(Path(complete).name.removeprefix("checkpoint-")) <= steps["save_steps"]
    resumed, whole = fresh_drafter(), fresh_drafter()
    train(resumed, killed, **steps)
    train(whole, tmp_path / "whole", **steps)
    assert all(torch.equal(tensor, resumed.state_dict()[name]) for name, tensor in whole.state_dict().items())
