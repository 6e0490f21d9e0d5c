"""The `distribution` command: text that a target writes, and how well drafters foresee it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafters.base import BlockDrafter
from ..drafters.dflash import DFlashDrafter
from ..drafters.flexdraft import FlexDraftDrafter
from ..training.continuations import sample_continuations
from .distribution import ENOUGH, measure
from .encoding import encode_turns
from .prompt_sets import PromptSet, load_prompt_set


def run_distribution(
    console: Console,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafters: Mapping[str, BlockDrafter],
    *,
    data: Sequence[str],
    prompts: int,
    prompt_length: int,
    new_tokens: int,
    temperature: float,
    nodes: int,
    stride: int,
    seed: int = 0,
    described: Mapping[str, Any] | None = None,
    json_path: Path | None = None,
    plots: Path | None = None,
) -> dict[str, Any]:
    """Lets the target write, measures every drafter on the same text, prints and stores the figures.

    Args:
        drafters: By the name they are shown under.
        prompts: Number of prompts of each kind.
        prompt_length: Tokens of each prompt that the target sees, its last ones; shorter prompts are left out.
        temperature: Of the text, and of the target's distributions.
        described: What else goes into the JSON.

    Raises:
        ValueError: No prompt is long enough, or a drafter does not fit.
    """
    if plots is not None:
        from .plots import plot_children, plot_coverage, plot_distances, save_figures
    for name, drafter in drafters.items():
        drafter.check_target(target)
        if not isinstance(drafter, (DFlashDrafter, FlexDraftDrafter)):
            raise ValueError(f"{name} is a {type(drafter).__name__}, whose distributions stand on no text alone.")
    sets = [load_prompt_set(name, prompts, seed) for name in data]
    rows = encode(sets, tokenizer, prompt_length).to(target.device)
    generator = torch.Generator(target.device).manual_seed(seed)
    with console.status("the target writes"):
        texts = sample_continuations(target, rows, new_tokens, temperature=temperature, generator=generator)
    found: dict[str, Any] = {}
    for name, drafter in drafters.items():
        with console.status(f"measuring {name}"):
            found[name] = measure(
                drafter, target, texts, prompt_length, temperature=temperature, nodes=nodes, stride=stride
            ).to_dict()
    for name, figures in found.items():
        # A name may be a long path: as a table's title it would be broken at the table's width.
        console.print(name, highlight=False, soft_wrap=True)
        console.print(depth_table(figures))
        console.print(child_table(figures))
    report = {
        **(described or {}),
        "data": list(data),
        "texts": len(texts),
        "prompt_length": prompt_length,
        "new_tokens": new_tokens,
        "temperature": temperature,
        "stride": stride,
        "seed": seed,
        "drafters": found,
    }
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if plots is not None:
        sides = {
            name: {
                side.replace("_", " "): (child[side]["accuracy"], child[side]["events"])
                for side in ("on_spine", "off_spine")
            }
            for name, child in ((name, figures["child_accuracy"]) for name, figures in found.items())
        }
        figures_by_file = {
            "distance": plot_distances({name: figures["total_variation"] for name, figures in found.items()}),
            "coverage": plot_coverage({name: figures["coverage"] for name, figures in found.items()}),
            "children": plot_children(sides),
        }
        save_figures(figures_by_file, plots)
    return report


def encode(sets: Sequence[PromptSet], tokenizer: PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    """The last `length` tokens of each prompt's first turn, long `[n, length]`.

    Raises:
        ValueError: All prompts are shorter.
    """
    rows = []
    for one in sets:
        for turns in one.prompts:
            ids = encode_turns(tokenizer, turns[:1], [], chat=one.chat)["input_ids"][0]
            if len(ids) >= length:
                rows.append(ids[-length:])
    if not rows:
        raise ValueError(f"no prompt has {length} tokens; give longer ones or a shorter prompt_length.")
    return torch.stack(rows)


def depth_table(figures: Mapping[str, Any]) -> Table:
    """Distance and coverages by depth."""
    table = Table(title=f"{figures['blocks']} blocks", title_justify="left")
    table.add_column("depth", justify="right")
    table.add_column("distance to the target", justify="right")
    for rank in figures["coverage"]:
        table.add_column(f"covered by {rank} best", justify="right")
    for depth, distance in enumerate(figures["total_variation"]):
        covered = (f"{values[depth]:.3f}" for values in figures["coverage"].values())
        table.add_row(str(depth + 1), f"{distance:.3f}", *covered)
    return table


def child_table(figures: Mapping[str, Any]) -> Table:
    """Best children on and off the spine."""
    child = figures["child_accuracy"]
    table = Table(title=f"Best children in trees of {child['nodes']} nodes", title_justify="left")
    for column in ("where", "nodes", "accuracy", "of the marginals there", "dead ends"):
        table.add_column(column, justify="left" if column == "where" else "right")
    for side in ("on_spine", "off_spine"):
        row = child[side]
        accuracies = [
            "–" if value is None else f"{value:.3f}" for value in (row["accuracy"], row["marginal_accuracy"])
        ]
        few = f" (fewer than {ENOUGH})" if row["events"] < ENOUGH else ""
        table.add_row(side.replace("_", " "), f"{row['events']}{few}", *accuracies, str(row["dead_ends"]))
    return table
