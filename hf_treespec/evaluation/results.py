"""What a benchmark comes to: the JSON, the tables and the rows of a CSV."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..drafters.fingerprint import weights_fingerprint
from . import environment
from .arms import tree_nodes
from .benchmark import Benchmark, Sample, Section
from .bootstrap import Speedup, paired_speedup
from .measurement import REPETITION_LIMIT, ArmResult, pool, tokens_per_second
from .oracle import cross_fitted_budgets
from .tables import fit_columns, hidden_columns_note

#: What is said of every arm; null where it does not apply.
ARM_KEYS = (
    "arm",
    "speedup",
    "speedup_ci95",
    "end_to_end_speedup",
    "auto_over",
    "auto_over_ci95",
    "acceptance_length",
    "tau_untruncated",
    "tau_per_response",
    "tokens_per_forward",
    "tokens_per_second",
    "request_seconds",
    "mean_nodes",
    "mean_rows",
    "greedy_match",
    "ties",
    "mismatches",
    "peak_bytes",
    "ms_per_round",
    "skipped",
)

#: Arms that decide by themselves. The first that was measured is held against every arm, prompt by prompt: what makes
#: a prompt hard cancels, so that this interval is far narrower than those of two speed-ups.
_DECIDING = ("auto", "flex-auto")
#: Keys of a pair of numbers, which a CSV has two columns for.
_INTERVALS = {"speedup_ci95": "speedup", "auto_over_ci95": "auto_over"}

#: Columns of a table that stay, however narrow the console: speed-up, τ and tokens a second.
_KEPT_COLUMNS = 3


def as_json(benchmark: Benchmark, **described: Any) -> dict[str, Any]:
    """All results. `described` joins the environment: names of the models and of what was asked for."""
    settings = benchmark.settings
    device = benchmark.target.device
    return {
        "environment": {
            "date": environment.now(),
            "commit": environment.commit(),
            "command": environment.command(),
            **environment.software(),
            "device": str(device),
            "hardware": environment.hardware(device),
            "dtype": str(benchmark.target.dtype).removeprefix("torch."),
            "drafter_dtype": str(benchmark.drafter.dtype).removeprefix("torch."),
            "drafter_family": benchmark.drafter.config.model_type.removeprefix("treespec_"),
            "drafter_fingerprint": weights_fingerprint(benchmark.drafter),
            "block_size": getattr(benchmark.drafter.config, "block_size", None),
            "max_new_tokens": settings.max_new_tokens,
            "repeats": settings.repeats,
            "seed": settings.seed,
            "generation": settings.generation,
            **described,
        },
        "partial": benchmark.partial,
        "datasets": [
            {"dataset": section.name, **_section(section, benchmark.names, settings.seed)}
            for section in benchmark.datasets
        ],
        "batches": [
            {"batch": section.batch, **_section(section, benchmark.names, settings.seed)}
            for section in benchmark.batches
        ],
    }


def _section(section: Section, names: list[str], seed: int) -> dict[str, Any]:
    samples, source = section.samples, section.source
    return {
        "source": source and {"path": source.path, "config": source.config, "split": source.split},
        "prompts": len({sample.prompt for sample in samples}),
        "requests": len(samples),
        "tokens": sum(sample.arms["plain"].new_tokens for sample in samples),
        "repeated_4grams": sum(sample.repeated_4grams for sample in samples) / len(samples) if samples else None,
        "notes": list(section.notes),
        "arms": [summarise_arm(section, name, seed) for name in names],
    }


def summarise_arm(section: Section, name: str, seed: int = 0) -> dict[str, Any]:
    """What the JSON says of one arm in one section."""
    row: dict[str, Any] = dict.fromkeys(ARM_KEYS)
    row |= {"arm": name, "ms_per_round": {}}
    samples = section.samples
    if name in section.skipped:
        return row | {"skipped": section.skipped[name]}
    if not samples:
        return row | {"skipped": "nothing was measured"}
    if name != "oracle":
        return row | _measured(samples, lambda sample: name, seed)
    chosen = cross_fitted_budgets(samples)
    if chosen is None:
        return row | {"skipped": "needs tree-N arms and at least two prompts, to choose on one half of them"}
    budgets = sorted({tree_nodes(arm) or 0 for arm in chosen.values()})
    return row | _measured(samples, lambda sample: chosen[sample.prompt], seed) | {"oracle_budgets": budgets}


def _measured(samples: list[Sample], arm_of: Callable[[Sample], str], seed: int) -> dict[str, Any]:
    results = [sample.arms[arm_of(sample)] for sample in samples]

    def of(name: str) -> list[ArmResult]:
        return [sample.arms[name] for sample in samples]

    def faster(arm: list[ArmResult], than: list[ArmResult], time: str, tokens: str) -> Speedup:
        columns = [[getattr(result, field) for result in side] for side in (than, arm) for field in (time, tokens)]
        return paired_speedup(*(_by_prompt(samples, column) for column in columns), seed=seed)

    decoding = ("decode_seconds", "decode_tokens")
    decode, whole = faster(results, of("plain"), *decoding), faster(results, of("plain"), "seconds", "new_tokens")
    deciding = next((name for name in _DECIDING if name in samples[0].arms), None)
    ahead = faster(of(deciding), results, *decoding) if deciding else Speedup(None, None)
    judged = [(sample, sample.differences[arm]) for sample in samples if (arm := arm_of(sample)) in sample.differences]
    differences = [difference for _, found in judged for difference in found]
    rows = sum(sample.rows for sample, _ in judged)
    peaks = [result.peak_bytes for result in results if result.peak_bytes is not None]
    return {
        "speedup": decode.value,
        "speedup_ci95": list(decode.interval) if decode.interval else None,
        "end_to_end_speedup": whole.value,
        "auto_over": ahead.value,
        "auto_over_ci95": list(ahead.interval) if ahead.interval else None,
        "tokens_per_second": tokens_per_second(results),
        "request_seconds": statistics.median(result.seconds for result in results),
        "greedy_match": 1 - len(differences) / rows if judged else None,
        "ties": sum(difference.verdict == "tie" for difference in differences) if judged else None,
        "mismatches": sum(difference.verdict == "bug" for difference in differences) if judged else None,
        "peak_bytes": max(peaks, default=None),
        **_acceptance(samples, arm_of),
    }


def _by_prompt(samples: Sequence[Sample], values: Sequence[float]) -> list[float]:
    """Sums of what each sample has, over the samples of each prompt."""
    sums = dict.fromkeys((sample.prompt for sample in samples), 0.0)
    for sample, value in zip(samples, values, strict=True):
        sums[sample.prompt] += value
    return list(sums.values())


def _acceptance(samples: list[Sample], arm_of: Callable[[Sample], str]) -> dict[str, Any]:
    """What the calls' reports say; for transformers' own loops, what the number of their forwards says."""
    results = [sample.arms[arm_of(sample)] for sample in samples]
    reports = [report for result in results for report in result.reports]
    if reports:
        total = pool(reports)
        forwards = sum(report.target_forwards * max(1, len(report.row_committed)) for report in reports)
        figures = {"tokens_per_forward": total.tokens / forwards if forwards else None, "ms_per_round": total.stage_ms}
        names = ("acceptance_length", "tau_untruncated", "tau_per_response", "mean_nodes", "mean_rows")
        return figures | {name: getattr(total, name) for name in names if total.pairs}
    calls = [(sample.rows, call) for sample in samples for call in sample.arms[arm_of(sample)].calls]
    forwards = sum(rows * call.deliveries for rows, call in calls)
    tokens = sum(call.new_tokens for _, call in calls)
    figures = {"tokens_per_forward": tokens / forwards if forwards else None}
    if arm_of(samples[0]) == "stock-chain":
        # Its first forward is the prefill and drafts nothing, every other one verifies a chain.
        rounds = forwards - len(calls)
        figures["acceptance_length"] = sum(call.decode_tokens for _, call in calls) / rounds if rounds else None
    return figures


def identical(report: Mapping[str, Any], arms: Mapping[str, Any]) -> bool:
    """Whether every arm of this library gave plain decoding's tokens, rounding ties apart."""
    ours = {name for name, arm in arms.items() if arm.drafter is not None and arm.exact}
    return not any(
        row["mismatches"]
        for section in (*report["datasets"], *report["batches"])
        for row in section["arms"]
        if row["arm"] in ours
    )


