"""A drafter's distributions against its target's: distance and coverage by depth, and how good its best children are.

All of it is measured along text that the target wrote, without decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..drafters.base import BlockDrafter
from ..drafters.dflash import DFlashDrafter
from ..training.agreement import ANCHORS_AT_ONCE, DepthAgreement, depth_agreement
from ..training.blocks import block_states
from ..training.lattices import lattices_along
from ..training.losses import rows_at_once
from ..training.teacher import teacher_forward
from ..trees import DraftLattice, DraftTree, expand

#: Events below which a share of them says little.
ENOUGH = 500


@dataclass(frozen=True)
class ChildAccuracy:
    """How often the target's next token is the best child of the node that the text stands on.

    The spine is the path of each depth's likeliest token by the drafter's own marginals, the best that a drafter
    without look-back can say.

    Attributes:
        events: Nodes the text stood on.
        hits: Of the nodes, those whose best child by the lattice holds the text's next token.
        marginal_hits: Of the nodes, those where the spine's token of that depth is the text's next one: what the same
            drafter says without its look-back, on the same nodes.
        dead_ends: Of the nodes, those that the lattice gives no children.
    """

    events: int = 0
    hits: int = 0
    marginal_hits: int = 0
    dead_ends: int = 0

    @property
    def accuracy(self) -> float | None:
        """Share of hits; None without events."""
        return self.hits / self.events if self.events else None

    @property
    def marginal_accuracy(self) -> float | None:
        """Share of hits of the marginals; None without events."""
        return self.marginal_hits / self.events if self.events else None


@dataclass(frozen=True)
class Distributions:
    """Everything measured of one drafter.

    Attributes:
        depths: Distance and coverages by depth.
        on_spine: Best children of nodes whose path is the spine's; the root is one.
        off_spine: Best children of the other nodes of the tree.
        nodes: Budget N of the trees whose nodes count.
    """

    depths: DepthAgreement
    on_spine: ChildAccuracy
    off_spine: ChildAccuracy
    nodes: int

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON."""
        sides = {
            name: {**asdict(side), "accuracy": side.accuracy, "marginal_accuracy": side.marginal_accuracy}
            for name, side in (("on_spine", self.on_spine), ("off_spine", self.off_spine))
        }
        return {
            "total_variation": self.depths.total_variation,
            "coverage": {str(rank): values for rank, values in self.depths.coverage.items()},
            "blocks": self.depths.blocks,
            "child_accuracy": {"nodes": self.nodes, **sides},
        }


def measure(
    drafter: BlockDrafter,
    target: PreTrainedModel,
    sequences: torch.Tensor,
    prompt_length: int,
    *,
    temperature: float = 1.0,
    ranks: Sequence[int] = (1, 5, 16),
    nodes: int = 32,
    stride: int = 1,
    batch_size: int = 8,
) -> Distributions:
    """Measures a drafter on text of its target.

    Args:
        drafter: A drafter that drafts from features alone, or inside the target (FlexDraft).
        sequences: Prompts and the target's continuations, sampled at `temperature`, long `[n, L]`.
        prompt_length: Position of the first anchor.
        temperature: Temperature of the target's distribution.
        ranks: The k of the coverages.
        nodes: Budget of the trees whose nodes count for the children's accuracy.
        stride: Positions from one anchor to the next.
        batch_size: Sequences a forward.
    """
    depths = depth_agreement(
        drafter, target, sequences, prompt_length, temperature=temperature, ranks=ranks, stride=stride
    )
    on, off = child_accuracy(
        drafter, target, sequences, prompt_length, nodes=nodes, stride=stride, batch_size=batch_size
    )
    return Distributions(depths, on, off, nodes)


@torch.no_grad()
def child_accuracy(
    drafter: BlockDrafter,
    target: PreTrainedModel,
    sequences: torch.Tensor,
    prompt_length: int,
    *,
    nodes: int = 32,
    stride: int = 1,
    batch_size: int = 8,
) -> tuple[ChildAccuracy, ChildAccuracy]:
    """Accuracy of the best children on and off the spine, over the nodes that the text passes in each anchor's tree.

    A dead end has no best child, so it counts as a miss; nodes at the last depth are not asked.
    """
    counts = torch.zeros(2, 4, dtype=torch.long)
    for batch in sequences.split(batch_size):
        spines: torch.Tensor | None = None
        texts = batch.cpu()
        drafts = lattices_along(drafter, target, batch, prompt_length, width=max(1, nodes - 1), stride=stride)
        for place, (anchor, lattice, _) in enumerate(drafts):
            if lattice.tokens.shape[2] == 1:
                spine = lattice.tokens[:, :, 0, 0]  # marginals are all it holds
            else:
                assert isinstance(drafter, DFlashDrafter)
                if spines is None:
                    spines = marginal_spines(drafter, target, batch, prompt_length, stride)
                spine = spines[:, place]
            tree = expand(lattice, texts[:, anchor], nodes)
            counts += _events(lattice, tree, texts[:, anchor + 1 :], spine)
    on, off = (ChildAccuracy(*row) for row in counts.tolist())
    return on, off


def _events(lattice: DraftLattice, tree: DraftTree, texts: torch.Tensor, spines: torch.Tensor) -> torch.Tensor:
    """Counts on and off the spine of one anchor of each row, `[2, 4]` in the order of `ChildAccuracy`.

    Args:
        texts: What follows the anchors, `[B, D or more]`.
        spines: Likeliest tokens by the marginals, `[B, D]`.
    """
    rows = torch.arange(len(texts))
    node = torch.zeros(len(texts), dtype=torch.long)
    slot, standing, on_spine = node, node == 0, node == 0
    counts = torch.zeros(2, 4, dtype=torch.long)
    for step in range(lattice.depth):
        token, alive = texts[:, step], slot >= 0
        offers = lattice.tokens[rows, step, slot.clamp(min=0)]
        by_marginal = spines[:, step] == token
        columns = torch.stack([node >= 0, alive & (offers[:, 0] == token), by_marginal, ~alive], dim=1)
        for side, stands in enumerate((standing & on_spine, standing & ~on_spine)):
            counts[side] += columns[stands].sum(0)
        on_spine = on_spine & by_marginal
        taken = (tree.parents == node[:, None]) & (tree.tokens == token[:, None])
        standing, node = standing & taken.any(1), taken.int().argmax(1)
        found = (offers == token[:, None]) & alive[:, None]
        following = lattice.next_slot[rows, step, slot.clamp(min=0), found.int().argmax(1)]
        slot = torch.where(found.any(1), following, -1)
    return counts


def marginal_spines(
    drafter: DFlashDrafter, target: PreTrainedModel, sequences: torch.Tensor, prompt_length: int, stride: int = 1
) -> torch.Tensor:
    """Likeliest token of every depth by the marginals, without look-back, `[n, anchors, D]` on the CPU."""
    config, modules = drafter.config, drafter.borrow(target)
    features, _ = teacher_forward(target, sequences, config.target_layer_ids)
    last = sequences.shape[1] - drafter.drafted_depths
    found = []
    for some in torch.arange(prompt_length, last, stride, device=sequences.device).split(ANCHORS_AT_ONCE):
        states = block_states(drafter, modules, sequences, features, some.expand(len(sequences), -1))
        hidden = drafter.norm(states).flatten(0, 2).split(rows_at_once(modules.vocab_size))
        best = torch.cat([modules.tokens(modules.logits(chunk).argmax(-1)).cpu() for chunk in hidden])
        found.append(best.view(states.shape[:3]))
    return torch.cat(found, dim=1)
