"""Sampling through a tree draws from the target's own distribution; three wrong walks do not.

The joint distribution of three tokens behind the first is known exactly for a vocabulary of 8, and compared with what
comes out by a chi-square test.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import build
from rigged import RiggedConfig, RiggedDrafter, RiggedSession

import hf_treespec  # noqa: F401
from hf_treespec.decoding.walk import Walk
from hf_treespec.drafters.base import DraftState
from hf_treespec.trees import DraftLattice, DraftTree

VOCAB = 8
TOKENS = 4
PROMPT = torch.tensor([[2, 5, 3]])
ROWS = 512


@functools.cache
def model() -> Any:
    size = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    return build("qwen3", "sdpa", seed=21, vocab_size=VOCAB, num_key_value_heads=1, **size)


@functools.cache
@torch.no_grad()
def joint() -> torch.Tensor:
    """Probability of every continuation, float64 `[V, V, V, V]`."""
    continuations = torch.tensor(list(itertools.product(range(VOCAB), repeat=TOKENS)))
    sequences = torch.cat([PROMPT.expand(len(continuations), -1), continuations], 1)
    log_probs = model()(input_ids=sequences).logits.double().log_softmax(-1)
    first = PROMPT.shape[1] - 1
    chosen = log_probs[:, first:-1].gather(2, continuations.unsqueeze(-1)).squeeze(-1)
    return chosen.sum(-1).exp().view([VOCAB] * TOKENS)


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """p-value of counts against expected counts, cells expecting fewer than 5 taken together."""
    small = expected < 5
    observed = torch.cat([counts[~small].double(), counts[small].double().sum()[None]])
    wanted = torch.cat([expected[~small], expected[small].sum()[None]])
    if wanted[-1] < 5:
        observed[-2], wanted[-2] = observed[-2] + observed[-1], wanted[-2] + wanted[-1]
        observed, wanted = observed[:-1], wanted[:-1]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64), statistic / 2))


def p_value(samples: torch.Tensor) -> float:
    """p-value of the joint distribution of tokens 2 to 4 of sampled continuations `[n, 4]`."""
    code = (samples[:, 1] * VOCAB + samples[:, 2]) * VOCAB + samples[:, 3]
    counts = torch.bincount(code, minlength=VOCAB**3)
    return chi_square(counts, joint().sum(0).flatten() * len(samples))


class FixedSession(RiggedSession):
    """Proposes one lattice whatever came before: per depth the tokens by their exact marginal, at wrong odds.

    The contract is checked elsewhere; hundreds of rows a call are to be fast here.
    """

    def _take(self, call: str, state: DraftState) -> None:
        assert len(state.anchors) == len(self.held)

    def lattice(self, state: DraftState) -> DraftLattice:
        width = min(state.width, VOCAB)
        others = list(range(TOKENS))
        marginals = torch.stack([joint().sum([axis for axis in others if axis != depth]) for depth in others[1:]])
        tokens = marginals.argsort(-1, descending=True)[: state.depth, :width]
        log_probs = (-0.35 * torch.arange(width)).log_softmax(-1).expand(len(tokens), -1)
        batch = len(self.held)
        if self.rig.slots == 1:
            return DraftLattice.marginal(tokens.expand(batch, -1, -1), log_probs.expand(batch, -1, -1))
        # Two parent slots that rank the tokens in opposite orders; a child's rank says which slot follows it.
        tokens = torch.stack([tokens, tokens.flip(-1)], 1)
        log_probs = torch.stack([log_probs, log_probs], 1).clone()
        log_probs[0, 1] = -torch.inf
        next_slot = (torch.arange(width) % 3 - 1).expand(tokens.shape).clone()
        next_slot[-1] = -1
        return DraftLattice(*(part.expand(batch, *part.shape).contiguous() for part in (tokens, log_probs, next_slot)))


def fixed(slots: int = 1) -> RiggedDrafter:
    drafter = RiggedDrafter(RiggedConfig(block_size=4, vocab_size=VOCAB, target_layer_ids=[0])).eval()
    drafter.session_class = FixedSession
    drafter.rig.slots = slots
    return drafter


def draw(samples: int, slots: int = 1, **options: Any) -> tuple[torch.Tensor, float]:
    """At least so many sampled continuations, and the share of walks that left the root."""
    drafter = fixed(slots).with_options(**{"budget": 16, **options})
    taken, first_depth, calls = [], 0.0, -(-samples // ROWS)
    for call in range(calls):
        torch.manual_seed(1000 + call)
        sequences = model().generate(
            PROMPT,
            assistant_model=drafter,
            do_sample=True,
            top_k=0,
            max_new_tokens=TOKENS,
            num_return_sequences=ROWS,
            pad_token_id=0,
        )
        taken.append(sequences[:, PROMPT.shape[1] :])
        first_depth += drafter.last_report.acceptance_by_depth[0] / calls
        drafter.rig.sessions.clear()
        drafter.rig.calls.clear()
    return torch.cat(taken), first_depth


@pytest.mark.parametrize(("slots", "options"), [(1, {}), (2, {"budget": 12}), (1, {"shape": "chain", "budget": 4})])
def test_sampled_trees_draw_from_the_target(slots: int, options: dict[str, Any]) -> None:
    samples, first_depth = draw(20_480, slots, **options)
    if options.get("shape") != "chain":
        assert first_depth >= 0.5, "the tree should hold at least half of the mass"
    assert p_value(samples) > 1e-3


# Wrong walks


def best_child(self: Walk, tree: DraftTree, node: int, row: int, probabilities: torch.Tensor) -> int | None:
    """The likeliest drafted child is taken, always."""
    children = [child for child in range(1, tree.sizes[row]) if int(tree.parents[row, child]) == node]
    return int(tree.tokens[row, children[0]]) if children else None


def no_renormalisation(self: Walk, tree: DraftTree, node: int, row: int, probabilities: torch.Tensor) -> int | None:
    """Children are accepted one after another with their full probability, and rejected ones may be drawn again."""
    for child in range(1, tree.sizes[row]):
        token = int(tree.tokens[row, child])
        if int(tree.parents[row, child]) == node and float(torch.rand(())) < float(probabilities[token]):
            return token
    return None


Choice = Callable[[Walk, DraftTree, int, int, torch.Tensor], "int | None"]


def walk_wrongly(monkeypatch: pytest.MonkeyPatch, choose: Choice) -> None:
    """Lets `choose` overrule the library's pick wherever it names a token."""
    call, pick = Walk.__call__, Walk._pick

    def remember(self: Any, tree: DraftTree, *args: Any, **kwargs: Any) -> Any:
        self.tree = tree
        return call(self, tree, *args, **kwargs)

    def overrule(self: Any, logits: torch.Tensor, nodes: dict[int, int], members: list[int]) -> list[int]:
        picked = pick(self, logits, nodes, members)
        if not hasattr(self, "tree"):
            return picked
        for index, row in enumerate(members):
            if nodes[row] < self.tree.sizes[row]:
                token = choose(self, self.tree, nodes[row], row, logits[row, nodes[row]].softmax(-1))
                picked[index] = picked[index] if token is None else token
        return picked

    monkeypatch.setattr(Walk, "__call__", remember)
    monkeypatch.setattr(Walk, "_pick", overrule)


