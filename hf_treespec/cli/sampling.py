"""The options that say how tokens are chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen: greedily, or by sampling with `generate`'s warpers."""

    panel: ClassVar[str] = "Sampling"

    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 decodes greedily.")] = 0.0
    top_k: Annotated[int, typer.Option(min=0, help="Sample among the k most likely tokens; 0 = among all.")] = 0
    top_p: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Sample among the likeliest tokens of this mass."),
    ] = 1.0
    min_p: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Drop tokens below this share of the best one's probability.",
            show_default="drop none",
        ),
    ] = None
    repetition_penalty: Annotated[
        float,
        typer.Option(min=0.0, help="Penalty on tokens seen before, greedily too; 1 = none."),
    ] = 1.0

    def generation(self) -> dict[str, Any]:
        """What `generate` takes for it."""
        greedy: dict[str, Any] = {"do_sample": False, "repetition_penalty": self.repetition_penalty}
        if self.temperature == 0:
            return greedy
        warpers = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        return {**greedy, "do_sample": True, **warpers}
