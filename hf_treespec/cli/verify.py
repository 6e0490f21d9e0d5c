"""`hf-treespec verify`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from .drafting import Drafting
from .errors import errors_in_a_line
from .groups import takes_groups
from .loading import load
from .options import (
    ChatOption,
    DeviceOption,
    DrafterArgument,
    DtypeOption,
    MaxNewTokensOption,
    Precision,
    SeedOption,
    TargetArgument,
)
from .prompts import encode
from .sampling import Sampling

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from ..evaluation.verification import Verification


@takes_groups
def verify(
    *,
    target: TargetArgument,
    drafter: DrafterArgument,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Prompt; may be repeated.", show_default="standard input"),
    ] = None,
    chat: ChatOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the sampled comparison; 0 leaves it out.")] = 0.8,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="Score difference below which two tokens tie.", show_default="1e-4 in float32"),
    ] = None,
    seed: SeedOption = 0,
    dtype: DtypeOption = Precision.float32,
    device: DeviceOption = None,
    drafting: Drafting,
) -> None:
    """Compare assisted with plain decoding, token for token: greedy, and sampled from the same seed.

    Exits with 0 if everything is identical, rounding ties apart, and with 1 otherwise. In float32 only true ties can
    differ.

    Example: `hf-treespec verify embedded embedded:treeflash --prompt "def add(a, b):"`
    """
    from rich.console import Console

    from ..evaluation.verification import verify as compare

    texts = prompt or [sys.stdin.read()]
    model, assistant, tokenizer = load(target, drafter, dtype, device)
    regimes = {"greedy": Sampling()}
    if temperature > 0:
        regimes[f"sampled, temperature {temperature:g}, seed {seed}"] = Sampling(temperature=temperature)
    console = Console(soft_wrap=True, highlight=False)
    passed = True
    with errors_in_a_line():
        assistant = assistant.with_options(**drafting.options())
        for text in texts:
            inputs = encode(tokenizer, text, chat, model.device)
            console.print(repr(_shorten(text)), style="bold", markup=False)
            for title, sampling in regimes.items():
                result = compare(
                    model,
                    assistant,
                    inputs,
                    seed=seed,
                    tolerance=tolerance,
                    max_new_tokens=max_new_tokens,
                    **sampling.generation(),
                )
                _print(console, tokenizer, title, result)
                passed &= result.passed
    raise typer.Exit(0 if passed else 1)


def _print(console: Console, tokenizer: PreTrainedTokenizerBase, title: str, result: Verification) -> None:
    summary = f"{result.new_tokens} tokens"
    if result.report is not None:
        summary += f", {result.report.target_forwards} target forwards, τ {result.report.acceptance_length:.2f}"
    if result.identical:
        console.print(f"  {title}: [green]identical[/], {summary}")
    for difference in result.differences:
        colour = "yellow" if difference.verdict == "tie" else "bold red"
        console.print(
            f"  {title}: first difference at new token {difference.position} of {summary}\n"
            f"    plain {_token(tokenizer, difference.expected)}, "
            f"assisted {_token(tokenizer, difference.actual)}\n"
            f"    plain's best score leads its second by {difference.gap:.2e} and the other token by "
            f"{difference.margin:.2e} (ties are below {difference.tolerance:.2e}): "
            f"[{colour}]{difference.verdict}[/]"
        )


def _shorten(text: str, length: int = 60) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _token(tokenizer: PreTrainedTokenizerBase, token: int | None) -> str:
    from rich.markup import escape

    return "has ended" if token is None else f"{token} {escape(repr(tokenizer.decode([token])))}"
