"""Options and arguments that several commands have, each under one name and with one help text."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch


class Precision(StrEnum):
    """Floating-point formats a model can be loaded in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"

    def torch_dtype(self) -> torch.dtype | None:
        """The torch dtype; None = the checkpoint's own."""
        import torch

        return None if self is Precision.auto else getattr(torch, self.value)


_TARGET = "Target model: Hub id, path, or `embedded`."
_DRAFTER = "Its drafter: Hub id, path, `embedded` or `embedded:FAMILY`."

TargetArgument = Annotated[str, typer.Argument(help=_TARGET)]
DrafterArgument = Annotated[str, typer.Argument(help=_DRAFTER)]
TargetOption = Annotated[str, typer.Option("--target", help=_TARGET)]
DrafterOption = Annotated[str, typer.Option("--drafter", help=_DRAFTER)]
BesideOption = Annotated[
    list[str] | None,
    typer.Option(
        "--beside", help="Further drafters for the same target, by comma, as NAME=DRAFTER: `tf=embedded:treeflash`."
    ),
]
DtypeOption = Annotated[Precision, typer.Option("--dtype", help="Format of the weights; `auto`: the checkpoint's.")]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="Device such as `cpu` or `cuda:0`.", show_default="the GPU, where there is one"),
]

PromptSetsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help='Prompts, by comma: JSONL files of {"turns": [...]} lines; gsm8k, math500, humaneval, mbpp, mt-bench '
        "from the Hub; stdlib-functions, stdlib-docstrings, stdlib-tests, which the embedded pair has never seen.",
        show_default="the last three, for the embedded target",
    ),
]
ChatOption = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Put the prompt into the chat template.",
        show_default="if the tokenizer has one",
    ),
]
PromptLengthOption = Annotated[int, typer.Option("--prompt-length", min=1, help="Tokens of each prompt.")]
MaxNewTokensOption = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Most tokens to generate.")]
NewTokensOption = Annotated[
    int,
    typer.Option(
        "--new-tokens", min=1, help="Tokens of each continuation: all are as long, past an end-of-text token too."
    ),
]
WritingTemperatureOption = Annotated[
    float, typer.Option("--temperature", min=0.01, help="Temperature that the target writes at.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of the random generators.")]

JsonOption = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="File to write the results to.")]
PlotsOption = Annotated[
    Path | None, typer.Option("--plots", file_okay=False, help="Folder to draw figures into (extra `plots`).")
]
