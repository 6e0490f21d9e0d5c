"""What a TreeFlash draft costs and yields by the number M of parents a depth, on this machine.

    python examples/draft_time.py --work build/embedded      # reads WORK/continuations_held_out

Prints, for M = 1 … 32 and the plain slots, the median milliseconds of `propose` behind some hundred tokens and
the acceptance length of trees of 16 and 64 nodes on text of the target.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import hf_treespec
from hf_treespec.training.acceptance import acceptance_lengths
from hf_treespec.training.continuations import load_continuations

PARENTS = (1, 2, 4, 8, 16, 32)
PROMPT_LENGTH = 128


def propose_ms(drafter: Any, target: Any, input_ids: torch.Tensor, budget: int, repeats: int) -> float:
    """Median milliseconds of a draft over the rounds of some generations."""
    times = []
    view = drafter.with_options(budget=budget, shape="tree")
    for seed in range(repeats):
        torch.manual_seed(seed)
        target.generate(input_ids, assistant_model=view, do_sample=True, temperature=0.8, top_k=0, max_new_tokens=96)
        times.append(view.last_report.stage_ms["propose"])
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder with the continuations of train_embedded.py")
    parser.add_argument("--drafter", help="folder of a TreeFlash drafter; the embedded one by default")
    parser.add_argument("--sequences", type=int, default=16, help="held-out sequences the acceptance is measured on")
    parser.add_argument("--repeats", type=int, default=5, help="generations that are timed")
    arguments = parser.parse_args()
    target, drafter, _ = hf_treespec.embedded.load(family="dflash" if arguments.drafter else "treeflash")
    if arguments.drafter:
        drafter = hf_treespec.AutoDrafter.from_pretrained(arguments.drafter, dtype=torch.float32)
    sequences = torch.from_numpy(load_continuations(arguments.work / "continuations_held_out").astype("int64"))
    sequences = sequences[: arguments.sequences]
    table = Table("M", "candidates", "propose ms", "tau 16", "tau 64", title="A TreeFlash draft", title_justify="left")
    rows: list[tuple[str, Any, int | None]] = [("plain slots", drafter.backbone, None)]
    for candidates in (64, None):
        rows += [(str(parents), drafter, candidates) for parents in PARENTS]
    timed: dict[int, list[float]] = {index: [] for index in range(len(rows))}
    console = Console()
    for _ in track(range(arguments.repeats), "timing", console=console):
        for index, (name, view, candidates) in enumerate(rows):
            configure(drafter, name, candidates)
            timed[index].append(propose_ms(view, target, sequences[:1, :PROMPT_LENGTH], 16, 1))
    for index, (name, view, candidates) in enumerate(track(rows, "acceptance", console=console)):
        configure(drafter, name, candidates)
        tau = acceptance_lengths(view, target, sequences, PROMPT_LENGTH, tree_nodes=(16, 64))
        table.add_row(
            name,
            "" if name == "plain slots" else str(candidates or "all"),
            f"{statistics.median(timed[index]):.2f}",
            f"{tau['tau_tree_16']:.2f}",
            f"{tau['tau_tree_64']:.2f}",
        )
    console.print(table)


def configure(drafter: Any, name: str, candidates: int | None) -> None:
    """Sets M and C of a drafter; plain slots have none."""
    if name.isdigit():
        drafter.config.num_parents, drafter.config.head_candidates = int(name), candidates or 64
        drafter.config.head = "candidates" if candidates else "full"


if __name__ == "__main__":
    main()
