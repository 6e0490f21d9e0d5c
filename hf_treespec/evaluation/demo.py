"""The demo: the embedded pair writes Python, next to plain decoding, and both are compared and timed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from .. import embedded
from ..drafters.base import BlockDrafter
from .collected_warnings import CollectedWarnings
from .demo_prompts import PROMPTS, SEEDS
from .encoding import encode_text
from .environment import software, usable_cores
from .measurement import (
    REPETITION_LIMIT,
    ArmResult,
    acceptance_length,
    pool,
    repeated_ngrams,
    tokens_per_second,
)
from .tables import fit_columns, hidden_columns_note
from .timing import timed_generate

#: Sampling over the whole vocabulary, and greedy decoding kept from looping.
REGIMES: dict[str, dict[str, Any]] = {
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0},
    "greedy": {"do_sample": False, "repetition_penalty": 1.2},
}
TITLES = {"sampled": "sampling at temperature 0.8", "greedy": "greedy, repetition penalty 1.2"}

#: What the ways of decoding are called.
ARMS = {"plain": "plain", "tree": "draft tree", "chain": "draft chain", "lookup": "prompt lookup"}
#: Columns of a table that stay, however narrow the console.
_KEPT_COLUMNS = 3


@dataclass
class PromptResult:
    """Everything measured on one prompt."""

    name: str
    arms: dict[str, ArmResult]
    repeated_4grams: float

    def identical(self, *arms: str) -> bool:
        """Whether every call of some arms gave the very tokens of plain decoding."""
        expected = self.arms["plain"].sequence
        return all(torch.equal(expected, call.sequence) for arm in arms for call in self.arms[arm].calls)


def summarise(results: Sequence[PromptResult]) -> dict[str, Any]:
    """What the JSON says about some prompts together, or about one."""

    def ratio(numerator: float | None, denominator: float | None) -> float | None:
        return numerator / denominator if numerator and denominator else None

    speeds = {arm: tokens_per_second(result.arms[arm] for result in results) for arm in results[0].arms}
    seconds = {arm: sum(result.arms[arm].seconds for result in results) for arm in results[0].arms}
    reports = [report for result in results for report in result.arms["tree"].reports]
    return {
        "identical": all(result.identical("tree", "chain") for result in results),
        "speedup": ratio(speeds["tree"], speeds["plain"]),
        "end_to_end_speedup": ratio(seconds["plain"], seconds["tree"]),
        "chain_speedup": ratio(speeds["chain"], speeds["plain"]),
        "lookup_speedup": ratio(speeds["lookup"], speeds["plain"]),
        "acceptance_length": acceptance_length(reports),
        "chain_acceptance_length": acceptance_length(
            report for result in results for report in result.arms["chain"].reports
        ),
        "tokens_per_second": speeds["tree"],
        "plain_tokens_per_second": speeds["plain"],
        "target_forwards": sum(result.arms["tree"].reports[0].target_forwards for result in results),
        "stage_ms": pool(reports).stage_ms,
    }


@dataclass(frozen=True)
class Demo:
    """The embedded pair and what is to be measured with it.

    Attributes:
        target: Embedded target.
        drafter: Its drafter.
        tokenizer: Their tokenizer.
        prompts: Names and texts.
        max_new_tokens: Most tokens to generate for each prompt.
        repeats: Times each arm runs on each prompt.
        seed: Added to every prompt's own seed.
        warnings: What this package warned of, by arm.
    """

    target: PreTrainedModel
    drafter: BlockDrafter
    tokenizer: PreTrainedTokenizerBase
    prompts: dict[str, str]
    max_new_tokens: int = 128
    repeats: int = 5
    seed: int = 0
    warnings: CollectedWarnings = field(default_factory=CollectedWarnings)

    def arms(self) -> dict[str, dict[str, Any]]:
        """The ways of decoding and what each adds to a `generate` call."""
        whole_block = self.drafter.drafted_depths + 1
        return {
            "plain": {},
            "tree": {"assistant_model": self.drafter},
            "chain": {"assistant_model": self.drafter.with_options(budget=whole_block, shape="chain")},
            "lookup": {"prompt_lookup_num_tokens": 10},
        }

    def inputs(self, text: str) -> dict[str, torch.Tensor]:
        """Model inputs of a prompt, led by the begin-of-text token as in training."""
        return encode_text(self.tokenizer, text, self.target.device)

    def stream(self, console: Console, count: int) -> None:
        """Writes the first prompts' continuations as they come, plain first, then with the drafter."""
        options = {**REGIMES["sampled"], "max_new_tokens": self.max_new_tokens}
        for name, text in list(self.prompts.items())[:count]:
            console.rule(f"[bold]{name}")
            console.print(text, style="dim", end="", markup=False, highlight=False)
            for title, style, arm in (("plain", "cyan", "plain"), ("with the drafter", "green", "tree")):
                console.print(f"── {title} ", style=f"bold {style}")
                torch.manual_seed(self.seed + SEEDS[name])
                streamer = _ConsoleStreamer(self.tokenizer, console, style)
                with self.warnings.of(ARMS[arm]):
                    self.target.generate(**self.inputs(text), **options, **self.arms()[arm], streamer=streamer)

    def measure(self, regime: str) -> Iterator[PromptResult]:
        """Runs every arm on every prompt, arms interleaved, and yields a result a prompt."""
        arms = self.arms()
        names = list(arms)
        options = {**REGIMES[regime], "max_new_tokens": self.max_new_tokens}
        for arm in names:
            with self.warnings.of(ARMS[arm]):
                timed_generate(self.target, self.inputs("import os\n"), seed=self.seed, **options, **arms[arm])
        for name, text in self.prompts.items():
            inputs = self.inputs(text)
            results = {arm: ArmResult() for arm in names}
            for repeat in range(self.repeats):
                # Each arm takes each place in turn, so that none always follows the same one.
                turn = repeat % len(names)
                for arm in names[turn:] + names[:turn]:
                    with self.warnings.of(ARMS[arm]):
                        call = timed_generate(
                            self.target, inputs, seed=self.seed + SEEDS[name], **options, **arms[arm]
                        )
                    results[arm].calls.append(call)
                    drafter = arms[arm].get("assistant_model")
                    if drafter is not None:
                        results[arm].reports.append(drafter.last_report)
            continuation = results["plain"].sequence[0, inputs["input_ids"].shape[1] :].tolist()
            yield PromptResult(name, results, repeated_ngrams(continuation))


