"""From a session's lattice to the tree a round verifies."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from ..configuration import TreeSpecConfig
from ..drafters.base import BlockDrafter, DraftSession, DraftState
from ..trees import DraftLattice, DraftTree, expand
from .clock import StageClock


class TreeCandidateGenerator(CandidateGenerator):
    """Drafts trees for our loop, and the best chain for transformers' own assisted loop.

    Args:
        session: The call's draft session.
        config: Decoding options.
        drafted_depths: Depths one draft covers.
        vocab_size: Tokens a lattice may hold for each parent at most.
        banned: Tokens the caller's processors never let through; they are not drafted.
        clock: Times the stages.
    """

    requires_model_outputs = True
    model_kwargs_overrides: ClassVar[dict[str, Any]] = {"output_hidden_states": True}

    def __init__(
        self,
        session: DraftSession,
        config: TreeSpecConfig,
        drafted_depths: int,
        vocab_size: int,
        banned: torch.Tensor | None = None,
        clock: StageClock | None = None,
    ) -> None:
        self.session = session
        self.config = config
        self.depth = min(drafted_depths, config.depth or drafted_depths)
        self._vocab_size = vocab_size
        self._banned = banned
        self._clock = clock or StageClock(torch.device("cpu"))

    @classmethod
    def for_stock_loop(
        cls, drafter: BlockDrafter, target: PreTrainedModel, max_length: int, config: TreeSpecConfig | None = None
    ) -> TreeCandidateGenerator:
        """A generator for one row of transformers' own assisted loop, where it drafts chains."""
        config = config or drafter.treespec_config or TreeSpecConfig()
        session = drafter.start(target, 1, max_length)
        session.configure(config)
        vocab_size = target.config.get_text_config().vocab_size
        return cls(session, config.with_options(shape="chain"), drafter.drafted_depths, vocab_size)

    def width(self, nodes: int) -> int:
        """Children of one parent that a tree of `nodes` nodes can hold."""
        return 1 if self.config.shape == "chain" else max(1, min(nodes - 1, self._vocab_size))

    def get_tree(self, state: DraftState, nodes: int) -> DraftTree | None:
        """Drafts one block and expands it to the best `nodes` nodes, roots included; None if it is not finite."""
        with self._clock.stage("propose"):
            lattice = self.session.propose(state)
        with self._clock.stage("expand"):
            if lattice.tokens.device.type != "cpu":
                # No host read here: what is not finite is never expanded.
                lattice = DraftLattice(
                    lattice.tokens,
                    lattice.log_probs.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf),
                    lattice.next_slot,
                )
            elif not lattice.is_finite():
                return None
            if self._banned is not None:
                lattice = _without(lattice, self._banned.to(lattice.tokens.device))
            if self.config.shape == "chain":
                lattice = DraftLattice(lattice.tokens[..., :1], lattice.log_probs[..., :1], lattice.next_slot[..., :1])
            return expand(lattice, state.anchors.to(lattice.tokens.device), nodes)

    def get_candidates(
        self,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any],
        model_outputs: Any,
        is_first_iteration: bool,
        n_last_matches: int,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Extends `input_ids` `[1, L]` by the drafter's best chain; the protocol of transformers' assisted loop."""
        budget = self.config.budget
        depth = min(self.depth, budget - 1) if isinstance(budget, int) else self.depth
        if is_first_iteration or depth < 1 or model_outputs is None:
            return input_ids, None
        hidden = model_outputs.hidden_states
        known = sum(self.session.lengths)
        rows = n_last_matches + 1 if known else hidden[0].shape[1]
        features = sum(
            self.session.fuse(index, hidden[layer + 1][:, :rows])
            for index, layer in enumerate(self.session.feature_layers)
        )
        assert isinstance(features, torch.Tensor)
        last = input_ids.shape[1] - 1
        state = DraftState(
            anchors=input_ids[:, -1],
            positions=torch.tensor([last], device=input_ids.device),
            features=features,
            feature_positions=torch.arange(last - rows, last, device=input_ids.device)[None],
            feature_valid=None,
            depth=depth,
            width=1,
        )
        tree = self.get_tree(state, depth + 1)
        if tree is None:
            return input_ids, None
        return torch.cat([input_ids, tree.tokens[:, 1:].to(input_ids.device)], dim=-1), None


def _without(lattice: DraftLattice, banned: torch.Tensor) -> DraftLattice:
    """The lattice with banned tokens moved behind all others, at −inf."""
    log_probs = lattice.log_probs.masked_fill(torch.isin(lattice.tokens, banned), -torch.inf)
    log_probs, order = log_probs.sort(dim=-1, descending=True, stable=True)
    return DraftLattice(lattice.tokens.gather(-1, order), log_probs, lattice.next_slot.gather(-1, order))
