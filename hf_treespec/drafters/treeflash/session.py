"""What a TreeFlash drafter proposes: every depth's distribution given each likely token before it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from ...trees import DraftLattice
from ..base import DraftState
from ..dflash import DFlashSession
from .approximation import ApproximationLogitsProcessor, ARApproximation
from .scoring import score_candidates, score_vocabulary, tempered
from .slots import child_slots, rows_of_parents, rows_to_slots

if TYPE_CHECKING:
    from .modeling_treeflash import TreeFlashDrafter

#: Largest vocabulary whose logits `head="auto"` computes for every parent.
_SMALL_VOCABULARY = 512


class TreeFlashSession(DFlashSession):
    """DFlash's draft context, and two stages over the states it denoises.

    The uncorrected distributions name M parents for the depth below each, then one parallel evaluation of the head
    scores the children of all of them. A chain is a walk through the same table.
    """

    drafter: TreeFlashDrafter

    def __init__(self, drafter: TreeFlashDrafter, target: PreTrainedModel, batch_size: int, max_length: int) -> None:
        super().__init__(drafter, target, batch_size, max_length)
        config, vocabulary = drafter.config, self.modules.vocab_size
        head = drafter.ar_approximation
        assert head is not None
        self.approximation: ARApproximation = head
        #: Parents of every depth but the first.
        self.parents = min(config.parents_on(head.d.weight.device), vocabulary)
        #: Tokens scored at every depth; None = the whole vocabulary.
        self.candidates: int | None = None
        short = config.head == "candidates" or (config.head == "auto" and vocabulary > _SMALL_VOCABULARY)
        if short and self.modules.selects:
            self.candidates = min(config.head_candidates, vocabulary)

    def bind(self, hidden: torch.Tensor) -> ApproximationLogitsProcessor:
        """The head as a logits processor over states `[D, H]` before the final norm (`denoise`)."""
        return self.approximation.bind(hidden, self.drafter.norm, self.modules)

    @torch.no_grad()
    def propose(self, state: DraftState) -> DraftLattice:
        hidden = self.drafted(self.denoise(state), state.depth)
        normed = self.drafter.norm(hidden)
        base = tempered(self.modules.logits(normed), self.temperature)
        width = min(state.width, self.candidates or base.shape[-1])
        # A chain is the best child of the best child: with none beside it, a dead end would leave the block empty.
        discount = self.drafter.config.dead_end_discount or (1.0 if state.width == 1 else None)

        shortlist = base.topk(self.candidates or max(self.parents, width if discount else 1))
        parents = shortlist.indices[:, :-1, : self.parents]
        # Parents and children are columns of the head until the end; the drafter looks back at tokens.
        previous, depths = rows_of_parents(state.anchors.to(base.device), self.modules.tokens(parents))
        depths = depths.to(hidden.device)
        corrected = self.approximation(
            self.modules.embed(previous, hidden.dtype).to(hidden.device),
            hidden[:, depths],
            self.approximation.project(normed)[:, depths],
        )
        tokens, log_probs = self._score(self.drafter.norm(corrected), shortlist.indices, base, width)
        if discount:
            marginal = shortlist.values[..., :width] - base.logsumexp(-1, keepdim=True) + math.log(discount)
            tokens = torch.cat([tokens, shortlist.indices[:, :, None, :width]], dim=2)
            log_probs = torch.cat([log_probs, marginal[:, :, None]], dim=2)
        log_probs[:, 0, 1:] = -torch.inf
        slots = child_slots(tokens, parents, self.parents if discount else -1)
        return DraftLattice(self.modules.tokens(tokens), log_probs, slots)

    def _score(
        self, rows: torch.Tensor, shortlist: torch.Tensor, base: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and log-probabilities `[B, D, M, K]` of rows `[B, R, H]`."""
        if self.candidates is not None:
            states = rows_to_slots(rows, self.parents)
            return score_candidates(states, shortlist, base, self.modules, self.temperature, width)
        tokens, log_probs = score_vocabulary(rows, self.modules, self.temperature, width)
        return rows_to_slots(tokens, self.parents), rows_to_slots(log_probs, self.parents)
