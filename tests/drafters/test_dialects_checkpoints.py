"""Published dialects: what is loaded, kept, saved again and refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from dialect_models import DIALECTS, golden, golden_states, golden_target, published, target_of
from golden_inputs import REDUCED, VOCAB, rows, tensor

from hf_treespec.drafters import AutoDrafter, DraftState
from hf_treespec.drafters.dflash import DFlashDrafter
from hf_treespec.drafters.treeflash import TreeFlashDrafter
from hf_treespec.training.agreement import depth_agreement
from hf_treespec.training.blocks import draft_blocks, sample_anchors
from hf_treespec.training.distillation import DistillationObjective
from hf_treespec.training.teacher import teacher_forward

OWN = {
    "embed_tokens.weight": torch.from_numpy(tensor("embed_tokens.weight", (VOCAB, 32))),
    "lm_head.weight": torch.from_numpy(tensor("lm_head.weight", (VOCAB, 32))),
}


def load(folder: Path, name: str, *args: Any, **kwargs: Any) -> DFlashDrafter:
    loaded = AutoDrafter.from_pretrained(published(folder, name, *args, **kwargs)).eval()
    assert isinstance(loaded, DFlashDrafter)
    return loaded


def proposals(drafter: DFlashDrafter) -> list[torch.Tensor]:
    session = drafter.start(target_of(drafter), 1, 64)
    lattices = [session.propose(state) for state in golden_states(drafter, session)]
    return [part for lattice in lattices for part in (lattice.tokens, lattice.log_probs, lattice.next_slot)]


@pytest.mark.parametrize("name", DIALECTS)
def test_a_round_trip_is_bit_equal(tmp_path: Path, name: str):
    first = load(tmp_path / "published", name)
    first.save_pretrained(tmp_path / "saved")
    again = AutoDrafter.from_pretrained(tmp_path / "saved").eval()
    assert type(again) is type(first)
    kept = first.state_dict()
    assert kept.keys() == again.state_dict().keys() == set(golden(name)["shapes"])
    assert all(torch.equal(found, kept[key]) for key, found in again.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(proposals(first), proposals(again), strict=True))


@pytest.mark.parametrize("name", ["zlab", "speculators", "deepspec"])
def test_shards_load_as_one_file_does(tmp_path: Path, name: str):
    whole, sharded = load(tmp_path / "whole", name), load(tmp_path / "sharded", name, shards=3)
    assert all(torch.equal(a, b) for a, b in zip(proposals(whole), proposals(sharded), strict=True))


def test_a_dtype_leaves_the_map_of_tokens_alone(tmp_path: Path):
    folder = published(tmp_path, "speculators")
    drafter = AutoDrafter.from_pretrained(folder, dtype=torch.bfloat16)
    assert drafter.dtype == drafter.lm_head.weight.dtype == torch.bfloat16
    assert drafter.target_ids.tolist() == REDUCED
    assert set(proposals(drafter)[0].flatten().tolist()) <= set(REDUCED)


@pytest.mark.parametrize("shipped", [("embed_tokens.weight",), ("lm_head.weight",), tuple(OWN)])
def test_a_shipped_embedding_or_head_is_used_and_kept(tmp_path: Path, shipped: tuple[str, ...]):
    drafter = load(tmp_path, "zlab", {name: OWN[name] for name in shipped})
    modules = drafter.start(golden_target(), 1, 64).modules
    tokens, hidden = torch.arange(VOCAB), torch.eye(32)
    embedding = OWN["embed_tokens.weight"] if "embed_tokens.weight" in shipped else torch.from_numpy(rows("embedding"))
    head = OWN["lm_head.weight"] if "lm_head.weight" in shipped else torch.from_numpy(rows("head"))
    assert torch.equal(modules.embed(tokens, torch.float32), embedding)
    torch.testing.assert_close(modules.logits(hidden), head.T)
    torch.testing.assert_close(modules.logits_of(tokens[:5], hidden), head[:5].T)
    drafter.tie_weights()
    assert all(torch.equal(drafter.state_dict()[name], OWN[name]) for name in shipped)


@pytest.mark.parametrize("shipped", [(), tuple(OWN)], ids=["borrowed", "shipped"])
def test_stated_scales_are_applied_and_others_are_the_targets(tmp_path: Path, shipped: tuple[str, ...]):
    """A target that scales both ends itself; the drafter's file states what takes the place of that, or nothing."""
    target = copy.deepcopy(golden_target())
    target.config.embedding_multiplier, target.config.logits_scaling = 3.0, 5.0
    target.config.final_logit_softcapping = 7.0
    extra, hidden = {name: OWN[name] for name in shipped}, torch.eye(32)
    embedding = OWN["embed_tokens.weight"] if shipped else torch.from_numpy(rows("embedding"))
    head = OWN["lm_head.weight"].T if shipped else torch.from_numpy(rows("head")).T
    stated = {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 1.5}
    drafter = load(tmp_path / "stated", "zlab", extra, **stated)
    modules = drafter.borrow(target)
    torch.testing.assert_close(modules.embed(torch.arange(VOCAB), torch.float32), 2.0 * embedding)
    torch.testing.assert_close(modules.logits(hidden), 1.5 * (0.5 * head / 1.5).tanh())
    drafter = load(tmp_path / "silent", "zlab", extra)
    modules = drafter.borrow(target)
    torch.testing.assert_close(modules.embed(torch.arange(VOCAB), torch.float32), embedding * (1 if shipped else 3.0))
    torch.testing.assert_close(modules.logits(hidden), head if shipped else 7.0 * (head / 5.0 / 7.0).tanh())


