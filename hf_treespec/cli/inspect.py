"""`hf-treespec inspect`."""

from __future__ import annotations

from typing import Annotated

import typer

from .errors import errors_in_a_line
from .options import JsonOption


def inspect(
    drafter: Annotated[str, typer.Argument(help="Drafter: Hub id, path, `embedded` or `embedded:FAMILY`.")],
    target: Annotated[
        str | None,
        typer.Option(help="Target to hold it to: Hub id, path, or `embedded`. Only its configuration is read."),
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Load the target's weights too, for the checks that need them.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Show what a drafter is, and whether it fits a target.

    Exits with 1 if it does not load or does not fit.

    Example: `hf-treespec inspect embedded:treeflash --target embedded --weights`
    """
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from ..evaluation.inspection import run_inspect

    disable_progress_bar()
    with errors_in_a_line():
        fits = run_inspect(Console(soft_wrap=True), drafter, target, weights=weights, json_path=json)
    raise typer.Exit(0 if fits else 1)
