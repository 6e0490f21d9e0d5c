"""What the `train` commands do: gather text that the target writes, train, and write the drafter's folder.

A folder holds `continuations/` (shards, kept between runs), `run/` (checkpoints) and, at the end, the drafter, its
card and `training_log.json`. A stopped command is run again with the same options.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .. import embedded
from ..drafters import AutoDrafter
from ..drafters.base import BlockDrafter
from ..drafters.dflash import DFlashConfig, DFlashDrafter
from ..drafters.flexdraft import FlexDraftDrafter
from ..drafters.treeflash import TreeFlashDrafter
from ..sources import find_source
from . import corpus
from .card import write_card, write_log
from .checkpoints import last_checkpoint
from .continuations import write_continuations
from .dflash import initialise_from_target, train_dflash
from .flexdraft import PARTS, initialise_from_text, train_flexdraft
from .streams import PromptStream, documents, prompt_stream
from .treeflash import train_treeflash

_EMBEDDED = "embedded"
#: Texts that a fresh FlexDraft drafter's scales are fitted to.
_SAMPLE = 8
_HELD_OUT_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is asked of a `train` command, whatever family it trains.

    Attributes:
        target: Hub id, path, or `"embedded"`.
        output: The drafter's folder.
        data: Text files, or JSONL of `{"text"}` or `{"turns"}` lines; none for the embedded target's own corpus.
        sequences: Continuations to train on.
        held_out: Continuations to measure on.
        prompt_length: Tokens of a prompt.
        new_tokens: Tokens of a continuation.
        temperature: The continuations' temperature, and that of the distribution learnt from.
        anchors: Blocks drawn from a sequence.
        loss: `"kl"` or `"ce"`.
        run: Fields of `RunSettings`, `seed` among them.
        dtype: Of the target; None = the checkpoint's own. Drafters are trained in float32.
        device: None = the GPU where there is one.
    """

    target: str
    output: Path
    data: tuple[Path, ...]
    sequences: int
    held_out: int
    prompt_length: int
    new_tokens: int
    temperature: float
    anchors: int
    loss: str
    run: dict[str, Any]
    dtype: torch.dtype | None
    device: str | None

    @property
    def options(self) -> dict[str, Any]:
        """What `train_dflash` and its siblings take."""
        return {
            "prompt_length": self.prompt_length,
            "temperature": self.temperature,
            "anchors": self.anchors,
            "loss": self.loss,
            **self.run,
        }


def run_dflash(
    job: Job, *, layers: int = 5, block_size: int = 16, mask_token_id: int | None = None
) -> dict[str, float]:
    """Trains a DFlash drafter from scratch. Returns the figures of `train_dflash`.

    Raises:
        ValueError: The data are too few, or the target has no token to mask with.
    """
    target, tokenizer = load_target(job)
    if mask_token_id is None:
        mask_token_id = len(tokenizer) if tokenizer.mask_token_id is None else tokenizer.mask_token_id
    if mask_token_id >= target.config.get_text_config().vocab_size:
        raise ValueError("the target has no unused token to mask with; choose one by its mask_token_id.")
    torch.manual_seed(job.run["seed"])
    config = DFlashConfig.for_target(
        target.config, num_hidden_layers=layers, block_size=block_size, mask_token_id=mask_token_id
    )
    drafter = initialise_from_target(DFlashDrafter(config), target).to(target.device)
    written, held_out = gather(job, target, tokenizer)
    metrics = train_dflash(drafter, target, written, held_out, job.output / "run", **job.options)
    finish(job, "dflash", drafter, written, held_out, metrics, job.options)
    return metrics


def run_treeflash(
    job: Job, init: str, *, gamma: float | str | None = "paper", freeze_backbone: bool = True
) -> dict[str, float]:
    """Trains a TreeFlash head on a DFlash drafter, which helps to write the text it learns from.

    Args:
        init: A DFlash drafter, or a TreeFlash drafter to train on: Hub id, path, `"embedded"` or `"embedded:FAMILY"`.

    Raises:
        ValueError: The drafter is of another family or does not fit the target, or the data are too few.
    """
    target, tokenizer = load_target(job)
    start = load_init(init, target)
    start.check_target(target)
    torch.manual_seed(job.run["seed"])
    drafter = start if isinstance(start, TreeFlashDrafter) else TreeFlashDrafter.from_dflash(start)
    written, held_out = gather(job, target, tokenizer, start)
    options: dict[str, Any] = {"gamma": gamma, "freeze_backbone": freeze_backbone, **job.options}
    metrics = train_treeflash(drafter, target, written, held_out, job.output / "run", **options)
    finish(job, "treeflash", drafter, written, held_out, metrics, options, init=init)
    return metrics


