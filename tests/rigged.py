"""Drafters that know the answer: lattices round an oracle continuation, and checks of what the loop tells them.

A `Rig` is the mutable script of a drafter (what to propose, what to check) and its logbook; views made by
`with_options` share it. Sessions hold the loop to its contract: positions are contiguous, every committed position's
feature arrives exactly once before it is needed, anchors are the committed tokens, walks end on verified nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_treespec.drafters.base import BlockDrafter, DraftSession, DraftState
from hf_treespec.trees import DraftLattice, DraftTree

BLOCK = 8

#: Decay of the log-probabilities with the rank: from equal candidates to a lead that underflows in float32.
_DECAYS = (0.0, 0.1, 0.5, 1.0, 3.0, 120.0)
_PEAKED = (0.5, 1.0, 3.0, 120.0)


@dataclass
class Rig:
    """Script and logbook of a rigged drafter.

    Attributes:
        rows: What each row of the call will hold by position, prompt and continuation without padding.
        kind: "perfect" (the right token leads at every depth), "half" (it is among the candidates most of the time, at
            any rank), "wrong" (it is never among them).
        slots: Parent slots M of the lattices.
        seed: Seed of everything random in the proposals.
        strict: Whether anchors must be the oracle's tokens (off where the oracle is not the whole truth).
        gap: Whether a session may start in the middle of a sequence.
        poison: Value written into the log-probabilities (NaN or inf), or None.
        calls: One entry per call of `propose` and `observe`.
        sessions: Every session started.
    """

    rows: list[list[int]] = field(default_factory=list)
    kind: str = "half"
    slots: int = 1
    seed: int = 0
    strict: bool = True
    gap: bool = False
    poison: float | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    sessions: list[RiggedSession] = field(default_factory=list)
    checked: list[PreTrainedModel] = field(default_factory=list)

    @property
    def proposals(self) -> list[dict[str, Any]]:
        return [call for call in self.calls if call["call"] == "propose"]


class RiggedConfig(PreTrainedConfig):
    model_type = "rigged_drafter"

    def __init__(
        self,
        block_size: int = BLOCK,
        mask_token_id: int = 3,
        target_layer_ids: Sequence[int] = (0, 2),
        vocab_size: int = 97,
        hidden_size: int = 64,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.block_size = block_size
        self.mask_token_id = mask_token_id
        self.target_layer_ids = list(target_layer_ids)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size


class RiggedSession(DraftSession):
    """Keeps the raw features of every row, in the order of their positions."""

    def __init__(self, rig: Rig, config: RiggedConfig, batch_size: int, max_length: int) -> None:
        self.rig = rig
        self.config = config
        self.max_length = max_length
        self.feature_layers = tuple(config.target_layer_ids)
        self.generator = torch.Generator().manual_seed(rig.seed)
        self.held: list[list[torch.Tensor]] = [[] for _ in range(batch_size)]
        self.first: list[int | None] = [None] * batch_size
        self.tree: DraftTree | None = None
        self.closed = 0

    # What the loop calls

    def fuse(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """The layers side by side, so that the sum over layers keeps each one's hidden states apart."""
        width = hidden.shape[-1]
        fused = hidden.new_zeros(*hidden.shape[:-1], width * len(self.feature_layers))
        fused[..., index * width : (index + 1) * width] = hidden
        return fused

    def propose(self, state: DraftState) -> DraftLattice:
        self._take("propose", state)
        assert 1 <= state.depth <= self.config.block_size - 1, f"depth {state.depth}"
        assert 1 <= state.width <= self.config.vocab_size, f"width {state.width}"
        lattice = self.lattice(state)
        if self.rig.poison is not None:
            log_probs = lattice.log_probs.clone()
            log_probs[..., 0] = self.rig.poison
            lattice = DraftLattice(lattice.tokens, log_probs, lattice.next_slot)
        return lattice

    def observe(self, state: DraftState) -> None:
        self._take("observe", state)

    def extra_rows(self, tree: DraftTree) -> None:
        self.tree = tree

    @property
    def lengths(self) -> list[int]:
        return [(first or 0) + len(held) for first, held in zip(self.first, self.held, strict=True)]

    def rollback(self, lengths: Sequence[int]) -> None:
        for row, length in enumerate(lengths):
            assert length <= self.lengths[row], f"row {row}: rollback to {length} of {self.lengths[row]}"
            del self.held[row][max(0, length - (self.first[row] or 0)) :]
        self.tree = None

    def close(self) -> None:
        self.closed += 1

    # What the tests read

    def features(self, row: int) -> torch.Tensor:
        """Features of a row in the order of their positions, `[T, H_target · layers]`."""
        return torch.stack(self.held[row])

    # How the loop is held to its contract

    def alive(self, row: int, position: int) -> bool:
        """Whether the oracle says that a row has more to come after its anchor."""
        return not self.rig.rows or position < len(self.rig.rows[row]) - 1

    def _take(self, call: str, state: DraftState) -> None:
        batch_size = len(self.held)
        positions = state.positions.tolist()
        anchors = state.anchors.tolist()
        assert len(anchors) == len(positions) == batch_size, f"{len(anchors)} anchors for {batch_size} rows"
        added = self._append(state)
        for row, (position, anchor) in enumerate(zip(positions, anchors, strict=True)):
            if not self.alive(row, position):
                continue
            have = self.lengths[row]
            assert have == position, f"row {row}: features of {have} positions, the anchor is at {position}"
            if self.rig.strict and self.rig.rows:
                wanted = self.rig.rows[row][position]
                assert anchor == wanted, f"row {row}: anchor {anchor} at {position}, the plain run holds {wanted}"
        self._check_walk(state, positions, added)
        self.tree = None
        self.rig.calls.append(
            {
                "call": call,
                "anchors": anchors,
                "positions": positions,
                "depth": state.depth,
                "width": state.width,
                "added": added,
                "extra_hidden": state.extra_hidden,
            }
        )

    def _append(self, state: DraftState) -> list[int]:
        """Takes the new features in; returns how many each row got."""
        if state.features is None:
            return [0] * len(self.held)
        assert state.feature_positions is not None
        batch_size, count, width = state.features.shape
        assert batch_size == len(self.held)
        assert width == self.config.hidden_size * len(self.feature_layers), f"width {width}"
        assert state.feature_positions.shape == (batch_size, count)
        valid = torch.ones(batch_size, count, dtype=torch.bool) if state.feature_valid is None else state.feature_valid
        added = []
        for row in range(batch_size):
            new = state.features[row][valid[row]]
            assert new.isfinite().all(), f"row {row}: features are not finite"
            places = state.feature_positions[row][valid[row]].tolist()
            if places and self.first[row] is None:
                assert places[0] == 0 or self.rig.gap, f"row {row}: the first feature is of position {places[0]}"
                self.first[row] = places[0]
            have = self.lengths[row]
            assert places == list(range(have, have + len(places))), f"row {row}: {places} after {have} positions"
            self.held[row].extend(new.clone())
            added.append(len(places))
        return added

    def _check_walk(self, state: DraftState, positions: list[int], added: list[int]) -> None:
        """The accepted node must be one of the verified tree, its path as long as what was committed."""
        if self.tree is None or state.accepted is None or not self.rig.rows:
            return
        depths, tokens, parents = self.tree.depths.tolist(), self.tree.tokens.tolist(), self.tree.parents.tolist()
        for row, node in enumerate(state.accepted.tolist()):
            if not self.alive(row, positions[row]) or not self.rig.strict:
                continue
            assert 0 <= node < self.tree.sizes[row], f"row {row}: accepted node {node} of {self.tree.sizes[row]}"
            committed = depths[row][node] + 1
            assert added[row] == committed, f"row {row}: {added[row]} features for {committed} accepted nodes"
            position = positions[row] - 1
            while node >= 0:
                wanted = self.rig.rows[row][position]
                assert tokens[row][node] == wanted, f"row {row}: node {node} holds {tokens[row][node]}, not {wanted}"
                node, position = parents[row][node], position - 1

    # What it proposes

    def right_tokens(self, state: DraftState) -> torch.Tensor:
        """The oracle's token at every depth, long `[B, D]`; −1 where it ends."""
        right = torch.full((len(self.held), state.depth), -1, dtype=torch.long)
        for row, position in enumerate(state.positions.tolist()):
            if self.rig.rows:
                coming = self.rig.rows[row][position + 1 : position + 1 + state.depth]
                right[row, : len(coming)] = torch.tensor(coming, dtype=torch.long)
        return right

    def lattice(self, state: DraftState) -> DraftLattice:
        """A lattice with the oracle's tokens where the script wants them and random tokens elsewhere."""
        right = self.right_tokens(state)
        batch_size, depth = right.shape
        slots, vocabulary = self.rig.slots, self.config.vocab_size
        shape = (batch_size, depth, slots)
        on_path = torch.zeros(shape, dtype=torch.bool)
        path_slot = torch.randint(0, slots, (batch_size, depth), generator=self.generator)
        path_slot[:, 0] = 0
        on_path.scatter_(2, path_slot.unsqueeze(-1), True)

        rank = self._ranks(on_path)
        keys = torch.rand(*shape, vocabulary, dtype=torch.float64, generator=self.generator)
        spot = right.clamp(min=0)[:, :, None, None].expand(*shape, 1)
        others = keys.scatter(3, spot, torch.inf).sort(-1).values
        # The right token goes between the two neighbours of its rank, or behind all of them where it is not proposed.
        above = torch.where(rank > 0, others.gather(3, (rank - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1), -1.0)
        below = others.gather(3, rank.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        keys.scatter_(3, spot, torch.where(rank < 0, 2.0, (above + below) / 2).unsqueeze(-1))
        width = min(state.width, vocabulary)
        tokens = keys.argsort(-1)[..., :width]

        known = (right >= 0)[:, :, None, None]
        is_right = (tokens == right[:, :, None, None]) & known
        decays = torch.tensor(_PEAKED if self.rig.kind == "perfect" else _DECAYS)
        chosen = decays[torch.randint(0, len(decays), shape, generator=self.generator)]
        scores = -chosen.unsqueeze(-1) * torch.arange(width)
        scores = scores.masked_fill(is_right & (rank < 0).unsqueeze(-1), -torch.inf)
        log_probs = scores.log_softmax(-1)
        log_probs[:, 0, 1:] = -torch.inf

        if slots == 1:
            return DraftLattice.marginal(tokens.squeeze(2), log_probs.squeeze(2))
        next_slot = torch.randint(-1, slots, tokens.shape, generator=self.generator)
        dead_ends = 0.0 if self.rig.kind == "perfect" else 0.1
        dead_end = torch.rand(batch_size, depth, generator=self.generator) < dead_ends
        following = torch.where(dead_end, -1, torch.cat([path_slot[:, 1:], path_slot[:, :1]], 1))
        next_slot = torch.where(is_right & on_path.unsqueeze(-1), following[:, :, None, None], next_slot)
        next_slot[:, -1] = -1
        return DraftLattice(tokens, log_probs, next_slot)

    def _ranks(self, on_path: torch.Tensor) -> torch.Tensor:
        """Rank of the right token in each parent's candidates, −1 = not among them, long like `on_path`."""
        if self.rig.kind == "perfect":
            rank = torch.zeros_like(on_path, dtype=torch.long)
        elif self.rig.kind == "wrong":
            rank = torch.full_like(on_path, -1, dtype=torch.long)
        else:
            draw = torch.rand(on_path.shape, generator=self.generator)
            rank = (torch.log(draw.clamp(min=1e-6)) / -1.2).long().clamp(max=9)
            rank[torch.rand(on_path.shape, generator=self.generator) < 0.2] = -1
        # Under a wrong parent the right token is bait: a walk that matches tokens without their parents takes it.
        bait = torch.rand(on_path.shape, generator=self.generator) < 0.5
        return torch.where(on_path, rank, torch.where(bait, 0, -1))


class RiggedDrafter(BlockDrafter):
    config_class = RiggedConfig
    session_class: type[RiggedSession] = RiggedSession

    def __init__(self, config: RiggedConfig) -> None:
        super().__init__(config)
        self.weights = torch.nn.Linear(1, 1)
        self.rig = Rig()
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing to initialise: there is nothing to learn."""

    def check_target(self, target: PreTrainedModel) -> None:
        self.rig.checked.append(target)
        vocabulary = target.config.get_text_config().vocab_size
        if vocabulary != self.config.vocab_size:
            raise ValueError(f"the rigged drafter's vocab_size is {self.config.vocab_size}, the target's {vocabulary}")

    def start(self, target: PreTrainedModel, batch_size: int, max_length: int, **options: Any) -> RiggedSession:
        session = self.session_class(self.rig, self.config, batch_size, max_length)
        self.rig.sessions.append(session)
        return session


def rows_of(sequences: torch.Tensor, inputs: dict[str, torch.Tensor], eos: Sequence[int] = ()) -> list[list[int]]:
    """Sequences `[B, L]` of a plain run as lists by position: left padding and what follows an eos cut off."""
    mask = inputs["attention_mask"]
    repeats = sequences.shape[0] // mask.shape[0]
    rows = []
    for row, sequence in enumerate(sequences.tolist()):
        length = int(mask[row // repeats].sum())
        prompt_end = mask.shape[1]
        continuation = sequence[prompt_end:]
        ends = [index for index, token in enumerate(continuation) if token in eos]
        rows.append(sequence[prompt_end - length : prompt_end] + continuation[: ends[0] + 1 if ends else None])
    return rows


def rigged(
    rows: list[list[int]],
    kind: str = "half",
    *,
    slots: int = 1,
    seed: int = 0,
    block_size: int = BLOCK,
    layers: Sequence[int] = (0, 2),
    session_class: type[RiggedSession] = RiggedSession,
    **fields: Any,
) -> RiggedDrafter:
    """A drafter that proposes round `rows` (see `rows_of`) as `kind` says."""
    drafter = RiggedDrafter(RiggedConfig(block_size=block_size, target_layer_ids=layers, **fields)).eval()
    drafter.session_class = session_class
    drafter.rig = Rig(rows=rows, kind=kind, slots=slots, seed=seed)
    return drafter


def same_script(drafter: RiggedDrafter, **changes: Any) -> Rig:
    """Changes fields of a drafter's script in place; views share it."""
    for name, value in changes.items():
        assert hasattr(drafter.rig, name), name
        setattr(drafter.rig, name, value)
    return drafter.rig
