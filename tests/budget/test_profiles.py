"""Profiles come back as they were stored, and whatever is wrong with a file only means measuring again."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hf_treespec.budget import ProfileKey, ProfileStore, profiles

KEY = ProfileKey(
    device="NVIDIA H100 80GB",
    target="qwen3-36x4096",
    drafter="dflash-5x4096",
    dtype="bfloat16",
    kv_dtype="bfloat16",
    attention="split",
    threads=0,
    torch="2.13",
    transformers="5.24",
    hf_treespec="0.1",
)
PROFILE = {"latency": {"drift": 0.25}, "acceptance": [1.0, 0.5]}


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "_kept", {})
    monkeypatch.setattr(profiles, "_warned", set())


@pytest.fixture
def store(tmp_path: Path) -> ProfileStore:
    return ProfileStore(tmp_path / "profiles")


def test_comes_back_as_stored(store: ProfileStore, caplog: pytest.LogCaptureFixture) -> None:
    assert store.load(KEY) is None
    store.save(KEY, PROFILE)
    assert ProfileStore(store.folder).load(KEY) == PROFILE
    store.save(KEY, {"latency": 2})
    assert store.load(KEY) == {"latency": 2}
    assert [path.name for path in store.folder.iterdir()] == [KEY.file_name]
    assert not caplog.records


def test_the_name_is_readable_and_the_key_stands_inside(store: ProfileStore) -> None:
    store.save(KEY, PROFILE)
    path = store.path(KEY)
    assert path.name.startswith("nvidia-h100-80gb-qwen3-36x4096-dflash-5x4096-bfloat16-split-")
    assert json.loads(path.read_text())["key"]["target"] == KEY.target
    for name in ("device", "target", "drafter", "dtype", "kv_dtype", "attention"):
        assert replace(KEY, **{name: "other"}).file_name != KEY.file_name
    assert replace(KEY, threads=4).file_name != KEY.file_name


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


FAULTS = {
    "half a file": lambda path: path.write_text(path.read_text()[:40]),
    "not text": lambda path: path.write_bytes(b"\xff\xfe\x00{"),
    "a list": lambda path: path.write_text("[1, 2]"),
    "another format": lambda path: rewrite(path, format=99),
    "no profile": lambda path: rewrite(path, profile=None),
    "foreign": lambda path: rewrite(path, key={**json.loads(path.read_text())["key"], "target": "llama"}),
    "an unknown field": lambda path: rewrite(path, key={**json.loads(path.read_text())["key"], "mood": "good"}),
    "another torch": lambda path: rewrite(path, key={**json.loads(path.read_text())["key"], "torch": "1.0"}),
    "stale": lambda path: rewrite(path, created=0.0),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_file_is_measured_again(store: ProfileStore, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    store.save(KEY, PROFILE)
    FAULTS[fault](store.path(KEY))
    with caplog.at_level(logging.WARNING):
        assert store.load(KEY) is None
        assert store.load(KEY) is None
    assert len(caplog.records) == 1
    assert str(store.path(KEY)) in caplog.text
    assert "measured" in caplog.text
    store.save(KEY, PROFILE)
    assert store.load(KEY) == PROFILE


def test_an_update_replaces_the_file(store: ProfileStore) -> None:
    updated = replace(KEY, torch="2.14")
    store.save(KEY, PROFILE)
    assert store.load(updated) is None
    store.save(updated, PROFILE)
    assert store.load(updated) == PROFILE
    assert len(list(store.folder.iterdir())) == 1


def test_an_unwritable_folder_keeps_profiles_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store = ProfileStore(tmp_path / "file" / "below")
    with caplog.at_level(logging.WARNING):
        store.save(KEY, PROFILE)
        store.save(KEY, PROFILE)
    assert len(caplog.records) == 1
    assert ProfileStore(store.folder).load(KEY) == PROFILE
    assert store.load(replace(KEY, torch="1.0")) is None


def test_a_failed_write_leaves_the_old_file(
    store: ProfileStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(KEY, PROFILE)
    old = store.path(KEY).read_text()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profiles.os, "replace", full)
    store.save(KEY, {"new": 1})
    assert "No space left" in caplog.text
    assert store.path(KEY).read_text() == old
    assert len(list(store.folder.iterdir())) == 1
    assert store.load(KEY) == {"new": 1}


def test_only_finite_numbers_are_stored(store: ProfileStore) -> None:
    with pytest.raises(ValueError, match="JSON"):
        store.save(KEY, {"rate": float("nan")})
    assert not store.path(KEY).exists()


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TREESPEC_PROFILES", str(tmp_path))
    assert ProfileStore().folder == tmp_path
    monkeypatch.delenv("HF_TREESPEC_PROFILES")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    assert ProfileStore().folder == tmp_path / "home" / "treespec" / "profiles"


# Loaded by its path: a process that needs neither torch nor transformers starts at once.
WRITER = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("profiles", sys.argv[1])
profiles = importlib.util.module_from_spec(spec)
sys.modules["profiles"] = profiles
spec.loader.exec_module(profiles)
key, store = profiles.ProfileKey(**json.loads(sys.argv[3])), profiles.ProfileStore(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for turn in range(150):
    store.save(key, {"who": sys.argv[4], "turn": turn, "weight": [turn] * 2000})
    seen = store.load(key)
    assert seen is not None and seen["weight"] == [seen["turn"]] * 2000
"""


def test_two_processes_write_at_once(store: ProfileStore) -> None:
    arguments = [str(profiles.__file__), str(store.folder), json.dumps(vars(KEY))]
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, *arguments, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in "ab"
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        _, errors = writer.communicate(timeout=300)
        assert (writer.returncode, errors) == (0, "")
    last = store.load(KEY)
    assert last is not None
    assert last["turn"] == 149
    assert [path.name for path in store.folder.iterdir()] == [KEY.file_name]