def run_flexdraft(
    job: Job,
    *,
    init: str | None = None,
    layers: int | None = None,
    block_size: int = 16,
    calibration_rank: int = 256,
    calibration_steps: int | None = None,
    calibration_batch_size: int | None = None,
) -> dict[str, float]:
    """Trains a FlexDraft drafter, by default one that starts as its target. Returns the figures of `train_flexdraft`.

    Args:
        init: A FlexDraft drafter to train on: Hub id or path; the options of a fresh one then count for nothing.
        layers: Last layers of the target to draft in; None = see `FlexDraftDrafter.from_target`.

    Raises:
        ValueError: The drafter is of another family or does not fit the target, or the data are too few.
    """
    target, tokenizer = load_target(job)
    torch.manual_seed(job.run["seed"])
    if init is None:
        drafter = FlexDraftDrafter.from_target(
            target, layers, block_size=block_size, calibration_rank=calibration_rank
        ).float()
    else:
        start = AutoDrafter.from_pretrained(init, dtype=torch.float32).to(target.device)
        if not isinstance(start, FlexDraftDrafter):
            raise ValueError(f"{init} is a {type(start).__name__}, not a FlexDraft drafter to train on.")
        drafter = start
    drafter.check_target(target)
    written, held_out = gather(job, target, tokenizer)
    if init is None:
        initialise_from_text(drafter, target, written[:_SAMPLE])
    options: dict[str, Any] = {
        "calibration_steps": calibration_steps,
        "calibration_batch_size": calibration_batch_size,
        **job.options,
    }
    metrics = train_flexdraft(drafter, target, written, held_out, job.output / "run", **options)
    finish(job, "flexdraft", drafter, written, held_out, metrics, options, init=init)
    return metrics


def load_target(job: Job) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target and its tokenizer.

    Raises:
        FileNotFoundError: The target is a path that leads nowhere.
    """
    device = job.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if job.target == _EMBEDDED:
        target, _, tokenizer = embedded.load(job.dtype, device)
        return target, tokenizer
    source = find_source(job.target)
    target = AutoModelForCausalLM.from_pretrained(source, dtype=job.dtype or "auto").to(device)
    return target, AutoTokenizer.from_pretrained(source)


def load_init(name: str, target: PreTrainedModel) -> DFlashDrafter:
    """The drafter to start from, in float32.

    Raises:
        ValueError: It is of a family that has no such head.
    """
    drafter: BlockDrafter
    source, _, family = name.partition(":")
    if source == _EMBEDDED:
        _, drafter, _ = embedded.load(torch.float32, target.device, family=family or "dflash")
    else:
        drafter = AutoDrafter.from_pretrained(name, dtype=torch.float32).to(target.device)
    if not isinstance(drafter, DFlashDrafter):
        raise ValueError(f"{name} is a {type(drafter).__name__}; a TreeFlash head stands on a DFlash drafter.")
    return drafter


def gather(
    job: Job, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drafter: BlockDrafter | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Continuations to train and to measure on, `[n, L]` and `[m, L]`, from `continuations/` or sampled into it."""
    sides = _streams(job, tokenizer)
    seed = job.run["seed"]
    found = [
        write_continuations(
            target,
            stream,
            job.output / "continuations" / name,
            sequences=count,
            prompt_length=job.prompt_length,
            new_tokens=job.new_tokens,
            temperature=job.temperature,
            seed=seed + index,
            drafter=drafter,
        )
        for index, (name, stream, count) in enumerate(
            [("train", sides[0], job.sequences), ("held_out", sides[1], job.held_out)]
        )
    ]
    return found[0], found[1]


def _streams(job: Job, tokenizer: PreTrainedTokenizerBase) -> tuple[PromptStream, PromptStream]:
    if job.data:
        return prompt_stream(documents(job.data), tokenizer).split(_HELD_OUT_SHARE, job.prompt_length)
    if job.target != _EMBEDDED:
        raise ValueError("say which prompts the target shall continue (`data`); only the embedded one has its own.")
    files = corpus.build_manifest()
    train, held_out = (
        PromptStream.anywhere(corpus.tokenize(corpus.read_texts(files, split), tokenizer))
        for split in ("train", "held_out")
    )
    return train, held_out


def finish(
    job: Job,
    family: str,
    drafter: BlockDrafter,
    written: np.ndarray,
    held_out: np.ndarray,
    metrics: dict[str, float],
    settings: dict[str, Any],
    init: str | None = None,
) -> None:
    """Writes the drafter, its card and the log."""
    drafter.save_pretrained(job.output)
    run = job.output / "run"
    runs = [run / part for part in PARTS] if family == "flexdraft" else [run]
    log = {
        "family": family,
        "target": job.target,
        "init": init,
        "data": _names(job.data),
        "sequences": len(written),
        "held_out": len(held_out),
        "length": written.shape[1],
        "device": str(drafter.device),
        "settings": settings,
        "drafter": drafter.config.to_diff_dict(),
        "job": asdict(job),
        "metrics": metrics,
        "history": [entry for run in runs for entry in history(run)],
    }
    write_log(job.output, log)
    write_card(job.output, drafter, log)


def history(folder: Path) -> list[dict[str, Any]]:
    """Losses and held-out figures on the way, by step, from the last checkpoint."""
    checkpoint = last_checkpoint(folder)
    if checkpoint is None:
        return []
    state = json.loads(Path(checkpoint, "trainer_state.json").read_text(encoding="utf-8"))
    return list(state["log_history"])


def _names(data: Iterable[Path]) -> list[str]:
    return [path.name for path in data] or ["the Python standard library's sources"]
