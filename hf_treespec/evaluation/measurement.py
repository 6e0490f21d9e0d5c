"""Measurements of one way of decoding, and what they come to over several prompts."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch

from ..decoding.report import GenerationReport
from .timing import TimedCall

#: A plain continuation that repeats more of its 4-grams than this is marked: looping text is easy to draft.
REPETITION_LIMIT = 0.2


@dataclass
class ArmResult:
    """All repeats of one way of decoding on one request."""

    calls: list[TimedCall] = field(default_factory=list)
    reports: list[GenerationReport] = field(default_factory=list)

    @property
    def sequence(self) -> torch.Tensor:
        return self.calls[0].sequence

    @property
    def seconds(self) -> float:
        """Median over repeats, end to end."""
        return statistics.median(call.seconds for call in self.calls)

    @property
    def decode_seconds(self) -> float:
        """Median over repeats, from the first new token on."""
        return statistics.median(call.decode_seconds for call in self.calls)

    @property
    def new_tokens(self) -> int:
        return self.calls[0].new_tokens

    @property
    def decode_tokens(self) -> int:
        return self.calls[0].decode_tokens

    @property
    def peak_bytes(self) -> int | None:
        """Highest over repeats."""
        return max((call.peak_bytes for call in self.calls if call.peak_bytes is not None), default=None)


def tokens_per_second(results: Iterable[ArmResult]) -> float | None:
    """Decode-only tokens per second over some requests; None where nothing was decoded after the first token."""
    results = list(results)
    seconds = sum(result.decode_seconds for result in results)
    tokens = sum(result.decode_tokens for result in results)
    return tokens / seconds if tokens and seconds > 0 else None


def pool(reports: Iterable[GenerationReport]) -> GenerationReport:
    """One report of several calls, whose derived figures are theirs pooled over rounds.

    `tokens_per_forward` alone is not pooled by it, since the calls' rows become rows of one batch.
    """
    total = GenerationReport()
    for report in reports:
        for name in ("rounds", "plain_rounds", "target_forwards", "tokens", "pairs", "committed", "whole_pairs"):
            setattr(total, name, getattr(total, name) + getattr(report, name))
        total.whole_committed += report.whole_committed
        total.nodes += report.nodes
        total.riding_rows += report.riding_rows
        total.row_committed += report.row_committed
        depths = zip_longest(total.accepted_by_depth, report.accepted_by_depth, fillvalue=0)
        total.accepted_by_depth = [sum(counts) for counts in depths]
        total.decode_seconds += report.decode_seconds
        for stage, seconds in report.stage_seconds.items():
            total.stage_seconds[stage] = total.stage_seconds.get(stage, 0.0) + seconds
    return total


def acceptance_length(reports: Iterable[GenerationReport]) -> float | None:
    """Tokens committed per drafted round, pooled over rounds; None without a drafted round."""
    total = pool(reports)
    return total.acceptance_length if total.pairs else None


def repeated_ngrams(tokens: Sequence[int], n: int = 4) -> float:
    """Share of a sequence's n-grams that it has had before."""
    grams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