def _format(value: float | None, pattern: str) -> str:
    return "–" if value is None else pattern.format(value)


def _interval(ends: Sequence[float] | None) -> str:
    return "–" if ends is None else f"{ends[0]:.2f}–{ends[1]:.2f}"


def _cells(row: Mapping[str, Any], on_gpu: bool) -> dict[str, str]:
    """What a table says of a measured arm: the columns, what matters most first."""
    match = _format(row["greedy_match"], "{:.0%}") + (f", {row['ties']} ties" if row["ties"] else "")
    peak = {"peak GB": _format(row["peak_bytes"] and row["peak_bytes"] / 1e9, "{:.1f}")} if on_gpu else {}
    over = {}
    if row["auto_over"] is not None:
        over["auto over it"] = f"{row['auto_over']:.2f} ({_interval(row['auto_over_ci95'])})"
    return {
        "speed-up": _format(row["speedup"], "{:.2f}×"),
        "τ": _format(row["acceptance_length"], "{:.2f}"),
        "tok/s": _format(row["tokens_per_second"], "{:.0f}"),
        "identical": f"[bold red]{match}, {row['mismatches']} differ[/]" if row["mismatches"] else match,
        "95 % interval": _interval(row["speedup_ci95"]),
        "nodes": _format(row["mean_nodes"], "{:.1f}"),
        **peak,
        **over,
        "with prefill": _format(row["end_to_end_speedup"], "{:.2f}×"),
        "tok/forward": _format(row["tokens_per_forward"], "{:.2f}"),
    }


