"""Two ways to score corrected states: over the whole vocabulary, or over a shortlist of each depth.

Both take states after the final norm, `[B, D, M, H]`, and return the K best tokens and their log-probabilities,
`[B, D, M, K]`, descending in K. Neither decides what is accepted: an estimated score can only choose a worse tree.
"""

from __future__ import annotations

import torch

from ..base import TargetModules


def tempered(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits at a temperature; no copy at 1."""
    return logits if temperature == 1.0 else logits / temperature


def score_vocabulary(
    states: torch.Tensor, modules: TargetModules, temperature: float, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of all tokens, with the exact normaliser. `states` may have any leading dimensions."""
    logits = tempered(modules.logits(states), temperature)
    best, tokens = logits.topk(width)
    return tokens, best - logits.logsumexp(-1, keepdim=True)


def score_candidates(
    states: torch.Tensor,
    shortlist: torch.Tensor,
    base: torch.Tensor,
    modules: TargetModules,
    temperature: float,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of a depth's shortlist, without a whole row of logits for every parent.

    Tokens outside the shortlist are taken to keep their uncorrected logits. The normaliser is then
    `log(Σ_in exp(corrected) + Σ_out exp(base))`. If corrected and base logits of the tokens outside differ by at most
    ε, and these hold a share q of the estimated mass, then every log-probability of a parent is off by one and the
    same amount, at most `max(log(1 + q(e^ε − 1)), −log(1 − q(1 − e^−ε)))`: the order of siblings is exact.

    Args:
        states: Corrected states after the final norm, `[B, D, M, H]`.
        shortlist: Candidates of each depth, long `[B, D, C]`.
        base: Uncorrected logits at the temperature, `[B, D, V]`.
        modules: The target's head.
        temperature: Temperature of the distributions.
        width: Tokens K to return, at most C.
    """
    logits = tempered(modules.logits_of(shortlist, states), temperature)
    whole = base.logsumexp(-1)
    inside = torch.minimum(base.gather(2, shortlist).logsumexp(-1), whole)
    # Cancellation loses only what is within rounding of the whole.
    outside = whole + torch.log1p(-(inside - whole).exp())
    normaliser = torch.logaddexp(logits.logsumexp(-1), outside.unsqueeze(2)).unsqueeze(-1)
    best, places = logits.topk(width)
    tokens = shortlist.unsqueeze(2).expand(-1, -1, states.shape[2], -1).gather(3, places)
    return tokens, best - normaliser
