"""Finding the checkpoint a stopped run goes on from."""

from __future__ import annotations

import json
from pathlib import Path


def last_checkpoint(folder: str | Path) -> str | None:
    """The latest complete `checkpoint-N` of a Trainer's folder; None where there is none.

    The Trainer writes `trainer_state.json` last, so a checkpoint whose state cannot be read was cut short by the end
    of its process, and the one before it counts.
    """
    found = sorted(
        (path for path in Path(folder).glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()),
        key=steps_of,
    )
    return next((str(path) for path in reversed(found) if _is_complete(path)), None)


def steps_of(checkpoint: str | Path) -> int:
    """Steps that a run had taken when it wrote a `checkpoint-N`."""
    return int(Path(checkpoint).name.removeprefix("checkpoint-"))


def _is_complete(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
