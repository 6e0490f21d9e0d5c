"""The head that makes a slot's distribution depend on the token before it (TreeFlash, arXiv 2606.03819, section 3).

With e the target's embedding of the previous token and h the slot's last hidden state,

    u, g = W · [RMSNorm(e) ; norm(h)] + b,    h⁺ = h + V · (silu(g) ⊙ u),

and the head of h⁺ gives the conditional distribution. V starts at zero: an untrained head changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LogitsProcessor

_EPS = 1e-6


class ARApproximation(nn.Module):
    """The head. Parameter names are the published ones.

    Args:
        hidden_size: H.
        intermediate_size: I.
        is_gated: Whether u is gated by silu(g), as published; without it the head is linear.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, is_gated: bool = True) -> None:
        super().__init__()
        self.is_gated = is_gated
        self.norm = nn.RMSNorm(hidden_size, eps=_EPS)
        self.ug = nn.Linear(2 * hidden_size, (2 if is_gated else 1) * intermediate_size)
        self.d = nn.Linear(intermediate_size, hidden_size, bias=False)

    def of_slots(self, normed: torch.Tensor) -> torch.Tensor:
        """The slots' part of u and g, `[..., 2·I]`, from hidden states under the last norm, `[..., H]`.

        W · [e ; h] is a sum of two products: that of the slot serves all of its previous tokens.
        """
        return F.linear(normed, self.ug.weight[:, normed.shape[-1] :], self.ug.bias)

    def forward(self, previous: torch.Tensor, hidden: torch.Tensor, of_slots: torch.Tensor) -> torch.Tensor:
        """Corrected hidden states h⁺ `[..., H]`, not yet normed.

        Args:
            previous: Embeddings of previous tokens, `[..., H]`.
            hidden: The slots' last hidden states before the norm, `[..., H]`.
            of_slots: Their part of u and g, `[..., 2·I]`.
        """
        mixed = F.linear(self.norm(previous), self.ug.weight[:, : previous.shape[-1]]) + of_slots
        if self.is_gated:
            up, gate = mixed.chunk(2, -1)
            mixed = F.silu(gate) * up
        return hidden + self.d(mixed)

    def bind(
        self,
        hidden: torch.Tensor,
        norm: nn.Module,
        embed: Callable[[torch.Tensor], torch.Tensor],
        head: Callable[[torch.Tensor], torch.Tensor],
    ) -> LogitsProcessor:
        """A logits processor that replaces the slots' logits by those given the previous token.

        Args:
            hidden: The slots' last hidden states before the norm, `[R, H]`: a row for every depth and parent, ordered
                so.
            norm: The drafter's last norm.
            embed: The target's embedding: long `[R]` to `[R, H]`.
            head: The target's head: `[R, H]` to logits `[R, V]`.

        Returns:
            A processor of `input_ids` `[R, T]`, whose last column is the previous token, and `scores` `[R, V]`.
        """
        return _BoundApproximation(self, hidden, norm, embed, head)


class _BoundApproximation(LogitsProcessor):
    def __init__(
        self,
        approximation: ARApproximation,
        hidden: torch.Tensor,
        norm: nn.Module,
        embed: Callable[[torch.Tensor], torch.Tensor],
        head: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.approximation, self.hidden, self.norm, self.embed, self.head = approximation, hidden, norm, embed, head

    @torch.no_grad()
    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if len(input_ids) != len(self.hidden):
            raise ValueError(
                f"the approximation is bound to {len(self.hidden)} rows of hidden states and was called with "
                f"{len(input_ids)} rows of input_ids; bind the states of these rows."
            )
        previous = self.embed(input_ids[:, -1])
        corrected = self.approximation(previous, self.hidden, self.approximation.of_slots(self.norm(self.hidden)))
        return cast(torch.FloatTensor, self.head(self.norm(corrected)).to(scores))
