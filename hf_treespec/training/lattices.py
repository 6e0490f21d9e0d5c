"""What a drafter would propose at every place of a text its target wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from ..configuration import TreeSpecConfig
from ..drafters.base import BlockDrafter, DraftState, TargetModules
from ..drafters.flexdraft import FlexDraftDrafter, packed_blocks
from ..trees import DraftLattice
from .teacher import teacher_forward

#: Places whose blocks are packed into one forward.
_ANCHORS_AT_ONCE = 32


@torch.no_grad()
def lattices_along(
    drafter: BlockDrafter,
    target: PreTrainedModel,
    sequences: torch.Tensor,
    prompt_length: int,
    *,
    width: int,
    stride: int = 1,
    chains: bool = False,
) -> Iterator[tuple[int, DraftLattice, DraftLattice | None]]:
    """Drafts at one anchor after another, for all sequences at once, through a session as decoding has it.

    The features of the whole texts come from one target forward, and each draft takes those of the positions since the
    last one into its context, so the drafts are exactly those of a call that decodes the texts.

    Args:
        drafter: A drafter that drafts from features alone, or inside the target (FlexDraft).
        sequences: Texts of one length, long `[B, L]`.
        prompt_length: Position of the first anchor.
        width: Children a parent may need.
        stride: Positions from one anchor to the next.
        chains: Whether to ask for chains too, which a drafter that looks back may continue where trees end.

    Yields:
        `(anchor, lattice, chain)` for each anchor whose whole block lies in the text: the lattice `[B, D, M, K]` on
        the CPU, and the lattice of width 1 where it is asked for.
    """
    if isinstance(drafter, FlexDraftDrafter):
        yield from _packed_lattices(drafter, target, sequences, prompt_length, width, stride, chains)
        return
    batch, length = sequences.shape
    session = drafter.start(target, batch, length)
    if drafter.treespec_config is not None:
        session.configure(drafter.treespec_config)
    features, _ = teacher_forward(target, sequences, session.feature_layers)
    parts = features.chunk(len(session.feature_layers), dim=-1)
    fused = torch.stack([session.fuse(index, part) for index, part in enumerate(parts)]).sum(0)
    columns = torch.arange(length, device=sequences.device).expand(batch, -1)
    done, depth = 0, drafter.drafted_depths
    try:
        for anchor in range(prompt_length, length - depth, stride):
            state = DraftState(
                anchors=sequences[:, anchor],
                positions=columns[:, anchor],
                features=fused[:, done:anchor],
                feature_positions=columns[:, done:anchor],
                feature_valid=None,
                depth=depth,
                width=width,
            )
            lattice = on_host(session.propose(state))
            chain = None
            if chains and lattice.tokens.shape[2] == 1:
                chain = best_chain(lattice)
            elif chains:
                known = replace(state, features=None, feature_positions=None, width=1)
                chain = on_host(session.propose(known))
            yield anchor, lattice, chain
            done = anchor
    finally:
        session.close()


def _packed_lattices(
    drafter: FlexDraftDrafter,
    target: PreTrainedModel,
    sequences: torch.Tensor,
    prompt_length: int,
    width: int,
    stride: int,
    chains: bool,
) -> Iterator[tuple[int, DraftLattice, DraftLattice | None]]:
    """`lattices_along` of a drafter that drafts inside the target: many places in one forward, without a cache."""
    modules, depth = TargetModules(target), drafter.drafted_depths
    temperature = (drafter.treespec_config or TreeSpecConfig()).drafter_temperature
    places = torch.arange(prompt_length, sequences.shape[1] - depth, stride, device=sequences.device)
    for anchors in places.split(_ANCHORS_AT_ONCE):
        packed = packed_blocks(drafter, target, sequences, anchors.expand(len(sequences), -1))
        for index, anchor in enumerate(anchors.tolist()):
            logits = drafter.calibrated_logits(modules, packed.drafted[:, index], sequences[:, anchor]) / temperature
            best, tokens = logits.topk(min(width, logits.shape[-1]))
            lattice = on_host(DraftLattice.marginal(tokens, best - logits.logsumexp(-1, keepdim=True)))
            yield anchor, lattice, best_chain(lattice) if chains else None


def on_host(lattice: DraftLattice) -> DraftLattice:
    """The lattice on the CPU."""
    return DraftLattice(lattice.tokens.cpu(), lattice.log_probs.cpu(), lattice.next_slot.cpu())


def rows_of(lattice: DraftLattice, rows: Sequence[int]) -> DraftLattice:
    """The lattices of some rows of a batch."""
    return DraftLattice(lattice.tokens[rows], lattice.log_probs[rows], lattice.next_slot[rows])


def best_chain(lattice: DraftLattice) -> DraftLattice:
    """The first child of every parent alone."""
    return DraftLattice(lattice.tokens[..., :1], lattice.log_probs[..., :1], lattice.next_slot[..., :1])


def walk(children: Mapping[tuple[int, int], int], following: Sequence[int]) -> list[int]:
    """Nodes of a tree that a text passes, the root first, from the tree's `(node, token) → child` table."""
    nodes = [0]
    for token in following:
        child = children.get((nodes[-1], token))
        if child is None:
            break
        nodes.append(child)
    return nodes