def section_table(console: Console, title: str, section: Mapping[str, Any]) -> Table:
    """A line an arm, the fastest in bold, and as many columns as the console has room for."""
    measured = [row for row in section["arms"] if row["skipped"] is None]
    on_gpu = any(row["peak_bytes"] for row in measured)
    cells = {row["arm"]: _cells(row, on_gpu) for row in measured}
    columns = list(next(iter(cells.values()), {}))
    fastest = max((row["speedup"] or 0.0 for row in measured), default=0.0)

    def table_of(columns: Sequence[str]) -> Table:
        table = Table(title=escape(title), title_justify="left", title_style="bold", caption_justify="left")
        table.add_column("arm", no_wrap=True)
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
        for row in measured:
            values = (cells[row["arm"]][column] for column in columns)
            table.add_row(row["arm"], *values, style="bold" if row["speedup"] == fastest else None)
        return table

    table, hidden = fit_columns(console, columns, table_of, _KEPT_COLUMNS)
    notes = [f"{row['arm']} skipped: {row['skipped']}" for row in section["arms"] if row["skipped"] is not None]
    notes += section["notes"]
    notes += [
        f"{row['arm']} chose N = {' and '.join(map(str, row['oracle_budgets']))}"
        for row in measured
        if "oracle_budgets" in row
    ]
    if (section["repeated_4grams"] or 0.0) > REPETITION_LIMIT:
        notes.append(f"{section['repeated_4grams']:.0%} of the text's 4-grams repeat: looping text is easy to draft")
    if hidden:
        notes.append(hidden_columns_note(hidden))
    table.caption = escape("\n".join(notes)) or None
    return table


_ENVIRONMENT_COLUMNS = (
    "date",
    "hf_treespec",
    "commit",
    "hardware",
    "threads",
    "dtype",
    "torch",
    "transformers",
    "target",
    "drafter",
    "max_new_tokens",
    "temperature",
    "repeats",
    "seed",
)
CSV_COLUMNS = (
    *_ENVIRONMENT_COLUMNS,
    "partial",
    "dataset",
    "batch",
    "prompts",
    "tokens",
    "arm",
    *(key for key in ARM_KEYS if key not in ("arm", "ms_per_round", *_INTERVALS)),
    *(f"{name}_{end}" for name in _INTERVALS.values() for end in ("low", "high")),
)


def check_csv(path: Path) -> None:
    """Checks that rows can be appended to a file.

    Raises:
        ValueError: It has other columns.
    """
    if path.is_file() and path.stat().st_size:
        with path.open(encoding="utf-8", newline="") as file:
            if tuple(next(csv.reader(file))) != CSV_COLUMNS:
                raise ValueError(f"{path} has other columns than this version writes; give a new file.")


def append_csv(report: Mapping[str, Any], path: Path) -> None:
    """Appends a row for each arm of each section to a file, which is begun with a header."""
    check_csv(path)
    known = {name: report["environment"].get(name) for name in _ENVIRONMENT_COLUMNS} | {"partial": report["partial"]}
    begun = path.is_file() and path.stat().st_size > 0
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, CSV_COLUMNS, extrasaction="ignore")
        if not begun:
            writer.writeheader()
        for section in (*report["datasets"], *report["batches"]):
            place = {"batch": 1, **{name: section[name] for name in section if name != "arms"}}
            for row in section["arms"]:
                ends = {
                    f"{name}_{end}": value
                    for key, name in _INTERVALS.items()
                    for end, value in zip(("low", "high"), row[key] or (None, None), strict=True)
                }
                writer.writerow({**known, **place, **row, **ends})
