"""Records the target's features: the outputs of the decoder layers a drafter reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..drafters.base import DraftSession
from ..transfer import to_device
from .support import decoder_layers

_RECORDING: ContextVar[FeatureRecorder | None] = ContextVar("treespec_recording", default=None)


class FeatureRecorder:
    """Listens to the feature layers during our own forwards, and only then.

    The hooks belong to one `generate` call; a context variable arms them, so a forward of the same target from another
    thread, or from inside a logits processor, passes unrecorded.
    """

    def __init__(self, target: PreTrainedModel, session: DraftSession) -> None:
        layers = decoder_layers(target)
        self._session = session
        self._last: torch.Tensor | None = None
        self._summed: set[int] = set()
        self._raw: dict[int, torch.Tensor] = {}
        self._fused: list[torch.Tensor] | None = None
        self._handles = [
            layers[layer].register_forward_hook(self._hook(index))
            for index, layer in enumerate(session.feature_layers)
        ]
        self._handles.append(layers[-1].register_forward_hook(self._keep_last))

    def _hook(self, index: int) -> Any:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            if _RECORDING.get() is not self:
                return
            hidden = output[0] if isinstance(output, tuple) else output
            if self._fused is None:
                self._raw[index] = hidden
            else:
                self._fuse(index, hidden)

        return record

    def _keep_last(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if _RECORDING.get() is self and self._fused is None:
            self._last = output[0] if isinstance(output, tuple) else output

    @property
    def riding_rows(self) -> int:
        """Rows of each sequence that the session brings into the coming forward's deeper layers by itself."""
        return self._session.riding_rows

    def last_hidden(self, first: int) -> torch.Tensor | None:
        """Last decoder layer's output for the rows from `first` on in the last verification forward, `[B, R, H]`."""
        return None if self._last is None else self._last[:, first:]

    def _fuse(self, index: int, hidden: torch.Tensor) -> None:
        assert self._fused is not None
        part = self._session.fuse(index, hidden)
        # A layer that reports again begins the next chunk; layers report in their own order, not in `fuse`'s.
        if not self._fused or index in self._summed:
            self._fused.append(part)
            self._summed = {index}
        else:
            self._fused[-1].add_(part)
            self._summed.add(index)

    @contextmanager
    def prefill(self) -> Iterator[None]:
        """Arms the hooks for a prefill, which may run in chunks: features are fused layer by layer as they appear."""
        self._fused = []
        with self._armed():
            yield

    @contextmanager
    def verification(self) -> Iterator[None]:
        """Arms the hooks for one verification forward: hidden states are kept until the walk has chosen its rows."""
        self._fused = None
        self._forget()
        with self._armed():
            yield

    @contextmanager
    def _armed(self) -> Iterator[None]:
        token = _RECORDING.set(self)
        try:
            yield
        finally:
            _RECORDING.reset(token)

    def prefill_features(self) -> torch.Tensor | None:
        """Fused features of the whole prefill, `[B, T, H]`; None if a feature layer did not report."""
        fused, self._fused = self._fused, None
        if not fused:
            return None
        return fused[0] if len(fused) == 1 else torch.cat(fused, dim=1)

    def reported(self) -> bool:
        """Whether every feature layer reported in the last verification forward."""
        return len(self._raw) == len(self._session.feature_layers)

    def select(self, paths: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Chosen rows of every feature layer in the last verification forward, each `[B, T, H_target]`.

        Args:
            paths: Nodes of each row; T is the most of a row, and shorter ones are filled up with the root.
        """
        longest = max(map(len, paths))
        nodes: dict[torch.device, torch.Tensor] = {}
        chosen = []
        for index in range(len(self._session.feature_layers)):
            hidden = self._raw[index]
            if hidden.shape[1] == 1:
                chosen.append(hidden)
                continue
            if hidden.device not in nodes:
                filled = [[*path, *[0] * (longest - len(path))] for path in paths]
                nodes[hidden.device] = to_device(filled, hidden.device)
            rows = nodes[hidden.device]
            if hidden.shape[0] == 1:
                chosen.append(hidden.index_select(1, rows[0]))
            else:
                chosen.append(hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1])))
        return chosen

    def fuse(self, selected: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """Features `[B, T₁ + T₂ + …, H]` of rows that `select` chose in one forward after the other."""
        total: torch.Tensor | None = None
        for index, parts in enumerate(zip(*selected, strict=True)):
            rows = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            part = self._session.fuse(index, rows)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._fused = None
        self._forget()

    def _forget(self) -> None:
        self._raw.clear()
        self._last = None
