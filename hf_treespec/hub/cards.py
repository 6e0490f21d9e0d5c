"""The model card of a drafter: one template for those trained here, those in the package and those published."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from ..drafters.base import BlockDrafter
from ..resources import resource_folder
from ..sources import is_hub_id
from .licenses import HUB_LICENSES
from .measurement import evaluation_results

EMBEDDED = "embedded"

#: What the Hub takes (https://huggingface.co/docs/hub/model-cards#specifying-a-base-model).
RELATIONS = ("adapter", "finetune", "merge", "quantized")
#: A drafter is weights of its own that work beside an unchanged base model and are useless without it: what the Hub
#: lists under adapters. It is no finetune, which would stand in the base model's place.
_RELATION = "adapter"

_KEYS = frozenset(
    """
    base_model base_model_relation datasets language library_name license license_name license_link model-index
    pipeline_tag tags
    """.split()  # noqa: SIM905
)
_DATASET_TYPE = re.compile(r"^(?:[\w-]+/)?[\w.-]+$")


def render_card(
    drafter: BlockDrafter,
    *,
    target: str,
    repo_id: str | None = None,
    path: str | Path | None = None,
    licence: str | None = None,
    notices: Sequence[str] = (),
    measurement: Mapping[str, Any] | None = None,
    training: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> ModelCard:
    """Renders a drafter's card.

    Args:
        drafter: Whose card it is.
        target: Hub id or path of its target, or `"embedded"`.
        repo_id: Where it is published; None = nowhere yet.
        path: Where it lies; None = where it was loaded from.
        licence: Its licence.
        notices: What the licences of the models it is derived from want said.
        measurement: What `bench --json` wrote; a card without one says so, and cannot be published.
        training: How it was trained, in Markdown.
        metadata: Metadata to keep: `datasets`, `language`, `license_link` and `tags`.
    """
    kept = dict(metadata or {})
    family = type(drafter).__name__.removesuffix("Drafter")
    tags = ["hf_treespec", "speculative-decoding", family.lower(), *(kept.get("tags") or ())]
    published = is_hub_id(target)
    named = licence is not None and licence not in HUB_LICENSES
    link = kept.get("license_link")
    results = list(evaluation_results(measurement)) if measurement else None
    name = (repo_id or f"{family.lower()}-{Path(target).name}").rpartition("/")[2]
    data = ModelCardData(
        base_model=target if published else None,
        base_model_relation=_RELATION if published else None,
        datasets=kept.get("datasets"),
        eval_results=results or None,
        language=kept.get("language"),
        library_name="hf_treespec",
        license="other" if named else licence,
        license_name=licence if named else None,
        license_link=link if named else None,
        model_name=name if results else None,
        pipeline_tag="text-generation",
        tags=tags,
    )
    text = (resource_folder("model_cards") / "drafter.md").read_text(encoding="utf-8")
    return ModelCard.from_template(
        data,
        template_str=text,
        title=name if repo_id else f"{family} drafter for {'the embedded target' if target == EMBEDDED else target}",
        family=family,
        target=target,
        target_link=_link(target),
        drafter=repo_id or path or drafter.name_or_path,
        embedded=target == EMBEDDED,
        packaged=family.lower() if path is None else None,
        repo_id=repo_id,
        facts=_facts(drafter, repo_id),
        measurement=measurement,
        sections=_sections(measurement) if measurement else (),
        training=training,
        license=licence,
        notices=notices,
    )


def _link(target: str) -> str:
    if target == EMBEDDED:
        return "the target embedded in the package"
    return f"[{target}](https://huggingface.co/{target})" if is_hub_id(target) else f"`{target}`"


def _facts(drafter: BlockDrafter, repo_id: str | None) -> list[str]:
    config = drafter.config
    size = sum(parameter.numel() for parameter in drafter.parameters())
    facts = [f"{_count(size)} parameters, {str(drafter.dtype).removeprefix('torch.')}"]
    if getattr(config, "num_hidden_layers", None):
        facts[0] += f", {config.num_hidden_layers} layers"
    facts.append(f"drafts up to {drafter.drafted_depths} tokens in one forward")
    layers = getattr(config, "target_layer_ids", None)
    if layers:
        facts.append(f"{drafter.use_of_layers} the target's decoder layers {', '.join(map(str, layers))} (0-based)")
    source = drafter.name_or_path
    if is_hub_id(source) and source != repo_id:
        facts.append(f"converted from [{source}](https://huggingface.co/{source})")
    return facts


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def _sections(measurement: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Titles, rows and notes of the tables."""
    said = measurement["environment"]
    how = f"up to {said.get('max_new_tokens')} tokens, medians of {said.get('repeats')} repeats, "
    temperature = said.get("temperature")
    how += f"temperature {temperature:g}" if temperature else "greedy"
    sections = []
    for section in (*measurement["datasets"], *measurement.get("batches", ())):
        name = f"`{section['dataset']}`" if "dataset" in section else f"Batches of {section['batch']}"
        rows = [_row(arm) for arm in section["arms"] if arm.get("skipped") is None]
        title = f"{name}, {section.get('prompts')} prompts, {how}"
        sections.append({"title": title, "rows": rows, "notes": section.get("notes") or ()})
    return sections


