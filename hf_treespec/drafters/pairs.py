"""Which published drafter goes with which target, from the files of `hub_configs`."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import PreTrainedModel
from transformers.utils import logging

from ..resources import resource_folder
from ..sources import ModelFiles

logger = logging.get_logger(__name__)

DIALECTS = ("dflash", "dflash2", "treeflash", "jetspec", "speculators", "deepspec", "muse")

_CACHED = re.compile(r"models--([^/\\]+?)--([^/\\]+)")


@dataclass(frozen=True)
class Pair:
    """A published drafter and the targets it was trained for.

    Attributes:
        drafter: Its Hub id.
        targets: Theirs.
        dialect: Format of its checkpoint, one of `DIALECTS`.
        block_size: Rows of a block; None = not published.
        thinking: Whether it was trained on text with thinking, or on text without; None = not published.
        license: Its licence's SPDX id in lower case; None = not published.
        default: Whether it is the one taken for its targets where nothing else is asked for.
        published: What its authors measured, each with its `source`, its `setting` and the `results`: benchmark,
            temperature, acceptance length τ (bonus included) and speed-up over plain decoding; None = not published.
        source: Where the two ids are from.
    """

    drafter: str
    targets: tuple[str, ...]
    dialect: str
    block_size: int | None
    thinking: bool | None
    license: str | None
    default: bool
    published: tuple[dict[str, Any], ...]
    source: str


@functools.cache
def published_pairs() -> tuple[Pair, ...]:
    """All pairs that the package knows, by drafter."""
    pairs = []
    for file in resource_folder("hub_configs").iterdir():
        if file.name.endswith(".json"):
            fields = json.loads(file.read_text(encoding="utf-8"))
            fields |= {name: tuple(fields[name]) for name in ("targets", "published")}
            pairs.append(Pair(**fields))
    return tuple(sorted(pairs, key=lambda pair: pair.drafter.lower()))


def find_pair(target: str | Path | PreTrainedModel, dialect: str | None = None) -> Pair:
    """The pair of a target, told by its id or by that of the model it was made from.

    Ids are compared without regard to case, and as a whole: `Qwen3-8B-Base` is no `Qwen3-8B`. A target that is not
    listed itself (a quantised or tuned one, an adapter) goes by the `base_model` of its model card.

    Args:
        target: A loaded model, a Hub id or a folder.
        dialect: Which of several drafters; by default the one that is marked so.

    Raises:
        ValueError: No drafter is known, or none in this dialect.
    """
    if dialect is not None and dialect not in DIALECTS:
        raise ValueError(f"dialect is {dialect!r}; it is one of {list(DIALECTS)}.")
    names = list(dict.fromkeys(_names_of(target)))
    for name in names:
        pairs = _pairs_of(name)
        if pairs:
            return _choose(name, pairs, dialect)
    unread: list[str] = []
    for name in names:
        try:
            bases = _bases_of(name)
        except LocalEntryNotFoundError:
            unread.append(name)
            continue
        for base, is_same in bases:
            pairs = _pairs_of(base)
            if pairs:
                pair = _choose(base, pairs, dialect)
                if not is_same:
                    logger.warning(
                        f"{pair.drafter} was trained for {base}, and {name} was tuned from that: fewer of its tokens "
                        "may be accepted. Outputs are the target's own all the same."
                    )
                return pair
    raise ValueError(_unknown(names, unread))


def _names_of(target: str | Path | PreTrainedModel) -> Iterator[str]:
    """Names that a target goes by: its id, that of the cached repository it was loaded from, its adapter's base."""
    if isinstance(target, (str, Path)):
        names = [str(target)]
    else:
        names = [getattr(target, "name_or_path", ""), getattr(target.config, "_name_or_path", "")]
        adapters = getattr(target, "peft_config", {}).values()
        names += [adapter.base_model_name_or_path or "" for adapter in adapters]
    for name in names:
        cached = _CACHED.search(name)
        if cached:
            yield f"{cached[1]}/{cached[2]}"
        if name:
            yield name


def _pairs_of(name: str) -> list[Pair]:
    return [pair for pair in published_pairs() if name.lower() in [target.lower() for target in pair.targets]]


def _choose(name: str, pairs: list[Pair], dialect: str | None) -> Pair:
    found = next((pair for pair in pairs if (pair.default if dialect is None else pair.dialect == dialect)), None)
    if found is None:
        there = {pair.dialect: pair.drafter for pair in pairs}
        raise ValueError(f"No drafter in the dialect {dialect!r} is known for {name}; there are {there}.")
    return found


def _bases_of(name: str) -> list[tuple[str, bool]]:
    """Models that a target's card says it was made from, and whether it is the same model in another form.

    Raises:
        LocalEntryNotFoundError: The card is not in the cache, and the Hub cannot or may not be asked.
    """
    try:
        path = ModelFiles(name).find("README.md")
    except LocalEntryNotFoundError:
        raise
    except (OSError, ValueError):  # no such repository, a name that is none
        return []
    if path is None:
        return []
    data = ModelCard.load(path).data
    bases = data.base_model or []
    is_same = data.get("base_model_relation") == "quantized"
    return [(base, is_same) for base in ([bases] if isinstance(bases, str) else bases)]


def _unknown(names: list[str], unread: list[str]) -> str:
    name = names[0] if names else "a model without a name"
    known = {target for pair in published_pairs() for target in pair.targets}
    spelled = {target.lower(): target for target in known} | {target.lower().split("/")[1]: target for target in known}
    wanted = name.lower()
    close = [*difflib.get_close_matches(wanted, spelled), *difflib.get_close_matches(wanted.split("/")[-1], spelled)]
    near = list(dict.fromkeys(spelled[match] for match in close))[:3]
    return (
        f"No published drafter is known for {name}. "
        + (f"Near matches: {', '.join(near)}. " if near else "")
        + (f"The Hub could not be asked for the card of {', '.join(unread)}, which may name one. " if unread else "")
        + "If it is one of those in another form, load that drafter by its id and pass `target=`, which checks the "
        f"pair. Or train one: `hf-treespec train dflash --target {name} …`, see docs/training.md."
    )
