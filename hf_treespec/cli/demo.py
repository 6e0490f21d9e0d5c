"""`hf-treespec demo`."""

from __future__ import annotations

from typing import Annotated

import typer

from .errors import errors_in_a_line
from .options import JsonOption, MaxNewTokensOption, SeedOption


def demo(
    family: Annotated[str, typer.Option(help="Drafter of the package: dflash, treeflash or flexdraft.")] = "dflash",
    prompts: Annotated[int | None, typer.Option(min=1, help="Number of prompts.", show_default="all")] = None,
    max_new_tokens: MaxNewTokensOption = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Times each way of decoding runs on each prompt.")] = 5,
    show: Annotated[int, typer.Option(min=0, help="Prompts whose text is streamed before the timing.")] = 2,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; no more are used than there are cores.")] = 2,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Write Python with the models in the package: the same tokens as plain decoding, and how much faster.

    Needs no download and no GPU. Exits with 1 if an output differs from plain decoding.
    """
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from ..evaluation.demo import run_demo

    disable_progress_bar()
    with errors_in_a_line():
        identical = run_demo(
            Console(),
            prompts=prompts,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            show=show,
            threads=threads,
            seed=seed,
            family=family,
            json_path=json,
        )
    raise typer.Exit(0 if identical else 1)
