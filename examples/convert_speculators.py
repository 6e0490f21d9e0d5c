"""Converts a drafter of another format into this package's: a speculators checkpoint, z-lab's DFlash, TreeFlash.

    python examples/convert_speculators.py owner/drafter-speculator.dflash converted

Drafters of those formats load as they are; converting one fixes its configuration, makes loading independent of the
format it came in, and is what `drafter.push_to_hub` does as well. What is written is loaded again and compared.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from hf_treespec import AutoDrafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="Hub id or folder of the drafter")
    parser.add_argument("output", type=Path, help="folder to write it to")
    parser.add_argument("--revision", help="branch, tag or commit of the Hub's repository")
    parser.add_argument("--dtype", default="auto", help="format of the weights, such as bfloat16")
    arguments = parser.parse_args()
    drafter = AutoDrafter.from_pretrained(arguments.checkpoint, dtype=arguments.dtype, revision=arguments.revision)
    drafter.save_pretrained(arguments.output)
    again = AutoDrafter.from_pretrained(arguments.output, dtype="auto").state_dict()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again[name], tensor), f"{name} has changed"
    print(f"{type(drafter).__name__}, {len(again)} tensors, written to {arguments.output}")


if __name__ == "__main__":
    main()
