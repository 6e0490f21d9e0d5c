"""How many tokens a round commits, from whole drafts walked along text the target wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..drafters.base import TargetModules
from ..trees import DraftLattice
from ..trees.expansion import expand
from .blocks import draft_blocks
from .teacher import teacher_forward

_CHUNK_ELEMENTS = 1 << 22
_FIELDS = ("tokens", "log_probs", "next_slot")


@torch.no_grad()
def acceptance_lengths(
    drafter: Any,
    target: PreTrainedModel,
    sequences: torch.Tensor,
    prompt_length: int,
    *,
    tree_nodes: Sequence[int] = (16,),
    batch_size: int = 2,
) -> dict[str, float]:
    """Acceptance length τ of chains and trees, bonus token included.

    A verified token is always the target's own, so the tokens of a decoded text fix every round: where each one starts
    and how far its draft agrees. Walking text sampled from the target at some temperature therefore gives the τ of
    decoding at that temperature, and no target forward is needed beyond the one that yields the features.

    Args:
        sequences: Prompts and the target's continuations, long `[n, L]`.
        prompt_length: Tokens of the prompts; the first round's anchor is the first token behind them.
        tree_nodes: Budgets N of the trees, the root included.
        batch_size: Sequences a forward.

    Returns:
        `tau_chain` and `tau_tree_N` for each budget, over all rounds whose whole block lies within the text.
    """
    config, modules = drafter.config, TargetModules(target)
    names = ["tau_chain", *(f"tau_tree_{nodes}" for nodes in tree_nodes)]
    rounds, committed = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    width = max([2, *tree_nodes]) - 1
    anchors = torch.arange(prompt_length, sequences.shape[1] - config.block_size + 1, device=sequences.device)
    for batch in sequences.split(batch_size):
        features, _ = teacher_forward(target, batch, config.target_layer_ids)
        hidden = draft_blocks(drafter.backbone, modules, batch, features, anchors.expand(len(batch), -1))
        for row, text in enumerate(batch.tolist()):
            starts = batch[row, anchors].to(hidden.device)
            # A chain is the tree of one child a parent.
            chains = _lattice(drafter, modules, hidden[row], starts, 1)
            trees = _lattice(drafter, modules, hidden[row], starts, width)
            for name, nodes in zip(names, (config.block_size, *tree_nodes), strict=True):
                lattice = chains if name == "tau_chain" else trees
                place = 0
                while place < len(anchors):
                    following = text[prompt_length + place + 1 :]
                    depth = _tree_depth(lattice, place, following, nodes)
                    rounds[name] += 1
                    committed[name] += depth + 1
                    place += depth + 1
    return {name: committed[name] / max(1, rounds[name]) for name in names}


def _lattice(
    drafter: Any, modules: TargetModules, hidden: torch.Tensor, starts: torch.Tensor, width: int
) -> DraftLattice:
    """What is drafted behind each of `starts`, long `[A]`, from `[A, D, H]`, on the host."""
    chunk = max(1, _CHUNK_ELEMENTS // (modules.vocab_size * hidden.shape[1]))
    pieces = zip(hidden.split(chunk), starts.split(chunk), strict=True)
    parts = [drafter.lattice(modules, piece, anchors, width) for piece, anchors in pieces]
    joined = (torch.cat([getattr(part, name) for part in parts]).cpu() for name in _FIELDS)
    return DraftLattice(*joined)


def _tree_depth(lattice: DraftLattice, place: int, following: Sequence[int], nodes: int) -> int:
    one = DraftLattice(*(getattr(lattice, name)[place : place + 1] for name in _FIELDS))
    (children,) = expand(one, one.tokens.new_zeros(1), nodes).children()
    node = depth = 0
    while depth < lattice.depth:
        child = children.get((node, following[depth]))
        if child is None:
            break
        node, depth = child, depth + 1
    return depth
