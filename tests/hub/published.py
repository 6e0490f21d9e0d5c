"""A tiny drafter with a real measurement of it, ready to be published for `acme/target`."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

from pairs import PROMPT, Pair, build_pair

from hf_treespec import AutoDrafter
from hf_treespec.drafters.base import BlockDrafter
from hf_treespec.evaluation.benchmark import Benchmark, Settings
from hf_treespec.evaluation.prompt_sets import HUB_SETS, PromptSet
from hf_treespec.evaluation.results import as_json

TARGET, REPO = "acme/target", "acme/drafter"


@functools.cache
def pair() -> Pair:
    return build_pair()


@functools.cache
def _measured() -> dict[str, Any]:
    sets = [
        PromptSet("gsm8k", ((PROMPT,), (PROMPT * 2,)), chat=False, source=HUB_SETS["gsm8k"]),
        PromptSet("of my own", ((PROMPT,),), chat=False, notes=("Prompts of one kind.",)),
    ]
    benchmark = Benchmark(*pair(), sets, ["chain", "tree-4"], Settings(max_new_tokens=6, repeats=1))
    benchmark.run(lambda section: None)
    return as_json(benchmark, target=TARGET, drafter="./drafter", temperature=0.0)


def measurement(**environment: Any) -> dict[str, Any]:
    """What `bench --json` writes of the pair, with some of its environment replaced."""
    found = copy.deepcopy(_measured())
    found["environment"] |= environment
    return found


def saved(folder: Path) -> BlockDrafter:
    """The drafter as its user has it: loaded from a folder."""
    pair()[1].save_pretrained(folder)
    return AutoDrafter.from_pretrained(folder)
