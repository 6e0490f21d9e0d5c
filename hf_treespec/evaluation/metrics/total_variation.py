"""Total variation distance by depth as a metric."""

from __future__ import annotations

from collections.abc import Sequence

import datasets
import evaluate

from ._grouping import mean_by_depth


class TotalVariation(evaluate.Metric):
    """Distance ½ Σ|p − q| between draft and target distributions, by depth."""

    def _info(self) -> evaluate.MetricInfo:
        probabilities = datasets.Sequence(datasets.Value("float32"))
        return evaluate.MetricInfo(
            description=(
                "Total variation distance between a drafter's and its target's next-token distributions, by drafted "
                "depth: the least probability with which a draw of one must be rejected as a draw of the other."
            ),
            citation="",
            inputs_description=(
                "predictions: the drafter's probabilities over the vocabulary, of each slot.\n"
                "references: the target's, behind the same text.\n"
                "depths: depth of each slot, from 1 on."
            ),
            features=datasets.Features(
                {"predictions": probabilities, "references": probabilities, "depths": datasets.Value("int64")}
            ),
        )

    def _compute(
        self,
        predictions: Sequence[Sequence[float]],
        references: Sequence[Sequence[float]],
        depths: Sequence[int],
    ) -> dict[str, object]:
        """`total_variation`, the mean over all slots, and `by_depth`."""
        distances = [
            sum(abs(q - p) for q, p in zip(draft, target, strict=True)) / 2
            for draft, target in zip(predictions, references, strict=True)
        ]
        return {"total_variation": sum(distances) / len(distances), "by_depth": mean_by_depth(distances, depths)}
