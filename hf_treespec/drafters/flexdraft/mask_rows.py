"""Mask rows on their way through a target's last layers: where they stand and what they see there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...attention.masks import LayerKind
from ...caches import TreeLayer
from ...transfer import to_device

#: What a rotary module answers: cosines and sines `[…, T, D]`, or complex factors.
Angles = tuple[torch.Tensor, ...] | torch.Tensor


@dataclass(frozen=True)
class MaskRows:
    """Mask rows that ride behind a forward's N clean rows.

    Attributes:
        embeddings: Hidden states they enter with, `[H]` for all alike or `[B, M, H]`.
        nodes: Clean row whose view each shares, long `[B, M]`.
        steps: Positions from that row to it, long `[B, M]`.
        groups: Rows of one group see each other both ways, long `[B, M]`.
        depths: Positions of the clean rows from the first one behind the cache, long `[B, N]`.
    """

    embeddings: torch.Tensor
    nodes: torch.Tensor
    steps: torch.Tensor
    groups: torch.Tensor
    depths: torch.Tensor

    def padded(self) -> MaskRows:
        """These rows, which share one embedding, and another one behind them that sees nothing of them."""
        last = torch.full_like(self.nodes[:, :1], -1)
        return replace(
            self,
            nodes=torch.cat([self.nodes, last + 1], 1),
            steps=torch.cat([self.steps, last + 2], 1),
            groups=torch.cat([self.groups, last], 1),
        )


@dataclass(frozen=True)
class RopeCall:
    """A call of a rotary module, so that it can be repeated for other positions."""

    module: nn.Module
    states: torch.Tensor
    positions: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> RopeCall:
        rest = {name: value for name, value in kwargs.items() if name not in ("x", "position_ids")}
        states = args[0] if args else kwargs["x"]
        if "position_ids" in kwargs:
            return cls(module, states, kwargs["position_ids"], args[1:], rest, output)
        return cls(module, states, args[1], args[2:], rest, output)

    def repeats(self, other: RopeCall) -> bool:
        """Whether two calls differ in their states and positions only."""
        return self.module is other.module and self.args == other.args and self.kwargs == other.kwargs

    def form(self) -> RopeCall:
        """The call without its tensors, to keep."""
        return replace(self, states=self.states[:0], positions=self.positions[:0], output=None)

    def at(self, positions: torch.Tensor, states: torch.Tensor) -> Angles:
        """What the module answers for other positions `[…, B, M]`."""
        # The forward itself: a call would run the hook that notes calls.
        angles: Angles = self.module.forward(states, positions.to(states.device), *self.args, **self.kwargs)
        return angles


class Ride:
    """Mask rows on their way through the layers of one forward."""

    def __init__(self, rows: MaskRows) -> None:
        self.rows = rows
        self.count = rows.nodes.shape[1]
        self.hidden: torch.Tensor | None = None
        self.positions: torch.Tensor | None = None
        self.masks: dict[tuple[LayerKind, torch.device], torch.Tensor] = {}
        self.ropes: list[tuple[RopeCall, Angles]] = []
        #: What the layer under way was called with, before the rows were put in.
        self.clean_call: dict[str, Any] = {}

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """The rows as they stand before a layer, on the device and in the dtype of its clean rows `[B, N, H]`."""
        rows = self.rows.embeddings if self.hidden is None else self.hidden
        rows = rows.to(hidden.device, hidden.dtype)
        return rows.expand(hidden.shape[0], self.count, -1)

    def place(self, clean: torch.Tensor) -> torch.Tensor:
        """Positions of the rows `[…, B, M]`, from those of the clean rows `[…, B or 1, N]`."""
        nodes = self.rows.nodes.to(clean.device)
        lead = clean.shape[:-2]
        known = clean.expand(*lead, nodes.shape[0], clean.shape[-1])
        positions: torch.Tensor = known.gather(-1, nodes.expand(*lead, *nodes.shape)) + self.rows.steps.to(
            clean.device
        )
        return positions

    def rope(self, call: RopeCall) -> Angles:
        for known, angles in self.ropes:
            if known is call:
                return angles
        assert self.positions is not None
        angles = call.at(self.positions, call.states)
        self.ropes.append((call, angles))
        return angles

    def mask(self, kind: LayerKind, clean: torch.Tensor, cached: TreeLayer | None) -> torch.Tensor:
        """What the rows see, `[B, 1, M, K + M]`, from the clean rows' additive mask `[B or 1, 1, N, K]`."""
        key = (kind, clean.device)
        if key not in self.masks:
            self.masks[key] = self._mask(kind, clean, cached)
        return self.masks[key]

    def _mask(self, kind: LayerKind, clean: torch.Tensor, cached: TreeLayer | None) -> torch.Tensor:
        rows, device, hidden = self.rows, clean.device, torch.finfo(clean.dtype).min
        nodes, groups = rows.nodes.to(device), rows.groups.to(device)
        batch, columns = nodes.shape[0], clean.shape[-1]
        below = clean.expand(batch, -1, -1, -1)
        below = below.gather(2, nodes[:, None, :, None].expand(-1, 1, -1, columns))
        own = groups[:, :, None] == groups[:, None, :]
        if kind.window is not None:
            depths, steps = rows.depths.to(device), rows.steps.to(device)
            place = depths.gather(1, nodes) + steps
            known = depths
            if cached is not None:
                prefix = torch.arange(columns - depths.shape[1], device=device) + cached.view_offset()
                known = torch.cat([prefix - to_device(cached.rows.lengths, device)[:, None], depths], 1)
            far = place[:, :, None] - known[:, None, :] >= kind.window
            below = below.masked_fill(far[:, None], hidden)
            own = own & (place[:, :, None] - place[:, None, :] < kind.window)
        beside = torch.zeros(own.shape, dtype=clean.dtype, device=device).masked_fill_(~own, hidden)
        return torch.cat([below, beside[:, None]], -1)
