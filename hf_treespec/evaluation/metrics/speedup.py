"""Speed-up over plain decoding as a metric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from ..bootstrap import paired_speedup


class Speedup(evaluate.Metric):
    """Plain decoding's time per token over another way's, pooled over prompts, with its interval."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=(
                "Decode-only speed-up: plain decoding's time per token over another way's, pooled over prompts, with "
                "a 95 % interval by a paired bootstrap over prompts."
            ),
            citation="",
            inputs_description=(
                "seconds, tokens: time after the first token and tokens generated in it, for each prompt.\n"
                "plain_seconds, plain_tokens: the same of plain decoding.\n"
                "seed: of the resampling."
            ),
            features=datasets.Features(
                {
                    "seconds": datasets.Value("float64"),
                    "tokens": datasets.Value("int64"),
                    "plain_seconds": datasets.Value("float64"),
                    "plain_tokens": datasets.Value("int64"),
                }
            ),
        )

    def _compute(
        self,
        seconds: Sequence[float],
        tokens: Sequence[int],
        plain_seconds: Sequence[float],
        plain_tokens: Sequence[int],
        seed: int = 0,
    ) -> dict[str, Any]:
        value, interval = paired_speedup(plain_seconds, plain_tokens, seconds, tokens, seed=seed)
        return {"speedup": value, "speedup_ci95": interval}
