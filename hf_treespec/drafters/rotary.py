"""The rotary embedding of a drafter's own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding


class DraftRotaryEmbedding(Qwen3RotaryEmbedding):
    """Qwen3's, whose frequencies stay in float32 when the drafter is cast.

    `from_pretrained(..., dtype=...)` leaves them so, while `.to(dtype)`, `.half()` and `.bfloat16()` cast every
    buffer. Frequencies rounded to bfloat16 are off by up to 0.4 %: over a thousand positions that can be a radian or
    more.
    """

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        exact: dict[str, Any] = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, moved in self.named_buffers(recurse=False):
            if moved.dtype != exact[name].dtype:
                self._buffers[name] = exact[name].to(moved.device)
        return self
