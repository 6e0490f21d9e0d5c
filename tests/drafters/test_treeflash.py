"""The TreeFlash head and its lattice: against DFlash, against a loop over paths, and as it is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_models import BLOCK, VOCAB, fused_features, state, tiny_drafter, tiny_target
from safetensors.torch import load_file, save_file
from test_dflash_checkpoints import zlab_folder
from transformers import AutoModel, LogitsProcessorList

from hf_treespec.drafters import AutoDrafter, find_family
from hf_treespec.drafters.dflash import DFlashDrafter
from hf_treespec.drafters.treeflash import ARApproximation, TreeFlashConfig, TreeFlashDrafter
from hf_treespec.trees import DraftLattice
from hf_treespec.trees.expansion import expand

DEPTH = BLOCK - 1


def tiny_treeflash(trained: bool = True, **options: Any) -> TreeFlashDrafter:
    """A drafter over the shared tiny DFlash; `trained` gives the head weights that matter."""
    fields: dict[str, Any] = {"num_parents": 4, "num_candidates": None, **options}
    torch.manual_seed(5)
    drafter = TreeFlashDrafter.from_dflash(tiny_drafter(tiny_target()), **fields)
    if trained and drafter.ar_approximation is not None:
        drafter.ar_approximation.d.weight.data.normal_(0.0, 0.5)
        drafter.ar_approximation.norm.weight.data.uniform_(0.5, 1.5)
    return drafter


def drafted(drafter: Any, rows: int = 2) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Modules of the target, hidden states `[B, D, H]` of a block, and the anchors."""
    target = tiny_target()
    tokens = torch.randint(0, VOCAB, (rows, 30), generator=torch.Generator().manual_seed(7))
    session = drafter.start(target, rows, 64)
    now = state(tokens, fused_features(session, target, tokens), 0, 20)
    return session.modules, session.denoise(now)[:, 1:], now.anchors


def probability(lattice: DraftLattice, row: int, path: list[int]) -> list[float]:
    """Log-probability of each step of a path, as far as it lies in the lattice."""
    slot, found = 0, []
    for depth, token in enumerate(path):
        ranks = (lattice.tokens[row, depth, slot] == token).nonzero()
        if slot < 0 or not len(ranks):
            break
        found.append(float(lattice.log_probs[row, depth, slot, ranks[0, 0]]))
        slot = int(lattice.next_slot[row, depth, slot, ranks[0, 0]])
    return found


def test_an_untrained_head_is_dflash():
    drafter, dflash = tiny_treeflash(trained=False), tiny_drafter(tiny_target())
    modules, hidden, anchors = drafted(drafter)
    assert torch.equal(drafter.correct(modules.embed(anchors, hidden.dtype)[:, None], hidden), hidden)
    plain = dflash.lattice(modules, hidden, anchors, 7)
    lattice = drafter.lattice(modules, hidden, anchors, 7)
    for depth in range(DEPTH):
        for slot in range(4 if depth else 1):
            assert torch.equal(lattice.tokens[:, depth, slot], plain.tokens[:, depth, 0])
            torch.testing.assert_close(lattice.log_probs[:, depth, slot], plain.log_probs[:, depth, 0])


