"""The command line: `hf-treespec` and its commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import __version__
from .hub.commands import publish

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from .training.commands import Job

app = typer.Typer(
    name="hf-treespec",
    help="Lossless speculative decoding for transformers, with draft trees.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
train_app = typer.Typer(help="Train a drafter for a target.", no_args_is_help=True)
app.add_typer(train_app, name="train")


class Shape(StrEnum):
    """What is verified in a round."""

    auto = "auto"
    tree = "tree"
    chain = "chain"


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


class Loss(StrEnum):
    """What a drafter is trained towards."""

    kl = "kl"
    ce = "ce"


class Optimizer(StrEnum):
    """What trains a drafter."""

    adamw = "adamw"
    muon = "muon"


TargetArgument = Annotated[str, typer.Argument(help="Target model: Hub id, path, or `embedded`.")]
DrafterArgument = Annotated[str, typer.Argument(help="Its drafter: Hub id, path, `embedded` or `embedded:FAMILY`.")]


def _budget(value: str | int) -> str | int:
    """A number of rows or the name of a policy; what it may be is `TreeSpecConfig`'s to say."""
    try:
        return int(value)
    except ValueError:
        return value


BudgetOption = Annotated[
    Any,
    typer.Option(
        parser=_budget,
        metavar="N|POLICY",
        help="Rows verified in a round, the root included, or `auto`, `static`, `ema`, `bastion`; the drafter's "
        "default if not set.",
    ),
]
ShapeOption = Annotated[Shape | None, typer.Option(help="Verify a draft tree or a single chain.")]
DepthOption = Annotated[int | None, typer.Option(min=1, help="Most depths to draft; all the drafter has if not set.")]
MaxNewTokensOption = Annotated[int, typer.Option(min=1, help="Most tokens to generate.")]
SeedOption = Annotated[int, typer.Option(help="Seed of the random generators.")]
DeviceOption = Annotated[
    str | None, typer.Option(help="Device such as `cpu` or `cuda:0`; the GPU, where there is one, if not set.")
]
ChatOption = Annotated[
    bool | None,
    typer.Option("--chat/--no-chat", help="Put the prompt into the chat template; done if the tokenizer has one."),
]
TemperatureOption = Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 decodes greedily.")]
TopKOption = Annotated[int, typer.Option(min=0, help="Sample among the k most likely tokens; 0 = among all.")]
TopPOption = Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample among the likeliest tokens of this mass.")]
MinPOption = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="Drop tokens below this share of the best one's probability."),
]
RepetitionPenaltyOption = Annotated[float, typer.Option(min=0.0, help="Penalty on tokens seen before; 1 = none.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _fail(error: Exception) -> typer.Exit:
    typer.echo(f"Error: {error}", err=True)
    return typer.Exit(2)


def _load(target: str, drafter: str, dtype: Precision, device: str | None, **options: Any) -> tuple[Any, Any, Any]:
    """Target, drafter with the options that are set, tokenizer."""
    from transformers.utils.logging import disable_progress_bar

    from .evaluation.loading import load_pair

    disable_progress_bar()
    try:
        model, assistant, tokenizer = load_pair(target, drafter, dtype=dtype.torch_dtype(), device=device)
        return model, assistant.with_options(**{k: v for k, v in options.items() if v is not None}), tokenizer
    except (OSError, ValueError) as error:
        raise _fail(error) from None


def _encode(
    tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool | None, device: torch.device
) -> dict[str, torch.Tensor]:
    if chat is None:
        chat = tokenizer.chat_template is not None
    if chat:
        messages = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    if encoded["input_ids"].shape[1] == 0:
        raise typer.BadParameter("the prompt has no tokens")
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def _sampling(
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
) -> dict[str, Any]:
    options: dict[str, Any] = {"do_sample": False, "repetition_penalty": repetition_penalty}
    if temperature > 0:
        options |= {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    return options


@app.command()
def demo(
    json: Annotated[Path | None, typer.Option(help="File to write the results to.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times each way of decoding runs on each prompt.")] = 5,
    prompts: Annotated[int | None, typer.Option(min=1, help="Number of prompts; all if not set.")] = None,
    max_new_tokens: MaxNewTokensOption = 128,
    show: Annotated[int, typer.Option(min=0, help="Prompts whose text is streamed before the timing.")] = 2,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; no more than there are cores.")] = 2,
    seed: SeedOption = 0,
    family: Annotated[
        str, typer.Option("--drafter", help="Which drafter of the package: dflash, treeflash or flexdraft.")
    ] = "dflash",
) -> None:
    """Write Python with the models in the package: the same tokens as plain decoding, and how much faster.

    Needs no download and no GPU. Exits with 1 if an output differs from plain decoding.
    """
    from rich.console import Console

    from .evaluation.demo import run_demo

    console = Console()
    try:
        identical = run_demo(
            console,
            prompts=prompts,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            show=show,
            threads=threads,
            seed=seed,
            family=family,
            json_path=json,
        )
    except FileNotFoundError as error:
        raise _fail(error) from None
    raise typer.Exit(0 if identical else 1)


@app.command()
def generate(
    target: TargetArgument = "embedded",
    drafter: DrafterArgument = "embedded",
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Prompt; standard input if not set.")] = None,
    chat: ChatOption = None,
    max_new_tokens: MaxNewTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionPenaltyOption = 1.0,
    seed: SeedOption = 0,
    budget: BudgetOption = None,
    shape: ShapeOption = None,
    depth: DepthOption = None,
    dtype: Annotated[Precision, typer.Option(help="Format of the weights; the checkpoint's own by default.")] = (
        Precision.auto
    ),
    device: DeviceOption = None,
    report: Annotated[bool, typer.Option(help="Print the report of the call to standard error.")] = True,
) -> None:
    """Continue a prompt, streaming the text to standard output."""
    import torch
    from transformers import TextStreamer

    text = sys.stdin.read() if prompt is None else prompt
    model, assistant, tokenizer = _load(target, drafter, dtype, device, budget=budget, shape=shape, depth=depth)
    inputs = _encode(tokenizer, text, chat, model.device)
    torch.manual_seed(seed)
    try:
        model.generate(
            **inputs,
            assistant_model=assistant,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            max_new_tokens=max_new_tokens,
            **_sampling(temperature, top_k, top_p, min_p, repetition_penalty),
        )
    except ValueError as error:
        raise _fail(error) from None
    if report:
        typer.echo(str(assistant.last_report), err=True)


@app.command()
def verify(
    target: TargetArgument,
    drafter: DrafterArgument,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Prompt, may be repeated; standard input if not set.")
    ] = None,
    chat: ChatOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the sampled comparison; 0 leaves it out.")] = 0.8,
    seed: SeedOption = 0,
    budget: BudgetOption = None,
    shape: ShapeOption = None,
    depth: DepthOption = None,
    dtype: Annotated[
        Precision, typer.Option(help="Format of the weights; in float32 only true ties can differ.")
    ] = Precision.float32,
    device: DeviceOption = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="Score difference below which two tokens tie; 1e-4 in float32 if not set."),
    ] = None,
) -> None:
    """Compare assisted with plain decoding, token for token: greedy, and sampled from the same seed.

    Exits with 0 if everything is identical, rounding ties apart, and with 1 otherwise.
    """
    from rich.console import Console

    from .evaluation.verification import verify as compare

    texts = prompt or [sys.stdin.read()]
    model, assistant, tokenizer = _load(target, drafter, dtype, device, budget=budget, shape=shape, depth=depth)
    regimes = {"greedy": _sampling(0.0)}
    if temperature > 0:
        regimes[f"sampled, temperature {temperature:g}, seed {seed}"] = _sampling(temperature)
    console = Console(soft_wrap=True, highlight=False)
    passed = True
    for text in texts:
        inputs = _encode(tokenizer, text, chat, model.device)
        console.print(repr(_shorten(text)), style="bold", markup=False)
        for title, options in regimes.items():
            try:
                result = compare(
                    model,
                    assistant,
                    inputs,
                    seed=seed,
                    tolerance=tolerance,
                    max_new_tokens=max_new_tokens,
                    **options,
                )
            except ValueError as error:
                raise _fail(error) from None
            passed &= result.passed
            summary = f"{result.new_tokens} tokens"
            if result.report is not None:
                summary += (
                    f", {result.report.target_forwards} target forwards, τ {result.report.acceptance_length:.2f}"
                )
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
    raise typer.Exit(0 if passed else 1)


