"""Small covering designs: few cells that hold every combination of chosen axes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Cell = dict[str, Any]
Rule = Callable[[Cell], bool]


def product(axes: Mapping[str, Sequence[Any]], exclusions: Mapping[str, Rule]) -> list[Cell]:
    """All cells that no rule excludes, in a fixed order."""
    cells = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return [cell for cell in cells if not any(rule(cell) for rule in exclusions.values())]


def interactions(axes: Sequence[str], together: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Every pair of axes, and the larger groups that must be covered together."""
    return [*itertools.combinations(axes, 2), *(tuple(group) for group in together)]


def covering(cells: Sequence[Cell], groups: Sequence[tuple[str, ...]]) -> list[Cell]:
    """Greedy choice of cells that hold every combination of every group; the same for the same arguments."""
    axes = list(cells[0])
    values = {axis: list(dict.fromkeys(cell[axis] for cell in cells)) for axis in axes}
    codes = {axis: torch.tensor([values[axis].index(cell[axis]) for cell in cells]) for axis in axes}
    columns: list[torch.Tensor] = []
    count = 0
    for group in groups:
        combined = torch.zeros(len(cells), dtype=torch.long)
        for axis in group:
            combined = combined * len(values[axis]) + codes[axis]
        distinct, column = combined.unique(return_inverse=True)
        columns.append(column + count)
        count += len(distinct)
    index = torch.stack(columns, 1)
    missing = torch.ones(count, dtype=torch.bool)
    chosen: list[Cell] = []
    while missing.any():
        # Ties go to the cell that comes first in a fixed shuffle: in the natural order early values would crowd.
        gain = missing[index].sum(1) * len(cells) + torch.randperm(
            len(cells), generator=torch.Generator().manual_seed(len(chosen))
        )
        best = int(gain.argmax())
        missing[index[best]] = False
        chosen.append(cells[best])
    return chosen


def covered(cells: Sequence[Cell], group: Sequence[str]) -> set[tuple[Any, ...]]:
    """The combinations of a group's values that some cell holds."""
    return {tuple(cell[axis] for axis in group) for cell in cells}
