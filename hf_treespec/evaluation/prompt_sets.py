"""The prompts of a benchmark: data sets of the Hub, JSONL files, held-out parts of the standard library.

Templates are those of the DFlash benchmark (arXiv 2602.06036, section 5; also DDTree's and BASTION's), and so is the
choice of a part: the order of `Dataset.shuffle(seed=0)`, from its beginning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import held_out

_MATH = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_CODE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"


@dataclass(frozen=True)
class HubSet:
    """Where a data set is on the Hub, and how a row of it becomes user turns."""

    path: str
    config: str | None
    split: str
    turns: Callable[[Mapping[str, Any]], Sequence[str]]


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one kind.

    Attributes:
        name: As given, a file by its stem.
        prompts: User turns of each prompt.
        chat: Whether they are said to a model, in its chat template; otherwise they are text to go on from.
        notes: What a reader of the results must know of the prompts.
        source: The data set of the Hub they are from, if they are.
    """

    name: str
    prompts: tuple[tuple[str, ...], ...]
    chat: bool = True
    notes: tuple[str, ...] = ()
    source: HubSet | None = None


HUB_SETS = {
    "gsm8k": HubSet("openai/gsm8k", "main", "test", lambda row: [row["question"] + _MATH]),
    "math500": HubSet("HuggingFaceH4/MATH-500", None, "test", lambda row: [row["problem"] + _MATH]),
    "humaneval": HubSet("openai/openai_humaneval", None, "test", lambda row: [f"{_CODE}{row['prompt']}\n```"]),
    "mbpp": HubSet("google-research-datasets/mbpp", "sanitized", "test", lambda row: [row["prompt"]]),
    "mt-bench": HubSet("HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: row["prompt"]),
}


def available_sets() -> list[str]:
    """Names that `load_prompt_set` knows, besides files."""
    return [*held_out.SLICES, *HUB_SETS]


def load_prompt_set(name: str, limit: int | None = None, seed: int = 0) -> PromptSet:
    """Loads prompts by the name of a data set, or from a JSONL file of `{"turns": [...]}` lines.

    Args:
        name: One of `available_sets()`, or a path.
        limit: Number of prompts; all by default.
        seed: Of the choice among the rows of a data set or file.

    Raises:
        ImportError: A data set of the Hub without the `datasets` library.
        ValueError: There is nothing of that name, or nothing usable in it.
    """
    if name in held_out.SLICES:
        prompts, notes = held_out.load_slice(name, limit)
        return PromptSet(name, tuple((text,) for text in prompts), chat=False, notes=notes)
    if name in HUB_SETS:
        source = HUB_SETS[name]
        return PromptSet(name, _choose(_from_hub(source), limit, seed), source=source)
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"No prompts named {name!r}: neither a JSONL file nor one of {', '.join(available_sets())}.")
    return PromptSet(path.stem, _choose(_from_jsonl(path), limit, seed))


def _choose(rows: Sequence[Sequence[str]], limit: int | None, seed: int) -> tuple[tuple[str, ...], ...]:
    if limit is None or limit >= len(rows):
        return tuple(map(tuple, rows))
    order = np.random.default_rng(seed).permutation(len(rows))[:limit]
    return tuple(tuple(rows[index]) for index in order)


def _from_hub(source: HubSet) -> list[Sequence[str]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            "Data sets of the Hub need the `datasets` library: pip install 'hf-treespec[eval]'. "
            "Prompts of your own can be given as a JSONL file."
        ) from error
    return [source.turns(row) for row in load_dataset(source.path, source.config, split=source.split)]


def _from_jsonl(path: Path) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            turns = json.loads(line)["turns"]
        except (json.JSONDecodeError, KeyError, TypeError):
            turns = None
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise ValueError(f'{path}, line {number}: expected {{"turns": [...]}} with the user\'s turns as text.')
        rows.append(turns)
    if not rows:
        raise ValueError(f"{path} holds no prompts.")
    return rows
