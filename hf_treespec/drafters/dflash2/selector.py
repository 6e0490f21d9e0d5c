"""The selector that scores how well a candidate follows the one before it (DFlash 2).

Sources: PyPI `dflash` 0.1.0 (MIT), which the golden outputs of the tests were made with; the DFlash 2 page of
vllm-project/speculators for the initialisation.
"""

from __future__ import annotations

import torch
from torch import nn

from .configuration_dflash2 import DFlash2Config


class CandidateSelector(nn.Module):
    """Adds `⟨A[a] · W h, B[b]⟩` to the logit of candidate b after token a, of rank r.

    A and B are the codebooks of predecessors and successors, a row for each token, h the drafter's final state of the
    depth that b stands at, W the `hidden_projection` to the r factors. What the drafter itself puts into b's logit is
    the unary part of the score; candidates are the tokens where that is largest, whatever stands before them.

    The successors of a fresh module are zero: it adds nothing.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size is None; the selector's codebooks have a row for each token of the target.")
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, states: torch.Tensor, previous: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """What is added to the logits of every pair, float32 `[B, D, M, K]`.

        Args:
            states: Final states of the depths, `[B, D, H]`.
            previous: Tokens that may stand before each depth, long `[B, D, M]`.
            candidates: Candidates of each depth, long `[B, D, K]`.
        """
        gate = self.hidden_projection(states).float().unsqueeze(2)
        return (self.predecessor_codebook[previous] * gate) @ self.successor_codebook[candidates].float().mT