@pytest.mark.parametrize("head", ["swiglu", "linear"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_lattice_is_that_of_a_loop_over_tokens(head: str, temperature: float):
    drafter = tiny_treeflash(ar_approximation=head)
    modules, hidden, anchors = drafted(drafter)
    lattice = drafter.lattice(modules, hidden, anchors, VOCAB, temperature)
    base = modules.logits(drafter.model.norm(hidden))
    for row in range(2):
        for depth in range(DEPTH):
            parents = anchors[row : row + 1] if not depth else base[row, depth - 1].topk(4).indices
            for slot, parent in enumerate(parents):
                embedded = modules.embed(parent[None], hidden.dtype)
                corrected = drafter.correct(embedded, hidden[row, depth][None])
                wanted = (modules.logits(drafter.model.norm(corrected))[0] / temperature).log_softmax(-1)
                order = lattice.tokens[row, depth, slot]
                assert sorted(order.tolist()) == list(range(VOCAB))
                torch.testing.assert_close(lattice.log_probs[row, depth, slot], wanted[order], atol=2e-5, rtol=1e-4)
                for rank, token in enumerate(order.tolist()):
                    best = base[row, depth].topk(4).indices.tolist()
                    inside = token in best and depth < DEPTH - 1
                    assert lattice.next_slot[row, depth, slot, rank] == (best.index(token) if inside else -1)
    assert (lattice.log_probs.diff(dim=-1)[:, 1:] <= 0).all()
    assert (lattice.log_probs[:, 0, 1:] == -torch.inf).all()


def test_the_head_matters():
    drafter = tiny_treeflash()
    modules, hidden, anchors = drafted(drafter)
    lattice = drafter.lattice(modules, hidden, anchors, 5)
    assert not torch.equal(lattice.tokens[:, 1, 0], lattice.tokens[:, 1, 1])


@pytest.mark.parametrize("candidates", [8, 16, 40])
def test_what_is_not_scored_is_taken_over_from_the_slot(candidates: int):
    """The stated error: (A + R) / (A + R′) with the slot's mass R and the conditional mass R′ of the other tokens."""
    drafter = tiny_treeflash()
    modules, hidden, anchors = drafted(drafter)
    exact = drafter.lattice(modules, hidden, anchors, VOCAB)
    drafter.config.num_candidates = candidates
    lattice = drafter.lattice(modules, hidden, anchors, VOCAB)
    assert lattice.tokens.shape[-1] == candidates
    base = modules.logits(drafter.model.norm(hidden))
    for row, depth, slot in ((0, 0, 0), (0, 1, 2), (1, 3, 3)):
        tokens = lattice.tokens[row, depth, slot]
        previous = anchors[row] if not depth else base[row, depth - 1].topk(4).indices[slot]
        corrected = drafter.correct(modules.embed(previous[None], hidden.dtype), hidden[row, depth][None])
        logits = modules.logits(drafter.model.norm(corrected))[0]
        others = torch.tensor([token for token in range(VOCAB) if token not in tokens.tolist()])
        inside, own, real = (part.logsumexp(-1) for part in (logits[tokens], base[row, depth, others], logits[others]))
        error = torch.logaddexp(inside, real) - torch.logaddexp(inside, own)
        known = {
            int(t): float(p)
            for t, p in zip(exact.tokens[row, depth, slot], exact.log_probs[row, depth, slot], strict=True)
        }
        wanted = torch.tensor([known[token] for token in tokens.tolist()]) + error
        torch.testing.assert_close(lattice.log_probs[row, depth, slot], wanted, atol=1e-4, rtol=1e-4)
        assert lattice.log_probs[row, depth, slot].exp().sum() <= 1 + 1e-5


def test_dead_ends_go_on_with_the_slots_own_distribution():
    drafter = tiny_treeflash(num_parents=2, dead_end_discount=0.5)
    modules, hidden, anchors = drafted(drafter)
    lattice = drafter.lattice(modules, hidden, anchors, VOCAB)
    base = modules.logits(drafter.model.norm(hidden)).log_softmax(-1)
    assert set(lattice.next_slot[:, :-1].unique().tolist()) == {0, 1, 2}
    assert set(lattice.next_slot[:, -1].unique().tolist()) == {-1}
    wanted = base[:, 1].sort(descending=True).values + torch.tensor(0.5).log()
    torch.testing.assert_close(lattice.log_probs[:, 1, 2], wanted, atol=1e-5, rtol=1e-5)
    tree = expand(lattice, anchors, 60)
    assert tree.depths.max() == DEPTH


def test_chains_are_gathered_from_the_same_table():
    """Each token is the best given the one before, or the slot's own best behind a token without a row."""
    drafter = tiny_treeflash(num_parents=1)
    modules, hidden, anchors = drafted(drafter, rows=8)
    lattice = drafter.lattice(modules, hidden, anchors, 1)
    chains = expand(lattice, anchors, BLOCK)
    base = modules.logits(drafter.model.norm(hidden))
    conditional = 0
    for row in range(8):
        previous, known = anchors[row], True
        for depth in range(DEPTH):
            embedded = modules.embed(previous[None], hidden.dtype)
            corrected = drafter.correct(embedded, hidden[row, depth][None])
            logits = modules.logits(drafter.model.norm(corrected))[0] if known else base[row, depth]
            conditional += known
            previous = logits.argmax()
            assert chains.tokens[row, depth + 1] == previous
            known = bool(previous == base[row, depth].argmax())
    assert 8 < conditional < 8 * DEPTH


def test_rows_do_not_know_each_other():
    drafter = tiny_treeflash()
    modules, hidden, anchors = drafted(drafter, rows=3)
    together = drafter.lattice(modules, hidden, anchors, 9)
    for row in range(3):
        alone = drafter.lattice(modules, hidden[row : row + 1], anchors[row : row + 1], 9)
        assert torch.equal(together.tokens[row : row + 1], alone.tokens)
        torch.testing.assert_close(together.log_probs[row : row + 1], alone.log_probs)


def test_bound_to_states_the_head_is_a_logits_processor():
    drafter = tiny_treeflash()
    modules, hidden, _ = drafted(drafter, rows=1)
    rows = hidden[0].repeat_interleave(3, 0)  # (depth, parent)
    ids = torch.randint(0, VOCAB, (len(rows), 4), generator=torch.Generator().manual_seed(1))
    head = drafter.ar_approximation
    processor = head.bind(rows, drafter.model.norm, lambda ids: modules.embed(ids, rows.dtype), modules.logits)
    base = modules.logits(drafter.model.norm(rows))
    scores = LogitsProcessorList([processor])(ids, base)
    embedded = modules.embed(ids[:, -1], rows.dtype)
    e = torch.nn.functional.rms_norm(embedded, (48,), head.norm.weight, 1e-6)
    up, gate = head.ug(torch.cat([e, drafter.model.norm(rows)], -1)).chunk(2, -1)
    wanted = modules.logits(drafter.model.norm(rows + head.d(torch.nn.functional.silu(gate) * up)))
    torch.testing.assert_close(scores, wanted, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(scores, base, atol=1e-2)
    with pytest.raises(ValueError, match="bound to 12 rows"):
        processor(ids[:2], base[:2])


def published_folder(folder: Path, drafter: TreeFlashDrafter, head: str | None = "swiglu") -> Path:
    """Writes a drafter as it is published: z-lab's configuration with one section more, and prefixed tensors."""
    zlab_folder(folder, drafter.model, treeflash_config={"ar_approximation": head, "candidate_tokens": 16})
    tensors = drafter.state_dict()
    if head is None:
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("head", ["swiglu", None])
def test_published_checkpoints_load(tmp_path: Path, head: str | None):
    drafter = tiny_treeflash()
    loaded = AutoDrafter.from_pretrained(published_folder(tmp_path / "published", drafter, head))
    assert type(loaded) is TreeFlashDrafter
    assert loaded.config.ar_approximation == head
    assert (loaded.config.num_parents, loaded.config.block_size) == (16, BLOCK)
    assert set(loaded.state_dict()) <= set(drafter.state_dict())
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, drafter.state_dict()[name])
    modules, hidden, anchors = drafted(loaded)
    if head is None:
        plain = loaded.model.lattice(modules, hidden, anchors, 6)
        assert torch.equal(loaded.lattice(modules, hidden, anchors, 6).log_probs, plain.log_probs)


def test_saved_checkpoints_keep_the_published_names(tmp_path: Path):
    drafter = tiny_treeflash()
    drafter.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {f"ar_approximation.{name}" for name in ("ug.weight", "ug.bias", "d.weight", "norm.weight")} <= names
    assert {"model.fc.weight", "model.hidden_norm.weight", "model.norm.weight"} <= names
    assert all(name.startswith(("model.", "ar_approximation.")) for name in names)
    for again in (AutoDrafter.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert type(again) is TreeFlashDrafter
        assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in drafter.state_dict().items())


def test_families_are_told_apart():
    assert find_family({"model_type": "qwen3", "dflash_config": {}, "treeflash_config": {}}) is TreeFlashDrafter
    assert find_family({"model_type": "treespec_treeflash"}) is TreeFlashDrafter
    assert find_family({"model_type": "treespec_dflash"}) is DFlashDrafter


def test_a_missing_head_is_loud(tmp_path: Path):
    drafter = tiny_treeflash()
    drafter.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("ar_approximation.d.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing: ar_approximation\.d\.weight"):
        TreeFlashDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("ar_approximation", "gru"), ("num_parents", 0), ("num_candidates", 3), ("dead_end_discount", 1.5)],
)
def test_contradictions_are_refused(field: str, value: Any):
    with pytest.raises(ValueError, match=field):
        TreeFlashConfig(**{field: value})


def test_a_new_head_starts_at_zero():
    drafter = TreeFlashDrafter(TreeFlashConfig(hidden_size=32, intermediate_size=16, num_hidden_layers=1))
    assert isinstance(drafter.ar_approximation, ARApproximation)
    assert not drafter.ar_approximation.d.weight.any()
    assert drafter.ar_approximation.ug.weight.any()


def test_half_precision(tmp_path: Path):
    drafter = tiny_treeflash(num_candidates=16).to(torch.bfloat16)
    modules, hidden, anchors = drafted(drafter)
    lattice = drafter.lattice(modules, hidden, anchors, 9)
    assert lattice.log_probs.dtype == torch.float32
    assert lattice.is_finite()
    assert json.loads(drafter.config.to_json_string())["num_candidates"] == 16