@app.command()
def bench(
    target: Annotated[str, typer.Option(help="Target model: Hub id, path, or `embedded`.")] = "embedded",
    drafter: Annotated[str, typer.Option(help="Its drafter: Hub id, path, `embedded` or `embedded:FAMILY`.")] = (
        "embedded"
    ),
    data: Annotated[
        list[str] | None,
        typer.Option(
            help='Prompts, by comma: JSONL files of {"turns": [...]} lines; gsm8k, math500, humaneval, mbpp, mt-bench '
            "from the Hub; stdlib-functions, stdlib-docstrings, stdlib-tests, which the embedded pair has never seen "
            "and which are its default."
        ),
    ] = None,
    arms: Annotated[
        list[str] | None,
        typer.Option(
            help="Ways of decoding, by comma; N is a number of verified rows, the root included: plain compiled "
            "lookup stock-chain chain tree-N marginal-N marginal-auto treeflash-N beam-N static-N bastion auto oracle "
            "flex-parallel flex-sequential flex-batch flex-auto; ARM@NAME is one of a drafter given by `--beside`. "
            "Those that cannot run are left out and say why."
        ),
    ] = None,
    beside: Annotated[
        list[str] | None,
        typer.Option(
            help="Further drafters for the same target, by comma, as NAME=DRAFTER: `tf=embedded:treeflash` for arms "
            "such as `auto@tf`."
        ),
    ] = None,
    batch_sweep: Annotated[
        str | None, typer.Option(help="Batch sizes to measure besides, by comma, such as `1,2,4`.")
    ] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Prompts of each kind.  [default: 16; --quick 2]")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens to generate.  [default: 256; --quick 48]")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Times each arm answers each prompt.  [default: 3; --quick 2]")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few prompts, tokens, repeats and arms: minutes.")] = False,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    repetition_penalty: RepetitionPenaltyOption = 1.0,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after the end of the text, to equal lengths.")] = False,
    seed: SeedOption = 0,
    dtype: Annotated[Precision, typer.Option(help="Format of the weights; the checkpoint's own by default.")] = (
        Precision.auto
    ),
    device: DeviceOption = None,
    json: Annotated[Path | None, typer.Option(help="File to write the results to.")] = None,
    csv: Annotated[Path | None, typer.Option(help="File to append a row for each arm and kind of prompt to.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder to draw figures into (extra `plots`).")] = None,
) -> None:
    """Measure ways of decoding against each other: interleaved, on the same prompts, with intervals.

    Ctrl-C ends the measuring and reports what has been measured. Exits with 1 if an output of this library differs
    from plain decoding by more than a rounding tie, and with 130 after an interrupt.
    """
    from rich.console import Console

    from .evaluation.bench import run_bench
    from .evaluation.benchmark import Settings
    from .evaluation.held_out import SLICES
    from .evaluation.loading import load_drafter

    if not data and target != "embedded":
        raise typer.BadParameter("say which prompts to use; only the embedded pair has its own", param_hint="--data")
    try:
        batch_sizes = [int(size) for size in _split([batch_sweep or ""])]
    except ValueError:
        batch_sizes = [0]
    if any(size < 1 for size in batch_sizes):
        raise typer.BadParameter("expected numbers from 1 on, such as `1,2,4`", param_hint="--batch-sweep")
    generation = _sampling(temperature, top_k, top_p, repetition_penalty=repetition_penalty)
    if ignore_eos:
        generation["eos_token_id"] = None
    settings = Settings(
        max_new_tokens or (48 if quick else 256), repeats or (2 if quick else 3), seed=seed, generation=generation
    )
    default_arms = "lookup,chain,tree-8,tree-16,auto"
    if not quick:
        default_arms = "lookup,stock-chain,chain,tree-8,tree-16,tree-32,auto"
    further = dict(name.partition("=")[::2] for name in _split(beside))
    if not all(name and source for name, source in further.items()):
        raise typer.BadParameter("expected NAME=DRAFTER, such as `tf=embedded:treeflash`", param_hint="--beside")
    pair, kept = _load(target, drafter, dtype, device), dtype.torch_dtype()
    try:
        identical = run_bench(
            Console(),
            pair,
            beside={name: load_drafter(source, dtype=kept, device=device) for name, source in further.items()},
            data=_split(data) or list(SLICES),
            arms=_split(arms) or _split([default_arms]),
            settings=settings,
            prompts=prompts or (2 if quick else 16),
            batch_sizes=batch_sizes,
            described={"target": target, "drafter": drafter, "beside": further, "temperature": temperature},
            json_path=json,
            csv_path=csv,
            plots=plots,
        )
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (ImportError, OSError, ValueError) as error:
        raise _fail(error) from None
    raise typer.Exit(0 if identical else 1)


