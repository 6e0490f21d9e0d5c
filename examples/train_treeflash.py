"""Trains the TreeFlash drafter that comes in the package, from the embedded DFlash drafter and text the target writes.

    python examples/train_treeflash.py --work build/embedded      # the folder of train_embedded.py, or an empty one

Ablations are options: `--head linear`, `--loss ce`, `--tune-backbone`, `--no-scaling`.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch

import hf_treespec
from hf_treespec.drafters.treeflash import TreeFlashDrafter
from hf_treespec.training.continuations import load_continuations
from hf_treespec.training.treeflash import train_treeflash

SEED = 0
PROMPT_LENGTH, TEMPERATURE = 128, 0.8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder with the continuations of train_embedded.py")
    parser.add_argument("--output", type=Path, help="folder of this run; WORK/treeflash by default")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--head", choices=("swiglu", "linear"), default="swiglu")
    parser.add_argument("--loss", choices=("kl", "ce"), default="kl")
    parser.add_argument("--learning-rate", type=float, default=6e-3)
    parser.add_argument("--tune-backbone", action="store_true", help="train the backbone with the head")
    parser.add_argument("--no-scaling", action="store_true", help="weigh all positions of a block alike")
    arguments = parser.parse_args()
    output = arguments.output or arguments.work / "treeflash"

    torch.manual_seed(SEED)
    target, dflash, _ = hf_treespec.embedded.load()
    drafter = TreeFlashDrafter.from_dflash(dflash, ar_approximation=arguments.head)
    sequences = load_continuations(arguments.work / "continuations_train")
    metrics = train_treeflash(
        drafter,
        target,
        sequences,
        load_continuations(arguments.work / "continuations_held_out"),
        output / "run",
        prompt_length=PROMPT_LENGTH,
        temperature=TEMPERATURE,
        tree_nodes=(8, 16, 32, 64),
        loss=arguments.loss,
        gamma=math.inf if arguments.no_scaling else None,
        freeze_backbone=not arguments.tune_backbone,
        optimizer="muon",
        learning_rate=arguments.learning_rate,
        max_steps=arguments.steps,
        seed=SEED,
    )
    drafter.to(torch.float16).save_pretrained(output / "drafter")
    (output / "metrics.json").write_text(json.dumps(metrics, indent=2))
    print(json.dumps(metrics, indent=2))


if __name__ == "__main__":
    main()
