"""The target's embedding and head with the scales that a drafter's configuration states."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from ..base import TargetModules, _alive
from .configuration_dflash2 import DFlash2Config


class ScaledTargetModules(TargetModules):
    """The target's embedding and head as a DFlash 2 drafter was trained on them.

    A scale that its configuration states takes the place of whatever the target does there; see `DFlash2Config`.
    """

    def __init__(self, target: PreTrainedModel, config: DFlash2Config) -> None:
        super().__init__(target)
        self._input_scale, self._output_multiplier = config.input_embedding_scale, config.output_multiplier
        if config.final_logit_softcapping is not None:
            self._softcap = config.final_logit_softcapping

    def embed(self, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
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

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        if self._output_multiplier is None:
            return super().scaled(logits)
        logits = logits * self._output_multiplier
        return torch.tanh(logits / self._softcap) * self._softcap if self._softcap else logits