@app.command()
def calibrate(
    target: Annotated[str, typer.Option(help="Target model: Hub id, path, or `embedded`.")] = "embedded",
    drafter: Annotated[str, typer.Option(help="Its drafter: Hub id, path, `embedded` or `embedded:FAMILY`.")] = (
        "embedded"
    ),
    contexts: Annotated[str, typer.Option(help="Cached columns to check predictions at, by comma.")] = "64,512",
    rounds: Annotated[
        int, typer.Option(min=3, help="Calls to measure of each number of rows; their median counts.")
    ] = 8,
    max_budget: Annotated[
        int | None, typer.Option(min=2, help="Most rows of a round.  [default: 64 on a CPU, 128 elsewhere]")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Forget the stored profile first.")] = False,
    dtype: Annotated[Precision, typer.Option(help="Format of the weights; the checkpoint's own by default.")] = (
        Precision.auto
    ),
    device: DeviceOption = None,
    plot: Annotated[Path | None, typer.Option(help="PNG for the curve over the points (extra `plots`).")] = None,
) -> None:
    """Measure ahead what verification costs on this machine, store it, and check the predictions.

    `generate` does the same by itself on first use; this only shows it.
    """
    from rich.console import Console

    from .evaluation.calibration import run_calibration

    try:
        columns = [int(size) for size in _split([contexts])]
    except ValueError:
        columns = []
    if not columns or min(columns) < 1:
        raise typer.BadParameter("expected numbers from 1 on, such as `64,512`", param_hint="--contexts")
    model, assistant, _ = _load(target, drafter, dtype, device)
    if max_budget is not None:
        assistant = assistant.with_options(max_budget=max_budget)
    try:
        run_calibration(Console(), model, assistant, contexts=columns, rounds=rounds, again=again, plot=plot)
    except (ImportError, OSError, ValueError) as error:
        raise _fail(error) from None


@app.command()
def distribution(
    target: Annotated[str, typer.Option(help="Target model: Hub id, path, or `embedded`.")] = "embedded",
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="Its drafters, by comma: Hub ids, paths, `embedded` or `embedded:FAMILY`.  [default: embedded]"
        ),
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="Prompts that the target continues, by comma, as `bench` takes them.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each kind.")] = 16,
    prompt_length: Annotated[int, typer.Option(min=1, help="Tokens of a prompt; shorter ones are left out.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that the target writes for each.")] = 192,
    temperature: Annotated[float, typer.Option(min=0.01, help="Sampling temperature of the target.")] = 0.8,
    nodes: Annotated[int, typer.Option(min=2, help="Nodes of the trees whose children count.")] = 32,
    stride: Annotated[int, typer.Option(min=1, help="Positions from one draft to the next.")] = 1,
    seed: SeedOption = 0,
    dtype: Annotated[Precision, typer.Option(help="Format of the weights; the checkpoint's own by default.")] = (
        Precision.auto
    ),
    device: DeviceOption = None,
    json: Annotated[Path | None, typer.Option(help="File to write the figures to.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder to draw figures into (extra `plots`).")] = None,
) -> None:
    """Measure how far drafters are from their target: distance and coverage by depth, best children of tree nodes.

    All drafters are measured on the same text, which the target writes first. Nothing is timed.
    """
    from rich.console import Console

    from .evaluation.distribution_command import run_distribution
    from .evaluation.held_out import SLICES
    from .evaluation.loading import load_drafter

    if not data and target != "embedded":
        raise typer.BadParameter("say which prompts to use; only the embedded pair has its own", param_hint="--data")
    names = _split(drafter) or ["embedded"]
    model, first, tokenizer = _load(target, names[0], dtype, device)
    try:
        others = {name: load_drafter(name, dtype=dtype.torch_dtype(), device=device) for name in names[1:]}
        run_distribution(
            Console(),
            model,
            tokenizer,
            {names[0]: first, **others},
            data=_split(data) or list(SLICES),
            prompts=prompts,
            prompt_length=prompt_length,
            new_tokens=new_tokens,
            temperature=temperature,
            nodes=nodes,
            stride=stride,
            seed=seed,
            described={"target": target},
            json_path=json,
            plots=plots,
        )
    except (ImportError, OSError, ValueError) as error:
        raise _fail(error) from None


