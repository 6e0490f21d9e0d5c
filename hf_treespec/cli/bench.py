"""`hf-treespec bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from .errors import errors_in_a_line
from .groups import takes_groups
from .loading import load, load_beside
from .options import (
    BesideOption,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    JsonOption,
    PlotsOption,
    Precision,
    PromptSetsOption,
    SeedOption,
    TargetOption,
)
from .prompts import prompt_sets
from .sampling import Sampling
from .values import named, numbers, split


class _Size(NamedTuple):
    """How much is measured where the options do not say."""

    prompts: int
    max_new_tokens: int
    repeats: int
    arms: str


_WHOLE = _Size(16, 256, 3, "lookup, stock-chain, chain, tree-8, tree-16, tree-32, auto")
_QUICK = _Size(2, 48, 2, "lookup, chain, tree-8, tree-16, auto")


def _both(name: str) -> str:
    """A default as the help shows it."""
    return f"{getattr(_WHOLE, name)}; {getattr(_QUICK, name)} with --quick"


@takes_groups
def bench(
    *,
    target: TargetOption = "embedded",
    drafter: DrafterOption = "embedded",
    beside: BesideOption = None,
    data: PromptSetsOption = None,
    arms: Annotated[
        list[str] | None,
        typer.Option(
            help="Ways of decoding, by comma; N is a number of verified rows, the root included: plain compiled "
            "lookup stock-chain chain tree-N marginal-N marginal-auto treeflash-N beam-N static-N bastion auto oracle "
            "flex-parallel flex-sequential flex-batch flex-auto; ARM@NAME, such as `auto@tf`, is one of a drafter "
            "given by `--beside`. Those that cannot run are left out and say why.",
            show_default=_both("arms"),
        ),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each kind.", show_default=_both("prompts"))
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens to generate.", show_default=_both("max_new_tokens"))
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Times each arm answers each prompt.", show_default=_both("repeats"))
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few prompts, tokens, repeats and arms: minutes.")] = False,
    batch_sweep: Annotated[
        str,
        typer.Option(
            help="Batch sizes to measure besides, by comma, such as `1,2,4`.", show_default="none", metavar="N,N,…"
        ),
    ] = "",
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end of the text, to equal lengths.")
    ] = False,
    seed: SeedOption = 0,
    dtype: DtypeOption = Precision.auto,
    device: DeviceOption = None,
    json: JsonOption = None,
    csv: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File to append a row for each arm and kind of prompt to.")
    ] = None,
    plots: PlotsOption = None,
    sampling: Sampling,
) -> None:
    """Measure ways of decoding against each other: interleaved, on the same prompts, with intervals.

    Ctrl-C ends the measuring and reports what has been measured. Exits with 1 if an output of this library differs
    from plain decoding by more than a rounding tie, and with 130 after an interrupt.

    Example: `hf-treespec bench --quick --beside tf=embedded:treeflash --arms chain,auto,auto@tf`
    """
    from rich.console import Console

    from ..evaluation.bench import run_bench
    from ..evaluation.benchmark import Settings

    size = _QUICK if quick else _WHOLE
    names, batch_sizes = prompt_sets(data, target), numbers(batch_sweep, "--batch-sweep")
    further = named(beside, "--beside")
    generation = sampling.generation()
    if ignore_eos:
        generation["eos_token_id"] = None
    settings = Settings(
        max_new_tokens or size.max_new_tokens, repeats or size.repeats, seed=seed, generation=generation
    )
    pair = load(target, drafter, dtype, device)
    others = load_beside(further, dtype, device)
    try:
        with errors_in_a_line():
            identical = run_bench(
                Console(),
                pair,
                beside=others,
                data=names,
                arms=split(arms) or split([size.arms]),
                settings=settings,
                prompts=prompts or size.prompts,
                batch_sizes=batch_sizes,
                described={
                    "target": target,
                    "drafter": drafter,
                    "beside": further,
                    "temperature": sampling.temperature,
                },
                json_path=json,
                csv_path=csv,
                plots=plots,
            )
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(0 if identical else 1)
