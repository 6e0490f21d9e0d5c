"""The head that makes a block drafter's depths depend on the token before them (TreeFlash, arXiv 2606.03819).

A DFlash depth knows the positions before the block, not which token the depth above it took. The head adds that: from
the embedding of the previous token and the drafter's hidden state it computes a correction of the state. It looks back
one token only, so the corrections of all depths and all candidate parents are one parallel evaluation.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LogitsProcessor

from ..base import TargetModules


class _Widths(Protocol):
    hidden_size: int
    intermediate_size: int
    ar_approximation: str | None


class ARApproximation(nn.Module):
    """`h⁺ = h + d(silu(g) · u)`, where `u, g` are the halves of `ug([norm(e) | final_norm(h)])`.

    Here e is the embedding of the previous token and h the last layer's state before the final norm. `d` starts at
    zero: an untrained head corrects nothing. Tensor names, order of the inputs and of the halves are the published
    ones.

    `ug` is linear in its two inputs, so the half that depends on h is computed once a depth (`project`), and only the
    half that depends on e once a parent.

    The `"linear"` kind has no gate, `h⁺ = h + d(u)`: the paper's ablation.
    """

    def __init__(self, config: _Widths) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.is_gated = config.ar_approximation == "swiglu"
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.ug = nn.Linear(2 * width, 2 * inner if self.is_gated else inner)
        self.d = nn.Linear(inner, width, bias=False)
        nn.init.zeros_(self.d.weight)

    def project(self, normed: torch.Tensor) -> torch.Tensor:
        """What a depth adds to `ug`, bias included, `[..., 2I]`, from its state after the final norm, `[..., H]`."""
        width = self.norm.weight.shape[0]
        return F.linear(normed, self.ug.weight[:, width:], self.ug.bias)

    def forward(self, previous: torch.Tensor, hidden: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        """Corrected hidden states, `[..., H]`, still to pass the final norm; all arguments broadcast.

        Args:
            previous: Embeddings of the previous tokens, `[..., H]`.
            hidden: Last layer's states before the final norm, `[..., H]`.
            projected: `project` of the same states after the final norm, `[..., 2I]`.
        """
        width = self.norm.weight.shape[0]
        mixed = F.linear(self.norm(previous), self.ug.weight[:, :width]) + projected
        if self.is_gated:
            up, gate = mixed.chunk(2, dim=-1)
            mixed = F.silu(gate) * up
        return hidden + self.d(mixed)

    def bind(self, hidden: torch.Tensor, norm: nn.Module, modules: TargetModules) -> ApproximationLogitsProcessor:
        """The head as a logits processor over given states; see `ApproximationLogitsProcessor`.

        Args:
            hidden: Last layer's states of the drafted depths before the final norm, `[D, H]`.
            norm: The drafter's final norm.
            modules: The target's embedding and head.
        """
        return ApproximationLogitsProcessor(self, hidden, norm, modules)


class ApproximationLogitsProcessor(LogitsProcessor):
    """Logits of every depth given the token before it, in the interface of transformers' processors.

    Rows are ordered (depth, parent): with M parents a depth, row `d · M + m` is the m-th of depth d, 0-based. The
    scores that come in are those of the uncorrected states; they are replaced.
    """

    def __init__(
        self, approximation: ARApproximation, hidden: torch.Tensor, norm: nn.Module, modules: TargetModules
    ) -> None:
        self.approximation, self.norm, self.modules = approximation, norm, modules
        self.hidden = hidden
        self.projected = approximation.project(norm(hidden))

    @torch.no_grad()
    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Corrected scores `[D · M, V]`.

        Args:
            input_ids: Tokens before each row's, long `[D · M, L]`; only the last column matters.
            scores: Uncorrected scores, `[D · M, V]`.

        Raises:
            ValueError: The rows are no multiple of the depths bound.
        """
        rows, depths = input_ids.shape[0], self.hidden.shape[0]
        if rows % depths:
            raise ValueError(f"{rows} rows are no multiple of the {depths} depths bound; rows are (depth, parent).")
        previous = self.modules.embed(input_ids[:, -1], self.hidden.dtype).to(self.hidden.device)
        corrected = self.approximation(
            previous.view(depths, rows // depths, -1), self.hidden[:, None], self.projected[:, None]
        )
        logits = self.modules.logits(self.norm(corrected)).flatten(0, 1)
        return logits.to(scores.device, scores.dtype)  # type: ignore[return-value]
