"""Trains the embedded target's FlexDraft drafter, on text that the target has written.

    python examples/train_flexdraft.py --work build/flexdraft

The target writes the texts first, where `--continuations` and `--held-out` do not name some.
The drafter goes to `WORK/drafter`, its figures to `WORK/metrics.json`. What is finished is kept, so that it goes on
where it was stopped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from train_treeflash import PROMPT_LENGTH, SEED, TEMPERATURE, gather
from transformers import PreTrainedModel

from hf_treespec import embedded
from hf_treespec.drafters.flexdraft import FlexDraftDrafter
from hf_treespec.training.flexdraft import initialise_from_text, train_flexdraft


def fresh(target: PreTrainedModel, written: np.ndarray, layers: int) -> FlexDraftDrafter:
    """An untrained drafter of the target's last layers."""
    torch.manual_seed(SEED)
    drafter = FlexDraftDrafter.from_target(target, layers, block_size=8, calibration_rank=256).float()
    initialise_from_text(drafter, target, written[:8])
    return drafter


def train(
    drafter: FlexDraftDrafter,
    target: PreTrainedModel,
    written: np.ndarray,
    held_out: np.ndarray,
    folder: Path,
    *,
    learning_rate: float = 1e-2,
    **run: Any,
) -> dict[str, float]:
    """Trains a drafter and returns its held-out figures; `run` is what `train_flexdraft` takes."""
    return train_flexdraft(
        drafter,
        target,
        written,
        held_out,
        folder,
        prompt_length=PROMPT_LENGTH,
        temperature=TEMPERATURE,
        anchors=64,
        optimizer="muon",
        learning_rate=learning_rate,
        seed=SEED,
        **run,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=6, help="last layers of the target's 12 to draft in")
    parser.add_argument("--steps", type=int, default=3200, help="steps of the attention")
    parser.add_argument("--start", type=Path, help="drafter of an earlier run to go on from")
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="Muon's peak")
    parser.add_argument("--calibration-steps", type=int, default=800)
    parser.add_argument("--calibration-batch-size", type=int, default=8, help="texts a step of the calibration")
    parser.add_argument("--sequences", type=int, default=2176, help="texts to train on")
    parser.add_argument("--held-out-sequences", type=int, default=16)
    parser.add_argument("--continuations", type=Path, help=".npy file, or folder of them, to train on [n, 512]")
    parser.add_argument("--held-out", type=Path, help=".npy file, or folder of them, to measure on [m, 512]")
    parser.add_argument("--batch-size", type=int, default=2, help="texts a step")
    parser.add_argument("--save-steps", type=int, default=250)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)

    target, _, tokenizer = embedded.load()
    written, held_out = gather(arguments, target, tokenizer)
    if arguments.start is None:
        drafter = fresh(target, written, arguments.layers)
    else:
        drafter = FlexDraftDrafter.from_pretrained(arguments.start, dtype=torch.float32)
    metrics = train(
        drafter,
        target,
        written,
        held_out,
        work / "run",
        learning_rate=arguments.learning_rate,
        batch_size=arguments.batch_size,
        tree_nodes=(8, 16, 32),
        max_steps=arguments.steps,
        save_steps=arguments.save_steps,
        calibration_steps=arguments.calibration_steps,
        calibration_batch_size=arguments.calibration_batch_size,
        live_sequences=4,
    )
    drafter.to(torch.float16).save_pretrained(work / "drafter")
    (work / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(json.dumps(metrics, indent=2))


if __name__ == "__main__":
    main()
