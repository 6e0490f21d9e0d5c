"""What a command says of an error that its user can do something about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def errors_in_a_line() -> Iterator[None]:
    """Turns what the library refuses, and what is missing, into a line on standard error and exit code 2."""
    try:
        yield
    except (ImportError, OSError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
