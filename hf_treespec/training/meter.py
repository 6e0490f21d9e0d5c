"""Throughput and memory of a training run."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState, TrainingArguments

_FILE = "meter.json"


class Meter(TrainerCallback):
    """Times a run's optimiser steps; what is measured or saved between them does not count.

    Args:
        resumed: The checkpoint a run goes on from, whose time counts too.
    """

    def __init__(self, device: torch.device, resumed: str | None = None) -> None:
        self.device = device
        self.steps, self.seconds = 0, 0.0
        self._since = 0.0
        earlier = Path(resumed or "", _FILE)
        if resumed is not None and earlier.is_file():
            self.steps, self.seconds = json.loads(earlier.read_text(encoding="utf-8"))

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Starts the clock."""
        self._since = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Stops it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds += time.perf_counter() - self._since
        self.steps += 1

    def on_save(self, args: TrainingArguments, state: TrainerState, *others: Any, **kwargs: Any) -> None:
        """Leaves the time with the checkpoint."""
        path = Path(args.output_dir, f"checkpoint-{state.global_step}", _FILE)
        path.write_text(json.dumps([self.steps, self.seconds]), encoding="utf-8")

    def figures(self, tokens_a_step: int) -> dict[str, float]:
        """`train_tokens_per_second`, of the tokens that went through the target, `train_seconds`, `peak_memory_bytes`.

        Without a step there is no speed, and where the system tells no peak (of this process), none is given.
        """
        found = {"train_seconds": self.seconds}
        if self.steps:
            found["train_tokens_per_second"] = self.steps * tokens_a_step / self.seconds
        peak = peak_memory(self.device)
        if peak is not None:
            found["peak_memory_bytes"] = float(peak)
        return found


def peak_memory(device: torch.device) -> int | None:
    """Most memory in use so far in bytes, allocated on a GPU or else resident in the process; None = unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
