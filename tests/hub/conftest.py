"""A loopback Hub for each test, reached in this process or by a user's script in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from loopback import LoopbackHub

ROOT = Path(__file__).parents[2]

#: Runs a script as a user would, logged in with `token`; returns what it printed.
UserScript = Callable[..., str]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """A Hub that huggingface_hub in this process talks to, with an empty cache and nobody logged in.

    huggingface_hub reads its environment once, when it is imported, which in a test run has long happened and may have
    been offline. So the values it has read are replaced here; `user_script` proves that the environment does the same.
    """
    with LoopbackHub().running() as running:
        home = tmp_path / "hf-home"
        for name, value in {
            "ENDPOINT": running.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": running.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_PROGRESS_BARS": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", running.endpoint)
        # A client that transformers makes once, for the Hub that it finds then.
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        huggingface_hub.close_session()
        yield running
        huggingface_hub.close_session()


@pytest.fixture
def cache(hub: LoopbackHub) -> Path:
    """Folder of the cache that goes with `hub`."""
    return Path(constants.HF_HUB_CACHE)


@pytest.fixture
def user_script(hub: LoopbackHub, tmp_path: Path) -> UserScript:
    """Runs a Python script in a fresh process with `HF_ENDPOINT` and `HF_HOME` set, as users would set them."""

    def run(script: str, *, home: Path = tmp_path / "user-home", **environment: str) -> str:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        settings = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_TREESPEC_PROFILES": str(tmp_path / "profiles"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**inherited, **settings, **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run