@app.command()
def inspect(
    drafter: DrafterArgument,
    target: Annotated[
        str | None,
        typer.Option(help="Target to hold it to: Hub id, path, or `embedded`. Its weights are not read."),
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Load the target's weights too, for the checks that need them.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="File to write the findings to.")] = None,
) -> None:
    """Show what a drafter is, and whether it fits a target.

    Exits with 1 if it does not load or does not fit.
    """
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from .evaluation.inspection import run_inspect

    disable_progress_bar()
    try:
        fits = run_inspect(Console(soft_wrap=True), drafter, target, weights=weights, json_path=json)
    except (OSError, ValueError) as error:
        raise _fail(error) from None
    raise typer.Exit(0 if fits else 1)


def _split(values: list[str] | None) -> list[str]:
    """The parts of values that are separated by commas."""
    return [part.strip() for value in values or [] for part in value.split(",") if part.strip()]


TrainTargetOption = Annotated[str, typer.Option("--target", help="Target model: Hub id, path, or `embedded`.")]
OutputOption = Annotated[
    Path, typer.Option("--output", file_okay=False, help="Folder for the drafter and the state of the run.")
]
DataOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--data",
        exists=True,
        dir_okay=False,
        help='Text file, or JSONL of {"text": ...} or {"turns": [...]} lines that the target continues or answers; '
        "may repeat. The embedded target has its own.",
    ),
]
SequencesOption = Annotated[int, typer.Option(min=1, help="Continuations to sample from the target.")]
HeldOutOption = Annotated[
    int, typer.Option("--held-out-sequences", min=1, help="Continuations to measure acceptance on.")
]
PromptLengthOption = Annotated[int, typer.Option(min=1, help="Tokens of a prompt, cut from the data.")]
NewTokensOption = Annotated[int, typer.Option(min=1, help="Tokens of a continuation.")]
WritingTemperatureOption = Annotated[float, typer.Option(min=0.01, help="Temperature of the continuations.")]
StepsOption = Annotated[int, typer.Option(min=1, help="Optimiser steps.")]
BatchSizeOption = Annotated[int, typer.Option(min=1, help="Sequences of a forward.")]
AccumulateOption = Annotated[int, typer.Option(min=1, help="Forwards of a step.")]
AnchorsOption = Annotated[int, typer.Option(min=1, help="Blocks drawn from a sequence.")]
LossOption = Annotated[Loss, typer.Option(help="Forward KL to the target's distribution, or its tokens alone.")]
SaveStepsOption = Annotated[int, typer.Option(min=1, help="Steps between checkpoints and measurements.")]
OptimizerOption = Annotated[Optimizer, typer.Option(help="AdamW, or Muon where data and time are short.")]
TargetPrecisionOption = Annotated[
    Precision, typer.Option(help="Format of the target; the drafter is trained in float32.")
]


