"""What a DFlash 2 drafter proposes: every depth's candidates, scored after each candidate of the depth above."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from ...trees import DraftLattice
from ..base import DraftState
from ..dflash import DFlashSession

if TYPE_CHECKING:
    from .modeling_dflash2 import DFlash2Drafter


class DFlash2Session(DFlashSession):
    """DFlash's draft context, and the selector over the candidates of each depth.

    The candidates of a depth are the tokens its own logits rank first. They are the parents of the next depth and,
    with the same numbers, the children of all parents above, so that nothing is a dead end. A score is the candidate's
    logit plus the selector's part for the pair. As the method defines it, a parent's distribution is the softmax of
    its scores over the candidates alone: probabilities are those given that the token is among the candidates.
    """

    drafter: DFlash2Drafter

    def __init__(self, drafter: DFlash2Drafter, target: PreTrainedModel, batch_size: int, max_length: int) -> None:
        super().__init__(drafter, target, batch_size, max_length)
        #: Candidates of a depth.
        self.candidates = min(drafter.config.selector_top_k, self.modules.vocab_size)

    @torch.no_grad()
    def propose(self, state: DraftState) -> DraftLattice:
        states = self.drafted(self.draft(state), state.depth)
        unary, candidates = self.modules.logits(states).topk(self.candidates)
        # Before depth 1 stands the anchor; of its slots only the first counts.
        anchors = state.anchors.to(candidates.device)[:, None, None].expand(-1, 1, self.candidates)
        previous = torch.cat([anchors, candidates[:, :-1]], dim=1).to(states.device)
        pairs = self.drafter.candidate_selector(states, previous, candidates.to(states.device))
        scores = unary.unsqueeze(2) + pairs.to(unary.device)
        log_probs, ranks = (scores / self.temperature).log_softmax(-1).topk(min(state.width, self.candidates))
        log_probs[:, 0, 1:] = -torch.inf
        tokens = candidates.unsqueeze(2).expand(-1, -1, self.candidates, -1).gather(3, ranks)
        next_slot = ranks.clone()
        next_slot[:, -1] = -1
        return DraftLattice(tokens, log_probs, next_slot)
