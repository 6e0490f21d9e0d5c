"""What a target does round its embedding and its head, and what a drafter that borrows them does; on a few rows.

Families scale embeddings inside their embedding module or behind it, multiply logits, cap them. Measuring says what a
drafter has to be given whatever the family calls it, without a forward of the decoder layers and without a pass over
the vocabulary.
"""

from __future__ import annotations

import copy
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..base import BlockDrafter

_ROWS = 4
#: Logits that the head's stand-in computes, and their size: where soft caps bend.
_LOGITS, _SIZE = 8, 20.0
_ARMED: ContextVar[bool] = ContextVar("hf_treespec_probing", default=False)


class _ReachedError(Exception):
    """The first decoder layer was called; ends the forward there."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


@dataclass(frozen=True)
class EmbeddingPath:
    """A few tokens on their way into a target, each `[T, H]` in float32 on the CPU.

    Attributes:
        rows: Their rows of the embedding's weight.
        given: What a drafter is given.
        seen: What the target's first decoder layer is given.
    """

    rows: torch.Tensor
    given: torch.Tensor
    seen: torch.Tensor


@torch.no_grad()
def embedding_path(drafter: BlockDrafter, target: PreTrainedModel) -> EmbeddingPath | None:
    """Follows a few tokens through the embedding; None where the target cannot be stopped at its first layer."""
    decoder, embedding = target.get_decoder(), target.get_input_embeddings()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return None
    weight = embedding.weight
    if isinstance(weight, DTensor):  # one of several ranks, which has some of the rows
        return None
    count = min(weight.shape[0], target.config.get_text_config().vocab_size)
    tokens = torch.linspace(1, count - 2, _ROWS, dtype=torch.long, device=weight.device)

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _ARMED.get():
            raise _ReachedError(args[0] if args else kwargs["hidden_states"])

    handle = layers[0].register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    token = _ARMED.set(True)
    try:
        decoder(input_ids=tokens[None], use_cache=False)
    except _ReachedError as reached:
        seen = reached.hidden[0]
    except Exception:  # third-party code, called in a way of our own: whatever it says, there is nothing to compare
        return None
    else:
        return None
    finally:
        _ARMED.reset(token)
        handle.remove()
    given = drafter.borrow(target).embed(tokens, weight.dtype if weight.is_floating_point() else seen.dtype)
    return EmbeddingPath(*(rows.float().cpu() for rows in (weight[tokens], given, seen)))


class _StandIn(nn.Module):
    """In place of a target's base model: gives hidden states, and None for whatever else is asked of an output."""

    class Output:
        def __init__(self, hidden: torch.Tensor) -> None:
            self.last_hidden_state = hidden

        def __getitem__(self, index: int) -> torch.Tensor:
            return self.last_hidden_state

        def __getattr__(self, name: str) -> None:
            return None

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> _StandIn.Output:
        return self.Output(self.hidden)


@torch.no_grad()
def logits_behind_head(drafter: BlockDrafter, target: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What the target makes of random hidden states, and what a drafter makes of them, each `[1, T, 8]`.

    Runs the target's own forward with stand-ins for its base model and its head, whose weights are random: it works on
    the meta device, and the target's modules are not touched. None where the target is built in another way.
    """
    decoder, head = target.get_decoder(), target.get_output_embeddings()
    body = next((name for name, child in target.named_children() if decoder in child.modules()), None)
    last = next((name for name, child in target.named_children() if child is head), None)
    if body is None or last is None:
        return None
    generator = torch.Generator().manual_seed(0)
    width = target.config.get_text_config().hidden_size
    hidden = torch.randn(1, _ROWS, width, generator=generator)
    # Without an initialisation of its own, which would draw from the generator that sampling draws from.
    matrix = nn.utils.skip_init(nn.Linear, width, _LOGITS, bias=False)
    matrix.weight.copy_(_SIZE * width**-0.5 * torch.randn(_LOGITS, width, generator=generator))
    view = copy.copy(target)
    view.__dict__["_modules"] = {**target._modules, body: _StandIn(hidden), last: matrix}
    try:
        output = type(target).forward(view, input_ids=torch.zeros(1, _ROWS, dtype=torch.long))
        wanted = output.logits.float()
    except Exception:  # as above
        return None
    given = drafter.borrow(target).scaled(matrix(hidden))
    return (wanted, given) if wanted.shape == given.shape else None


def ratio(left: torch.Tensor, right: torch.Tensor, tolerance: float = 0.02) -> float | None:
    """The constant c with `left = c · right`, to `tolerance` of the largest entry; None where there is none.

    The tolerance is bfloat16's: a factor such as √H is rounded there before it is applied.
    """
    left, right = left.float(), right.float()
    norm = float((right * right).sum())
    if not norm or not bool(left.isfinite().all()):
        return None
    factor = float((left * right).sum()) / norm
    close = bool((left - factor * right).abs().max() <= tolerance * left.abs().max())
    return factor if close else None


def is_one(factor: float) -> bool:
    """Whether a measured factor is 1, to rounding."""
    return abs(factor - 1) < 0.02
