"""Measurements with numbers chosen by hand."""

from __future__ import annotations

import torch

from hf_treespec.decoding.report import GenerationReport
from hf_treespec.evaluation.benchmark import Sample, Section
from hf_treespec.evaluation.measurement import ArmResult
from hf_treespec.evaluation.timing import TimedCall

TOKENS = 11


def report(rounds: int, committed: int, nodes: int) -> GenerationReport:
    return GenerationReport(
        rounds=rounds,
        target_forwards=rounds + 1,
        tokens=committed + 1,
        pairs=rounds,
        committed=committed,
        whole_pairs=rounds - 1,
        whole_committed=committed - 1,
        nodes=nodes,
        row_committed=[(committed, rounds)],
        stage_seconds={"verify": 0.5},
        decode_seconds=1.0,
    )


def arm(
    *seconds: float,
    sequence: torch.Tensor | None = None,
    reports: tuple[GenerationReport, ...] = (),
    forwards: int = 0,
) -> ArmResult:
    """An arm whose repeats took these times after the first of eleven tokens, and one second before it."""
    sequence = torch.arange(TOKENS)[None] if sequence is None else sequence
    calls = [
        TimedCall(sequence, TOKENS, time + 1.0, time, TOKENS - 1, deliveries=forwards or TOKENS) for time in seconds
    ]
    return ArmResult(calls, list(reports))


def sample(prompt: int, **arms: ArmResult) -> Sample:
    """A request; `tree_8` stands for `tree-8`."""
    inputs = {"input_ids": torch.zeros(1, 0, dtype=torch.long)}
    named = {name.replace("_", "-"): result for name, result in arms.items()}
    return Sample(prompt, inputs, 0, named, dict.fromkeys(named, ()))


def section(*samples: Sample) -> Section:
    return Section("made up", started=list(samples))
