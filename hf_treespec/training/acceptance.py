"""How many tokens a round commits, from whole drafts walked along text the target wrote."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ..drafters.base import BlockDrafter
from ..trees import expand
from .lattices import lattices_along, rows_of, walk


def acceptance_lengths(
    drafter: BlockDrafter,
    target: PreTrainedModel,
    sequences: torch.Tensor,
    prompt_length: int,
    *,
    tree_nodes: Sequence[int] = (16,),
    batch_size: int = 32,
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
    names = ["tau_chain", *(f"tau_tree_{nodes}" for nodes in tree_nodes)]
    rounds, committed = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    width, depth = max([2, *tree_nodes]) - 1, drafter.drafted_depths
    for batch in sequences.split(batch_size):
        texts = batch.tolist()
        # Where each text's next round starts, for the chain and for each budget.
        due = {name: [prompt_length] * len(texts) for name in names}
        for anchor, lattice, chain in lattices_along(drafter, target, batch, prompt_length, width=width, chains=True):
            assert chain is not None
            for name, nodes in zip(names, (0, *tree_nodes), strict=True):
                rows = [row for row, place in enumerate(due[name]) if place == anchor]
                if not rows:
                    continue
                chosen = rows_of(lattice if nodes else chain, rows)
                trees = expand(chosen, batch[rows, anchor].cpu(), nodes or depth + 1)
                for row, children in zip(rows, trees.children(), strict=True):
                    tokens = len(walk(children, texts[row][anchor + 1 : anchor + 1 + depth]))
                    rounds[name] += 1
                    committed[name] += tokens
                    due[name][row] += tokens
    return {name: committed[name] / max(1, rounds[name]) for name in names}
