"""What every `train` command takes, and the job that it comes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from ..errors import errors_in_a_line
from ..options import (
    DeviceOption,
    NewTokensOption,
    Precision,
    PromptLengthOption,
    SeedOption,
    WritingTemperatureOption,
)
from ..values import split

if TYPE_CHECKING:
    from ...training.commands import Job


class Loss(StrEnum):
    """What a drafter is trained towards."""

    kl = "kl"
    ce = "ce"


class Optimizer(StrEnum):
    """What trains a drafter."""

    adamw = "adamw"
    muon = "muon"


OutputOption = Annotated[
    Path, typer.Option("--output", file_okay=False, help="Folder for the drafter and the state of the run.")
]
BlockSizeOption = Annotated[int, typer.Option("--block-size", min=2, help="Rows of a block, the anchor's included.")]


@dataclass(frozen=True, kw_only=True)
class Text:
    """What the target writes to be learnt from."""

    panel: ClassVar[str] = "Text that the target writes"

    data: Annotated[
        list[str] | None,
        typer.Option(
            help='What the target continues or answers, by comma: text files, or JSONL of {"text": ...} or '
            '{"turns": [...]} lines.',
            show_default="the standard library's sources, for the embedded target",
        ),
    ] = None
    sequences: Annotated[int, typer.Option(min=1, help="Continuations to sample from the target.")] = 4096
    held_out_sequences: Annotated[int, typer.Option(min=1, help="Continuations to measure acceptance on.")] = 32
    prompt_length: PromptLengthOption = 128
    new_tokens: NewTokensOption = 384
    temperature: WritingTemperatureOption = 0.8


@dataclass(frozen=True, kw_only=True)
class Run:
    """How the drafter learns."""

    panel: ClassVar[str] = "Training"

    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 2000
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences of a forward.")] = 4
    accumulate: Annotated[int, typer.Option(min=1, help="Forwards of a step.")] = 1
    anchors: Annotated[int, typer.Option(min=1, help="Blocks drawn from a sequence.")] = 128
    loss: Annotated[Loss, typer.Option(help="Forward KL to the target's distribution, or its tokens alone.")] = Loss.kl
    optimizer: Annotated[Optimizer, typer.Option(help="AdamW, or Muon where data and time are short.")] = (
        Optimizer.adamw
    )
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 1e-4
    save_steps: Annotated[int, typer.Option(min=1, help="Steps between checkpoints and measurements.")] = 250
    dtype: Annotated[
        Precision,
        typer.Option(help="Format of the target, `auto`: its checkpoint's; the drafter is trained in float32."),
    ] = Precision.auto
    device: DeviceOption = None
    seed: SeedOption = 0


def job_of(target: str, output: Path, text: Text, run: Run) -> Job:
    """The job that the options describe."""
    from ...training.commands import Job

    data = tuple(map(Path, split(text.data)))
    for path in data:
        if not path.is_file():
            raise typer.BadParameter(f"there is no file {path}", param_hint="--data")
    return Job(
        target=target,
        output=output,
        data=data,
        sequences=text.sequences,
        held_out=text.held_out_sequences,
        prompt_length=text.prompt_length,
        new_tokens=text.new_tokens,
        temperature=text.temperature,
        anchors=run.anchors,
        loss=run.loss.value,
        run={
            "max_steps": run.steps,
            "batch_size": run.batch_size,
            "accumulate": run.accumulate,
            "optimizer": run.optimizer.value,
            "learning_rate": run.learning_rate,
            "save_steps": run.save_steps,
            "seed": run.seed,
        },
        dtype=run.dtype.torch_dtype(),
        device=run.device,
    )


def train_and_tell(train: Callable[[], dict[str, float]]) -> None:
    """Runs a job and prints the figures it ends with."""
    with errors_in_a_line():
        metrics = train()
    typer.echo("\n".join(f"{name}: {value:.3f}" for name, value in metrics.items()))