class _ConsoleStreamer(TextStreamer):
    """Writes finished text to a rich console."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console, style: str) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.console = console
        self.style = style

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Writes a piece of text."""
        end = "\n" if stream_end else ""
        self.console.print(text, style=self.style, end=end, markup=False, highlight=False, soft_wrap=True)


def _number(value: float | None, pattern: str = "{:.2f}") -> str:
    return "–" if value is None else pattern.format(value)


def _cells(result: PromptResult) -> dict[str, str]:
    """What a table says of a prompt: the columns, what matters most first."""
    row = summarise([result])
    flagged = result.repeated_4grams > REPETITION_LIMIT
    return {
        "identical": "yes" if row["identical"] else "[bold red]no",
        "speed-up": _number(row["speedup"], "{:.2f}×"),
        "τ": _number(row["acceptance_length"]),
        "tok/s": _number(row["tokens_per_second"], "{:.0f}"),
        "plain": _number(row["plain_tokens_per_second"], "{:.0f}"),
        "repeated": f"[yellow]{result.repeated_4grams:.0%}" if flagged else f"{result.repeated_4grams:.0%}",
        "forwards": str(row["target_forwards"]),
    }


def prompt_table(console: Console, regime: str, results: Sequence[PromptResult]) -> Table:
    """A line a prompt, and as many columns as the console has room for."""
    cells = {result.name: _cells(result) for result in results}

    def table_of(columns: Sequence[str]) -> Table:
        title = f"{TITLES[regime][0].upper()}{TITLES[regime][1:]}"
        table = Table(title=title, title_justify="left", title_style="bold", caption_justify="left")
        table.add_column("prompt", no_wrap=True)
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
        for name, row in cells.items():
            table.add_row(name, *(row[column] for column in columns))
        return table

    table, hidden = fit_columns(console, list(next(iter(cells.values()))), table_of, _KEPT_COLUMNS)
    repetitive = [result.name for result in results if result.repeated_4grams > REPETITION_LIMIT]
    notes = [hidden_columns_note(hidden)] if hidden else []
    if repetitive:
        notes.append(f"4-grams repeat, and looping text is easy to draft: {', '.join(repetitive)}")
    table.caption = "\n".join(notes) or None
    return table


