"""`hf-treespec calibrate`."""

from __future__ import annotations

from typing import Annotated

import typer

from .errors import errors_in_a_line
from .loading import load
from .options import DeviceOption, DrafterOption, DtypeOption, PlotsOption, Precision, TargetOption
from .values import numbers


def calibrate(
    target: TargetOption = "embedded",
    drafter: DrafterOption = "embedded",
    contexts: Annotated[
        str, typer.Option(help="Cached columns to check predictions at, by comma.", metavar="N,N,…")
    ] = "64,512",
    repeats: Annotated[
        int, typer.Option(min=3, help="Calls to measure of each number of rows; their median counts.")
    ] = 8,
    max_budget: Annotated[
        int | None, typer.Option(min=2, help="Most rows of a round.", show_default="64 on a CPU, 128 elsewhere")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Forget the stored profile first.")] = False,
    dtype: DtypeOption = Precision.auto,
    device: DeviceOption = None,
    plots: PlotsOption = None,
) -> None:
    """Measure ahead what verification costs on this machine, store it, and check the predictions.

    `generate` does the same by itself on first use; this only shows it.
    """
    from rich.console import Console

    from ..evaluation.calibration import run_calibration

    columns = numbers(contexts, "--contexts")
    if not columns:
        raise typer.BadParameter("expected a number at least", param_hint="--contexts")
    model, assistant, _ = load(target, drafter, dtype, device)
    with errors_in_a_line():
        if max_budget is not None:
            assistant = assistant.with_options(max_budget=max_budget)
        run_calibration(Console(), model, assistant, contexts=columns, repeats=repeats, again=again, plots=plots)
