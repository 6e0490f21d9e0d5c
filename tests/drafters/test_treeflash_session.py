"""The conditional lattice: against a loop, against DFlash, and expanded."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dflash_models import BLOCK, VOCAB, fused_features, state, tiny_drafter, tiny_target
from treeflash_models import dense_correction, loop_lattice, loop_logits, tiny_treeflash

from hf_treespec import TreeSpecConfig
from hf_treespec.drafters import DraftState
from hf_treespec.drafters.dflash import DFlashSession
from hf_treespec.drafters.treeflash import TreeFlashSession
from hf_treespec.drafters.treeflash.slots import child_slots, rows_of_parents, rows_to_slots
from hf_treespec.trees import DraftLattice, expand
from hf_treespec.trees.expansion import expand_levels

TARGET = tiny_target()
KINDS: list[dict[str, Any]] = [{}, {"draft_window": 5}, {"is_causal": True}, {"ar_approximation": "linear"}]


def tokens_of(rows: int, length: int = 40) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(5))


def assert_close(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, atol=2e-5, rtol=1e-5)


def proposed(drafter: Any, rows: int = 1, anchor: int = 20, **options: Any) -> tuple[DraftLattice, Any, DraftState]:
    """A lattice of rows drafted alike, its session, and the state it was asked with."""
    tokens = tokens_of(rows)
    session = drafter.start(TARGET, rows, 64)
    session.configure(TreeSpecConfig(**options.pop("decoding", {})))
    asked = state(tokens, fused_features(session, TARGET, tokens), 0, anchor, **options)
    return session.propose(asked), session, asked


def fresh_session(drafter: Any, like: TreeFlashSession, rows: int) -> TreeFlashSession:
    session = drafter.start(TARGET, rows, 64)
    session.temperature, session.kinds = like.temperature, like.kinds
    return session


@pytest.mark.parametrize("overrides", KINDS, ids=["full", "window", "causal", "linear"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_lattice_equals_a_loop(overrides: dict[str, Any], temperature: float):
    drafter = tiny_treeflash(TARGET, **overrides)
    lattice, session, asked = proposed(drafter, rows=2, decoding={"drafter_temperature": temperature})
    assert session.candidates is None
    assert lattice.tokens.shape == (2, BLOCK - 1, 4, 7)
    assert lattice.log_probs.dtype == torch.float32
    dead = alive = 0
    for row, depths in enumerate(loop_lattice(session, fresh_session(drafter, session, 2), asked)):
        for depth, slots in enumerate(depths):
            for slot, (tokens, log_probs, following) in enumerate(slots):
                assert lattice.tokens[row, depth, slot].tolist() == tokens
                assert_close(lattice.log_probs[row, depth, slot], torch.tensor(log_probs))
                assert lattice.next_slot[row, depth, slot].tolist() == following
                dead += sum(index < 0 for index in following)
                alive += sum(index >= 0 for index in following)
    assert (lattice.log_probs[:, 0, 1:] == -torch.inf).all()
    assert dead > 10
    assert alive > 10


def test_a_draft_window_of_the_call_counts():
    drafter = tiny_treeflash(TARGET)
    narrow = proposed(drafter, decoding={"draft_window": 5})[0]
    assert_close(narrow.log_probs, proposed(tiny_treeflash(TARGET, draft_window=5))[0].log_probs)
    assert not torch.equal(narrow.log_probs, proposed(drafter)[0].log_probs)


def test_conditions_matter():
    """Different parents give different children, or the tests above would prove little."""
    lattice, _, _ = proposed(tiny_treeflash(TARGET))
    first = lattice.tokens[0, 1:, :, 0]
    assert any(len(set(depth.tolist())) > 1 for depth in first)


@pytest.mark.parametrize("head", ["full", "candidates"])
def test_tokens_are_distinct_and_ordered(head: str):
    lattice, session, _ = proposed(tiny_treeflash(TARGET, head=head, head_candidates=20), width=12)
    assert session.candidates == (20 if head == "candidates" else None)
    for depth in range(lattice.depth):
        for slot in range(4 if depth else 1):
            assert len(set(lattice.tokens[0, depth, slot].tolist())) == 12
    differences = lattice.log_probs[0, 1:].diff(dim=-1)
    assert (differences <= 0).all()


def test_an_untrained_head_is_dflash():
    plain = tiny_drafter(TARGET)
    for head in ("full", "candidates"):
        drafter = tiny_treeflash(TARGET, scale=0.0, head=head)
        tokens = tokens_of(2)
        ours, theirs = drafter.start(TARGET, 2, 64), plain.start(TARGET, 2, 64)
        assert isinstance(ours, TreeFlashSession)
        features = fused_features(theirs, TARGET, tokens)
        assert torch.equal(features, fused_features(ours, TARGET, tokens))
        asked = state(tokens, features, 0, 20, width=1)
        hidden = ours.denoise(asked)
        assert torch.equal(ours.drafter.norm(hidden), theirs.draft(asked))
        previous = ours.modules.embed(tokens[:, :BLOCK], hidden.dtype)
        assert torch.equal(drafter.correct(previous, hidden), hidden)
        assert torch.equal(
            ours.modules.logits(drafter.norm(drafter.correct(previous, hidden))),
            theirs.modules.logits(theirs.drafter.norm(hidden)),
        )
        ours, theirs = drafter.start(TARGET, 2, 64), plain.start(TARGET, 2, 64)
        chain, wanted = ours.propose(asked), theirs.propose(asked)
        rows, slots = torch.arange(2), torch.zeros(2, dtype=torch.long)
        for depth in range(BLOCK - 1):
            assert torch.equal(chain.tokens[rows, depth, slots, 0], wanted.tokens[:, depth, 0, 0])
            assert_close(chain.log_probs[rows, depth, slots, 0], wanted.log_probs[:, depth, 0, 0])
            slots = chain.next_slot[rows, depth, slots, 0]


def test_the_head_alone_as_a_logits_processor():
    drafter = tiny_treeflash(TARGET)
    _, session, asked = proposed(drafter)
    hidden = fresh_session(drafter, session, 1).denoise(asked)[0, 1:]
    processor = session.bind(hidden)
    depths, parents = len(hidden), 3
    input_ids = torch.randint(0, VOCAB, (depths * parents, 6), generator=torch.Generator().manual_seed(1))
    scores = torch.zeros(depths * parents, VOCAB)
    logits = processor(input_ids, scores)
    assert logits.shape == scores.shape
    for row, sequence in enumerate(input_ids):
        assert_close(logits[row], loop_logits(session, hidden[row // parents], int(sequence[-1])))
    input_ids[:, :-1] = 0
    assert torch.equal(processor(input_ids, scores), logits)
    with pytest.raises(ValueError, match="7 rows are no multiple of the 4 depths"):
        processor(input_ids[:7], scores[:7])


def test_correct_broadcasts_over_parents():
    drafter = tiny_treeflash(TARGET)
    hidden, previous = torch.randn(2, 3, 1, 48), torch.randn(2, 3, 5, 48)
    corrected = drafter.correct(previous, hidden)
    assert corrected.shape == (2, 3, 5, 48)
    for index in ((0, 0, 0), (1, 2, 4), (0, 1, 3)):
        assert_close(corrected[index], dense_correction(drafter, previous[index], hidden[index[0], index[1], 0]))
    corrected.sum().backward()
    assert drafter.ar_approximation.ug.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@torch.no_grad()
def test_candidates_keep_the_order_and_bound_the_normaliser(temperature: float):
    decoding = {"drafter_temperature": temperature}
    drafter = tiny_treeflash(TARGET, head="candidates", head_candidates=12)
    short, session, asked = proposed(drafter, width=12, decoding=decoding)
    whole, _, _ = proposed(tiny_treeflash(TARGET, head="full"), width=VOCAB, decoding=decoding)
    hidden = fresh_session(drafter, session, 1).denoise(asked)[0, 1:]
    base = session.modules.logits(drafter.norm(hidden)) / temperature
    worst = 0.0
    for depth in range(BLOCK - 1):
        listed = base[depth].topk(12).indices
        outside = torch.ones(VOCAB, dtype=torch.bool).index_fill_(0, listed, False)
        parents = base[depth - 1].topk(4).indices.tolist() if depth else [int(asked.anchors[0])]
        for slot, parent in enumerate(parents):
            logits = loop_logits(session, hidden[depth], parent) / temperature
            exact = dict(zip(whole.tokens[0, depth, slot].tolist(), whole.log_probs[0, depth, slot], strict=True))
            assert set(short.tokens[0, depth, slot].tolist()) == set(listed.tolist())
            errors = torch.stack(
                [
                    score - exact[token]
                    for token, score in zip(
                        short.tokens[0, depth, slot].tolist(), short.log_probs[0, depth, slot], strict=True
                    )
                ]
            )
            assert_close(errors, errors[:1].expand(12))
            epsilon = float((logits - base[depth])[outside].abs().max())
            kept = base[depth][outside].logsumexp(-1)
            share = float((kept - torch.logaddexp(kept, logits[~outside].logsumexp(-1))).exp())
            bound = max(math.log1p(share * math.expm1(epsilon)), -math.log1p(share * math.expm1(-epsilon)))
            assert abs(float(errors[0])) <= bound + 1e-4
            worst = max(worst, abs(float(errors[0])))
    assert worst > 1e-2, "the estimate was never off: nothing was tested"


def test_candidates_that_are_the_vocabulary_are_exact():
    short, session, _ = proposed(tiny_treeflash(TARGET, head="candidates", head_candidates=999), width=9)
    assert session.candidates == VOCAB
    whole, _, _ = proposed(tiny_treeflash(TARGET, head="full"), width=9)
    assert torch.equal(short.tokens[:, 1:], whole.tokens[:, 1:])
    assert torch.equal(short.next_slot[:, 1:], whole.next_slot[:, 1:])
    assert_close(short.log_probs, whole.log_probs)


def test_which_head_is_taken(monkeypatch: pytest.MonkeyPatch):
    def candidates(**options: Any) -> int | None:
        return tiny_treeflash(TARGET, **options).start(TARGET, 1, 64).candidates

    assert candidates() is None
    assert candidates(head="candidates", head_candidates=8) == 8
    monkeypatch.setattr("hf_treespec.drafters.treeflash.session._SMALL_VOCABULARY", VOCAB - 1)
    assert candidates(head_candidates=8) == 8
    assert candidates(head="full") is None
    monkeypatch.setattr("hf_treespec.drafters.base.TargetModules.selects", False)
    assert candidates(head="candidates", head_candidates=8) is None


def test_logits_of_chosen_tokens():
    target = tiny_target()
    target.lm_head = torch.nn.Linear(48, VOCAB)
    modules = tiny_drafter(target).start(target, 1, 64).modules
    modules._logits_divisor, modules._softcap = 3.0, 2.0
    hidden, tokens = torch.randn(2, 5, 48), torch.randint(0, VOCAB, (2, 9))
    wanted = modules.logits(hidden).gather(2, tokens[:, None].expand(-1, 5, -1))
    assert modules.selects
    assert_close(modules.logits_of(tokens, hidden), wanted)


@pytest.mark.parametrize("head", ["full", "candidates"])
def test_a_chain_is_gathered_from_the_table(head: str):
    """After a token among the parents its conditional, after another the uncorrected distribution."""
    fallbacks = 0
    for anchor in range(8, 38):
        drafter = tiny_treeflash(TARGET, num_parents=2, head=head, head_candidates=8)
        lattice, session, asked = proposed(drafter, anchor=anchor, width=1)
        assert lattice.tokens.shape == (1, BLOCK - 1, 3, 1)
        hidden = fresh_session(drafter, session, 1).denoise(asked)[0, 1:]
        base = session.modules.logits(drafter.norm(hidden))
        wanted = [loop_logits(session, hidden[0], int(asked.anchors[0]))]
        chosen: list[int] = []
        for depth in range(BLOCK - 1):
            if depth:
                known = chosen[-1] in base[depth - 1].topk(2).indices.tolist()
                wanted.append(loop_logits(session, hidden[depth], chosen[-1]) if known else base[depth])
                fallbacks += not known
            logits = wanted[-1]
            if head == "candidates":
                logits = torch.full_like(logits, -torch.inf).index_copy_(
                    0, base[depth].topk(8).indices, logits[base[depth].topk(8).indices]
                )
            chosen.append(int(logits.argmax()))
        tree = expand(lattice, asked.anchors, BLOCK)
        assert tree.tokens[0, 1:].tolist() == chosen
        assert tree.parents[0].tolist() == [-1, *range(BLOCK - 1)]
    assert fallbacks > 3


def test_dead_ends_may_go_on_at_a_discount():
    ends, _, _ = proposed(tiny_treeflash(TARGET))
    goes_on, session, asked = proposed(tiny_treeflash(TARGET, dead_end_discount=0.25))
    assert goes_on.tokens.shape == (1, BLOCK - 1, 5, 7)
    assert torch.equal(goes_on.tokens[:, :, :4], ends.tokens)
    assert torch.equal(goes_on.log_probs[:, :, :4], ends.log_probs)
    expected = torch.where(ends.next_slot < 0, 4, ends.next_slot)
    expected[:, -1] = -1
    assert torch.equal(goes_on.next_slot[:, :, :4], expected)
    marginal = DFlashSession.propose(fresh_session(session.drafter, session, 1), asked)
    assert torch.equal(goes_on.tokens[:, :, 4], marginal.tokens[:, :, 0])
    assert_close(goes_on.log_probs[:, 1:, 4], marginal.log_probs[:, 1:, 0] + math.log(0.25))
    assert (goes_on.log_probs[:, 0, 4] == -torch.inf).all()
    assert goes_on.next_slot[0, :-1, 4, :4].tolist() == [[0, 1, 2, 3]] * (BLOCK - 2)


@pytest.mark.parametrize("head", ["full", "candidates"])
def test_rows_do_not_know_each_other(head: str):
    drafter = tiny_treeflash(TARGET, head=head, head_candidates=16)
    tokens = tokens_of(3)
    batch = drafter.start(TARGET, 3, 64)
    features = fused_features(batch, TARGET, tokens)
    together = batch.propose(state(tokens, features, 0, 20))
    for row in range(3):
        single = drafter.start(TARGET, 1, 64)
        alone = single.propose(state(tokens[row : row + 1], features[row : row + 1], 0, 20))
        valid = alone.log_probs[0] > -torch.inf
        assert torch.equal(together.tokens[row][valid], alone.tokens[0][valid])
        assert torch.equal(together.next_slot[row][valid], alone.next_slot[0][valid])
        assert_close(together.log_probs[row], alone.log_probs[0])


@pytest.mark.parametrize("head", ["full", "candidates"])
def test_another_dtype_than_the_target(head: str):
    drafter = tiny_treeflash(TARGET, head=head).to(torch.bfloat16)
    lattice, _, _ = proposed(drafter)
    assert lattice.log_probs.dtype == torch.float32
    assert lattice.is_finite()
    assert (lattice.log_probs[:, 1:] > -torch.inf).all()


@pytest.mark.parametrize("depth", range(1, BLOCK))
def test_a_cut_depth_is_the_head_of_the_block(depth: int):
    drafter = tiny_treeflash(TARGET)
    whole, _, _ = proposed(drafter)
    cut, _, _ = proposed(drafter, depth=depth, width=3)
    assert cut.tokens.shape == (1, depth, 4, 3)
    assert torch.equal(cut.tokens[:, 1:], whole.tokens[:, 1:depth, :, :3])
    assert_close(cut.log_probs, whole.log_probs[:, :depth, :, :3])
    assert torch.equal(cut.next_slot[:, : depth - 1, :1], whole.next_slot[:, : depth - 1, :1, :3])
    assert (cut.next_slot[:, -1] == -1).all()


def test_more_parents_than_tokens():
    lattice, _, asked = proposed(tiny_treeflash(TARGET, num_parents=200, head_candidates=200), width=VOCAB)
    assert lattice.tokens.shape == (1, BLOCK - 1, VOCAB, VOCAB)
    assert (lattice.next_slot[:, :-1] >= 0)[lattice.log_probs[:, :-1] > -torch.inf].all(), "nothing is a dead end"
    assert len(expand(lattice, asked.anchors, 32)) == 32


@pytest.mark.parametrize("discount", [None, 0.5])
def test_trees_follow_the_conditionals(discount: float | None):
    """Both forms of the expansion take the same nodes, each with the product of its conditionals."""
    lattice, _, asked = proposed(tiny_treeflash(TARGET, dead_end_discount=discount), rows=2, width=31)
    tree, levels = expand(lattice, asked.anchors, 32), expand_levels(lattice, asked.anchors, 32)
    for name in ("tokens", "parents", "depths", "log_scores"):
        assert torch.equal(getattr(tree, name), getattr(levels, name)), name
    for row in range(2):
        slots, scores = {0: 0}, {0: 0.0}
        for node in range(1, tree.sizes[row]):
            parent, depth = int(tree.parents[row, node]), int(tree.depths[row, node]) - 1
            slot = slots[parent]
            assert slot >= 0, "a dead end has a child"
            rank = lattice.tokens[row, depth, slot].tolist().index(int(tree.tokens[row, node]))
            slots[node] = int(lattice.next_slot[row, depth, slot, rank])
            scores[node] = scores[parent] + float(lattice.log_probs[row, depth, slot, rank])
            assert float(tree.log_scores[row, node]) == pytest.approx(scores[node], abs=1e-5)


def test_layout_of_rows_and_slots():
    anchors, parents = torch.tensor([7, 8]), torch.arange(12).view(2, 2, 3)
    previous, depths = rows_of_parents(anchors, parents)
    assert previous.tolist() == [[7, 0, 1, 2, 3, 4, 5], [8, 6, 7, 8, 9, 10, 11]]
    assert depths.tolist() == [0, 1, 1, 1, 2, 2, 2]
    slots = rows_to_slots(previous, 3)
    assert slots[0].tolist() == [[7, 0, 0], [0, 1, 2], [3, 4, 5]]
    alone, depths = rows_of_parents(anchors, parents[:, :0])
    assert alone.tolist() == [[7], [8]]
    assert depths.tolist() == [0]
    children = torch.tensor([[[[2, 9]], [[5, 3]], [[1, 4]]]])
    assert child_slots(children, parents[:1], -1).tolist() == [[[[2, -1]], [[2, 0]], [[-1, -1]]]]
    assert child_slots(children, parents[:1], 3).tolist() == [[[[2, 3]], [[2, 0]], [[-1, -1]]]]
