"""Shared set-up: small and offline, one thread, and the ledger of ties that a session settles at its end."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "matrix: the full product of the exactness matrix (hours); -m matrix runs it")
    # transformers repeats advice about samplers and caches that is not under test here.
    warnings.filterwarnings("ignore", module="transformers")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the full matrix out unless a marker expression asks for it."""
    if "matrix" in (config.getoption("markexpr") or ""):
        return
    kept = [item for item in items if item.get_closest_marker("matrix") is None]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


@pytest.fixture(scope="session", autouse=True)
def ties() -> Iterator[None]:
    """A first difference inside plain's rounding is a tie; more than one in 10⁵ tokens is a fault."""
    from parity import LEDGER

    yield
    LEDGER.settle()
