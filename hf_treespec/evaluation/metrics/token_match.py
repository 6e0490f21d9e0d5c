"""Equality with plain decoding as a metric."""

from __future__ import annotations

from collections.abc import Sequence

import datasets
import evaluate


class TokenMatch(evaluate.Metric):
    """Share of outputs that are plain decoding's, token for token."""

    def _info(self) -> evaluate.MetricInfo:
        tokens = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description="Share of outputs that are plain decoding's, token for token.",
            citation="",
            inputs_description=(
                "predictions: token ids of each output.\nreferences: token ids that plain decoding gives."
            ),
            features=datasets.Features({"predictions": tokens, "references": tokens}),
        )

    def _compute(self, predictions: Sequence[Sequence[int]], references: Sequence[Sequence[int]]) -> dict[str, float]:
        """`token_match`, and the mean number of leading tokens that agree."""
        pairs = list(zip(predictions, references, strict=True))
        equal = [list(predicted) == list(expected) for predicted, expected in pairs]
        agreeing = [
            next((place for place, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair)))
            for pair in pairs
        ]
        return {"token_match": sum(equal) / len(pairs), "common_prefix": sum(agreeing) / len(pairs)}
