"""How far a drafter's distributions are from its target's, depth by depth, along text the target wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..drafters.base import BlockDrafter, TargetModules
from ..drafters.dflash import DFlashDrafter
from ..drafters.flexdraft import FlexDraftDrafter, packed_blocks
from .blocks import draft_blocks
from .losses import rows_at_once
from .teacher import teacher_forward

#: Anchors whose blocks are drafted in one forward.
ANCHORS_AT_ONCE = 64

#: Float32 probabilities `[rows, V]` of some of the drafted rows, over the target's vocabulary.
Probabilities = Callable[[slice], torch.Tensor]


@dataclass(frozen=True)
class DepthAgreement:
    """Agreement of draft and target at depths 1 to D, means over all anchors.

    Attributes:
        total_variation: Total variation distance ½ Σ|p − q| between the two distributions, by depth.
        coverage: By k, then depth: the target's probability of drawing one of the draft's k likeliest tokens.
        blocks: Blocks measured, which is the number of rows of every depth.
    """

    total_variation: list[float]
    coverage: dict[int, list[float]]
    blocks: int


@torch.no_grad()
def depth_agreement(
    drafter: BlockDrafter,
    target: PreTrainedModel,
    sequences: torch.Tensor,
    prompt_length: int,
    *,
    temperature: float = 1.0,
    ranks: Sequence[int] = (1, 5, 16),
    stride: int = 1,
    batch_size: int = 2,
) -> DepthAgreement:
    """Compares distributions at every depth of blocks that start at every `stride`-th position.

    The text is the path: the target's distribution is that behind the text so far, the draft's is that of the slot,
    given the text's previous token where the drafter looks at it. With text sampled from the target this is the mean
    over the paths that decoding takes.

    Args:
        drafter: A drafter that drafts from features alone, or inside the target (FlexDraft).
        sequences: Prompts and the target's continuations, long `[n, L]`.
        prompt_length: Position of the first anchor.
        temperature: Temperature of the target's distribution, the one the text was sampled at.
        ranks: The k of the coverages.
        batch_size: Sequences a forward.
    """
    modules, depths = TargetModules(target), drafter.drafted_depths
    anchors = torch.arange(prompt_length, sequences.shape[1] - depths, stride, device=sequences.device)
    slots = torch.arange(1, depths + 1, device=sequences.device)
    sums = torch.zeros(depths, 1 + len(ranks), dtype=torch.float64)
    blocks = 0
    for batch in sequences.split(batch_size):
        for some, teacher, draft in _drafts_along(drafter, target, modules, batch, anchors):
            wanted = teacher[:, some[:, None] + slots - 1]
            found = _compare(modules, draft, wanted.flatten(0, 2), temperature, ranks)
            sums += found.view(-1, depths, sums.shape[1]).sum(0)
            blocks += len(batch) * len(some)
    means = (sums / max(1, blocks)).T.tolist()
    return DepthAgreement(means[0], dict(zip(ranks, means[1:], strict=True)), blocks)


def _drafts_along(
    drafter: BlockDrafter,
    target: PreTrainedModel,
    whole: TargetModules,
    sequences: torch.Tensor,
    anchors: torch.Tensor,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, Probabilities]]:
    """Some anchors, the target's final states `[B, T, H]`, and the drafts, rows ordered (text, anchor, depth)."""
    parts = anchors.split(ANCHORS_AT_ONCE)
    if isinstance(drafter, FlexDraftDrafter):
        for some in parts:
            packed = packed_blocks(drafter, target, sequences, some.expand(len(sequences), -1))
            rows = packed.drafted.flatten(0, 2)
            bonus = sequences[:, some].repeat_interleave(packed.drafted.shape[2], 1).flatten()

            def calibrated(
                chosen: slice,
                drafter: FlexDraftDrafter = drafter,
                rows: torch.Tensor = rows,
                bonus: torch.Tensor = bonus,
            ) -> torch.Tensor:
                return drafter.calibrated_logits(whole, rows[chosen, None], bonus[chosen]).squeeze(1).softmax(-1)

            yield some, packed.teacher, calibrated
        return
    assert isinstance(drafter, DFlashDrafter)
    modules, width = drafter.borrow(target), whole.vocab_size
    features, teacher = teacher_forward(target, sequences, drafter.config.target_layer_ids)
    for some in parts:
        rows = draft_blocks(drafter, modules, sequences, features, some.expand(len(sequences), -1)).flatten(0, 2)

        def spread(chosen: slice, rows: torch.Tensor = rows) -> torch.Tensor:
            return modules.spread(modules.logits(rows[chosen]).softmax(-1), width)

        yield some, teacher, spread


def _compare(
    modules: TargetModules,
    probabilities: Probabilities,
    teacher: torch.Tensor,
    temperature: float,
    ranks: Sequence[int],
) -> torch.Tensor:
    """Distance and coverages of each row, float64 `[rows, 1 + len(ranks)]` on the CPU."""
    chunk = rows_at_once(modules.vocab_size)
    found = []
    for start in range(0, len(teacher), chunk):
        rows = slice(start, start + chunk)
        truth, draft = (modules.logits(teacher[rows]) / temperature).softmax(-1), probabilities(rows)
        best = draft.topk(min(max(ranks), draft.shape[-1])).indices
        covered = truth.gather(-1, best).cumsum(-1)
        columns = [(draft - truth).abs().sum(-1) / 2]
        columns += [covered[:, min(rank, covered.shape[1]) - 1] for rank in ranks]
        found.append(torch.stack(columns, dim=-1).double().cpu())
    return torch.cat(found)
