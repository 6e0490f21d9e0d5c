"""What `hf-treespec bench --json` measured of a drafter, and whether it is this drafter that was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from ..drafters.base import BlockDrafter
from ..drafters.fingerprint import weights_fingerprint
from ..sources import is_hub_id

_HOW = "hf-treespec bench --target TARGET --drafter DRAFTER --data PROMPTS --json bench.json"
_NEEDED = ("command", "date", "hardware", "dtype", "hf_treespec", "torch", "transformers", "target", "drafter")
#: Arms that do not say how fast this library is: transformers' own loop, and the best of several arms in hindsight.
_NOT_OURS = ("stock-chain", "oracle")


def read_measurement(measurement: str | Path | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What `bench --json` wrote, from its file or as it is.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: There is none, it is something else, it was interrupted, or no drafted arm was measured.
    """
    if measurement is None:
        raise ValueError(f"A drafter is published with a measurement, and none is given. Make one: {_HOW}")
    found: Any = measurement
    if not isinstance(measurement, Mapping):
        path = Path(measurement)
        if not path.is_file():
            raise FileNotFoundError(f"There is no measurement {str(path)!r}. Make one: {_HOW}")
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is no JSON ({error}). Make a measurement: {_HOW}") from None
    if not isinstance(found, Mapping) or not isinstance(found.get("environment"), Mapping):
        raise ValueError(f"A measurement is what bench writes, with its environment; this is not. Make one: {_HOW}")
    absent = [name for name in _NEEDED if not found["environment"].get(name)]
    if absent:
        raise ValueError(f"The measurement does not say its {', '.join(absent)}. Make a new one: {_HOW}")
    if found.get("partial"):
        raise ValueError(f"The measurement was interrupted, so it shows a part only. Let it end: {_HOW}")
    if not any(drafted_arms(section) for section in found.get("datasets", ())):
        raise ValueError(f"The measurement has no arm that used the drafter. Measure chain, tree or auto: {_HOW}")
    return found


def check_measurement(measurement: Mapping[str, Any], drafter: BlockDrafter, target: str) -> None:
    """Checks that a measurement is of this drafter on this target, by whatever it says of them.

    Args:
        measurement: From `read_measurement`.
        drafter: The drafter that is to be published.
        target: Hub id of its target.

    Raises:
        ValueError: It is of another one.
    """
    said = measurement["environment"]
    family = drafter.config.model_type.removeprefix("treespec_")
    own = {"drafter_family": family, "block_size": getattr(drafter.config, "block_size", None)}
    for name, value in own.items():
        if said.get(name) not in (None, value):
            raise ValueError(
                f"The measurement is of another drafter: its {name} is {said[name]!r}, this one's is {value!r}. "
                f"Measure this one: {_HOW}"
            )
    if said.get("drafter_fingerprint") is None:
        if drafter.name_or_path and not _same_name(said["drafter"], drafter.name_or_path):
            raise ValueError(
                f"The measurement is of another drafter: it names {said['drafter']!r}, this one is "
                f"{drafter.name_or_path!r}. Measure this one: {_HOW}"
            )
    elif said["drafter_fingerprint"] != weights_fingerprint(drafter):
        raise ValueError(
            f"The measurement is of other weights than this drafter's ({said['drafter']!r} on {said['date']}). "
            f"Measure these: {_HOW}"
        )
    if not _same_name(said["target"], target):
        raise ValueError(
            f"The measurement is on another target: {said['target']!r}, and the drafter is published for {target!r}. "
            f"Name the one it was measured on (--target), or measure again: {_HOW}"
        )


def _same_name(measured: str, wanted: str) -> bool:
    """Whether two names may mean one model: a folder counts by its own name."""
    if is_hub_id(measured) and is_hub_id(wanted):
        return measured.lower() == wanted.lower()
    return Path(measured).name.lower() == Path(wanted).name.lower()


def drafted_arms(section: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The arms of a section in which this library decoded with the drafter, none of those measured beside it."""
    return [
        arm
        for arm in section.get("arms", ())
        if arm.get("acceptance_length")
        and arm.get("speedup")
        and arm["arm"] not in _NOT_OURS
        and "@" not in arm["arm"]
    ]


def headline(section: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The arm a section is summed up by: `auto`, the default, or else the fastest."""
    arms = drafted_arms(section)
    return max(arms, key=lambda arm: (arm["arm"] == "auto", arm["speedup"]), default=None)


def evaluation_results(measurement: Mapping[str, Any]) -> Iterator[EvalResult]:
    """Speed-up and acceptance length on each kind of prompt, for a card's model-index."""
    for section in measurement["datasets"]:
        arm = headline(section)
        if arm is None:
            continue
        source = section.get("source") or {}
        name = str(section["dataset"])
        for metric, title in (
            ("speedup", f"decode-only speed-up over plain decoding ({arm['arm']})"),
            ("acceptance_length", f"acceptance length τ ({arm['arm']})"),
        ):
            yield EvalResult(
                task_type="text-generation",
                dataset_type=source.get("path") or "".join(c if c.isalnum() or c in "-_." else "-" for c in name),
                dataset_name=name,
                dataset_config=source.get("config"),
                dataset_split=source.get("split"),
                metric_type=metric,
                metric_name=title,
                metric_value=round(arm[metric], 3),
            )
