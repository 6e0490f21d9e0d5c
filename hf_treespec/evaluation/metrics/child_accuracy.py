"""How good the best children of a draft tree's nodes are as a metric."""

from __future__ import annotations

from collections.abc import Sequence

import datasets
import evaluate


class ChildAccuracy(evaluate.Metric):
    """Share of nodes whose best child holds the target's next token, on and off the spine."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=(
                "Share of draft-tree nodes that the target's text passes whose best child is its next token: on the "
                "spine, the path of every depth's likeliest token by the marginals, and off it, where a drafter "
                "without look-back does not know the node it extends."
            ),
            citation="",
            inputs_description=(
                "predictions: token of the node's best child, −1 for a dead end.\n"
                "references: the target's next token.\n"
                "on_spine: whether the node's path is the spine's so far; the root's is."
            ),
            features=datasets.Features(
                {
                    "predictions": datasets.Value("int64"),
                    "references": datasets.Value("int64"),
                    "on_spine": datasets.Value("bool"),
                }
            ),
        )

    def _compute(
        self, predictions: Sequence[int], references: Sequence[int], on_spine: Sequence[bool]
    ) -> dict[str, float | int | None]:
        """Accuracy and number of nodes of each side; None where there are none."""
        found: dict[str, float | int | None] = {}
        for name, side in (("on_spine", True), ("off_spine", False)):
            hits = [
                predicted == token
                for predicted, token, stands in zip(predictions, references, on_spine, strict=True)
                if stands == side
            ]
            found[name] = sum(hits) / len(hits) if hits else None
            found[f"{name}_nodes"] = len(hits)
        return found
