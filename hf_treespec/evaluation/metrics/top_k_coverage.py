"""Coverage of the target's tokens by a drafter's best ones as a metric."""

from __future__ import annotations

from collections.abc import Sequence

import datasets
import evaluate

from ._grouping import mean_by_depth


class TopKCoverage(evaluate.Metric):
    """Share of the target's tokens among a drafter's k likeliest, by depth."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Share of the target's tokens that are among the drafter's k likeliest, by drafted depth.",
            citation="",
            inputs_description=(
                "predictions: the drafter's tokens of each slot, likeliest first, at least k of them.\n"
                "references: the target's token.\n"
                "depths: depth of each slot, from 1 on.\n"
                "k: how many of the drafter's tokens count."
            ),
            features=datasets.Features(
                {
                    "predictions": datasets.Sequence(datasets.Value("int64")),
                    "references": datasets.Value("int64"),
                    "depths": datasets.Value("int64"),
                }
            ),
        )

    def _compute(
        self, predictions: Sequence[Sequence[int]], references: Sequence[int], depths: Sequence[int], k: int = 1
    ) -> dict[str, object]:
        """`coverage`, the mean over all slots, and `by_depth`."""
        covered = [float(token in best[:k]) for best, token in zip(predictions, references, strict=True)]
        return {"coverage": sum(covered) / len(covered), "by_depth": mean_by_depth(covered, depths)}
