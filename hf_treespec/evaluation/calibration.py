"""Calibration ahead of use, and how far its predictions are off."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel

from ..budget import BudgetController, ProfileStore
from ..configuration import TreeSpecConfig
from ..decoding import budgets
from ..drafters.base import BlockDrafter

#: Rows that predictions are checked at: those that are fitted, and others between them.
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
#: Fewest forwards that a median is taken of: of one or two, a single slow one would decide.
LEAST_REPEATS = 3
_WARM_UP_ROUNDS = 2
#: Rows measured ahead of use, and how many times longer the second context is that they are measured behind.
_FITTED, _LONGER = (1, 2, 4, 8, 16, 32, 64, 128), 6
#: Blocks of text that a call decodes, when sizes are fitted and when they are checked.
_FIT_BLOCKS, _CHECK_BLOCKS = 2, 4


@dataclass(frozen=True)
class Check:
    """Predicted and measured milliseconds of a forward of `rows` rows behind `context` cached columns."""

    context: int
    rows: int
    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_ms / self.measured_ms - 1


def calibrate(target: PreTrainedModel, drafter: BlockDrafter, *, context: int = 64, again: bool = False) -> Path:
    """Measures and stores a pair's latencies.

    A first use leaves out sizes that cannot pay, and other contexts; here there is the time for them.

    Args:
        context: Length of the shorter prompt that sizes are measured behind.
        again: Whether to forget what is known already.

    Returns:
        The profile's file.
    """
    view = drafter.with_options(budget="auto")
    key, store = budgets.profile_key(target, view, DynamicCache()), ProfileStore()
    path = store.path(key)
    if again:
        budgets.forget(view)
        path.unlink(missing_ok=True)
    if path.exists():
        return path
    for _ in range(8):
        _generate(target, view, context, 32)
        with lent_controller(target, view) as controller:
            if not controller.calibrating:
                break
    with lent_controller(target, view) as controller:
        for _ in range(LEAST_REPEATS):
            for behind in (context, _LONGER * context):
                for size in (size for size in _FITTED if size <= controller.limit):
                    for ms in _verify_ms(target, view, behind, size, _FIT_BLOCKS):
                        controller.latency.update(size, behind, 1, ms, controller.kind_of(size))
        store.save(key, controller.profile())
    return path


def check(
    target: PreTrainedModel, drafter: BlockDrafter, contexts: Sequence[int], repeats: int = 8
) -> Iterator[list[Check]]:
    """Predictions of a calibrated pair against measurements, a list a context, for the rows that it may verify.

    Sizes take turns, `repeats` times. Before each turn the pair decodes as by default, which tells the controller how
    quick the machine is just then; what it predicts after that is held against calls of fixed budgets, from which it
    learns nothing. Trees may come out smaller than asked where a drafter offers too little; sizes that come up fewer
    than `LEAST_REPEATS` times are left out.

    Raises:
        ValueError: `repeats` is below `LEAST_REPEATS`.
    """
    if repeats < LEAST_REPEATS:
        raise ValueError(f"`repeats` must be at least {LEAST_REPEATS}, of which a median is taken; got {repeats}.")
    adaptive = drafter.with_options(budget="auto")
    with lent_controller(target, drafter) as controller:
        sizes = [size for size in SIZES if size <= controller.limit]
    for context in contexts:
        found: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for _ in range(repeats):
            _generate(target, adaptive, context, _CHECK_BLOCKS * (drafter.drafted_depths + 1))
            with lent_controller(target, drafter) as controller:
                curve = controller.verify_ms(context)
            for size in sizes:
                found[size] += [
                    (curve[size - 1], ms) for ms in _verify_ms(target, drafter, context, size, _CHECK_BLOCKS)
                ]
        yield [
            Check(context, size, *(statistics.median(column) for column in zip(*pairs, strict=True)))
            for size, pairs in found.items()
            if len(pairs) >= LEAST_REPEATS
        ]


def _verify_ms(target: PreTrainedModel, drafter: BlockDrafter, context: int, size: int, blocks: int) -> list[float]:
    """Median milliseconds of a verification of `size` rows in one call; nothing where no tree had as many."""
    view = drafter.with_options(budget=size, shape="tree")
    _generate(target, view, context, blocks * (drafter.drafted_depths + 1))
    report = view.last_report
    measured = list(zip(report.nodes_history, report.verify_ms_history, strict=True))[_WARM_UP_ROUNDS:]
    # The last rounds of a call have less room, hence fewer rows.
    fitting = [ms for rows, ms in measured if rows == size]
    return [statistics.median(fitting)] if fitting else []


@contextmanager
def lent_controller(target: PreTrainedModel, drafter: BlockDrafter) -> Iterator[BudgetController]:
    """The pair's controller for calls of default options."""
    config = (drafter.treespec_config or TreeSpecConfig()).with_options(budget="auto")
    with budgets.lend_policy(config, target, drafter, DynamicCache()) as policy:
        assert isinstance(policy, BudgetController)
        yield policy


def run_calibration(
    console: Console,
    target: PreTrainedModel,
    drafter: BlockDrafter,
    *,
    contexts: Sequence[int],
    repeats: int = 8,
    again: bool = False,
    plots: Path | None = None,
) -> list[Check]:
    """Calibrates a pair, prints predictions beside measurements and draws the curve over the points.

    Args:
        plots: Folder for the figure, `verification.png`.

    Raises:
        ImportError: A plot is asked for without matplotlib.
        ValueError: `repeats` is below `LEAST_REPEATS`.
    """
    if plots is not None:
        from .plots import plot_calibration, save_figures
    path = calibrate(target, drafter, again=again)
    checks: list[Check] = []
    steps = check(target, drafter, contexts, repeats)
    for part in track(steps, "measuring", total=len(contexts), console=console, transient=True):
        checks += part
    table = Table(title="A verification forward", title_justify="left")
    for column in ("context", "rows", "predicted ms", "measured ms", "error"):
        table.add_column(column, justify="right")
    for item in checks:
        table.add_row(
            str(item.context),
            str(item.rows),
            f"{item.predicted_ms:.2f}",
            f"{item.measured_ms:.2f}",
            f"{item.error:+.0%}",
        )
    console.print(table)
    worst = max(checks, key=lambda item: abs(item.error))
    median = statistics.median(abs(item.error) for item in checks)
    console.print(
        f"Median error {median:.0%}, largest {worst.error:+.0%}. Stored in {path}", highlight=False, soft_wrap=True
    )
    if plots is not None:
        with lent_controller(target, drafter) as controller:
            curves = {context: controller.verify_ms(context) for context in contexts}
        points = [(item.context, item.rows, item.measured_ms) for item in checks]
        save_figures({"verification": plot_calibration(curves, points)}, plots)
    return checks


def _generate(target: PreTrainedModel, drafter: BlockDrafter, context: int, new_tokens: int) -> None:
    vocabulary = target.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, context), generator=generator).to(target.device)
    target.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=drafter,
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
    )
