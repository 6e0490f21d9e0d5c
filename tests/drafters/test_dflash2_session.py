"""The convolution, the scales and the lattice of pairs: against loops, fed in other portions, expanded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from dflash2_models import CANDIDATES, loop_lattice, tiny_dflash2
from dflash_models import BLOCK, MASK, VOCAB, fused_features, state, tiny_target
from torch import nn

from hf_treespec import TreeSpecConfig
from hf_treespec.drafters import DraftState, TargetModules
from hf_treespec.drafters.dflash2 import DFlash2Config, DFlash2Session, DynamicConvolution
from hf_treespec.training.blocks import draft_blocks
from hf_treespec.training.teacher import teacher_forward
from hf_treespec.trees import DraftLattice, expand
from hf_treespec.trees.expansion import expand_levels

TARGET = tiny_target()
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "three taps": {"conv_kernel_size": 3, "conv_group_size": 8},
    "causal": {"is_causal": True},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "scaled": {"input_embedding_scale": 1.5, "output_multiplier": 0.5, "final_logit_softcapping": 3.0},
}


def tokens_of(rows: int, length: int = 40) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(5))


def assert_close(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, atol=2e-5, rtol=1e-5)


def proposed(
    drafter: Any, rows: int = 1, anchor: int = 20, decoding: dict[str, Any] | None = None, **options: Any
) -> tuple[DraftLattice, DFlash2Session, DraftState]:
    """A lattice of rows drafted alike, its session, and the state it was asked with."""
    tokens = tokens_of(rows)
    session = drafter.start(TARGET, rows, 64)
    session.configure(TreeSpecConfig(**(decoding or {})))
    asked = state(tokens, fused_features(session, TARGET, tokens), 0, anchor, **options)
    return session.propose(asked), session, asked


def convolution(taps: int, group: int, width: int = 8, block: int = 4) -> DynamicConvolution:
    torch.manual_seed(0)
    config = DFlash2Config(
        hidden_size=width, conv_kernel_size=taps, conv_group_size=group, block_size=block, num_attention_heads=4
    )
    module = DynamicConvolution(config)
    module.base_kernel.data.normal_()
    return module


def convolved(module: DynamicConvolution, side: int, inputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """One side's convolution of one block's `rows` `[S, H]`, number by number; `inputs` are what makes its kernel."""
    slots, width = rows.shape
    result = torch.zeros_like(rows)
    delta = module.kernel_projection(inputs).view(slots, 2, module.taps, module.groups)
    for slot in range(slots):
        for channel in range(width):
            for tap in range(min(module.taps, slot + 1)):
                group = channel * module.groups // width
                kernel = module.base_kernel[side, tap, channel] + delta[slot, side, tap, group]
                result[slot, channel] += kernel * rows[slot - tap, channel]
    return result


@pytest.mark.parametrize(("taps", "group"), [(1, 8), (2, 2), (3, 4), (4, 1)])
@torch.no_grad()
def test_the_convolution_equals_a_loop(taps: int, group: int):
    module, rows = convolution(taps, group), torch.randn(2, 4, 8)
    found = module(rows, torch.tanh)
    for row, block in enumerate(rows):
        wanted = convolved(module, 1, block, torch.tanh(convolved(module, 0, block, block)))
        assert_close(found[row], wanted)


@torch.no_grad()
def test_blocks_side_by_side_do_not_mix():
    module, rows = convolution(3, 4), torch.randn(2, 12, 8)
    together = module(rows, torch.tanh)
    for start in (0, 4, 8):
        assert_close(together[:, start : start + 4], module(rows[:, start : start + 4], torch.tanh))


@pytest.mark.parametrize("slots", [1, 2, 3])
@torch.no_grad()
def test_the_head_of_a_block_is_convolved_as_in_the_whole(slots: int):
    module, rows = convolution(4, 4), torch.randn(2, 4, 8)
    assert_close(module(rows[:, :slots], torch.tanh), module(rows, torch.tanh)[:, :slots])


@torch.no_grad()
def test_a_row_that_a_convolution_changes_changes_the_rows_behind_it_alone():
    module, rows = convolution(2, 4), torch.randn(1, 4, 8)
    other = rows.clone()
    other[:, 2] += 1.0
    changed = (module(rows, nn.Identity()) != module(other, nn.Identity())).any(-1)[0]
    assert changed.tolist() == [False, False, True, True]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_session_equals_the_forward(kind: str):
    """`forward` without a cache is the definition: whole context and block in one pass."""
    drafter, tokens = tiny_dflash2(TARGET, **KINDS[kind]), tokens_of(1)
    session, done = drafter.start(TARGET, 1, 64), 0
    features = fused_features(session, TARGET, tokens)
    block = torch.full((1, BLOCK), MASK)
    for anchor in (11, 12, 19, 33):
        hidden = session.draft(state(tokens, features, done, anchor))
        block[:, 0] = tokens[:, anchor]
        context = drafter.hidden_norm(features[:, :anchor])
        positions = torch.arange(anchor + BLOCK)[None]

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            columns = torch.arange(keys.shape[2])
            distance = columns[-BLOCK:, None] - columns
            seen = distance < (drafter.config.layer_window(layer) or 1000)
            if drafter.config.layer_is_causal(layer):
                seen &= distance >= 0
            groups = queries.shape[1] // keys.shape[1]
            keys, values = (part.repeat_interleave(groups, 1) for part in (keys, values))
            scores = (queries @ keys.mT) * queries.shape[-1] ** -0.5
            return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values

        scale = drafter.config.input_embedding_scale or 1.0
        embedded = TARGET.get_input_embeddings()(block) * scale
        assert_close(hidden, drafter.decode(embedded, context, positions, attend))
        done = anchor


@torch.no_grad()
def test_training_blocks_equal_the_session():
    """Blocks that stand side by side in one forward are convolved each for itself."""
    drafter, tokens, anchors = tiny_dflash2(TARGET, conv_kernel_size=3), tokens_of(2), [1, 8, 9, 30]
    session = drafter.start(TARGET, 2, 64)
    features = fused_features(session, TARGET, tokens)
    raw, _ = teacher_forward(TARGET, tokens, session.feature_layers)
    together = draft_blocks(drafter, session.modules, tokens, raw, torch.tensor(anchors).expand(2, -1))
    for index, anchor in enumerate(anchors):
        hidden = drafter.start(TARGET, 2, 64).draft(state(tokens, features, 0, anchor))
        assert_close(together[:, index], hidden[:, 1:])


@pytest.mark.parametrize("kind", KINDS)
def test_portions_of_features_do_not_matter(kind: str):
    drafter, tokens = tiny_dflash2(TARGET, **KINDS[kind]), tokens_of(1)
    whole, portions = drafter.start(TARGET, 1, 64), drafter.start(TARGET, 1, 64)
    features = fused_features(whole, TARGET, tokens)
    wanted = whole.propose(state(tokens, features, 0, 31))
    portions.propose(state(tokens, features, 0, 10))
    portions.observe(state(tokens, features, 10, 11))
    portions.propose(state(tokens, features, 11, 25))
    portions.observe(state(tokens, features, 25, 31))
    found = portions.propose(state(tokens, None, 31, 31))
    assert portions.lengths == whole.lengths == [31]
    assert torch.equal(found.tokens[:, 1:], wanted.tokens[:, 1:])
    assert torch.equal(found.next_slot[:, 1:], wanted.next_slot[:, 1:])
    assert_close(found.log_probs, wanted.log_probs)


@pytest.mark.parametrize("kind", ["full", "three taps", "scaled"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_lattice_equals_a_loop(kind: str, temperature: float):
    drafter = tiny_dflash2(TARGET, **KINDS[kind])
    lattice, session, asked = proposed(drafter, rows=2, width=4, decoding={"drafter_temperature": temperature})
    fresh = drafter.start(TARGET, 2, 64)
    assert lattice.tokens.shape == (2, BLOCK - 1, CANDIDATES, 4)
    assert lattice.log_probs.dtype == torch.float32
    for row, depths in enumerate(loop_lattice(session, fresh, asked)):
        for depth, slots in enumerate(depths):
            for slot, (tokens, log_probs, following) in enumerate(slots):
                assert lattice.tokens[row, depth, slot].tolist() == tokens
                assert_close(lattice.log_probs[row, depth, slot], torch.tensor(log_probs))
                assert lattice.next_slot[row, depth, slot].tolist() == following


def test_only_the_anchor_stands_before_depth_one():
    lattice, _, _ = proposed(tiny_dflash2(TARGET), rows=2)
    assert (lattice.log_probs[:, 0, 1:] == -torch.inf).all()
    assert (lattice.log_probs[:, 0, 0] > -torch.inf).all()


def test_candidates_are_distinct_ordered_and_lead_to_their_own_slot():
    lattice, session, asked = proposed(tiny_dflash2(TARGET), width=VOCAB)
    fresh = session.drafter.start(TARGET, 1, 64)
    candidates = session.modules.logits(fresh.draft(asked)[:, 1:]).topk(CANDIDATES).indices[0].tolist()
    assert lattice.tokens.shape == (1, BLOCK - 1, CANDIDATES, CANDIDATES), "never more children than candidates"
    assert (lattice.log_probs.diff(dim=-1)[:, 1:] <= 0).all()
    for depth in range(lattice.depth):
        for slot in range(CANDIDATES if depth else 1):
            tokens, following = lattice.tokens[0, depth, slot].tolist(), lattice.next_slot[0, depth, slot].tolist()
            assert sorted(tokens) == sorted(candidates[depth])
            last = depth == lattice.depth - 1
            assert following == [-1 if last else candidates[depth].index(token) for token in tokens]


def test_probabilities_of_the_candidates_sum_to_one():
    """Over the candidates alone, whatever the width asked for."""
    for temperature in (1.0, 0.5):
        whole, _, _ = proposed(tiny_dflash2(TARGET), width=VOCAB, decoding={"drafter_temperature": temperature})
        sums = whole.log_probs.exp().sum(-1)
        assert_close(sums[:, 1:], torch.ones(1, BLOCK - 2, CANDIDATES))
        assert_close(sums[:, 0, 0], torch.ones(1))
        cut, _, _ = proposed(tiny_dflash2(TARGET), width=3, decoding={"drafter_temperature": temperature})
        assert torch.equal(cut.log_probs, whole.log_probs[..., :3])
        assert torch.equal(cut.tokens[:, 1:], whole.tokens[:, 1:, :, :3])


def test_predecessors_matter():
    """Different parents rank their children differently, or the tests above would prove little."""
    lattice, _, _ = proposed(tiny_dflash2(TARGET))
    assert any(len(set(depth.tolist())) > 1 for depth in lattice.tokens[0, 1:, :, 0])


def test_more_candidates_than_tokens():
    lattice, _, asked = proposed(tiny_dflash2(TARGET, selector_top_k=200), width=VOCAB)
    assert lattice.tokens.shape == (1, BLOCK - 1, VOCAB, VOCAB)
    assert len(expand(lattice, asked.anchors, 32)) == 32


@pytest.mark.parametrize("depth", range(1, BLOCK))
def test_a_cut_depth_is_the_head_of_the_block(depth: int):
    drafter = tiny_dflash2(TARGET)
    whole, _, _ = proposed(drafter)
    cut, _, _ = proposed(drafter, depth=depth)
    assert torch.equal(cut.tokens, whole.tokens[:, :depth])
    assert_close(cut.log_probs, whole.log_probs[:, :depth])
    assert torch.equal(cut.next_slot[:, : depth - 1], whole.next_slot[:, : depth - 1])
    assert (cut.next_slot[:, -1] == -1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_know_each_other(kind: str):
    """Rows of a batch whose contexts are of different lengths."""
    drafter, tokens = tiny_dflash2(TARGET, **KINDS[kind]), tokens_of(3)
    batch = drafter.start(TARGET, 3, 64)
    features, ends = fused_features(batch, TARGET, tokens), torch.tensor([20, 9, 14])
    columns = torch.arange(20).expand(3, -1)
    asked = replace(
        state(tokens, features, 0, 20),
        anchors=tokens[torch.arange(3), ends],
        positions=ends,
        feature_positions=columns,
        feature_valid=columns < ends[:, None],
    )
    together = batch.propose(asked)
    for row, end in enumerate(ends.tolist()):
        alone = drafter.start(TARGET, 1, 64).propose(state(tokens[row : row + 1], features[row : row + 1], 0, end))
        real = alone.log_probs[0] > -torch.inf
        assert torch.equal(together.tokens[row][real], alone.tokens[0][real])
        assert torch.equal(together.next_slot[row][real], alone.next_slot[0][real])
        assert_close(together.log_probs[row], alone.log_probs[0])


def test_trees_follow_the_conditionals():
    """Both forms of the expansion take the same nodes, each with the product of its conditionals."""
    lattice, _, asked = proposed(tiny_dflash2(TARGET), rows=2, width=31)
    tree, levels = expand(lattice, asked.anchors, 32), expand_levels(lattice, asked.anchors, 32)
    for name in ("tokens", "parents", "depths", "log_scores"):
        assert torch.equal(getattr(tree, name), getattr(levels, name)), name
    for row in range(2):
        slots, scores = {0: 0}, {0: 0.0}
        for node in range(1, tree.sizes[row]):
            parent, depth = int(tree.parents[row, node]), int(tree.depths[row, node]) - 1
            rank = lattice.tokens[row, depth, slots[parent]].tolist().index(int(tree.tokens[row, node]))
            scores[node] = scores[parent] + float(lattice.log_probs[row, depth, slots[parent], rank])
            slots[node] = int(lattice.next_slot[row, depth, slots[parent], rank])
            assert float(tree.log_scores[row, node]) == pytest.approx(scores[node], abs=1e-5)


def test_scales_left_to_the_target_are_the_targets():
    target = tiny_target()
    target.config.embedding_multiplier, target.config.final_logit_softcapping = 2.0, 1.5
    ours, theirs = tiny_dflash2(target).borrow(target), TargetModules(target)
    tokens, hidden = torch.arange(5), torch.randn(5, 48)
    assert torch.equal(ours.embed(tokens, torch.float32), theirs.embed(tokens, torch.float32))
    assert torch.equal(ours.logits(hidden), theirs.logits(hidden))


@torch.no_grad()
def test_stated_scales_replace_the_targets():
    """Also what an embedding class of its own does, as Gemma's."""

    class Doubled(nn.Embedding):
        def forward(self, *args: Any) -> torch.Tensor:
            return 2.0 * super().forward(*args)

    target = tiny_target()
    target.set_input_embeddings(Doubled(VOCAB, 48))
    target.config.embedding_multiplier, target.config.final_logit_softcapping = 7.0, 1.5
    tokens, hidden = torch.arange(5), torch.randn(5, 48)
    plain = hidden @ target.get_output_embeddings().weight.T
    scales = {"input_embedding_scale": 3.0, "output_multiplier": 0.25}
    for softcap, wanted in [(0.0, plain / 4), (2.0, torch.tanh(plain / 8) * 2), (None, torch.tanh(plain / 6) * 1.5)]:
        modules = tiny_dflash2(target, **scales, final_logit_softcapping=softcap).borrow(target)
        assert_close(modules.embed(tokens, torch.float32), 3.0 * target.get_input_embeddings().weight[:5])
        assert_close(modules.logits(hidden), wanted)
    capped = tiny_dflash2(target, final_logit_softcapping=2.0).borrow(target)
    assert_close(capped.logits(hidden), torch.tanh(plain / 2) * 2)


def test_another_dtype_than_the_target():
    lattice, _, _ = proposed(tiny_dflash2(TARGET).to(torch.bfloat16))
    assert lattice.log_probs.dtype == torch.float32
    assert lattice.is_finite()
    assert (lattice.log_probs[:, 1:] > -torch.inf).all()
