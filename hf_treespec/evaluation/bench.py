"""The `bench` command: loads, measures, prints and writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafters.base import BlockDrafter
from .arms import tree_nodes
from .benchmark import Benchmark, Settings
from .prompt_sets import load_prompt_set
from .results import append_csv, as_json, check_csv, identical, section_table


def run_bench(
    console: Console,
    pair: tuple[PreTrainedModel, BlockDrafter, PreTrainedTokenizerBase],
    *,
    data: Sequence[str],
    arms: Sequence[str],
    settings: Settings,
    prompts: int | None = None,
    batch_sizes: Sequence[int] = (),
    beside: Mapping[str, BlockDrafter] | None = None,
    described: dict[str, Any] | None = None,
    json_path: Path | None = None,
    csv_path: Path | None = None,
    plots: Path | None = None,
) -> bool:
    """Measures arms on prompts, prints a table for each kind of prompt and writes what is asked for.

    Args:
        console: Where to print.
        pair: Target, drafter, tokenizer.
        data: Names of prompt sets, see `load_prompt_set`.
        arms: Names of arms, see `arms.ARMS`.
        settings: How requests are decoded.
        prompts: Number of prompts of each set; all by default.
        batch_sizes: Batch sizes to measure besides.
        beside: Further drafters by name, whose arms are `ARM@NAME`.
        described: What to add to the environment in all outputs.
        json_path: File for the results.
        csv_path: File to append a row for each arm to.
        plots: Folder for figures.

    Returns:
        Whether every output of this library was plain decoding's, rounding ties apart.

    Raises:
        ImportError: A library that is asked for is not installed.
        KeyboardInterrupt: The run was interrupted; what was measured has been printed and written.
        ValueError: An arm, a prompt set or a file cannot be used.
    """
    # What can be refused is refused before anything is measured.
    if csv_path is not None:
        check_csv(csv_path)
    if plots is not None:
        from .plots import write_plots
    sets = [load_prompt_set(name, prompts, settings.seed) for name in data]
    benchmark = Benchmark(*pair, sets, arms, settings, batch_sizes, beside)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("warming up", total=benchmark.steps)
        benchmark.run(lambda section: progress.update(task, advance=1, description=section))
    report = as_json(benchmark, **(described or {}))
    knowledge = last_knowledge(benchmark)
    report["surrogate"] = {name: knowledge.get(name) for name in ("accepted_over_expected", "correlation")}
    for section in report["datasets"]:
        if section["prompts"] or not benchmark.partial:
            console.print(section_table(console, f"{section['dataset']}, {section['prompts']} prompts", section))
    for section in report["batches"]:
        console.print(section_table(console, f"batch {section['batch']}, {section['prompts']} batches", section))
    console.print(_legend(settings), style="dim", highlight=False)
    for line in benchmark.warnings.lines():
        console.print(line, style="yellow", markup=False, highlight=False)
    if knowledge.get("correlation") is not None:
        console.print(_foresight(**report["surrogate"]), style="dim", highlight=False)
    if benchmark.partial:
        console.print("Interrupted: only what had been measured is shown.", style="bold yellow")
    same = identical(report, benchmark.arms)
    if not same:
        console.print("Some output differs from plain decoding, and not by a rounding tie.", style="bold red")
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if csv_path is not None:
        append_csv(report, csv_path)
    if plots is not None:
        write_plots(
            report,
            plots,
            predicted_ms={int(nodes): ms for nodes, ms in knowledge.get("verify_ms", {}).items()},
            histories=nodes_histories(benchmark),
            reliability=knowledge.get("reliability"),
        )
    if benchmark.partial:
        raise KeyboardInterrupt
    return same


def nodes_histories(benchmark: Benchmark) -> dict[str, list[int]]:
    """Rows verified in each round of the first request, for the arms that choose how many and report it."""
    samples = next((section.samples for section in benchmark.datasets if section.samples), [])
    histories: dict[str, list[int]] = {}
    for name, result in samples[0].arms.items() if samples else ():
        history = getattr(result.reports[0], "nodes_history", None) if result.reports else None
        if history and tree_nodes(name) is None:
            histories[name] = list(history)
    return histories


def last_knowledge(benchmark: Benchmark) -> dict[str, Any]:
    """What the `auto` arm's policy knew after its last call; empty where that arm did not run."""
    for section in reversed(benchmark.datasets):
        for sample in reversed(section.samples):
            reports = sample.arms["auto"].reports if "auto" in sample.arms else []
            if reports:
                return reports[-1].budget
    return {}


def _foresight(accepted_over_expected: float, correlation: float) -> str:
    return (
        f"`auto` committed {accepted_over_expected:.0%} of the tokens that it expected of its drafted rounds; "
        f"expected and committed tokens of a round correlate by {correlation:.2f}."
    )


def _legend(settings: Settings) -> str:
    return (
        "Speed-up is decode-only: time per token after the first, plain decoding's over the arm's, pooled over "
        f"prompts; medians of {settings.repeats} interleaved repeats, interval by a paired bootstrap over prompts. "
        "τ counts the tokens a drafted round commits, the target's own included; nodes are rows verified in it, the "
        "root included. Auto over it: how much faster the arm that decides by itself is than this one, with a paired "
        f"interval. {torch.get_num_threads()} CPU threads."
    )