def _row(arm: Mapping[str, Any]) -> list[str]:
    def say(value: float | None, pattern: str) -> str:
        return "–" if value is None else pattern.format(value)

    low, high = arm.get("speedup_ci95") or (None, None)
    same = say(arm.get("greedy_match"), "{:.0%}")
    same += f", {arm['ties']} ties" if arm.get("ties") else ""
    same += f", {arm['mismatches']} differ" if arm.get("mismatches") else ""
    return [
        f"`{arm['arm']}`",
        say(arm.get("speedup"), "{:.2f}×"),
        "–" if low is None else f"{low:.2f}–{high:.2f}",
        say(arm.get("acceptance_length"), "{:.2f}"),
        say(arm.get("tokens_per_second"), "{:.0f}"),
        same,
    ]


def training_section(card: ModelCard) -> str | None:
    """What a card written by this package says of the training."""
    if card.data.get("library_name") != "hf_treespec":
        return None
    found = re.search(r"^## Training\n(.*?)(?=^## |\Z)", card.text, re.MULTILINE | re.DOTALL)
    return found.group(1).strip() if found else None


def write_card(card: ModelCard, folder: Path) -> Path:
    """Writes `README.md`."""
    path = folder / "README.md"
    path.write_text(str(card).rstrip() + "\n", encoding="utf-8")
    return path


def check_card(card: ModelCard) -> None:
    """Checks a card's metadata by the rules of the Hub that can be checked without it.

    Raises:
        ValueError: A rule is broken; the message says which.
    """
    data = card.data.to_dict()
    problems = [f"{key!r} is no key of a drafter's card" for key in sorted(data.keys() - _KEYS)]
    problems += [f"{key} is missing" for key in ("base_model", "license", "model-index") if not data.get(key)]
    if data.get("license") not in (None, "other", *HUB_LICENSES):
        problems.append(f"license {data['license']!r} is none of the Hub's; use `other` with a license_name")
    if data.get("license") == "other" and not data.get("license_name"):
        problems.append("license `other` needs a license_name")
    elif data.get("license") == "other" and not data.get("license_link"):
        problems.append(
            f"license `other` ({data['license_name']}) needs a license_link: state both in the drafter's own README.md"
        )
    if data.get("base_model_relation") not in RELATIONS:
        problems.append(f"base_model_relation {data.get('base_model_relation')!r} is none of {', '.join(RELATIONS)}")
    try:
        validate_repo_id(data.get("base_model") or "a/b")
    except HFValidationError as error:
        problems.append(f"base_model is no id of the Hub: {error}")
    for key in ("tags", "datasets", "language"):
        values = data.get(key) or []
        if not all(isinstance(value, str) for value in ([values] if isinstance(values, str) else values)):
            problems.append(f"{key} must be text")
    for index in data.get("model-index") or ():
        for result in index["results"]:
            if not _DATASET_TYPE.match(result["dataset"]["type"]):
                problems.append(f"the dataset type {result['dataset']['type']!r} is no name the Hub takes")
    if problems:
        raise ValueError(f"The card's metadata break rules of the Hub: {'; '.join(problems)}.")
