"""`hf-treespec train treeflash`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..groups import takes_groups
from ..options import TargetOption
from .options import OutputOption, Run, Text, job_of, train_and_tell


@takes_groups
def treeflash(
    *,
    target: TargetOption = "embedded",
    output: OutputOption,
    init: Annotated[
        str,
        typer.Option(
            help="DFlash drafter the head stands on, or a TreeFlash drafter to go on with: Hub id, path, `embedded` "
            "or `embedded:FAMILY`."
        ),
    ] = "embedded",
    freeze_backbone: Annotated[
        bool, typer.Option(help="Train the head alone, which the paper found as good as everything.")
    ] = True,
    scaling: Annotated[bool, typer.Option(help="Weigh the first tokens of a block most.")] = True,
    text: Text,
    run: Run = Run(learning_rate=1e-4),
) -> None:
    """Train a TreeFlash head on a DFlash drafter, which helps to write the text it learns from.

    Run again with the same options, it goes on where it stopped.

    Example: `hf-treespec train treeflash --target your/model --init its/dflash-drafter --data prompts.jsonl
    --output my-drafter`
    """
    from ...training.commands import run_treeflash

    job, gamma = job_of(target, output, text, run), "paper" if scaling else None
    train_and_tell(lambda: run_treeflash(job, init, gamma=gamma, freeze_backbone=freeze_backbone))
