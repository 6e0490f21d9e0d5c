"""When a row stops: on the host where the rule allows it, by the user's own criteria per token where it does not."""

from __future__ import annotations

from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StopStringCriteria,
)


class Stopping:
    """The stopping criteria of one call.

    End-of-sequence tokens and the maximum length are read off the tokens on the host; all other criteria are called
    once per token, with the tensors plain `generate` would give them.

    Attributes:
        max_length: Longest sequence, prompt included.
        pads: Whether finished rows go on as padding, as they do exactly when a criterion knows end-of-sequence tokens.
        rows_alone: Whether the criteria may be asked about some rows without the others.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.max_length: int = min(c.max_length for c in criteria if isinstance(c, MaxLengthCriteria))
        self._ends: frozenset[int] = frozenset()
        self._others = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self._ends |= frozenset(criterion.eos_token_id.tolist())
            elif type(criterion) is not MaxLengthCriteria:
                self._others.append(criterion)
        self.rows_alone = all(type(criterion) is StopStringCriteria for criterion in self._others)

    @property
    def reads_tokens(self) -> bool:
        """Whether criteria beyond end-of-sequence and length have to be called for each token."""
        return bool(self._others)

    def stops(self, tokens: list[int], input_ids: torch.Tensor, scores: Any) -> list[bool]:
        """Whether rows stop with their newest token.

        Args:
            tokens: Newest token of each row.
            input_ids: The rows' sequences, newest token included, long `[R, L]`.
            scores: Processed scores so far, as plain `generate` passes them on.
        """
        if input_ids.shape[1] >= self.max_length:
            ended = [True] * len(tokens)
        else:
            ended = [token in self._ends for token in tokens]
        if self._others:
            ended = [a or b for a, b in zip(ended, self._others(input_ids, scores).tolist(), strict=True)]
        return ended
