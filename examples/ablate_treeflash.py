r"""What each choice in a TreeFlash head is worth: short equal training runs, and one table.

    python examples/ablate_treeflash.py --work build/ablation --continuations build/treeflash/continuations_train \
        --held-out build/treeflash/continuations_held_out

Every variant starts from the embedded DFlash drafter and sees the same text in the same order. Folders of finished
variants are kept: a stopped run goes on. The table comes to lie in `WORK/ablation.json` and `WORK/ablation.md`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from hf_treespec import embedded
from hf_treespec.drafters.treeflash import TreeFlashDrafter
from hf_treespec.training.acceptance import acceptance_lengths
from hf_treespec.training.continuations import load_continuations
from hf_treespec.training.distillation import RunSettings
from hf_treespec.training.treeflash import TreeFlashObjective, train_treeflash

SEED = 0
PROMPT_LENGTH = 128
TEMPERATURE = 0.8
TREE_NODES = (16, 64)
PARENTS = (2, 4, 8, 16, 32)
TEMPERATURES = (0.7, 1.0, 1.4)

#: What differs from a SwiGLU head trained alone, on the forward KL, with early tokens weighted most.
VARIANTS: dict[str, dict[str, Any]] = {
    "as trained": {},
    "linear head": {"head": "linear"},
    "cross-entropy": {"loss": "ce"},
    "backbone tuned too": {"freeze_backbone": False, "learning_rate": 5e-3},
    "all tokens weighted alike": {"gamma": None},
}
FIGURES = {"tau_chain": "chain", "tau_tree_16": "tree of 16", "tau_tree_64": "tree of 64", "tvd": "distance"}


def train(
    name: str,
    target: PreTrainedModel,
    base: Any,
    written: np.ndarray,
    held_out: np.ndarray,
    work: Path,
    run: dict[str, int],
) -> dict[str, float]:
    """Trains one variant, or reads what it came to."""
    folder = work / name.replace(" ", "-")
    done = folder / "metrics.json"
    if not done.exists():
        options = {"learning_rate": 1.5e-2, **VARIANTS[name]}
        torch.manual_seed(SEED)
        drafter = TreeFlashDrafter.from_dflash(base, ar_approximation=options.pop("head", "swiglu"))
        metrics = train_treeflash(
            drafter,
            target,
            written,
            held_out,
            folder / "run",
            temperature=TEMPERATURE,
            prompt_length=PROMPT_LENGTH,
            tree_nodes=TREE_NODES,
            optimizer="muon",
            save_steps=run["max_steps"],
            seed=SEED,
            **run,
            **options,
        )
        done.write_text(json.dumps({name.removeprefix("eval_"): value for name, value in metrics.items()}))
    found: dict[str, float] = json.loads(done.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for everything the run writes")
    parser.add_argument("--continuations", type=Path, required=True, help="what train_treeflash.py wrote to train on")
    parser.add_argument("--held-out", type=Path, required=True, help="what it wrote to measure on")
    parser.add_argument("--held-out-sequences", type=int, default=32)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch-size", type=int, default=2, help="sequences a step")
    parser.add_argument("--anchors", type=int, default=48, help="blocks drawn from a sequence")
    arguments = parser.parse_args()
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    run = {"max_steps": arguments.steps, "batch_size": arguments.batch_size, "anchors": arguments.anchors}
    written = load_continuations(arguments.continuations)
    held_out = load_continuations(arguments.held_out)[: arguments.held_out_sequences]
    sequences = torch.from_numpy(held_out.astype(np.int64))

    target, base, _ = embedded.load(torch.float32, family="dflash")
    plain = TreeFlashObjective(TreeFlashDrafter.from_dflash(base), target, temperature=TEMPERATURE)
    rows: dict[str, dict[str, float]] = {
        "no head": plain.measure(sequences, RunSettings(PROMPT_LENGTH, tree_nodes=TREE_NODES))
    }
    for name in VARIANTS:
        # The backbone may be trained, so that every variant gets its own.
        _, base, _ = embedded.load(torch.float32, family="dflash")
        rows[name] = train(name, target, base, written, held_out, work, run)
    _, trained, _ = embedded.load(torch.float32, family="treeflash")

    def walked(**options: float) -> dict[str, float]:
        view = trained.with_options(**options)
        return acceptance_lengths(view, target, sequences, PROMPT_LENGTH, tree_nodes=TREE_NODES)

    for parents in PARENTS:
        trained.config.num_parents = parents
        rows[f"embedded drafter, {parents} parents a depth"] = walked()
    trained.config.num_parents = PARENTS[1]
    for temperature in TEMPERATURES:
        rows[f"{PARENTS[1]} parents, drafter temperature {temperature}"] = walked(drafter_temperature=temperature)
    trained.config.dead_end_discount = 0.5
    rows[f"{PARENTS[1]} parents, dead ends going on at half"] = walked()

    (work / "ablation.json").write_text(json.dumps({**run, "rows": rows}, indent=2))
    table = Table(title=f"{arguments.steps} steps of {arguments.batch_size} sequences each", title_justify="left")
    table.add_column("")
    lines = ["| | " + " | ".join(FIGURES.values()) + " |", "| --- |" + " --- |" * len(FIGURES)]
    for title in FIGURES.values():
        table.add_column(title, justify="right")
    for name, row in rows.items():
        cells = [f"{row[figure]:.3f}" if figure in row else "" for figure in FIGURES]
        table.add_row(name, *cells)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    (work / "ablation.md").write_text("\n".join(lines) + "\n")
    Console().print(table)


if __name__ == "__main__":
    main()
