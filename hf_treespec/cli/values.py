"""Values of options that hold several, separated by commas."""

from __future__ import annotations

from collections.abc import Sequence

import typer


def split(values: Sequence[str] | None) -> list[str]:
    """The parts of values that are separated by commas."""
    return [part.strip() for value in values or () for part in value.split(",") if part.strip()]


def numbers(value: str, option: str) -> list[int]:
    """Whole numbers from 1 on."""
    try:
        found = [int(part) for part in split([value])]
    except ValueError:
        found = [0]
    if any(number < 1 for number in found):
        raise typer.BadParameter("expected numbers from 1 on, such as `1,2,4`", param_hint=option)
    return found


def named(values: Sequence[str] | None, option: str) -> dict[str, str]:
    """Drafters given as NAME=DRAFTER."""
    found = dict(part.partition("=")[::2] for part in split(values))
    if not all(name and source for name, source in found.items()):
        raise typer.BadParameter("expected NAME=DRAFTER, such as `tf=embedded:treeflash`", param_hint=option)
    return found
