"""A target's layer as mask rows take it by themselves: all is the target's but the attention's projections."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .layout import attention_of, is_linear


class LayerView:
    """A decoder layer that computes the last of its rows by projections of the drafter's.

    Everything else is the layer's own module, and no hook of the layer or its attention runs: those are for the rows
    of the text.

    Args:
        layer: The target's layer.
        own: How mask rows compute each of its attention's projections, by name.
    """

    def __init__(self, layer: nn.Module, own: Mapping[str, nn.Module]) -> None:
        attention = attention_of(layer)
        self._rows = _Rows()
        projections = {name: _Projection(attention.get_submodule(name), own[name], self._rows) for name in own}
        place = next(name for name, child in layer.named_children() if child is attention)
        self._base, self._attention = layer, attention
        self._layer = bare_copy(layer, {place: bare_copy(attention, projections)})

    def __call__(self, hidden: torch.Tensor, kwargs: dict[str, Any], device: torch.device) -> torch.Tensor:
        """The layer's output `[B, M, H]` of mask rows.

        Args:
            hidden: The rows, `[B, M, H]`.
            kwargs: The layer's further arguments.
            device: Where the layer computes.
        """
        self._rows.count = hidden.shape[1]
        moved = {name: _moved(value, device) for name, value in kwargs.items()}
        with in_place(self._base), in_place(self._attention):
            output = self._layer.forward(hidden.to(device), **moved)
        found: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return found


class _Rows:
    """How many mask rows pass."""

    count = 0


class _Projection(nn.Module):
    """A projection whose last rows are mask rows: a latent one runs over what is cached, too."""

    def __init__(self, base: nn.Module, own: nn.Module, rows: _Rows) -> None:
        super().__init__()
        self.base, self.bare, self.own, self._rows = base, bare_copy(base, {}), own, rows

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        count = self._rows.count
        axis = row_axis(states, count)
        before = states.shape[axis] - count
        if not before:
            return through(self.own, states).to(states)
        with in_place(self.base):
            cached: torch.Tensor = self.bare(states.narrow(axis, 0, before))
        return torch.cat([cached, through(self.own, states.narrow(axis, before, count)).to(cached)], axis)


def row_axis(states: torch.Tensor, rows: int) -> int:
    """The axis of the rows in what a projection or norm is given: `[B, T, …]` or `[B, heads, T, D]`."""
    if states.ndim == 3:
        return 1
    # More than all rows: cached ones come first.
    return min((axis for axis in (1, 2) if states.shape[axis] >= rows), key=lambda axis: states.shape[axis])


def through(own: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """What a tuned module makes of rows, on its own device and in its own dtype."""
    weight = next(own.parameters())
    computed: torch.Tensor = own(rows.to(weight.device, weight.dtype))
    return computed


def computing_as(base: nn.Module, tuned: nn.Module) -> nn.Module:
    """A tuned module that computes as the target's does, on the drafter's own parameters."""
    if isinstance(tuned, nn.Linear) and is_linear(base):
        return tuned
    own = bare_copy(base, {})
    own._parameters = OrderedDict(tuned.named_parameters(recurse=False))
    return own


def bare_copy(module: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    """A module without hooks that shares everything with `module` but has other children in some places."""
    copied = copy.copy(module)
    copied._modules = {**module._modules, **children}
    for name in (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks_with_kwargs",
    ):
        copied.__dict__[name] = OrderedDict()
    # A forward that was put on the module itself (accelerate does) computes on that module.
    copied.__dict__.pop("forward", None)
    return copied


@contextmanager
def in_place(module: nn.Module) -> Iterator[None]:
    """Has a module's tensors where it computes, which accelerate may keep elsewhere from one forward to the next.

    A bare copy shares the table they are put in.
    """
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        yield
        return
    hook.pre_forward(module)
    try:
        yield
    finally:
        hook.post_forward(module, None)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return tuple(_moved(part, device) for part in value) if type(value) is tuple else value
