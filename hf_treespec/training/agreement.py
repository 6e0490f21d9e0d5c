"""How far a drafter's distributions are from its target's, depth by depth, along text the target wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..drafters.base import TargetModules
from ..drafters.dflash import DFlashDrafter
from .blocks import draft_blocks
from .losses import rows_at_once
from .teacher import teacher_forward

#: Anchors whose blocks are drafted in one forward.
ANCHORS_AT_ONCE = 64


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
    drafter: DFlashDrafter,
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
        sequences: Prompts and the target's continuations, long `[n, L]`.
        prompt_length: Position of the first anchor.
        temperature: Temperature of the target's distribution, the one the text was sampled at.
        ranks: The k of the coverages.
        batch_size: Sequences a forward.
    """
    config, modules, teacher_modules = drafter.config, drafter.borrow(target), TargetModules(target)
    depths = drafter.drafted_depths
    anchors = torch.arange(prompt_length, sequences.shape[1] - depths, stride, device=sequences.device)
    slots = torch.arange(1, depths + 1, device=sequences.device)
    sums = torch.zeros(depths, 1 + len(ranks), dtype=torch.float64)
    blocks = 0
    for batch in sequences.split(batch_size):
        features, teacher = teacher_forward(target, batch, config.target_layer_ids)
        for some in anchors.split(ANCHORS_AT_ONCE):
            hidden = draft_blocks(drafter, modules, batch, features, some.expand(len(batch), -1))
            wanted = teacher[:, some[:, None] + slots - 1]
            found = _compare(modules, teacher_modules, hidden.flatten(0, 2), wanted.flatten(0, 2), temperature, ranks)
            sums += found.view(-1, depths, sums.shape[1]).sum(0)
            blocks += len(batch) * len(some)
    means = (sums / max(1, blocks)).T.tolist()
    return DepthAgreement(means[0], dict(zip(ranks, means[1:], strict=True)), blocks)


def _compare(
    modules: TargetModules,
    teacher_modules: TargetModules,
    hidden: torch.Tensor,
    teacher: torch.Tensor,
    temperature: float,
    ranks: Sequence[int],
) -> torch.Tensor:
    """Distance and coverages of each row, float64 `[rows, 1 + len(ranks)]` on the CPU."""
    chunk = rows_at_once(teacher_modules.vocab_size)
    found = []
    for drafted, wanted in zip(hidden.split(chunk), teacher.split(chunk), strict=True):
        truth = (teacher_modules.logits(wanted) / temperature).softmax(-1)
        draft = modules.spread(modules.logits(drafted).softmax(-1), truth.shape[-1])
        best = draft.topk(min(max(ranks), draft.shape[-1])).indices
        covered = truth.gather(-1, best).cumsum(-1)
        columns = [(draft - truth).abs().sum(-1) / 2]
        columns += [covered[:, min(rank, covered.shape[1]) - 1] for rank in ranks]
        found.append(torch.stack(columns, dim=-1).double().cpu())
    return torch.cat(found)
