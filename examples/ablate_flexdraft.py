r"""What the parts of a FlexDraft drafter are worth on the embedded target: calibration, pruning, layers, hooks.

    python examples/ablate_flexdraft.py --drafter embedded:flexdraft --held-out build/flexdraft/continuations_held_out
    python examples/ablate_flexdraft.py --work build/ablation --layers 2,4,6,8 \
        --continuations build/flexdraft/continuations_train --held-out build/flexdraft/continuations_held_out

The first form compares a trained drafter's drafts with and without the calibration, paired over texts that the target
wrote, decodes their prompts with several thresholds, and times rounds with hooks and without. The second trains
drafters of so many last layers alike and for a short time. Figures are printed as JSON, which `--json` keeps.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from train_flexdraft import fresh, train
from train_treeflash import PROMPT_LENGTH, SEED, TEMPERATURE
from transformers import PreTrainedModel

from hf_treespec import embedded
from hf_treespec.drafters.flexdraft import FlexDraftDrafter
from hf_treespec.evaluation.bootstrap import paired_speedup
from hf_treespec.evaluation.loading import load_drafter
from hf_treespec.evaluation.measurement import pool
from hf_treespec.training.acceptance import acceptance_lengths
from hf_treespec.training.continuations import load_continuations

NEW_TOKENS = 128
TREE_NODES = (16,)
SAMPLING: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "temperature": TEMPERATURE, "top_k": 0}

#: Thresholds of selective verification: a node's group of mask rows, and the node itself.
PRUNING: dict[str, dict[str, Any]] = {
    "everything": {"flex_group_score": 0.0},
    "groups above 0.01": {"flex_group_score": 0.01},
    "groups above 0.03": {"flex_group_score": 0.03},
    "groups above 0.1": {"flex_group_score": 0.1},
    "groups above 0.1, nodes above 0.01": {"flex_group_score": 0.1, "flex_verify_score": 0.01},
    "groups above 0.1, nodes above 0.03": {"flex_group_score": 0.1, "flex_verify_score": 0.03},
}


def calibration(drafter: FlexDraftDrafter, target: PreTrainedModel, sequences: torch.Tensor) -> dict[str, Any]:
    """Acceptance lengths with and without the calibration, and the ratio with its 95 % interval over texts."""
    kept = drafter.anchor_bias_mlp
    per_text: dict[str, list[dict[str, float]]] = {"with": [], "without": []}
    for name, module in (("with", kept), ("without", None)):
        drafter.anchor_bias_mlp = module
        for sequence in sequences.split(1):
            per_text[name].append(
                acceptance_lengths(drafter, target, sequence, PROMPT_LENGTH, tree_nodes=TREE_NODES, batch_size=1)
            )
    drafter.anchor_bias_mlp = kept
    found: dict[str, Any] = {}
    for figure in per_text["with"][0]:
        calibrated, plain = ([text[figure] for text in per_text[name]] for name in ("with", "without"))
        ones = [1.0] * len(calibrated)
        # Rounds over one text are inverse to its acceptance length.
        ratio = paired_speedup([1 / tau for tau in plain], ones, [1 / tau for tau in calibrated], ones, seed=SEED)
        found[figure] = {
            "with": len(calibrated) / sum(1 / tau for tau in calibrated),
            "without": len(plain) / sum(1 / tau for tau in plain),
            "ratio": ratio.value,
            "ci95": ratio.interval and list(ratio.interval),
        }
    return found


#: Ways to verify one chain of 8: with hooks that nothing uses, and with a group of rows behind its first node.
HOOKS: dict[str, dict[str, Any]] = {
    "plain rounds, hooks attached": {"budget": 1},
    "rows alone": {"flex_mode": "sequential"},
    "rows ride, joint": {"flex_mode": "parallel", "flex_variant": "joint", "flex_groups": 1},
    "rows ride, twice": {"flex_mode": "parallel", "flex_variant": "twice", "flex_groups": 1},
}


def hooks(drafter: FlexDraftDrafter, target: PreTrainedModel, sequences: torch.Tensor) -> dict[str, dict[str, float]]:
    """Milliseconds of a verification and of the draft, medians over texts; plain rounds without any hooks beside them.

    The ways take turns on every text.
    """
    other = embedded.load_drafter(family="dflash").with_options(budget=1)
    views = {
        name: drafter.with_options(**{"shape": "chain", "budget": 8, **options}) for name, options in HOOKS.items()
    }
    views["plain rounds, DFlash's hooks"] = other
    spent: dict[str, list[dict[str, float]]] = {name: [] for name in views}
    for sequence in sequences:
        for name, view in views.items():
            torch.manual_seed(SEED)
            target.generate(sequence[None, :PROMPT_LENGTH], assistant_model=view, **SAMPLING)
            spent[name].append(view.last_report.stage_ms)
    return {
        name: {stage: statistics.median(text[stage] for text in texts) for stage in ("verify", "propose")}
        for name, texts in spent.items()
    }


def pruning(
    drafter: FlexDraftDrafter, target: PreTrainedModel, sequences: torch.Tensor, shape: str, budget: int
) -> dict[str, dict[str, float]]:
    """Rows a round and acceptance length of parallel decoding under every threshold."""
    found = {}
    for name, options in PRUNING.items():
        view = drafter.with_options(flex_mode="parallel", shape=shape, budget=budget, **options)
        reports = []
        for seed, sequence in enumerate(sequences):
            torch.manual_seed(seed)
            prompt = sequence[None, :PROMPT_LENGTH]
            target.generate(prompt, assistant_model=view, **SAMPLING)
            reports.append(view.last_report)
        total = pool(reports)
        found[name] = {"rows": total.mean_rows, "nodes": total.mean_nodes, "tau": total.acceptance_length}
    return found


def layers(
    counts: list[int], target: PreTrainedModel, written: np.ndarray, held_out: np.ndarray, work: Path, steps: int
) -> dict[str, dict[str, float]]:
    """Held-out figures of drafters of so many layers; those that are finished in the working folder are kept."""
    found = {}
    for count in counts:
        folder = work / f"layers-{count}"
        done = folder / "metrics.json"
        if not done.exists():
            metrics = train(
                fresh(target, written, count),
                target,
                written,
                held_out,
                folder / "run",
                batch_size=2,
                tree_nodes=TREE_NODES,
                max_steps=steps,
                save_steps=steps,
                live_sequences=1,
            )
            done.write_text(json.dumps(metrics))
        found[str(count)] = json.loads(done.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", help="a trained drafter: path, or `embedded:flexdraft`")
    parser.add_argument("--held-out", type=Path, required=True, help="texts of the target to measure on")
    parser.add_argument("--held-out-sequences", type=int, default=16)
    parser.add_argument("--layers", help="numbers of last layers to compare, by comma")
    parser.add_argument("--continuations", type=Path, help="texts of the target to train those on")
    parser.add_argument("--steps", type=int, default=200, help="steps of each of them")
    parser.add_argument("--work", type=Path, default=Path("build/ablate-flexdraft"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    held_out = load_continuations(arguments.held_out)[: arguments.held_out_sequences]
    sequences = torch.from_numpy(held_out.astype(np.int64))
    target, _, _ = embedded.load()
    found: dict[str, Any] = {}
    if arguments.drafter:
        drafter = load_drafter(arguments.drafter, dtype=torch.float32)
        assert isinstance(drafter, FlexDraftDrafter)
        found["hooks"] = hooks(drafter, target, sequences)
        found["calibration"] = calibration(drafter, target, sequences)
        for shape, budget in (("chain", 8), ("tree", 16)):
            found[f"pruning, {shape} of {budget}"] = pruning(drafter, target, sequences, shape, budget)
    if arguments.layers:
        counts = [int(count) for count in arguments.layers.split(",")]
        written = load_continuations(arguments.continuations)
        found["layers"] = layers(counts, target, written, held_out, arguments.work, arguments.steps)
    text = json.dumps(found, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
