"""Shared set-up: small and offline, one thread, and the ledger of ties that a session settles at its end."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Profiles of tiny models are nobody's: not in the user's cache.
os.environ["HF_TREESPEC_PROFILES"] = tempfile.mkdtemp(prefix="treespec-profiles-")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def ties() -> Iterator[None]:
    """A first difference inside plain's rounding is a tie; more than one in 10⁵ tokens is a fault."""
    from parity import LEDGER

    yield
    LEDGER.settle()
