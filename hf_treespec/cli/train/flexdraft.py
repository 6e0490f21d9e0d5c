"""`hf-treespec train flexdraft`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..groups import takes_groups
from ..options import TargetOption
from .options import BlockSizeOption, OutputOption, Run, Text, job_of, train_and_tell


@takes_groups
def flexdraft(
    *,
    target: TargetOption = "embedded",
    output: OutputOption,
    init: Annotated[
        str | None,
        typer.Option(help="FlexDraft drafter to go on with: Hub id or path.", show_default="a copy of the target"),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="Last layers to draft in.", show_default="10, or a third of fewer than 30"),
    ] = None,
    block_size: BlockSizeOption = 16,
    calibration_rank: Annotated[int, typer.Option(min=1, help="Width of the calibration.")] = 256,
    calibration_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of the calibration.", show_default="a quarter of --steps")
    ] = None,
    calibration_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences of a step of it.", show_default="4 x --batch-size")
    ] = None,
    text: Text,
    run: Run = Run(learning_rate=2e-4, anchors=32),
) -> None:
    """Train a FlexDraft drafter, with which the target drafts in its own last layers.

    Run again with the same options, it goes on where it stopped.

    Example: `hf-treespec train flexdraft --target your/model --data prompts.jsonl --output my-drafter`
    """
    from ...training.commands import run_flexdraft

    job = job_of(target, output, text, run)
    train_and_tell(
        lambda: run_flexdraft(
            job,
            init=init,
            layers=layers,
            block_size=block_size,
            calibration_rank=calibration_rank,
            calibration_steps=calibration_steps,
            calibration_batch_size=calibration_batch_size,
        )
    )
