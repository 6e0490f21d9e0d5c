"""`hf-treespec generate`."""

from __future__ import annotations

import sys
from typing import Annotated

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


@takes_groups
def generate(
    *,
    target: TargetArgument = "embedded",
    drafter: DrafterArgument = "embedded",
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Prompt.", show_default="standard input")
    ] = None,
    chat: ChatOption = None,
    max_new_tokens: MaxNewTokensOption = 256,
    seed: SeedOption = 0,
    dtype: DtypeOption = Precision.auto,
    device: DeviceOption = None,
    report: Annotated[bool, typer.Option(help="Print the report of the call to standard error.")] = True,
    sampling: Sampling,
    drafting: Drafting,
) -> None:
    """Continue a prompt, streaming the text to standard output.

    Example: `hf-treespec generate embedded embedded --prompt "class Stack:" --temperature 0.8`
    """
    import torch
    from transformers import TextStreamer

    text = sys.stdin.read() if prompt is None else prompt
    model, assistant, tokenizer = load(target, drafter, dtype, device)
    inputs = encode(tokenizer, text, chat, model.device)
    torch.manual_seed(seed)
    with errors_in_a_line():
        assistant = assistant.with_options(**drafting.options())
        model.generate(
            **inputs,
            assistant_model=assistant,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            max_new_tokens=max_new_tokens,
            **sampling.generation(),
        )
    if report:
        typer.echo(str(assistant.last_report), err=True)
