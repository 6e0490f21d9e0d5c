"""The model card and the log that a trained drafter's folder gets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..drafters.base import BlockDrafter
from ..hub import cards

_NAMES = {
    "eval_tau_chain": "acceptance length τ, chain",
    "eval_tvd": "total variation distance, mean over depths",
    "eval_tvd_first": "total variation distance, first depth",
    "eval_tvd_last": "total variation distance, last depth",
    "train_tokens_per_second": "training speed, tokens/s",
    "peak_memory_bytes": "peak memory, bytes",
}


def write_log(folder: Path, log: Mapping[str, Any]) -> Path:
    """Writes `training_log.json`: what was trained on what, how, and the figures on the way and at the end."""
    path = folder / "training_log.json"
    path.write_text(json.dumps(log, indent=2, default=str) + "\n", encoding="utf-8")
    return path


def write_card(folder: Path, drafter: BlockDrafter, log: Mapping[str, Any]) -> Path:
    """Writes the model card `README.md` of a trained drafter. It has no measurement yet, and says so.

    Args:
        folder: The drafter's.
        drafter: The drafter.
        log: With `target`, `data`, `settings` and `metrics`; `init` where the drafter started from another.
    """
    return cards.write_card(
        cards.render_card(drafter, target=log["target"], path=folder, training=_training(log)), folder
    )


def _training(log: Mapping[str, Any]) -> str:
    """What the card says of the training, in Markdown."""
    metrics, settings = log["metrics"], log["settings"]
    hours = metrics.get("train_seconds", 0.0) / 3600
    rows = "\n".join(
        f"| {_NAMES.get(name) or _tree_name(name)} | {value:.4g} |"
        for name, value in metrics.items()
        if name in _NAMES or name.startswith("eval_tau_tree_")
    )
    options = ", ".join(f"{name} {value}" for name, value in settings.items() if name != "max_steps")
    start = f"- **Start**: `{log['init']}`.\n" if log.get("init") else ""
    return f"""{start}- **Data**: {log["sequences"]} sequences of {log["length"]} tokens: continuations that the target
  wrote at temperature {settings["temperature"]:g} from prompts of {settings["prompt_length"]} tokens of
  {", ".join(log["data"])}.
- **Training**: {settings["max_steps"]} steps, {hours:.2f} hours in the optimiser's steps, on {log["device"]};
  {options}.

On {log["held_out"]} continuations of held-out prompts, which the target wrote the same way:

| | |
| --- | --- |
{rows}

Acceptance says how many tokens a round commits, not how much time that saves."""


def _tree_name(name: str) -> str:
    return f"acceptance length τ, tree of {name.removeprefix('eval_tau_tree_')} nodes"
