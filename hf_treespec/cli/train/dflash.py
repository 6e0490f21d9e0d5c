"""`hf-treespec train dflash`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..groups import takes_groups
from ..options import TargetOption
from .options import BlockSizeOption, OutputOption, Run, Text, job_of, train_and_tell


@takes_groups
def dflash(
    *,
    target: TargetOption = "embedded",
    output: OutputOption,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the drafter.")] = 5,
    block_size: BlockSizeOption = 16,
    mask_token_id: Annotated[
        int | None,
        typer.Option(help="Mask token.", show_default="the tokenizer's, or the first id it does not use"),
    ] = None,
    text: Text,
    run: Run = Run(learning_rate=6e-4),
) -> None:
    """Train a DFlash drafter from scratch on text that the target itself writes.

    Run again with the same options, it goes on where it stopped.

    Example: `hf-treespec train dflash --target your/model --data prompts.jsonl --output my-drafter`
    """
    from ...training.commands import run_dflash

    job = job_of(target, output, text, run)
    train_and_tell(lambda: run_dflash(job, layers=layers, block_size=block_size, mask_token_id=mask_token_id))
