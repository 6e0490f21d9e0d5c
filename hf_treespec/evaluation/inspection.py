"""What a drafter is, and whether it fits a target: the body of `hf-treespec inspect`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import ModelCard
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from .. import embedded
from ..drafters import AutoDrafter
from ..drafters.base import BlockDrafter
from ..drafters.checks import Finding, Status, describe_windows, examine
from ..drafters.rope import describe_rope
from ..sources import find_source

_EMBEDDED = "embedded"
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MARKS = {
    Status.fits: "[green]✓[/]",
    Status.slow: "[yellow]![/]",
    Status.wrong: "[red]✗[/]",
    Status.unchecked: "[dim]–[/]",
}


@dataclass(frozen=True)
class Inspection:
    """What was found out about a drafter.

    Attributes:
        drafter: Its name as given.
        target: The target's name as given; None = none.
        verdict: "fits", "fits with warnings", "does not fit", "does not load", or "no target given".
        family: Its class; empty where it does not load.
        dialect: Whose `config.json` it has.
        layout: What it is made of, by field.
        memory: Parameters, bytes of the weights by dtype, and bytes of keys and values for each context position.
        origin: Licence and trained target, as far as configuration or card say so.
        findings: Every check.
    """

    drafter: str
    target: str | None
    verdict: str
    family: str = ""
    dialect: str = ""
    layout: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str | None] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether nothing speaks against using it."""
        return not self.verdict.startswith("does not")


def inspect_drafter(drafter: str, target: str | None = None, *, weights: bool = False) -> Inspection:
    """Looks at a drafter and, where a target is named, holds the pair to every rule.

    Of the target only the configuration is read: its model is built without weights, so that a large one costs
    nothing.

    Args:
        drafter: Hub id, path, `"embedded"` or `"embedded:FAMILY"`.
        target: Hub id, path or `"embedded"`.
        weights: Whether to load the target's weights too, which some checks need.

    Raises:
        OSError: There is no such model.
        ValueError: The target's configuration is of no causal LM.
    """
    source = _find(drafter, "dflash")
    raw, _ = PreTrainedConfig.get_config_dict(source)
    origin = _origin(source)
    try:
        model = AutoDrafter.from_pretrained(source, dtype="auto")
    except ValueError as error:
        finding = Finding("checkpoint", Status.wrong, str(error))
        return Inspection(drafter, target, "does not load", dialect=_dialect(raw), origin=origin, findings=[finding])
    network = None if target is None else _target(_find(target, "target"), weights)
    findings = [] if network is None else _examine(model, network)
    statuses = {finding.status for finding in findings}
    verdict = "fits"
    if network is None:
        verdict = "no target given"
    elif Status.wrong in statuses:
        verdict = "does not fit"
    elif Status.slow in statuses:
        verdict = "fits with warnings"
    return Inspection(
        drafter,
        target,
        verdict,
        family=type(model).__name__,
        dialect=_dialect(raw),
        layout=_layout(model.config, network),
        memory=_memory(model),
        origin={**origin, **_recorded(model.config)},
        findings=findings,
    )


def _find(name: str, default: str) -> str:
    kind, _, family = name.partition(":")
    return str(embedded.path(family or default)) if kind == _EMBEDDED else find_source(name)


def _target(source: str, weights: bool) -> PreTrainedModel:
    if weights:
        return AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    config = AutoConfig.from_pretrained(source)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        if named is not None and hasattr(named, "_from_config"):
            return named._from_config(config)
        return AutoModelForCausalLM.from_config(config)


def _examine(drafter: BlockDrafter, target: PreTrainedModel) -> list[Finding]:
    if drafter.rules:
        return list(examine(drafter, target))
    try:
        drafter.check_target(target)
    except ValueError as error:
        return [Finding("target", Status.wrong, str(error))]
    return [Finding("target", Status.fits, type(target).__name__)]


def _dialect(config: dict[str, Any]) -> str:
    """Whose form a `config.json` has, as it calls itself."""
    kind = config.get("speculators_model_type") or config.get("model_type") or "unnamed"
    names = ", ".join(config.get("architectures") or ())
    return "hf_treespec" if str(kind).startswith("treespec_") else f"{names or 'no architecture'} ({kind})"


def _layout(config: Any, target: PreTrainedModel | None) -> dict[str, Any]:
    """Fields of a drafter; those of its own attention where it has one that is not the target's."""
    layers = config.num_hidden_layers
    text = None if target is None else target.config.get_text_config()
    count = config.num_target_layers or (text.num_hidden_layers if text is not None else None)
    return {
        "layers": layers,
        "hidden_size": config.hidden_size,
        "block_size": config.block_size,
        "feature_layers": list(config.target_layer_ids),
        "target_layers": count,
        "vocab_size": config.vocab_size,
        **(_attention(config) if _has_attention(config) else {}),
    }