@train_app.command("dflash")
def train_dflash_command(
    output: OutputOption,
    target: TrainTargetOption = "embedded",
    data: DataOption = None,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the drafter.")] = 5,
    block_size: Annotated[int, typer.Option(min=2, help="Rows of a block, the anchor included.")] = 16,
    mask_token_id: Annotated[
        int | None,
        typer.Option(help="Mask token; the tokenizer's, or the first id it does not use, if not set."),
    ] = None,
    sequences: SequencesOption = 4096,
    held_out_sequences: HeldOutOption = 32,
    prompt_length: PromptLengthOption = 128,
    new_tokens: NewTokensOption = 384,
    temperature: WritingTemperatureOption = 0.8,
    steps: StepsOption = 2000,
    batch_size: BatchSizeOption = 4,
    accumulate: AccumulateOption = 1,
    anchors: AnchorsOption = 128,
    loss: LossOption = Loss.kl,
    optimizer: OptimizerOption = Optimizer.adamw,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 6e-4,
    save_steps: SaveStepsOption = 250,
    dtype: TargetPrecisionOption = Precision.auto,
    device: DeviceOption = None,
    seed: SeedOption = 0,
) -> None:
    """Train a DFlash drafter from scratch on text that the target itself writes.

    Run again with the same options, it goes on where it stopped.
    """
    from .training.commands import run_dflash

    job = _job(**locals())
    _train(lambda: run_dflash(job, layers=layers, block_size=block_size, mask_token_id=mask_token_id))


