"""A session's context and drafts: against whole forwards, and itself fed in other portions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from dflash_models import BLOCK, MASK, VOCAB, fused_features, state, tiny_drafter, tiny_target
from torch import nn
from transformers import AutoModelForSeq2SeqLM, Qwen3Model, T5Config

from hf_treespec.drafters import DraftState
from hf_treespec.drafters.dflash import DFlashDrafter
from hf_treespec.training.blocks import draft_blocks
from hf_treespec.training.teacher import teacher_forward

WINDOWS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"is_causal": [True, False]},
    {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7, "is_causal": [False, True]},
    {"draft_window": 5},
]
WINDOW_IDS = ["full", "causal", "half causal", "sliding", "sliding causal", "draft window"]


def tokens_of(rows: int, length: int = 40) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(5))


def assert_close(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("overrides", WINDOWS, ids=WINDOW_IDS)
def test_session_equals_the_forward(overrides: dict[str, Any]):
    """`forward` without a cache is the definition: whole context and block in one pass."""
    target = tiny_target()
    drafter = tiny_drafter(target, **overrides)
    tokens = tokens_of(1)
    session = drafter.start(target, 1, 64)
    features = fused_features(session, target, tokens)
    raw, _ = teacher_forward(target, tokens, session.feature_layers)
    done = 0
    for anchor in (11, 12, 19, 33):
        hidden = session.draft(state(tokens, features, done, anchor))
        block = torch.full((1, BLOCK), MASK)
        block[:, 0] = tokens[:, anchor]
        whole = drafter(target.get_input_embeddings()(block), raw[:, :anchor]).last_hidden_state
        assert_close(hidden, whole)
        done = anchor
        assert session.lengths == [anchor]


@pytest.mark.parametrize("overrides", WINDOWS, ids=WINDOW_IDS)
def test_training_blocks_equal_the_session(overrides: dict[str, Any]):
    target = tiny_target()
    drafter = tiny_drafter(target, **overrides)
    tokens = tokens_of(2)
    session = drafter.start(target, 2, 64)
    features = fused_features(session, target, tokens)
    raw, _ = teacher_forward(target, tokens, session.feature_layers)
    anchors = [1, 8, 9, 30]
    together = draft_blocks(drafter, session.modules, tokens, raw, torch.tensor(anchors).expand(2, -1))
    for index, anchor in enumerate(anchors):
        fresh = drafter.start(target, 2, 64)
        hidden = fresh.draft(state(tokens, features, 0, anchor))[:, 1:]
        assert_close(together[:, index], hidden)
        assert_close(fresh.modules.logits(together[:, index]), fresh.modules.logits(hidden))


@pytest.mark.parametrize("overrides", WINDOWS, ids=WINDOW_IDS)
def test_portions_of_features_do_not_matter(overrides: dict[str, Any]):
    target = tiny_target()
    drafter = tiny_drafter(target, **overrides)
    tokens = tokens_of(1)
    whole, portions = drafter.start(target, 1, 64), drafter.start(target, 1, 64)
    features = fused_features(whole, target, tokens)
    wanted = whole.draft(state(tokens, features, 0, 31))
    portions.draft(state(tokens, features, 0, 10))
    portions.observe(state(tokens, features, 10, 11))
    portions.observe(state(tokens, features, 11, 11))
    portions.observe(state(tokens, None, 11, 11))
    portions.draft(state(tokens, features, 11, 25))
    portions.observe(state(tokens, features, 25, 31))
    assert portions.lengths == whole.lengths == [31]
    assert_close(portions.draft(state(tokens, None, 31, 31)), wanted)


@pytest.mark.parametrize("overrides", WINDOWS, ids=WINDOW_IDS)
def test_ragged_batch_equals_rows_alone(overrides: dict[str, Any]):
    """Rows with left padding, then with different numbers of newly accepted positions."""
    target = tiny_target()
    drafter = tiny_drafter(target, **overrides)
    tokens = tokens_of(3)
    batch = drafter.start(target, 3, 64)
    alone = [drafter.start(target, 1, 64) for _ in range(3)]
    features = fused_features(batch, target, tokens)
    junk = torch.full((1, 64, features.shape[2]), torch.nan)
    ends = [[0, 9, 14, 14, 20], [0, 3, 5, 11, 12], [0, 12, 12, 20, 35]]
    for round_, observed in enumerate([False, False, True, False]):
        spans = [(row[round_], row[round_ + 1]) for row in ends]
        longest = max(end - start for start, end in spans)
        parts, places, valid = [], [], []
        for row, (start, end) in enumerate(spans):
            gap = longest - (end - start)
            # The prompt is padded on the left, accepted paths on the right.
            pieces = [features[row : row + 1, start:end], junk[:, :gap]]
            spots = [torch.arange(start, end), torch.zeros(gap, dtype=torch.long)]
            real = [torch.ones(end - start, dtype=torch.bool), torch.zeros(gap, dtype=torch.bool)]
            order = slice(None, None, -1) if round_ == 0 else slice(None)
            parts.append(torch.cat(pieces[order], dim=1))
            places.append(torch.cat(spots[order]))
            valid.append(torch.cat(real[order]))
        anchors = torch.tensor([end for _, end in spans])
        together = DraftState(
            anchors=tokens[torch.arange(3), anchors],
            positions=anchors,
            features=torch.cat(parts),
            feature_positions=torch.stack(places),
            feature_valid=torch.stack(valid),
            depth=BLOCK - 1,
            width=5,
        )
        singles = [
            state(tokens[row : row + 1], features[row : row + 1], start, end, width=5)
            for row, (start, end) in enumerate(spans)
        ]
        if observed:
            batch.observe(together)
            for session, single in zip(alone, singles, strict=True):
                session.observe(single)
        else:
            lattice = batch.propose(together)
            for row, (session, single) in enumerate(zip(alone, singles, strict=True)):
                wanted = session.propose(single)
                assert torch.equal(lattice.tokens[row], wanted.tokens[0])
                assert_close(lattice.log_probs[row], wanted.log_probs[0])
        assert batch.lengths == [end for _, end in spans]


def test_rows_without_validity_after_unequal_lengths():
    target = tiny_target()
    drafter = tiny_drafter(target)
    tokens = tokens_of(2)
    session = drafter.start(target, 2, 64)
    features = fused_features(session, target, tokens)
    session.observe(state(tokens, features, 0, 20))
    session.rollback([12, 20])
    positions = torch.stack([torch.arange(12, 15), torch.arange(20, 23)])
    chosen = torch.stack([features[0, 12:15], features[1, 20:23]])
    anchors = torch.tensor([15, 23])
    ragged = DraftState(tokens[[0, 1], anchors], anchors, chosen, positions, None, BLOCK - 1, 5)
    lattice = session.propose(ragged)
    for row, anchor in enumerate((15, 23)):
        single = drafter.start(target, 1, 64)
        wanted = single.propose(state(tokens[row : row + 1], features[row : row + 1], 0, anchor))
        assert_close(lattice.log_probs[row], wanted.log_probs[0, ..., :5])


def test_rollback_forgets():
    target = tiny_target()
    drafter = tiny_drafter(target)
    tokens = tokens_of(1)
    session, fresh = drafter.start(target, 1, 64), drafter.start(target, 1, 64)
    features = fused_features(session, target, tokens)
    session.draft(state(tokens, features, 0, 30))
    session.rollback([8])
    assert session.lengths == [8]
    again = session.draft(state(tokens, features, 8, 15))
    assert_close(again, fresh.draft(state(tokens, features, 0, 15)))
    session.rollback([99])
    assert session.lengths == [15]


def test_positions_are_the_true_ones():
    """A gap before a chunk of context moves what is seen, in the windows too."""
    target = tiny_target()
    tokens = tokens_of(1)
    for overrides in ({}, {"draft_window": 9}):
        drafter = tiny_drafter(target, **overrides)
        session = drafter.start(target, 1, 64)
        features = fused_features(session, target, tokens)
        late = state(tokens, features, 0, 6, positions=torch.arange(20, 26)[None])
        session.observe(replace(late, positions=torch.tensor([26])))
        hidden = session.draft(replace(state(tokens, None, 26, 26), anchors=tokens[:, 6]))
        raw, _ = teacher_forward(target, tokens, session.feature_layers)
        block = torch.full((1, BLOCK), MASK)
        block[:, 0] = tokens[:, 6]
        # Rotary attention knows distances alone, so the same context at 0 to 5 gives the same block.
        assert_close(hidden, drafter(target.get_input_embeddings()(block), raw[:, :6]).last_hidden_state)


def test_a_cut_depth_is_the_head_of_the_block():
    target = tiny_target()
    drafter = tiny_drafter(target)
    tokens = tokens_of(1)
    features = fused_features(drafter.start(target, 1, 64), target, tokens)
    whole = drafter.start(target, 1, 64).propose(state(tokens, features, 0, 20))
    assert whole.depth == drafter.drafted_depths == BLOCK - 1
    for depth in range(1, BLOCK):
        cut = drafter.start(target, 1, 64).propose(state(tokens, features, 0, 20, depth=depth, width=3))
        assert cut.tokens.shape == (1, depth, 1, 3)
        assert torch.equal(cut.tokens, whole.tokens[:, :depth, :, :3])
        assert_close(cut.log_probs, whole.log_probs[:, :depth, :, :3])
        assert (cut.next_slot[:, -1] == -1).all()
        assert (cut.next_slot[:, :-1] == 0).all()


def test_log_probs_are_normalised_over_the_vocabulary():
    target = tiny_target()
    drafter = tiny_drafter(target)
    tokens = tokens_of(1)
    for temperature in (1.0, 0.5):
        session = drafter.start(target, 1, 64)
        session.temperature = temperature
        features = fused_features(session, target, tokens)
        lattice = session.propose(state(tokens, features, 0, 20, width=10_000))
        assert lattice.tokens.shape == (1, BLOCK - 1, 1, VOCAB)
        assert lattice.log_probs.dtype == torch.float32
        torch.testing.assert_close(lattice.log_probs.exp().sum(-1), torch.ones(1, BLOCK - 1, 1))
        other = drafter.start(target, 1, 64)
        logits = session.modules.logits(other.draft(state(tokens, features, 0, 20)))[:, 1:] / temperature
        wanted = logits.log_softmax(-1).sort(-1, descending=True)
        assert_close(lattice.log_probs[:, :, 0], wanted.values)


def test_buffers_grow_without_losing_anything():
    target = tiny_target()
    drafter = tiny_drafter(target)
    tokens = tokens_of(1, 200)
    session = drafter.start(target, 1, 256)
    features = fused_features(session, target, tokens)
    for anchor in range(1, 180):
        session.observe(state(tokens, features, anchor - 1, anchor))
    assert session.lengths == [179]
    fresh = drafter.start(target, 1, 256)
    wanted = fresh.draft(state(tokens, features, 0, 179))
    assert_close(session.draft(state(tokens, None, 179, 179)), wanted)
    assert session.buffers.storage.shape[4] < 4 * 179


def test_forward_with_padding():
    target = tiny_target()
    drafter = tiny_drafter(target)
    tokens = tokens_of(1)
    raw, _ = teacher_forward(target, tokens, drafter.config.target_layer_ids)
    block = target.get_input_embeddings()(torch.full((1, BLOCK), MASK))
    padded = torch.cat([torch.randn(1, 3, raw.shape[2]), raw[:, :10]], dim=1)
    positions = torch.cat([torch.zeros(3, dtype=torch.long), torch.arange(10 + BLOCK)])[None]
    mask = torch.cat([torch.zeros(1, 3), torch.ones(1, 10 + BLOCK)], dim=1)
    hidden = drafter(block, padded, position_ids=positions, attention_mask=mask).last_hidden_state
    assert_close(hidden, drafter(block, raw[:, :10]).last_hidden_state)


def test_another_dtype_than_the_target():
    target = tiny_target()
    drafter = tiny_drafter(target).to(torch.bfloat16)
    tokens = tokens_of(1)
    session = drafter.start(target, 1, 64)
    features = fused_features(session, target, tokens)
    assert features.dtype == torch.bfloat16
    lattice = session.propose(state(tokens, features, 0, 20))
    assert lattice.log_probs.dtype == torch.float32
    assert lattice.is_finite()


def without_head(target: Any) -> Any:
    return Qwen3Model(target.config)


def encoder_decoder(target: Any) -> Any:
    config = T5Config(vocab_size=VOCAB, d_model=48, d_kv=8, d_ff=8, num_layers=1, num_heads=2)
    return AutoModelForSeq2SeqLM.from_config(config)


@pytest.mark.parametrize(
    ("target_fields", "drafter_fields", "message"),
    [
        ({"hidden_size": 40}, {}, "hidden size is 40, the drafter's hidden_size is 48"),
        ({}, {"target_hidden_size": 24}, "feature width is 48, the drafter's target_hidden_size is 24"),
        ({"num_hidden_layers": 7}, {}, "number of layers is 7, the drafter's num_target_layers is 6"),
        ({}, {"target_layer_ids": [1, 6], "num_target_layers": None}, r"target_layer_ids \[6\] are no decoder layers"),
        ({"vocab_size": 50}, {}, "vocabulary size is 50, the drafter's vocab_size is 61"),
        ({}, {"mask_token_id": 61}, "mask_token_id 61 is no row"),
        (without_head, {}, "Qwen3Model has no input embedding or no output head"),
        (encoder_decoder, {}, "encoder-decoder"),
    ],
)
def test_check_target(target_fields: Any, drafter_fields: dict[str, Any], message: str):
    target = tiny_target()
    drafter = tiny_drafter(target, **drafter_fields)
    other = target_fields(target) if callable(target_fields) else tiny_target(**target_fields)
    with pytest.raises(ValueError, match=message):
        drafter.check_target(other)
    tiny_drafter(target).check_target(target)


def test_check_target_of_a_widened_fusion():
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.fc = nn.Linear(50, 48, bias=False)
    with pytest.raises(ValueError, match="fc takes 50 features, but 2 feature layers of width 48 give 96"):
        drafter.check_target(target)


def test_a_drafter_keeps_no_target():
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.start(target, 1, 64).close()
    assert isinstance(drafter, DFlashDrafter)
    assert not any(module is target for module in drafter.modules())
    assert drafter.treespec_config is None
    assert drafter.last_report is None
