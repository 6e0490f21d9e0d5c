"""Acceptance length τ as a metric."""

from __future__ import annotations

from collections.abc import Sequence

import datasets
import evaluate


class AcceptanceLength(evaluate.Metric):
    """Tokens committed per drafted round, the target's own token included."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=(
                "Acceptance length τ of speculative decoding: tokens committed per drafted round, the target's own "
                "token included, so 1 is plain decoding."
            ),
            citation="",
            inputs_description=(
                "committed: tokens committed in each response's drafted rounds, after truncation.\n"
                "rounds: drafted rounds of each response."
            ),
            features=datasets.Features({"committed": datasets.Value("int64"), "rounds": datasets.Value("int64")}),
        )

    def _compute(self, committed: Sequence[int], rounds: Sequence[int]) -> dict[str, float]:
        """`acceptance_length` pools all rounds; `tau_per_response` is the mean of the responses' own τ."""
        ratios = [tokens / count for tokens, count in zip(committed, rounds, strict=True) if count]
        return {
            "acceptance_length": sum(committed) / sum(rounds) if sum(rounds) else 0.0,
            "tau_per_response": sum(ratios) / len(ratios) if ratios else 0.0,
        }
