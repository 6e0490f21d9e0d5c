"""The examples run as written, with tiny models on a Hub of this machine."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from loopback import LoopbackHub
from pairs import PROMPT, save_pair
from published import REPO, TARGET, pair, saved

EXAMPLES = Path(__file__).parents[2] / "examples"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: Any) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.fixture
def target(hub: LoopbackHub, tmp_path: Path) -> str:
    """Hub id of the target, whose tokenizer has a chat template."""
    save_pair(pair(), tmp_path / "pair")
    folder = tmp_path / "pair" / "target"
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    hub.create_from(TARGET, folder)
    return TARGET


@pytest.mark.parametrize("name", ["pipeline_chat", "publish_drafter", "convert_speculators"])
def test_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, name, "--help")
    assert end.value.code == 0
    assert f"python examples/{name}.py" in capsys.readouterr().out


def test_pipeline_chat(
    hub: LoopbackHub,
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    hub.create_from(REPO, tmp_path / "pair" / "drafter")
    questions = iter([PROMPT, PROMPT, ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(questions))
    run(monkeypatch, "pipeline_chat", target, REPO, "--max-new-tokens", 8, "--report")
    assert list(questions) == []
    printed = capsys.readouterr().out
    assert printed.count("acceptance length") == 2
    assert hub.asked("GET", f"{REPO}/resolve")


def test_publish_drafter(hub: LoopbackHub, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_acme")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [PROMPT * number]}) + "\n" for number in (1, 2)))
    saved(tmp_path / "drafter")
    arguments = [target, tmp_path / "drafter", REPO, "--data", prompts, "--max-new-tokens", 6]
    run(monkeypatch, "publish_drafter", *arguments, "--work", tmp_path / "dry", "--dry-run")
    assert REPO not in hub.repositories
    run(monkeypatch, "publish_drafter", *arguments, "--work", tmp_path / "work", "--private")
    assert hub.repositories[REPO].private
    assert sorted(hub.repositories[REPO].files) == sorted(
        path.relative_to(tmp_path / "dry" / "repository").as_posix()
        for path in (tmp_path / "dry" / "repository").rglob("*.*")
        if path.is_file()
    )
