"""Tables that have as many columns as the console has room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table


def fit_columns(
    console: Console, columns: Sequence[str], table_of: Callable[[Sequence[str]], Table], keep: int
) -> tuple[Table, Sequence[str]]:
    """The table of the most columns that fit, the first ones, and the names of those that are left out.

    rich would cut a little off each instead.

    Args:
        console: Where the table is to be printed.
        columns: Names, what matters most first.
        table_of: Makes the table of some of them.
        keep: Columns that stay, however narrow the console.
    """
    shown, unlimited = len(columns), console.options.update(max_width=10_000)
    while shown > keep and console.measure(table_of(columns[:shown]), options=unlimited).maximum > console.width:
        shown -= 1
    return table_of(columns[:shown]), columns[shown:]


def hidden_columns_note(names: Sequence[str]) -> str:
    """What is said of columns that are left out."""
    return f"a wider terminal also shows: {', '.join(names)}"