def test_an_own_embedding_and_head_leave_the_width_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    load(tmp_path / "both", "jetspec_adapter").check_target(golden_target(24))
    monkeypatch.delitem(golden("jetspec_adapter")["shapes"], "lm_head.weight")
    drafter = load(tmp_path / "one", "jetspec_adapter")
    with pytest.raises(ValueError, match="hidden size is 24, the drafter's hidden_size is 32"):
        drafter.check_target(golden_target(24))


def test_the_target_it_was_trained_for_is_recorded(tmp_path: Path):
    assert load(tmp_path, "speculators").config.target_name_or_path == "owner/target"


def test_older_speculators_checkpoints_load_without_the_targets_modules(tmp_path: Path):
    extra = {"verifier_norm.weight": torch.ones(32), "verifier_lm_head.weight": torch.ones(len(REDUCED), 32)}
    drafter = load(tmp_path, "speculators", extra)
    assert not any(name.startswith("verifier") for name in drafter.state_dict())


@pytest.mark.parametrize(
    ("name", "extra", "overrides", "message"),
    [
        ("speculators", {"d2t": torch.tensor(REDUCED)}, {}, "d2t and t2d contradict each other"),
        ("speculators", {}, {"aux_hidden_state_layer_ids": [0, 2]}, "0 is the output of the target's embedding"),
        ("speculators", {}, {"mask_token_id": None}, r"lacks \['mask_token_id'\]"),
        ("speculators", {}, {"draft_vocab_size": 16}, r"misshaped: d2t \[17\] instead of \[16\]"),
        (
            "zlab",
            {"layers.0.self_attn.qkv_proj.weight": torch.ones(1)},
            {},
            r"fused projections \(layers\.0\.self_attn\.qkv_proj\.weight",
        ),
        ("zlab", {"layers.0.self_attn.g_proj.weight": torch.ones(1)}, {}, "gates of attention"),
        ("deepspec", {}, {"markov_rank": 256}, "DSpark drafter .*markov_rank.*: 256"),
        ("deepspec", {}, {"enable_confidence_head": True}, "DSpark drafter .*enable_confidence_head"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, name: str, extra: dict[str, torch.Tensor], overrides: dict[str, Any], message: str
):
    folder = published(tmp_path, name, extra, **overrides)
    for family in (AutoDrafter, DFlashDrafter):
        with pytest.raises(ValueError, match=message):
            family.from_pretrained(folder)


def test_a_reduced_head_without_its_map_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(golden("speculators")["shapes"], "d2t")
    with pytest.raises(ValueError, match="missing: d2t"):
        load(tmp_path, "speculators")


def test_transformers_own_loop_is_refused_where_it_would_draft_with_other_modules(tmp_path: Path):
    drafter = load(tmp_path, "deepspec")
    with pytest.raises(ValueError, match=r"sample_from_anchor=True\. Leave out speculation_type"):
        drafter(torch.zeros(1, 4, 32), torch.zeros(1, 2, 64))


@pytest.mark.parametrize("head", ["full", "candidates"])
def test_a_treeflash_head_over_a_reduced_vocabulary(tmp_path: Path, head: str):
    """Parents and children are target tokens; log-probabilities are over the columns, as a plain loop has them."""
    backbone = load(tmp_path, "speculators")
    drafter = TreeFlashDrafter.from_dflash(backbone, num_parents=4, head=head, head_candidates=len(REDUCED))
    torch.nn.init.normal_(drafter.ar_approximation.d.weight, std=0.3)
    session, fresh = (drafter.start(golden_target(), 1, 64) for _ in range(2))
    columns = {token: column for column, token in enumerate(REDUCED)}
    for state in golden_states(drafter, session, width=6):
        hidden = fresh.drafted(fresh.denoise(state), 3)[0]
        marginals = [backbone.lm_head(drafter.norm(vector)).topk(4).indices.tolist() for vector in hidden]
        lattice = session.propose(state)
        for depth, vector in enumerate(hidden):
            parents = [REDUCED[c] for c in marginals[depth - 1]] if depth else [int(state.anchors)]
            for slot, parent in enumerate(parents):
                embedded = backbone.embed_tokens.weight[parent]
                wanted = backbone.lm_head(drafter.norm(drafter.correct(embedded, vector))).log_softmax(-1)
                tokens = lattice.tokens[0, depth, slot].tolist()
                assert tokens == [REDUCED[column] for column in wanted.topk(6).indices.tolist()]
                found = lattice.log_probs[0, depth, slot]
                torch.testing.assert_close(found, wanted[[columns[t] for t in tokens]], atol=1e-5, rtol=0)
                if depth < 2:
                    known = [REDUCED[column] for column in marginals[depth]]
                    following = [known.index(token) if token in known else -1 for token in tokens]
                    assert lattice.next_slot[0, depth, slot].tolist() == following


def sequences() -> torch.Tensor:
    return torch.randint(0, VOCAB - 1, (2, 16), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", ["zlab_sliding", "deepspec", "speculators", "speculators_anchor"])
def test_training_drafts_as_a_session_does(tmp_path: Path, name: str):
    drafter, target = load(tmp_path, name), golden_target()
    session, depths = drafter.start(target, 1, 64), drafter.drafted_depths
    texts = sequences()[:1]
    features, _ = teacher_forward(target, texts, drafter.config.target_layer_ids)
    hidden = draft_blocks(drafter, session.modules, texts, features, torch.tensor([[8]]))
    fused = sum(session.fuse(index, part) for index, part in enumerate(features[:, :8].chunk(2, dim=-1)))
    columns = torch.arange(8)[None]
    state = DraftState(texts[:, 8], torch.tensor([8]), fused, columns, None, depths, 4)
    torch.testing.assert_close(hidden[0], session.drafted(session.draft(state), depths), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("loss", ["kl", "ce"])
@pytest.mark.parametrize("name", ["deepspec", "speculators"])
def test_the_loss_is_over_the_drafters_own_vocabulary(tmp_path: Path, name: str, loss: str):
    drafter, target, texts = load(tmp_path, name), golden_target(), sequences()
    depths, ids = drafter.drafted_depths, REDUCED if name == "speculators" else list(range(VOCAB))
    anchors = sample_anchors(2, 16, depths, 3)
    found = DistillationObjective(drafter, target, loss=loss, gamma=None).loss_at(texts, anchors)
    features, teacher = teacher_forward(target, texts, drafter.config.target_layer_ids)
    hidden = draft_blocks(drafter, drafter.borrow(target), texts, features, anchors)
    losses = []
    for row, block, depth in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(depths)).tolist():
        log_q = drafter.lm_head(hidden[row, block, depth]).log_softmax(-1)
        place = int(anchors[row, block]) + depth + 1
        token = int(texts[row, place])
        if loss == "kl":
            truth = target.lm_head(teacher[row, place - 1])[ids].softmax(-1)
            losses.append(-(truth * log_q).sum())
        elif token in ids:
            losses.append(-log_q[ids.index(token)])
    torch.testing.assert_close(found, torch.stack(losses).mean())


def test_distances_are_over_the_whole_vocabulary(tmp_path: Path):
    drafter, target, texts = load(tmp_path, "speculators"), golden_target(), sequences()
    found = depth_agreement(drafter, target, texts, 6, ranks=(1, 3))
    features, teacher = teacher_forward(target, texts, drafter.config.target_layer_ids)
    anchors = torch.arange(6, 13).expand(2, -1)
    hidden = draft_blocks(drafter, drafter.borrow(target), texts, features, anchors)
    draft = torch.zeros(2, 7, 3, VOCAB)
    draft[..., REDUCED] = drafter.lm_head(hidden).softmax(-1)
    truth = target.lm_head(torch.stack([teacher[:, 6 + depth : 13 + depth] for depth in range(3)], dim=2)).softmax(-1)
    assert found.total_variation == pytest.approx(((draft - truth).abs().sum(-1) / 2).mean((0, 1)).tolist(), abs=1e-5)
    covered = truth.gather(-1, draft.topk(3).indices).sum(-1).mean((0, 1)).tolist()
    assert found.coverage[3] == pytest.approx(covered, abs=1e-5)
