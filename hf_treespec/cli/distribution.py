"""`hf-treespec distribution`."""

from __future__ import annotations

from typing import Annotated

import typer

from .errors import errors_in_a_line
from .loading import load, load_beside
from .options import (
    BesideOption,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    JsonOption,
    NewTokensOption,
    PlotsOption,
    Precision,
    PromptLengthOption,
    PromptSetsOption,
    SeedOption,
    TargetOption,
    WritingTemperatureOption,
)
from .prompts import prompt_sets
from .values import named


def distribution(
    target: TargetOption = "embedded",
    drafter: DrafterOption = "embedded",
    beside: BesideOption = None,
    data: PromptSetsOption = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each kind; too short ones are left out.")] = 16,
    prompt_length: PromptLengthOption = 64,
    new_tokens: NewTokensOption = 192,
    temperature: WritingTemperatureOption = 0.8,
    nodes: Annotated[int, typer.Option(min=2, help="Nodes of the trees whose children count.")] = 32,
    stride: Annotated[int, typer.Option(min=1, help="Positions from one draft to the next.")] = 1,
    seed: SeedOption = 0,
    dtype: DtypeOption = Precision.auto,
    device: DeviceOption = None,
    json: JsonOption = None,
    plots: PlotsOption = None,
) -> None:
    """Measure how far drafters are from their target: distance and coverage by depth, best children of tree nodes.

    All drafters are measured on the same text, which the target writes first. Nothing is timed.

    Example: `hf-treespec distribution --beside tf=embedded:treeflash --data stdlib-functions`
    """
    from rich.console import Console

    from ..evaluation.distribution_command import run_distribution

    names, further = prompt_sets(data, target), named(beside, "--beside")
    model, first, tokenizer = load(target, drafter, dtype, device)
    others = load_beside(further, dtype, device)
    with errors_in_a_line():
        run_distribution(
            Console(),
            model,
            tokenizer,
            {drafter: first, **others},
            data=names,
            prompts=prompts,
            prompt_length=prompt_length,
            new_tokens=new_tokens,
            temperature=temperature,
            nodes=nodes,
            stride=stride,
            seed=seed,
            described={"target": target, "drafter": drafter, "beside": further},
            json_path=json,
            plots=plots,
        )
