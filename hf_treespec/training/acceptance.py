"""How many tokens a round commits, from whole drafts walked along text the target wrote."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ..drafters.base import TargetModules
from ..drafters.dflash import DFlashDrafter
from ..trees import DraftLattice
from ..trees.expansion import expand
from .blocks import draft_blocks
from .teacher import teacher_forward

_CHUNK_ELEMENTS = 1 << 22


@torch.no_grad()
def acceptance_lengths(
    drafter: DFlashDrafter,
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
        hidden = draft_blocks(drafter, modules, batch, features, anchors.expand(len(batch), -1))
        tokens, log_probs = _best(modules, hidden, width)
        for row, text in enumerate(batch.tolist()):
            for name, nodes in zip(names, (0, *tree_nodes), strict=True):
                place = 0
                while place < len(anchors):
                    following = text[prompt_length + place + 1 :]
                    if nodes:
                        depth = _tree_depth(tokens[row, place], log_probs[row, place], following, nodes)
                    else:
                        depth = _chain_depth(tokens[row, place, :, 0].tolist(), following)
                    rounds[name] += 1
                    committed[name] += depth + 1
                    place += depth + 1
    return {name: committed[name] / max(1, rounds[name]) for name in names}


def _best(modules: TargetModules, hidden: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Best `width` tokens of each drafted row and their log-probabilities, `[..., width]` on the host."""
    rows = hidden.flatten(0, -2)
    found = []
    for chunk in rows.split(max(1, _CHUNK_ELEMENTS // modules.vocab_size)):
        logits = modules.logits(chunk)
        best, tokens = logits.topk(min(width, logits.shape[-1]))
        found.append((tokens.cpu(), (best - logits.logsumexp(-1, keepdim=True)).cpu()))
    tokens, log_probs = (torch.cat(parts) for parts in zip(*found, strict=True))
    shape = (*hidden.shape[:-1], -1)
    return tokens.view(shape), log_probs.view(shape)


def _chain_depth(drafted: Sequence[int], following: Sequence[int]) -> int:
    depth = 0
    while depth < len(drafted) and drafted[depth] == following[depth]:
        depth += 1
    return depth


def _tree_depth(tokens: torch.Tensor, log_probs: torch.Tensor, following: Sequence[int], nodes: int) -> int:
    lattice = DraftLattice.marginal(tokens[None], log_probs[None])
    (children,) = expand(lattice, tokens.new_zeros(1), nodes).children()
    node = depth = 0
    while depth < len(tokens):
        child = children.get((node, following[depth]))
        if child is None:
            break
        node, depth = child, depth + 1
    return depth
