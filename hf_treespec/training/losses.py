"""Losses over a borrowed, frozen head, in chunks: no float32 `[tokens, vocabulary]` is ever held for all tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

_CHUNK_ELEMENTS = 1 << 22

#: Loss of each row from its student logits `[rows, V]` and the row numbers of the chunk.
RowLoss = Callable[[torch.Tensor, slice], torch.Tensor]


def rows_at_once(vocab_size: int) -> int:
    """Rows whose float32 logits are held at a time."""
    return max(1, _CHUNK_ELEMENTS // vocab_size)


class _ChunkedLoss(torch.autograd.Function):
    """Sums weighted row losses and keeps only their gradient to the hidden states."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        row_loss: RowLoss,
        chunk: int,
    ) -> torch.Tensor:
        gradient = torch.empty_like(hidden)
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            with torch.enable_grad():
                leaf = hidden[rows].detach().requires_grad_()
                loss = (row_loss(head(leaf), rows) * weights[rows]).sum()
                (gradient[rows],) = torch.autograd.grad(loss, leaf)
            total += loss.detach()
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0].to(gradient.dtype), None, None, None, None


def distillation_loss(
    hidden: torch.Tensor,
    teacher_hidden: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    teacher_head: Callable[[torch.Tensor], torch.Tensor],
    *,
    kind: str,
    temperature: float,
    vocab_size: int,
) -> torch.Tensor:
    """Weighted mean loss of drafted rows, with a gradient to their states.

    Args:
        hidden: The drafter's final hidden states, `[rows, H]`.
        teacher_hidden: The target's final hidden states at the position before each drafted one, `[rows, H]`.
        labels: Columns of the tokens that stand at the drafted positions, long `[rows]`.
        weights: Weight of each row, float32 `[rows]`.
        head: The drafter's head, from hidden states to float32 logits `[rows, vocab_size]`.
        teacher_head: The target's head, to the logits of the same columns: over a reduced vocabulary the target's
            distribution is the one over its tokens.
        kind: `"kl"`: cross-entropy to the target's own distribution, which is the expectation of `"ce"` over the next
            token and has the gradient of the KL divergence; `"ce"`: to the tokens themselves, as in the paper.
        temperature: Temperature of the target's distribution for `"kl"`.

    Raises:
        ValueError: `kind` is neither.
    """
    row_loss = _row_loss(teacher_hidden, labels, teacher_head, kind, temperature)
    return _ChunkedLoss.apply(hidden, weights, head, row_loss, rows_at_once(vocab_size)) / weights.sum()


def calibration_loss(
    hidden: torch.Tensor,
    bias: Callable[[slice], torch.Tensor],
    teacher_hidden: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    *,
    kind: str,
    temperature: float,
    vocab_size: int,
) -> torch.Tensor:
    """`distillation_loss` of the target's logits with a bias, with a gradient to the parameters of the bias.

    Args:
        hidden: The drafter's final hidden states, `[rows, H]`.
        bias: Bias `[rows, V]` of a chunk's rows; computed again for the gradient.
    """
    row_loss = _row_loss(teacher_hidden, labels, head, kind, temperature)

    def chunk_loss(rows: slice) -> torch.Tensor:
        return (row_loss(head(hidden[rows]) + bias(rows), rows) * weights[rows]).sum()

    chunk, total = rows_at_once(vocab_size), weights.new_zeros(())
    for start in range(0, len(hidden), chunk):
        total = total + checkpoint(chunk_loss, slice(start, start + chunk), use_reentrant=False)
    return total / weights.sum()


def _row_loss(
    teacher_hidden: torch.Tensor,
    labels: torch.Tensor,
    teacher_head: Callable[[torch.Tensor], torch.Tensor],
    kind: str,
    temperature: float,
) -> RowLoss:
    if kind not in ("kl", "ce"):
        raise ValueError(f'loss is {kind!r}; it must be "kl" or "ce".')

    def row_loss(logits: torch.Tensor, rows: slice) -> torch.Tensor:
        if kind == "ce":
            return F.cross_entropy(logits, labels[rows], reduction="none")
        with torch.no_grad():
            wanted = (teacher_head(teacher_hidden[rows]) / temperature).softmax(-1)
        # Σ p (lse − logit) = lse − p · logit, as p sums to one.
        return logits.logsumexp(-1) - (wanted * logits).sum(-1)

    return row_loss
