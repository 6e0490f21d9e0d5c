"""The application that the commands are put together to."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from .bench import bench
from .calibrate import calibrate
from .demo import demo
from .distribution import distribution
from .generate import generate
from .inspect import inspect
from .publish import publish
from .train import train
from .verify import verify

app = typer.Typer(
    name="hf-treespec",
    help="Lossless speculative decoding for transformers, with draft trees.",
    epilog="Begin with `hf-treespec demo`: it needs no download and no GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="markdown",
)
app.command()(demo)
app.command()(generate)
app.command()(verify)
app.command()(bench)
app.command()(calibrate)
app.command()(inspect)
app.command()(distribution)
app.add_typer(train, name="train")
app.command()(publish)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the console script."""
    app()
