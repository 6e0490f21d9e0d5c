"""What a drafter is, and whether it fits a target: the body of `hf-treespec inspect`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import ModelCard
from huggingface_hub.errors import LocalEntryNotFoundError
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from yaml import YAMLError  # type: ignore[import-untyped]

from .. import embedded
from ..drafters import AutoDrafter
from ..drafters.base import BlockDrafter
from ..drafters.checkpoint import Checkpoint
from ..drafters.checks import Finding, Status, describe_windows, examine, mask_in_tokenizer, own
from ..drafters.rope import describe_rope
from ..hub.licenses import license_of
from ..sources import ModelFiles, find_source
from .loading import find_target

_EMBEDDED = "embedded"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
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

    Of the target only the configuration and the tokenizer are read: its model is built without weights, so that a
    large one costs nothing.

    Args:
        drafter: Hub id, path, `"embedded"` or `"embedded:FAMILY"`.
        target: Hub id, path or `"embedded"`.
        weights: Whether to load the target's weights too, which some checks need.

    Raises:
        OSError: There is no such model.
        ValueError: The target's configuration is of no causal LM, or a drafter's.
    """
    kind, _, family = drafter.partition(":")
    source = str(embedded.path(family or "dflash")) if kind == _EMBEDDED else find_source(drafter)
    files = ModelFiles(source)
    dialect = ""
    try:
        dialect = _dialect(Checkpoint(files).config)
        model = AutoDrafter.from_pretrained(source, dtype="auto")
    except ValueError as error:
        origin, findings = _origin(files)
        findings = [Finding("checkpoint", Status.wrong, str(error)), *findings]
        return Inspection(drafter, target, "does not load", dialect=dialect, origin=origin, findings=findings)
    network = None
    origin, findings = _origin(files)
    if target is not None:
        place = find_target(target)
        network = _target(place, weights)
        findings = [*_examine(model, network), *_mask_in_tokenizer(model, place), *findings]
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
        dialect=dialect,
        layout={**_layout(model.config, network), "own": _own(model)},
        memory=_memory(model),
        origin={**origin, **_recorded(drafter, model.config)},
        findings=findings,
    )


def _target(source: str, weights: bool) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(source)
    # The class it was saved as: that of a multimodal target is none of AutoModelForCausalLM's.
    named = getattr(transformers, (config.architectures or [""])[0], AutoModelForCausalLM)
    if weights:
        return named.from_pretrained(source, dtype="auto")
    with torch.device("meta"):
        return named.from_config(config) if named is AutoModelForCausalLM else named._from_config(config)


def _examine(drafter: BlockDrafter, target: PreTrainedModel) -> list[Finding]:
    if drafter.rules:
        return list(examine(drafter, target))
    try:
        drafter.check_target(target)
    except ValueError as error:
        return [Finding("target", Status.wrong, str(error))]
    return [Finding("target", Status.fits, type(target).__name__)]


def _mask_in_tokenizer(drafter: BlockDrafter, source: str) -> Iterator[Finding]:
    """Holds the mask token to the target's tokenizer, where it has one and the drafter a mask."""
    mask = getattr(drafter.config, "mask_token_id", None)
    if mask is None:
        return
    if ModelFiles(source).find(*_TOKENIZER_FILES) is None:
        yield Finding("mask and tokenizer", Status.unchecked, "the target has no tokenizer")
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, ImportError) as error:
        yield Finding("mask and tokenizer", Status.unchecked, f"the target's tokenizer does not load: {error}")
        return
    yield mask_in_tokenizer(mask, tokenizer)


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


def _own(drafter: BlockDrafter) -> dict[str, int]:
    """Tokens of the embedding and of the head that the drafter has itself; those not named are the target's."""
    modules = {name: own(drafter, field) for name, field in (("embedding", "embed_tokens"), ("head", "lm_head"))}
    return {name: module.weight.shape[0] for name, module in modules.items() if module is not None}


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


def _origin(files: ModelFiles) -> tuple[dict[str, str | None], list[Finding]]:
    """What the card says; nothing where there is none, or one that cannot be had or whose metadata cannot be read."""
    findings = []
    try:
        path = files.find("README.md")
        metadata = ModelCard.load(path, ignore_metadata_errors=True).data.to_dict() if path else {}
    except LocalEntryNotFoundError as error:
        metadata, findings = {}, [Finding("card", Status.unchecked, str(error).partition("\n")[0])]
    except (ValueError, YAMLError):
        metadata = {}
    base = metadata.get("base_model")
    trained_for = ", ".join(base) if isinstance(base, list) else base
    return {"licence": license_of(metadata), "trained_for": trained_for}, findings


def _recorded(drafter: str, config: Any) -> dict[str, str]:
    """The trained target as the configuration names it; that of the embedded drafters has no name but ours."""
    name = getattr(config, "target_name_or_path", None)
    if drafter.partition(":")[0] == _EMBEDDED:
        name = _EMBEDDED
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
        rows.append(("drafts with", _drafts_with(layout["own"])))
    rows.append(("licence", found.origin.get("licence") or "not stated"))
    rows.append(("trained for", found.origin.get("trained_for") or "not stated"))
    return rows


def _drafts_with(own: dict[str, int]) -> str:
    borrowed = " and ".join(name for name in ("embedding", "head") if name not in own)
    parts = [f"its own {name} of {tokens:,} tokens" for name, tokens in own.items()]
    return ", ".join([*parts, *([f"the target's {borrowed}"] if borrowed else [])])


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