def _has_attention(config: Any) -> bool:
    return hasattr(config, "num_attention_heads")


def _attention(config: Any) -> dict[str, Any]:
    layers = range(config.num_hidden_layers)
    return {
        "heads": config.num_attention_heads,
        "key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "windows": [config.layer_window(layer) for layer in layers],
        "causal": [config.layer_is_causal(layer) for layer in layers],
        "rope": dict(config.rope_parameters),
        "max_position_embeddings": config.max_position_embeddings,
        "mask_token_id": config.mask_token_id,
    }


def _memory(drafter: BlockDrafter) -> dict[str, Any]:
    config = drafter.config
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    numbers = 0
    if _has_attention(config):
        numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return {
        "parameters": parameters,
        "dtype": str(drafter.dtype).removeprefix("torch."),
        "weight_bytes": {name: parameters * size for name, size in _BYTES.items()},
        "context_bytes_per_position": {name: numbers * size for name, size in _BYTES.items()},
    }


def _origin(source: str) -> dict[str, str | None]:
    """What the card says; nothing where there is none."""
    path = cached_file(source, "README.md", _raise_exceptions_for_missing_entries=False)
    data = ModelCard(Path(path).read_text(encoding="utf-8"), ignore_metadata_errors=True).data if path else None
    base = getattr(data, "base_model", None)
    return {
        "licence": getattr(data, "license", None),
        "trained_for": ", ".join(base) if isinstance(base, list) else base,
    }


def _recorded(config: Any) -> dict[str, str]:
    name = getattr(config, "target_name_or_path", None)
    return {"trained_for": name} if name else {}


def run_inspect(
    console: Console, drafter: str, target: str | None, *, weights: bool = False, json_path: Path | None = None
) -> bool:
    """Inspects a drafter, prints what was found and writes it as JSON. Returns whether it loads and fits."""
    found = inspect_drafter(drafter, target, weights=weights)
    _print(console, found)
    if json_path is not None:
        json_path.write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
    return found.fits


def _print(console: Console, found: Inspection) -> None:
    colour = {"fits": "green", "fits with warnings": "yellow"}.get(found.verdict, "red" if not found.fits else "bold")
    against = "" if found.target is None else f" for {found.target}"
    console.print(f"{escape(found.drafter)}{escape(against)}: [{colour}]{found.verdict}[/]", highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _rows(found):
        table.add_row(name, escape(value))
    console.print(table)
    checks = Table(show_header=False, box=None, padding=(0, 1, 0, 0))
    for finding in found.findings:
        checks.add_row(_MARKS[finding.status], finding.rule, escape(str(finding)))
    console.print(checks)


def _rows(found: Inspection) -> list[tuple[str, str]]:
    rows = [("family", f"{found.family}, config.json of {found.dialect}".removeprefix(", "))]
    if found.layout:
        layout, memory = found.layout, found.memory
        rows.append(("layout", f"{layout['layers']} layers of width {layout['hidden_size']}"))
        if "heads" in layout:
            causal = layout["causal"]
            sees = "causal" if all(causal) else "partly causal" if any(causal) else "two-way"
            looks = f"{describe_windows(layout['windows'])}; trained to {layout['max_position_embeddings']:,}"
            rows += [
                ("heads", f"{layout['heads']} over {layout['key_value_heads']}, of {layout['head_dim']} channels"),
                ("block", f"{layout['block_size']} rows, {sees}"),
                ("looks back", looks),
                ("rotary", describe_rope(layout["rope"])),
                ("features", draw_layers(layout["feature_layers"], layout["target_layers"])),
                ("tokens", f"{layout['vocab_size'] or '?'} in all, mask {layout['mask_token_id']}"),
            ]
        else:
            rows += [
                ("block", f"{layout['block_size']} rows"),
                ("drafts in", draw_layers(layout["feature_layers"], layout["target_layers"])),
                ("tokens", f"{layout['vocab_size'] or '?'} in all"),
            ]
        rows += [
            ("parameters", f"{memory['parameters']:,}, stored as {memory['dtype']}"),
            ("memory", ", ".join(f"{name} {_size(count)}" for name, count in memory["weight_bytes"].items())),
            (
                "a position",
                ", ".join(f"{name} {_size(count)}" for name, count in memory["context_bytes_per_position"].items()),
            ),
        ]
    rows.append(("licence", found.origin.get("licence") or "not stated"))
    rows.append(("trained for", found.origin.get("trained_for") or "not stated"))
    return rows


def draw_layers(ids: list[int], count: int | None) -> str:
    """Feature layers among the target's, such as `·●··●· 1, 4 of 6`."""
    listed = ", ".join(map(str, ids))
    if count is None:
        return listed
    return f"{''.join('●' if layer in ids else '·' for layer in range(count))} {listed} of {count}"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.4g} {unit}"