@pytest.mark.parametrize("choose", [best_child, no_renormalisation])
def test_wrong_picks_are_noticed(monkeypatch: pytest.MonkeyPatch, choose: Choice) -> None:
    walk_wrongly(monkeypatch, choose)
    samples, _ = draw(4_096)
    assert p_value(samples) < 1e-6


class _AnyParent(dict[tuple[int, int], int]):
    """Looks a child up by depth and token alone, whichever parent it hangs from (as long as the path ascends)."""

    def __init__(self, tree: DraftTree, row: int) -> None:
        super().__init__()
        self.depths = tree.depths[row].tolist()
        size = tree.sizes[row]
        tokens = tree.tokens[row].tolist()
        self.holders: dict[tuple[int, int], list[int]] = {}
        for node in range(1, size):
            self.holders.setdefault((self.depths[node], tokens[node]), []).append(node)

    def get(self, key: Any, default: Any = None) -> Any:
        holders = self.holders.get((self.depths[key[0]] + 1, key[1]), [])
        return next((node for node in holders if node > key[0]), default)


def test_a_sibling_of_another_parent_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftTree, "children", lambda self: [_AnyParent(self, row) for row in range(self.batch_size)])
    samples, _ = draw(8_192)
    assert p_value(samples) < 1e-6


def test_the_test_itself() -> None:
    """Exact draws pass; draws from a distribution a little off do not."""
    generator = torch.Generator().manual_seed(0)
    flat = joint().flatten()

    def samples(probabilities: torch.Tensor) -> torch.Tensor:
        codes = torch.multinomial(probabilities, 20_480, replacement=True, generator=generator)
        return torch.stack([codes // VOCAB ** (TOKENS - 1 - place) % VOCAB for place in range(TOKENS)], 1)

    assert abs(float(flat.sum()) - 1) < 1e-6
    assert p_value(samples(flat)) > 1e-3
    assert p_value(samples(flat**1.2)) < 1e-6
