"""Chains drafted through our rounds against transformers' own DFlash loop: the same drafts, round by round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from dflash_models import tiny_drafter, tiny_target
from transformers import PreTrainedModel
from transformers.generation import candidate_generator

import hf_treespec  # noqa: F401  (teaches generate() about drafters)
from hf_treespec.drafters import DraftState, TargetModules
from hf_treespec.drafters.dflash import DFlashSession

if not hasattr(candidate_generator, "DFlashTokenCandidateGenerator"):
    pytest.skip("this transformers has no DFlash loop", allow_module_level=True)

#: Small, so that random drafts are often right: acceptance lengths vary without anything rigged.
VOCAB = 4
NEW_TOKENS = 40


@dataclass
class Draft:
    """One draft of a run: the position of its anchor, its tokens and the logits they come from, `[D, V]`."""

    anchor: int
    tokens: list[int]
    logits: torch.Tensor


@dataclass
class Traced:
    """One call of `generate`: the sequence it returned, its drafts, the forwards it took of the target."""

    sequence: list[int]
    drafts: list[Draft]
    forwards: int

    @property
    def acceptance_lengths(self) -> list[int]:
        return [after.anchor - before.anchor for before, after in pairwise(self.drafts)]


@dataclass
class Pair:
    """A target, what transformers' loop drafts with and our drafter of the same weights."""

    target: PreTrainedModel
    stock: PreTrainedModel
    ours: Any


def dflash(**overrides: Any) -> Pair:
    """The stock loop drives our own model, through its `forward`."""
    target = tiny_target(vocab_size=VOCAB)
    drafter = tiny_drafter(target, mask_token_id=VOCAB - 1, **overrides)
    return Pair(target, drafter, drafter)


def muse(**overrides: Any) -> Pair:
    from muse_models import muse_of, tiny_assistant, tiny_muse_target

    target = tiny_muse_target(VOCAB)
    assistant = tiny_assistant(target, **overrides)
    return Pair(target, assistant, muse_of(assistant))


def muse_in_both() -> Pair:
    pair = muse()
    return Pair(pair.target, pair.ours, pair.ours)


WINDOWED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
PAIRS: dict[str, Callable[[], Pair]] = {
    "dflash": dflash,
    "dflash causal": lambda: dflash(is_causal=True),
    "dflash half causal": lambda: dflash(is_causal=[True, False]),
    "dflash sliding": lambda: dflash(**WINDOWED),
    "dflash sliding causal": lambda: dflash(**WINDOWED, is_causal=[False, True]),
    "muse": muse,
    "muse half sliding": lambda: muse(**WINDOWED),
    "muse full": lambda: muse(layer_types=["full_attention"] * 2),
    "muse in both": muse_in_both,
}


def generate(target: PreTrainedModel, drafts: list[Draft], **options: Any) -> Traced:
    prompt = torch.randint(0, VOCAB, (1, 13), generator=torch.Generator().manual_seed(4))
    forwards = []
    handle = target.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        # Without the mask, tokens that happen to be the padding's would count as padding.
        mask = torch.ones_like(prompt)
        sequence = target.generate(prompt, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, **options)
    finally:
        handle.remove()
    return Traced(sequence[0].tolist(), drafts, len(forwards))


def run_stock(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Traced:
    drafts: list[Draft] = []

    class Recorder(candidate_generator.DFlashTokenCandidateGenerator):
        def get_candidates(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            candidates, logits = super().get_candidates(input_ids, *args, **kwargs)
            if logits is not None:
                anchor = input_ids.shape[1] - 1
                drafts.append(Draft(anchor, candidates[0, anchor + 1 :].tolist(), logits[0].clone()))
            return candidates, logits

    monkeypatch.setattr("transformers.generation.utils.DFlashTokenCandidateGenerator", Recorder)
    return generate(pair.target, drafts, assistant_model=pair.stock, speculation_type="dflash")


def run_ours(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Traced:
    drafts: list[Draft] = []
    logits_of, propose = TargetModules.logits, DFlashSession.propose
    seen: list[torch.Tensor] = []

    def note_logits(modules: TargetModules, hidden: torch.Tensor) -> torch.Tensor:
        seen.append(logits_of(modules, hidden))
        return seen[-1]

    def note_draft(session: DFlashSession, state: DraftState) -> Any:
        lattice = propose(session, state)
        drafts.append(Draft(int(state.positions), lattice.tokens[0, :, 0, 0].tolist(), seen[-1][0]))
        return lattice

    monkeypatch.setattr(TargetModules, "logits", note_logits)
    monkeypatch.setattr(DFlashSession, "propose", note_draft)
    view = pair.ours.with_options(shape="chain", budget=pair.ours.config.block_size)
    return generate(pair.target, drafts, assistant_model=view)


def as_the_target(pair: Pair, logits: torch.Tensor) -> torch.Tensor:
    """What the target does with its head's output and transformers' loop leaves out for a draft."""
    text = pair.target.config.get_text_config()
    logits = logits * getattr(text, "output_multiplier", 1.0)
    cap = getattr(text, "final_logit_softcapping", None)
    return cap * torch.tanh(logits / cap) if cap else logits


@pytest.mark.parametrize("name", PAIRS)
def test_a_chain_is_the_stock_loop(name: str, monkeypatch: pytest.MonkeyPatch):
    """The same tokens, acceptance lengths and forwards, from equal draft logits in every round."""
    pair = PAIRS[name]()
    plain = generate(pair.target, [])
    stock, ours = run_stock(pair, monkeypatch), run_ours(pair, monkeypatch)
    assert stock.sequence == ours.sequence == plain.sequence
    assert len(set(ours.acceptance_lengths)) > 2
    assert stock.acceptance_lengths == ours.acceptance_lengths
    assert stock.forwards == ours.forwards < plain.forwards
    for theirs, draft in zip(stock.drafts, ours.drafts, strict=True):
        depth = len(draft.tokens)
        assert theirs.anchor == draft.anchor
        assert theirs.tokens[:depth] == draft.tokens
        torch.testing.assert_close(draft.logits, as_the_target(pair, theirs.logits)[:depth], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["dflash", "muse"])
def test_the_comparison_sees_a_feature_layer_off_by_one(name: str, monkeypatch: pytest.MonkeyPatch):
    pair = PAIRS[name]()
    stock = run_stock(pair, monkeypatch)
    pair.ours.config.target_layer_ids = [2, 4]
    ours = run_ours(pair, monkeypatch)
    assert stock.sequence == ours.sequence
    assert stock.acceptance_lengths != ours.acceptance_lengths
    first = as_the_target(pair, stock.drafts[0].logits)
    assert (ours.drafts[0].logits - first).abs().max() > 0.01
