"""Tiny FlexDraft drafters, sessions that are told what to draft, and the draft as one dense forward."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from models import WINDOW
from torch import nn
from transformers import PreTrainedModel

from hf_treespec.drafters import DraftState
from hf_treespec.drafters.flexdraft import FlexDraftDrafter, FlexDraftSession
from hf_treespec.drafters.flexdraft.layout import attention_of, decoder_of, final_norm_of, projections_of
from hf_treespec.trees import DraftTree

BLOCK = 6


def tiny_flexdraft(target: PreTrainedModel, *, num_layers: int = 2, block_size: int = BLOCK, seed: int = 3) -> Any:
    """A drafter none of whose tensors is the target's, nor neutral."""
    torch.manual_seed(seed)
    drafter = GuidedDrafter.from_target(target, num_layers, block_size=block_size, calibration_rank=5)
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        parameter.data.add_(0.15 * torch.randn(parameter.shape, generator=generator))
    return drafter


@dataclass
class Guide:
    """What a guided drafter drafts, and its logbook.

    Attributes:
        rows: What each row of the call will hold by position; empty = draft as the weights say.
        modes: Modes of the rounds, over and over; empty = what the options say.
        fails: Fail in the draft of this round.
        drafts: `(anchor positions, drafted logits, whether groups had been brought)` of every draft.
        groups: `(anchor positions, tree, their states)` of every verification that groups rode in.
    """

    rows: list[list[int]] = field(default_factory=list)
    modes: Sequence[str] = ()
    fails: int | None = None
    drafts: list[tuple[list[int], torch.Tensor, bool]] = field(default_factory=list)
    groups: list[tuple[list[int], DraftTree, torch.Tensor]] = field(default_factory=list)


class GuidedSession(FlexDraftSession):
    """Drafts for real, then makes what comes next likely at most depths, so that walks end all over the tree."""

    guide: Guide
    _tree: DraftTree | None = None
    _starts: list[int]

    def extra_rows(self, tree: DraftTree) -> None:
        if self.guide.modes:
            mode = self.guide.modes[len(self.guide.drafts) % len(self.guide.modes)]
            self.options = self.options.with_options(flex_mode=mode)
        super().extra_rows(tree)
        self._tree = tree.prefix(self._groups) if self._groups else None

    def draft_logits(self, state: DraftState) -> torch.Tensor:
        if self.guide.fails == len(self.guide.drafts):
            raise RuntimeError("told to fail")
        brought = self._attached().hidden
        if self._tree is not None and brought is not None:
            self.guide.groups.append((self._starts, self._tree, brought.clone()))
        was_brought = self._brought(state) is not None
        logits = super().draft_logits(state)
        starts = self._starts = state.positions.tolist()
        self.guide.drafts.append((starts, logits.clone(), was_brought))
        for row, (start, wanted) in enumerate(zip(starts, self.guide.rows, strict=False)):
            for depth, token in enumerate(wanted[start + 1 : start + 1 + logits.shape[1]]):
                if (start + 7 * depth + row) % 5:
                    logits[row, depth, token] += 12.0
        return logits


class GuidedDrafter(FlexDraftDrafter):
    """A FlexDraft drafter whose sessions follow `guide`."""

    guide: Guide

    def start(self, target: PreTrainedModel, batch_size: int, max_length: int) -> GuidedSession:
        session = GuidedSession(self, target, batch_size, max_length)
        session.guide = self.guide
        return session


def guided(drafter: Any, guide: Guide, **options: Any) -> Any:
    """A view that follows a guide."""
    view = drafter.with_options(**{"budget": 6, "flex_mode": "batch", "flex_group_score": 0.0, **options})
    view.guide = guide
    return view


class _ByRow(nn.Module):
    """The target's projection for the rows of the text, the drafter's for the others."""

    def __init__(self, base: nn.Module, tuned: nn.Module, dense: _Dense) -> None:
        super().__init__()
        self.base, self.own = base, copy.deepcopy(base)
        for name, parameter in tuned.named_parameters():
            getattr(self.own, name).data = parameter.data
        # Not a module of this one: it holds this one.
        object.__setattr__(self, "dense", dense)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        length, size = self.dense.length, self.dense.size
        axis = 1 if states.shape[1] == length + size else 2
        parts = [self.base(states.narrow(axis, 0, length)), self.own(states.narrow(axis, length, size))]
        return torch.cat(parts, axis)


class _Dense:
    """A copy of a target in which the last `size` rows of a sequence are the drafter's."""

    def __init__(self, target: PreTrainedModel, drafter: Any) -> None:
        self.size, self.length = drafter.config.block_size, 0
        self.model = copy.deepcopy(target)
        self.last = torch.empty(0)

        def enter(module: nn.Module, args: Any) -> Any:
            hidden = args[0].clone()
            hidden[:, self.length :] = drafter.mask_embedding
            return (hidden, *args[1:])

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.last = output[0] if isinstance(output, tuple) else output

        layers, split = decoder_of(self.model)[1], drafter.config.split_layer
        layers[split].register_forward_pre_hook(enter)
        layers[-1].register_forward_hook(leave)
        for layer, tuned in zip(layers[split:], drafter.layers, strict=True):
            attention = attention_of(layer)
            for name, base in projections_of(attention).items():
                setattr(attention, name, _ByRow(base, tuned.self_attn.get_submodule(name), self))

    def __call__(self, text: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        self.length = length = len(text)
        seen = torch.ones(length + self.size, length + self.size, dtype=torch.bool).tril()
        seen[length:, length:] = True
        place = torch.arange(length + self.size)
        masks = {}
        for kind, window in (("full_attention", 10**6), ("sliding_attention", WINDOW)):
            visible = seen & (place[:, None] - place[None] < window)
            masks[kind] = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
        config = self.model.config.get_text_config()
        kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
        mask = masks if hasattr(config, "layer_types") else masks[kind]
        tokens = torch.tensor([text + [0] * self.size])
        logits = self.model(input_ids=tokens, attention_mask=mask, position_ids=place[None], use_cache=False).logits
        return self.last[0, length:], logits[0, length:]


_dense = functools.lru_cache(maxsize=2)(_Dense)


@torch.no_grad()
def dense_group(target: PreTrainedModel, drafter: Any, text: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A group behind a text by one forward of everything under explicit masks, without a cache or a hook of ours.

    Returns:
        States behind the last layer `[block_size, H]`, and the target's logits for them `[block_size, V]`.
    """
    return _dense(target, drafter)(text)


@torch.no_grad()
def dense_draft(target: PreTrainedModel, drafter: Any, text: list[int]) -> torch.Tensor:
    """Calibrated logits of the drafted depths `[block_size − 1, V]` after a text that ends with the anchor."""
    hidden, logits = dense_group(target, drafter, text[:-1])
    normed = final_norm_of(decoder_of(target)[0])(hidden)[1:]
    bonus = target.get_input_embeddings()(torch.tensor(text[-1:])).expand(len(normed), -1)
    first, activation, last = drafter.anchor_bias_mlp
    return logits[1:] + last(activation(first(torch.cat([bonus, normed], -1))))
