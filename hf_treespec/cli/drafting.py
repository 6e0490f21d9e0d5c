"""The options that say how a drafter is used."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar

import typer


class Shape(StrEnum):
    """What is verified in a round."""

    auto = "auto"
    tree = "tree"
    chain = "chain"


def _budget(value: str | int) -> str | int:
    """A number of rows or the name of a policy; what it may be is `TreeSpecConfig`'s to say."""
    try:
        return int(value)
    except ValueError:
        return value


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """Decoding options, as `TreeSpecConfig` names them; None = the drafter's default."""

    panel: ClassVar[str] = "Drafting"

    budget: Annotated[
        Any,
        typer.Option(
            parser=_budget,
            metavar="N|POLICY",
            help="Rows verified in a round, the root included, or `auto`, `static`, `ema`, `bastion`.",
            show_default="the drafter's",
        ),
    ] = None
    shape: Annotated[
        Shape | None,
        typer.Option(help="Verify a draft tree or a single chain.", show_default="the drafter's"),
    ] = None
    depth: Annotated[
        int | None,
        typer.Option(min=1, help="Most depths to draft.", show_default="all it has"),
    ] = None

    def options(self) -> dict[str, Any]:
        """Those that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}
