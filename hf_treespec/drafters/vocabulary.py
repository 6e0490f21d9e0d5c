"""What a drafter reads tokens with and ranks them with, where its checkpoint ships its own."""

from __future__ import annotations

import weakref

import torch
from torch import nn
from transformers import PreTrainedModel

from .base import TargetModules, _alive


class DraftVocabulary(TargetModules):
    """A target's input embedding and head, with a drafter's own in their place where it has them.

    What a drafter ships is what it was trained with, so the target's never takes its place (vLLM drafters whose head
    was replaced fell from 25 % to 1.7 % acceptance). The target's multipliers and soft-capping belong to the target's
    modules and go with them; a scale that the drafter's configuration states takes their place in either case.

    A head of a reduced vocabulary has a column for each of `target_ids`: `logits` and their normaliser are over those
    `vocab_size` columns, and `tokens` says which tokens they are.

    Args:
        target: Whose modules stand in for the ones not given.
        embedding: Own embedding of the target's token ids.
        head: Own head.
        target_ids: Token of each column of the head, distinct, long `[draft vocabulary]`; None = column and token are
            the same.
        input_scale: What the embedding's rows are multiplied by, and all that happens to them; None = as the target
            does, or nothing to an own embedding's.
        output_multiplier: What the head's logits are multiplied by; None likewise.
        softcap: Their bound; 0 = none, None likewise.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        embedding: nn.Embedding | None = None,
        head: nn.Linear | None = None,
        target_ids: torch.Tensor | None = None,
        *,
        input_scale: float | None = None,
        output_multiplier: float | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__(target)
        self.target_ids = target_ids
        if embedding is not None:
            self._embedding = weakref.ref(embedding)
            self._embedding_device = embedding.weight.device
            self._embedding_multiplier = 1.0
        if head is not None:
            self._lm_head = weakref.ref(head)
            self._head_device, self._head_dtype = head.weight.device, head.weight.dtype
            self._logits_divisor, self._logits_multiplier, self._softcap = 1.0, 1.0, None
            self.vocab_size = head.out_features
        self._input_scale = input_scale
        if output_multiplier is not None:
            self._logits_divisor, self._logits_multiplier = 1.0, output_multiplier
        if softcap is not None:
            self._softcap = softcap

    def embed(self, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Embeds long `[...]` token ids, cast to `dtype`."""
        if self._input_scale is None:
            return super().embed(token_ids, dtype)
        embedding, token_ids = _alive(self._embedding), token_ids.to(self._embedding_device)
        # The scale is one of the table's rows: whatever a target's own class does to them is left out.
        rows: torch.Tensor
        if isinstance(embedding, nn.Embedding) and type(embedding).forward is not nn.Embedding.forward:
            rows = nn.Embedding.forward(embedding, token_ids)
        else:
            rows = embedding(token_ids)
        return (rows * self._input_scale if self._input_scale != 1.0 else rows).to(dtype)

    def tokens(self, columns: torch.Tensor) -> torch.Tensor:
        """Token ids of columns of `logits`, long `[...]`."""
        return columns if self.target_ids is None else self.target_ids.to(columns.device)[columns]

    def columns(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of `logits` of token ids, long `[...]`, and whether they have one (bool); 0 where not."""
        if self.target_ids is None:
            return super().columns(tokens)
        ids, order = self.target_ids.to(tokens.device).sort()
        places = torch.searchsorted(ids, tokens).clamp_(max=len(ids) - 1)
        known = ids[places] == tokens
        return torch.where(known, order[places], 0), known

    def restrict(self, logits: torch.Tensor) -> torch.Tensor:
        """The target's logits `[..., V]` of the tokens that `logits` has columns of, in their order."""
        return logits if self.target_ids is None else logits[..., self.target_ids.to(logits.device)]

    def spread(self, values: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Values of the columns of `logits` at their tokens, `[..., vocab_size]`; 0 for tokens that have none."""
        if self.target_ids is None:
            return values
        whole = values.new_zeros(*values.shape[:-1], vocab_size)
        whole[..., self.target_ids.to(values.device)] = values
        return whole