def pooled_table(regime: str, results: Sequence[PromptResult]) -> Table:
    """All prompts together: one line a way of decoding, and where a round's time goes."""
    pooled = summarise(results)
    stages = " · ".join(f"{stage} {milliseconds:.2f}" for stage, milliseconds in pooled["stage_ms"].items())
    table = Table(
        title=f"All prompts, {TITLES[regime]}", title_justify="left", title_style="bold", caption_justify="left"
    )
    table.caption = f"ms per round, draft tree: {stages}"
    table.add_column("", no_wrap=True)
    for column in ("identical", "tok/s", "speed-up", "with prefill", "τ"):
        table.add_column(column, justify="right")
    seconds = {arm: sum(result.arms[arm].seconds for result in results) for arm in ARMS}
    plain_speed = tokens_per_second(result.arms["plain"] for result in results)
    for arm, title in ARMS.items():
        speed = tokens_per_second(result.arms[arm] for result in results)
        drafted = arm in ("tree", "chain")
        same = all(result.identical(arm) for result in results)
        table.add_row(
            f"[bold]{title}" if arm == "tree" else title,
            ("yes" if same else "[bold red]no") if drafted else "",
            _number(speed, "{:.0f}"),
            _number(speed / plain_speed if speed and plain_speed else None, "{:.2f}×"),
            _number(seconds["plain"] / seconds[arm], "{:.2f}×"),
            _number(acceptance_length(report for result in results for report in result.arms[arm].reports))
            if drafted
            else "",
        )
    return table


def as_json(measured: dict[str, list[PromptResult]]) -> dict[str, Any]:
    """The sampled regime at the top level, the greedy one beside it."""
    sections = {
        regime: {
            "pooled": summarise(results),
            "prompts": [
                {"prompt": result.name, **summarise([result]), "repeated_4grams": result.repeated_4grams}
                for result in results
            ],
        }
        for regime, results in measured.items()
    }
    return {**sections["sampled"], "greedy": sections["greedy"], "environment": software()}


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_demo(
    console: Console,
    *,
    prompts: int | None = None,
    max_new_tokens: int = 128,
    repeats: int = 5,
    show: int = 2,
    threads: int = 2,
    seed: int = 0,
    family: str = "dflash",
    json_path: Path | None = None,
) -> bool:
    """Runs the demo on the embedded pair and prints what it finds.

    Args:
        console: Where to print.
        prompts: Number of prompts, from the first; all by default.
        max_new_tokens: Most tokens to generate for each.
        repeats: Times each arm runs on each prompt; medians are shown.
        show: Prompts whose continuations are streamed before anything is timed.
        threads: Threads torch computes with; no more than there are cores.
        seed: Added to every prompt's own seed.
        family: Which of the embedded drafters.
        json_path: File for the results.

    Returns:
        Whether every assisted output was the plain one, token for token.
    """
    chosen = dict(list(PROMPTS.items())[:prompts])
    cores = usable_cores()
    if threads > cores:
        # Threads that share a core wait for each other in every operator.
        console.print(f"Of {threads} threads only {cores} can run at once here: computing with {cores}.")
        threads = cores
    with _threads(threads):
        demo = Demo(*embedded.load(family=family), chosen, max_new_tokens=max_new_tokens, repeats=repeats, seed=seed)
        demo.stream(console, show)
        measured: dict[str, list[PromptResult]] = {}
        with Progress(console=console, transient=True) as progress:
            for regime in REGIMES:
                task = progress.add_task(f"measuring, {TITLES[regime]}", total=len(chosen))
                measured[regime] = []
                for result in demo.measure(regime):
                    measured[regime].append(result)
                    progress.advance(task)
        summary = as_json(measured)
    for regime, results in measured.items():
        console.print(prompt_table(console, regime, results))
        console.print(pooled_table(regime, results))
    console.print(
        "Speed-up is decode-only: tokens per second after the first token, against plain decoding, medians of "
        f"{repeats} interleaved repeats; tok/s are the draft tree's, beside plain decoding's. τ counts the tokens a "
        "drafted round commits, the target's own included; repeated are 4-grams that a text has had before. "
        "Prompt lookup is there for its speed: when sampling, its tokens are not plain decoding's.",
        style="dim",
    )
    for line in demo.warnings.lines():
        console.print(line, style="yellow", markup=False, highlight=False)
    if json_path is not None:
        json_path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary["pooled"]["identical"] and summary["greedy"]["pooled"]["identical"]
