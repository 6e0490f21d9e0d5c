"""Mask rows inside a stock target: hooks route them through projections of their own, and nothing else changes.

Mask rows enter at a decoder layer and pass it and all later ones. In each they take the drafter's attention
projections where the other rows, here called clean, take the target's; norms, MLP and everything else are shared. They
see what the clean row they hang on sees, and their own group both ways; no clean row sees them.

Rows that ride are put in by forward hooks: no module is replaced, no forward copied, no cache patched. Hooks act in
the context that attached them alone, and there in forwards that mask rows ride in; every other forward passes through
them untouched, and while nothing rides most of them are gone. Rows that pass a layer alone take a view of it, which
shares all but the projections.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from ...attention.interface import ARMED, TreeAttention
from ...attention.masks import LayerKind, layer_kinds
from ...caches import TreeLayer, takes_trees
from .layer_view import LayerView, computing_as, row_axis, through
from .layout import attention_of, decoder_of, projections_of, rotaries_of
from .mask_rows import Angles, MaskRows, Ride, RopeCall

#: The tuning whose hooks act in this context: the last one attached.
_IN_FORCE: ContextVar[AttentionTuning | None] = ContextVar("treespec_attention_tuning", default=None)


@dataclass(frozen=True)
class _LayerCall:
    """How a decoder calls one of its layers: everything that is no tensor, and which rotary call it hands on."""

    kwargs: dict[str, Any]
    cache_name: str
    has_positions: bool
    rope: RopeCall


class _Tap:
    """Stands in for the cache of one layer call and keeps what the layer was handed, for a second call of it."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.seen: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.seen is None:
            self.seen = self._cache.update(keys, values, *args, **kwargs)
            return self.seen
        return torch.cat([self.seen[0], keys], 2), torch.cat([self.seen[1], values], 2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class AttentionTuning:
    """The hooks of one drafter on one target, from `attach` to `detach`.

    Attributes:
        positions: Positions of the clean rows of the last forward over our cache, `[…, B or 1, N]`.
        hidden: States of the last forward's mask rows behind the last layer, before the final norm, `[B, M, H]`.

    Args:
        tuned: The drafter's layers, each with a `self_attn` of projections under the target's names.
        target: The target.
        first: Decoder layer that mask rows enter at, 0-based; they pass it and all later ones.
        variant: `"joint"` puts the rows in the clean rows' own layer call, `"twice"` calls each layer again for them.
    """

    def __init__(
        self,
        tuned: nn.ModuleList,
        target: PreTrainedModel,
        first: int,
        variant: Literal["joint", "twice"] = "joint",
    ) -> None:
        text = target.config.get_text_config()
        self._decoder, layers = decoder_of(target)
        self._first = first
        self._layers = list(layers)[first:]
        self._tuned = tuned
        self._kinds = layer_kinds(text)
        self._variant = variant
        self._head_counts = {getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
        self._handles: list[Any] = []
        #: The target's projections, each with how mask rows compute it, and the hooks on them.
        self._projections: list[tuple[nn.Module, nn.Module]] = []
        self._projection_handles: list[Any] = []
        self._layer_handles: list[Any] = []
        #: The layers as mask rows take them by themselves.
        self._views: list[LayerView] = []
        self._before: AttentionTuning | None = None
        self._rope_calls: list[RopeCall] = []
        self._layer_calls: dict[int, _LayerCall] = {}
        self._ride: Ride | None = None
        #: Clean rows of the projections under way, and mask rows; None = all rows are clean.
        self._routing: tuple[int, int] | None = None
        self._tail: tuple[int, torch.Tensor] | None = None
        self._armed: TreeAttention | None = None
        self._cache: weakref.ref[Cache] | None = None
        self.positions: torch.Tensor | None = None
        self.hidden: torch.Tensor | None = None

    # Attaching and detaching

    def attach(self) -> Self:
        """Registers the hooks; in this context they are in force until `detach`, over any attached before."""
        try:
            for rotary in rotaries_of(self._decoder):
                self._handles.append(rotary.register_forward_hook(self._note_rope, with_kwargs=True))
            self._handles.append(self._hook_entry(0))
            self._reach_layers()
            for index, layer in enumerate(self._layers):
                tuned = self._tuned[index].self_attn
                assert isinstance(tuned, nn.Module)
                bases = projections_of(attention_of(layer))
                own = {name: computing_as(base, tuned.get_submodule(name)) for name, base in bases.items()}
                self._projections += zip(bases.values(), own.values(), strict=True)
                self._views.append(LayerView(layer, own))
        except BaseException:
            self.detach()
            raise
        self._before = _IN_FORCE.get()
        _IN_FORCE.set(self)
        return self

    def detach(self) -> None:
        """Removes the hooks; safe to call again."""
        self._leave_projections()
        self._leave_layers()
        for handle in self._handles:
            handle.remove()
        self._handles, self._projections, self._views = [], [], []
        self._ride = self._routing = self._tail = self.hidden = self.positions = None
        self._rope_calls = []
        self._layer_calls = {}
        if _IN_FORCE.get() is self:
            _IN_FORCE.set(self._before)
        self._before = None

    # Every hook costs every forward, and most of them only rows that ride need.

    def _hook_entry(self, index: int) -> Any:
        enter = functools.partial(self._enter, index)
        return self._layers[index].register_forward_pre_hook(enter, with_kwargs=True)

    def _reach_layers(self) -> None:
        if self._layer_handles:
            return
        for index, layer in enumerate(self._layers):
            if index:
                self._layer_handles.append(self._hook_entry(index))
            # Before all others: those that look at the layer's output are to see clean rows only.
            leave = functools.partial(self._leave, index)
            self._layer_handles.append(layer.register_forward_hook(leave, with_kwargs=True, prepend=True))

    def _leave_layers(self) -> None:
        for handle in self._layer_handles:
            handle.remove()
        self._layer_handles = []

    def _reach_projections(self) -> None:
        if self._projection_handles:
            return
        for base, own in self._projections:
            # Around all others, which are to see clean rows only.
            self._projection_handles.append(base.register_forward_pre_hook(self._cut, prepend=True))
            self._projection_handles.append(base.register_forward_hook(functools.partial(self._join, own)))

    def _leave_projections(self) -> None:
        for handle in self._projection_handles:
            handle.remove()
        self._projection_handles = []

    # What rides

    def board(self, rows: MaskRows | None) -> None:
        """Lets rows ride in the next forward of the target in this context; None = let nothing ride."""
        self._ride = None if rows is None else Ride(rows)
        if rows is not None:
            self._reach_layers()
            if self._variant == "joint":
                self._reach_projections()
        self._routing = self.hidden = None

    @contextmanager
    def riding(self, rows: MaskRows) -> Iterator[None]:
        """Lets rows ride in the one forward made inside."""
        self.board(rows)
        try:
            yield
        finally:
            self._ride = self._routing = None

    @property
    def boarded(self) -> int:
        """Mask rows that ride in the next forward."""
        return 0 if self._ride is None else self._ride.count

    def is_ambiguous(self, rows: int) -> bool:
        """Whether so many rows, clean and masks, cannot be told from heads in `[B, rows, heads, D]`."""
        return rows in self._head_counts

    @property
    def cache(self) -> Cache | None:
        """The cache of ours that the target's last forward in this context wrote to."""
        return None if self._cache is None else self._cache()

    @property
    def kinds(self) -> list[LayerKind]:
        """Kinds of the layers that mask rows pass."""
        return self._kinds[self._first :]

    @property
    def layer_ids(self) -> range:
        """The layers that mask rows pass, 0-based."""
        return range(self._first, self._first + len(self._layers))

    def draft(
        self, embeddings: torch.Tensor, positions: torch.Tensor, masks: dict[LayerKind, torch.Tensor]
    ) -> torch.Tensor:
        """Runs mask rows alone through the layers, over what the cache holds; its next forward overwrites them.

        Args:
            embeddings: States they enter with, `[B, M, H]`.
            positions: Their positions, long `[…, B, M]`.
            masks: Additive masks `[B, 1, M, K + M]` by layer kind.

        Returns:
            States behind the last layer, before the final norm, `[B, M, H]`.
        """
        hidden, cache = embeddings, self.cache
        assert cache is not None
        angles: list[tuple[RopeCall, Angles]] = []
        for index, (view, kind) in enumerate(zip(self._views, self.kinds, strict=True)):
            call = self._layer_calls[index]
            found = next((known for rope, known in angles if rope is call.rope), None)
            if found is None:
                found = call.rope.at(positions, hidden)
                angles.append((call.rope, found))
            kwargs = {
                **call.kwargs,
                call.cache_name: cache,
                "attention_mask": masks[kind],
                "position_embeddings": found,
            }
            if call.has_positions:
                kwargs["position_ids"] = positions if positions.ndim == 2 else positions[0]
            hidden = view(hidden, kwargs, cache.layers[self._first + index].keys.device)
        return hidden

    # Hooks

    def _note_rope(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if _IN_FORCE.get() is self:
            self._rope_calls.append(RopeCall.of(module, args, kwargs, output))

    def _enter(self, index: int, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if _IN_FORCE.get() is not self:
            return None
        if len(args) > 1:
            names = list(inspect.signature(layer.forward).parameters)
            kwargs = {**dict(zip(names[1:], args[1:], strict=False)), **kwargs}
            args = args[:1]
        self._note_call(index, kwargs)
        ride = self._ride
        if ride is None:
            if index == 0:
                self._stand_back()
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        kwargs = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        ride.clean_call = dict(kwargs)
        call = self._rope_call(kwargs.get("position_embeddings"), layer)
        if ride.positions is None:
            ride.positions = ride.place(call.positions)
        if self._variant == "joint":
            hidden, kwargs = self._joined(ride, index, layer, hidden, kwargs, call)
        else:
            name, cache = _cache_among(kwargs)
            if cache is None:
                raise ValueError("the variant 'twice' reads keys and values from the cache; use 'joint' without one.")
            ride.clean_call[name] = kwargs[name] = _Tap(cache)
            ride.hidden = ride.enter(hidden)
        return (hidden,), kwargs

    def _stand_back(self) -> None:
        """Leaves a forward that nothing rides in what hooks it can do without, before it comes to them."""
        self._leave_projections()
        if len(self._layer_calls) == len(self._layers):
            self._leave_layers()
            self._rope_calls = []

    def _joined(
        self, ride: Ride, index: int, layer: nn.Module, hidden: torch.Tensor, kwargs: dict[str, Any], call: RopeCall
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The layer's arguments with the rows behind the clean ones."""
        clean, count, mask = hidden.shape[1], ride.count, kwargs["attention_mask"]
        if not isinstance(mask, torch.Tensor) or mask.ndim != 4 or not mask.is_floating_point():
            raise ValueError("mask rows ride in forwards with additive masks `[B, 1, N, K]` in every layer only.")
        below = ride.mask(self._kinds[self._first + index], mask, self._cached(layer, kwargs))
        above = torch.cat(
            [
                mask.expand(below.shape[0], -1, -1, -1),
                mask.new_full((below.shape[0], 1, clean, count), torch.finfo(mask.dtype).min),
            ],
            -1,
        )
        changed = dict(kwargs)
        changed["attention_mask"] = torch.cat([above, below], 2)
        changed["position_embeddings"] = _behind(kwargs["position_embeddings"], ride.rope(call))
        if kwargs.get("position_ids") is not None:
            assert ride.positions is not None
            rows = ride.positions if ride.positions.ndim == 2 else ride.positions[0]
            changed["position_ids"] = torch.cat([kwargs["position_ids"].expand(rows.shape[0], -1), rows], -1)
        self._routing = (clean, count)
        self._widen_attention(index, clean + count, clean)
        return torch.cat([hidden, ride.enter(hidden)], 1), changed

    def _leave(self, index: int, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if _IN_FORCE.get() is not self:
            return None
        ride, last = self._ride, index == len(self._layers) - 1
        if ride is not None:
            output = self._left(ride, index, layer, output)
        if last:
            self._rope_calls = []
            if ride is not None:
                self.hidden, self._ride = ride.hidden, None
        return output

    def _left(self, ride: Ride, index: int, layer: nn.Module, output: Any) -> Any:
        """The layer's output of the clean rows alone; the rows' own goes on with them."""
        if self._variant == "joint":
            assert self._routing is not None
            clean, self._routing = self._routing[0], None
            hidden = output[0] if isinstance(output, tuple) else output
            ride.hidden, hidden = hidden[:, clean:], hidden[:, :clean]
            # No gradient reaches a clean row from a mask row's loss but through its keys and values, which are frozen.
            hidden = hidden.detach()
            output = (hidden, *output[1:]) if isinstance(output, tuple) else hidden
            self._narrow_attention()
        else:
            self._again(ride, index, layer)
        return output

    def _again(self, ride: Ride, index: int, layer: nn.Module) -> None:
        """Calls a layer a second time, for the mask rows alone."""
        assert ride.hidden is not None
        kwargs = dict(ride.clean_call)
        mask = kwargs["attention_mask"]
        call = self._rope_call(kwargs["position_embeddings"], layer)
        kwargs["attention_mask"] = ride.mask(self._kinds[self._first + index], mask, self._cached(layer, kwargs))
        kwargs["position_embeddings"] = ride.rope(call)
        if kwargs.get("position_ids") is not None:
            assert ride.positions is not None
            kwargs["position_ids"] = ride.positions if ride.positions.ndim == 2 else ride.positions[0]
        clean, cached = mask.shape[2], self._cached(layer, kwargs)
        assert cached is not None
        self._widen_attention(index, clean + ride.count, clean)
        try:
            ride.hidden = self._views[index](ride.hidden, kwargs, cached.keys.device)
        finally:
            self._narrow_attention()

    def _cut(self, base: nn.Module, args: Any) -> Any:
        """Leaves a projection of the target its clean rows."""
        if self._routing is None or _IN_FORCE.get() is not self:
            return None
        (states,) = args
        clean, count = self._routing
        axis = row_axis(states, clean + count)
        # A latent projection runs over what is cached, too: its clean rows are all but the last.
        before = states.shape[axis] - count
        self._tail = axis, states.narrow(axis, before, count)
        return (states.narrow(axis, 0, before),)

    def _join(self, own: nn.Module, base: nn.Module, args: Any, output: torch.Tensor) -> Any:
        if self._routing is None or _IN_FORCE.get() is not self:
            return None
        assert self._tail is not None
        (axis, rows), self._tail = self._tail, None
        # Clean rows give the keys and values of mask rows a weight of 0, which does not hide what is no number.
        return torch.cat([output, through(own, rows).to(output).nan_to_num(0.0, 0.0, 0.0)], axis)

    # Particulars

    def _note_call(self, index: int, kwargs: dict[str, Any]) -> None:
        """Notes how the decoder calls a layer, in forwards over a cache of ours."""
        name, cache = _cache_among(kwargs)
        if cache is None or not takes_trees(cache):
            return
        if index and index in self._layer_calls:
            return
        call = self._rope_call(kwargs.get("position_embeddings"), self._layers[index])
        if index == 0:
            self._cache, self.positions = weakref.ref(cache), call.positions
        if index not in self._layer_calls:
            known = next((other.rope for other in self._layer_calls.values() if other.rope.repeats(call)), None)
            self._layer_calls[index] = _LayerCall(
                {
                    key: value
                    for key, value in kwargs.items()
                    if not isinstance(value, torch.Tensor) and key not in (name, "position_embeddings")
                },
                name,
                kwargs.get("position_ids") is not None,
                known or call.form(),
            )

    def _rope_call(self, angles: Any, layer: nn.Module) -> RopeCall:
        """The call of a rotary module whose result a layer is handed."""
        for call in self._rope_calls:
            if call.output is angles or (isinstance(angles, tuple) and call.output[0] is angles[0]):
                return call
        raise ValueError(
            f"{type(layer).__name__} is not handed the result of a rotary module as `position_embeddings`, so mask "
            "rows cannot be given positions; use a DFlash drafter for this target."
        )

    def _cached(self, layer: nn.Module, kwargs: dict[str, Any]) -> TreeLayer | None:
        cache = next((value for value in kwargs.values() if isinstance(value, (Cache, _Tap))), None)
        if cache is None:
            return None
        found = cache.layers[attention_of(layer).layer_idx]
        if not isinstance(found, TreeLayer):
            raise ValueError(f"mask rows ride over caches of ours, not over a {type(found).__name__}.")
        return found

    def _widen_attention(self, index: int, columns: int, clean: int) -> None:
        """Tells tree attention of the columns behind the tree's; windows may hide prefix from rows further right."""
        tree = ARMED.get()
        self._armed = tree
        if tree is None:
            return
        visible = tree.prefix_visible
        if self._kinds[self._first + index].window is not None:
            visible = False
        ARMED.set(replace(tree, nodes=tree.nodes + columns - clean, prefix_visible=visible))

    def _narrow_attention(self) -> None:
        if self._armed is not None:
            ARMED.set(self._armed)
        self._armed = None


def _cache_among(kwargs: dict[str, Any]) -> tuple[str, Cache | None]:
    """The cache among a layer's arguments, by whichever name it has there."""
    return next(((name, value) for name, value in kwargs.items() if isinstance(value, Cache)), ("", None))


def _behind(clean: Angles, rows: Angles) -> Angles:
    """`[…, N, D]` and `[…, M, D]` as `[…, N + M, D]`; the leading dimensions broadcast."""
    if isinstance(clean, tuple):
        return tuple(_behind(*parts) for parts in zip(clean, rows, strict=True))  # type: ignore[misc]
    assert isinstance(rows, torch.Tensor)
    lead = torch.broadcast_shapes(clean.shape[:-2], rows.shape[:-2])
    return torch.cat([part.expand(*lead, *part.shape[-2:]) for part in (clean, rows.to(clean))], -2)