@train_app.command("treeflash")
def train_treeflash_command(
    output: OutputOption,
    target: TrainTargetOption = "embedded",
    init: Annotated[
        str,
        typer.Option(
            help="DFlash drafter the head stands on, or a TreeFlash drafter to go on with; id, path, or `embedded`."
        ),
    ] = "embedded",
    data: DataOption = None,
    freeze_backbone: Annotated[
        bool, typer.Option(help="Train the head alone, which the paper found as good as everything.")
    ] = True,
    scaling: Annotated[bool, typer.Option(help="Weigh the first tokens of a block most.")] = True,
    sequences: SequencesOption = 4096,
    held_out_sequences: HeldOutOption = 32,
    prompt_length: PromptLengthOption = 128,
    new_tokens: NewTokensOption = 384,
    temperature: WritingTemperatureOption = 0.8,
    steps: StepsOption = 2000,
    batch_size: BatchSizeOption = 4,
    accumulate: AccumulateOption = 1,
    anchors: AnchorsOption = 128,
    loss: LossOption = Loss.kl,
    optimizer: OptimizerOption = Optimizer.adamw,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 1e-4,
    save_steps: SaveStepsOption = 250,
    dtype: TargetPrecisionOption = Precision.auto,
    device: DeviceOption = None,
    seed: SeedOption = 0,
) -> None:
    """Train a TreeFlash head on a DFlash drafter, which helps to write the text it learns from.

    Run again with the same options, it goes on where it stopped.
    """
    from .training.commands import run_treeflash

    job = _job(**locals())
    gamma = "paper" if scaling else None
    _train(lambda: run_treeflash(job, init, gamma=gamma, freeze_backbone=freeze_backbone))


@train_app.command("flexdraft")
def train_flexdraft_command(
    output: OutputOption,
    target: TrainTargetOption = "embedded",
    init: Annotated[
        str | None, typer.Option(help="FlexDraft drafter to go on with, id or path; a copy of the target if not set.")
    ] = None,
    data: DataOption = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Last layers to draft in; 10, or a third of fewer than 30, if not set.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=2, help="Rows of a block, the one for the anchor included.")] = 16,
    calibration_rank: Annotated[int, typer.Option(min=1, help="Width of the calibration.")] = 256,
    calibration_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of the calibration; a quarter of `--steps` if not set.")
    ] = None,
    sequences: SequencesOption = 4096,
    held_out_sequences: HeldOutOption = 32,
    prompt_length: PromptLengthOption = 128,
    new_tokens: NewTokensOption = 384,
    temperature: WritingTemperatureOption = 0.8,
    steps: StepsOption = 2000,
    batch_size: BatchSizeOption = 4,
    accumulate: AccumulateOption = 1,
    anchors: AnchorsOption = 32,
    loss: LossOption = Loss.kl,
    optimizer: OptimizerOption = Optimizer.adamw,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 2e-4,
    save_steps: SaveStepsOption = 250,
    dtype: TargetPrecisionOption = Precision.auto,
    device: DeviceOption = None,
    seed: SeedOption = 0,
) -> None:
    """Train a FlexDraft drafter, with which the target drafts in its own last layers.

    Run again with the same options, it goes on where it stopped.
    """
    from .training.commands import run_flexdraft

    job = _job(**locals())
    _train(
        lambda: run_flexdraft(
            job,
            init=init,
            layers=layers,
            block_size=block_size,
            calibration_rank=calibration_rank,
            calibration_steps=calibration_steps,
        )
    )


def _job(**options: Any) -> Job:
    """The job that the options of a `train` command describe."""
    from .training.commands import Job

    return Job(
        target=options["target"],
        output=options["output"],
        data=tuple(options["data"] or ()),
        sequences=options["sequences"],
        held_out=options["held_out_sequences"],
        prompt_length=options["prompt_length"],
        new_tokens=options["new_tokens"],
        temperature=options["temperature"],
        anchors=options["anchors"],
        loss=options["loss"].value,
        run={
            "max_steps": options["steps"],
            "optimizer": options["optimizer"].value,
            **{name: options[name] for name in ("batch_size", "accumulate", "learning_rate", "save_steps", "seed")},
        },
        dtype=options["dtype"].torch_dtype(),
        device=options["device"],
    )


def _train(run: Callable[[], dict[str, float]]) -> None:
    try:
        metrics = run()
    except (OSError, ValueError) as error:
        raise _fail(error) from None
    typer.echo("\n".join(f"{name}: {value:.3f}" for name, value in metrics.items()))


def _shorten(text: str, length: int = 60) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _token(tokenizer: PreTrainedTokenizerBase, token: int | None) -> str:
    from rich.markup import escape

    return "has ended" if token is None else f"{token} {escape(repr(tokenizer.decode([token])))}"


app.command("publish")(publish)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
