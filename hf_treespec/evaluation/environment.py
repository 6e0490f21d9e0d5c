"""What a measurement ran on."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from .. import __version__


def software() -> dict[str, Any]:
    """Versions, and the threads torch computes with."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_treespec": __version__,
        "threads": torch.get_num_threads(),
    }


def usable_cores() -> int:
    """Cores this process may run on: those of the machine, or the share it was given."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def hardware(device: torch.device) -> str:
    """Name of the processor that computes."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor() or platform.machine()


def commit() -> str | None:
    """Commit of the checkout this package runs from; None where it is installed without one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def command() -> str:
    """The command line of this process, as a shell takes it."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def now() -> str:
    """The time, UTC, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _processor() -> str:
    """The CPU's model name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
