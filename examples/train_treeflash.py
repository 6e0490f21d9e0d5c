r"""Trains the TreeFlash head that comes in the package, on top of the embedded DFlash drafter.

    python examples/train_treeflash.py --work build/treeflash
    python examples/train_treeflash.py --work build/treeflash --continuations build/embedded/continuations_train \
        --held-out build/embedded/continuations_held_out

Text that the embedded target writes is what it learns from: sampled into the working folder with the embedded drafter
to help, or taken from where it is already. Stopped and run again, it goes on where it was. The drafter comes to lie in
`WORK/drafter`, its figures before and after in `WORK/metrics.json`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_treespec import embedded
from hf_treespec.drafters.treeflash import TreeFlashDrafter
from hf_treespec.training import corpus
from hf_treespec.training.continuations import load_continuations, write_continuations
from hf_treespec.training.distillation import RunSettings
from hf_treespec.training.treeflash import TreeFlashObjective, train_treeflash

SEED = 0
PROMPT_LENGTH, NEW_TOKENS = 128, 384
TEMPERATURE = 0.8
TREE_NODES = (8, 16, 32, 64)


def texts(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, split: str, count: int, folder: Path
) -> np.ndarray:
    """The target's continuations of prompts from one side of the standard library's modules, `[count, L]`."""
    stream = corpus.tokenize(corpus.read_texts(corpus.build_manifest(), split), tokenizer)
    return write_continuations(
        target,
        stream,
        folder,
        sequences=count,
        prompt_length=PROMPT_LENGTH,
        new_tokens=NEW_TOKENS,
        temperature=TEMPERATURE,
        seed=SEED,
    )


def gather(
    arguments: argparse.Namespace, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[np.ndarray, np.ndarray]:
    """Texts to train and to measure on: from where the arguments say they are, or written into the working folder."""
    found = []
    for split, folder, count in (
        ("train", arguments.continuations, arguments.sequences),
        ("held_out", arguments.held_out, arguments.held_out_sequences),
    ):
        if folder:
            found.append(load_continuations(folder)[:count])
        else:
            found.append(texts(target, tokenizer, split, count, arguments.work / f"continuations_{split}"))
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for everything the run writes")
    parser.add_argument("--continuations", type=Path, help=".npy file, or folder of them, to train on [n, 512]")
    parser.add_argument("--held-out", type=Path, help=".npy file, or folder of them, to measure on [m, 512]")
    parser.add_argument("--sequences", type=int, default=2176, help="continuations to sample, or to use of given ones")
    parser.add_argument("--held-out-sequences", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences a step")
    parser.add_argument("--anchors", type=int, default=128, help="blocks drawn from a sequence")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--learning-rate", type=float, default=1.5e-2)
    parser.add_argument("--head", choices=("swiglu", "linear"), default="swiglu")
    parser.add_argument("--loss", choices=("kl", "ce"), default="kl")
    parser.add_argument(
        "--scaling", action=argparse.BooleanOptionalAction, default=True, help="weigh the first tokens of a block most"
    )
    parser.add_argument(
        "--freeze-backbone", action=argparse.BooleanOptionalAction, default=True, help="train the head alone"
    )
    parser.add_argument("--save-steps", type=int, default=250)
    arguments = parser.parse_args()
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(SEED)
    target, base, tokenizer = embedded.load(family="dflash")
    written, held_out = gather(arguments, target, tokenizer)

    drafter = TreeFlashDrafter.from_dflash(base, ar_approximation=arguments.head)
    run = {"prompt_length": PROMPT_LENGTH, "tree_nodes": TREE_NODES}
    # A fresh head corrects nothing, so these are the figures of the drafter it starts from.
    objective = TreeFlashObjective(drafter, target, temperature=TEMPERATURE)
    before = objective.measure(torch.from_numpy(held_out.astype(np.int64)), RunSettings(**run))
    print(json.dumps({"before": before}, indent=2), flush=True)
    after = train_treeflash(
        drafter,
        target,
        written,
        held_out,
        work / "run",
        temperature=TEMPERATURE,
        anchors=arguments.anchors,
        loss=arguments.loss,
        gamma="paper" if arguments.scaling else None,
        freeze_backbone=arguments.freeze_backbone,
        batch_size=arguments.batch_size,
        max_steps=arguments.steps,
        optimizer=arguments.optimizer,
        learning_rate=arguments.learning_rate,
        save_steps=arguments.save_steps,
        seed=SEED,
        **run,
    )
    drafter.to(torch.float16).save_pretrained(work / "drafter")
    (work / "metrics.json").write_text(json.dumps({"before": before, "after": after}, indent=2))
    print(json.dumps({"after": after}, indent=2))


if __name__ == "__main__":
    main()
