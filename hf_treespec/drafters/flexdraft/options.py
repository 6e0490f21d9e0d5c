"""Decoding options that only a FlexDraft drafter has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ...configuration import TreeSpecConfig, check_count

MODES = ("auto", "batch", "parallel", "sequential")
VARIANTS = ("joint", "twice")


@dataclass(frozen=True)
class FlexDraftOptions(TreeSpecConfig):
    """`TreeSpecConfig` and what a FlexDraft drafter can be told besides; nothing here changes which tokens come out.

    Attributes:
        flex_mode: `"parallel"` drafts inside the verification forward, for every node that the walk may end on;
            `"sequential"` drafts after it, for the node the walk ended on, in a forward of the last layers alone;
            `"batch"` takes `"parallel"` up to `flex_parallel_batch` rows, the paper's rule; `"auto"` starts from that
            rule and then takes what costs a round less, as measured while decoding.
        flex_parallel_batch: Largest batch that `"batch"` drafts for in parallel (the paper's 2); None = any.
        flex_variant: How mask rows ride. `"joint"`: in the very layer call of the verified rows, whose values it moves
            by rounding. `"twice"`: in a second call of each layer; verified rows and cache keep their bits.
        flex_group_score: Path score below which a node brings no mask rows along; where the walk ends on such a node
            the next draft is sequential. None = by device: 0.1 on a CPU, where every row costs, and 0.01, the released
            code's threshold, elsewhere.
        flex_groups: Most nodes with mask rows, the likeliest; None = all.
        flex_verify_score: Path score below which a candidate is not verified at all; 0 = verify what the budget takes.
    """

    flex_mode: Literal["auto", "batch", "parallel", "sequential"] = "auto"
    flex_parallel_batch: int | None = 2
    flex_variant: Literal["joint", "twice"] = "joint"
    flex_group_score: float | None = None
    flex_groups: int | None = None
    flex_verify_score: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.flex_mode not in MODES:
            raise ValueError(f"`flex_mode` must be one of {', '.join(MODES)}, got {self.flex_mode!r}.")
        if self.flex_variant not in VARIANTS:
            raise ValueError(f"`flex_variant` must be one of {', '.join(VARIANTS)}, got {self.flex_variant!r}.")
        check_count("flex_groups", self.flex_groups)
        check_count("flex_parallel_batch", self.flex_parallel_batch)
        for name in ("flex_group_score", "flex_verify_score"):
            score = getattr(self, name)
            if score is not None and not (isinstance(score, int | float) and 0.0 <= score < 1.0):
                raise ValueError(f"`{name}` is a path score of at least 0 and below 1, got {score!r}.")

    def mode(self, batch_size: int) -> Literal["parallel", "sequential"]:
        """The mode that a batch of `batch_size` rows is drafted for in, before anything is measured."""
        if self.flex_mode in ("parallel", "sequential"):
            return self.flex_mode
        most = self.flex_parallel_batch
        return "parallel" if most is None or batch_size <= most else "sequential"

    def group_score(self, device: torch.device) -> float:
        """The path score below which a node brings no mask rows along on a device."""
        if self.flex_group_score is not None:
            return self.flex_group_score
        return 0.1 if device.type == "cpu" else 0.01
