"""The examples run as written, with tiny models on a Hub of this machine."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import LoopbackHub
from pairs import PROMPT, save_pair
from published import REPO, TARGET, pair, saved
from safetensors.torch import save_file

from hf_treespec import AutoDrafter

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


def test_convert_speculators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drafter = pair()[1]
    source = tmp_path / "zlab"
    source.mkdir()
    fields = drafter.config.to_dict() | {"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}
    fields["dflash_config"] = {name: fields[name] for name in ("mask_token_id", "target_layer_ids")}
    (source / "config.json").write_text(json.dumps(fields))
    save_file(drafter.state_dict(), source / "model.safetensors", metadata={"format": "pt"})
    run(monkeypatch, "convert_speculators", source, tmp_path / "converted")
    assert json.loads((tmp_path / "converted" / "config.json").read_text())["model_type"] == "treespec_dflash"
    kept = AutoDrafter.from_pretrained(tmp_path / "converted").state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in drafter.state_dict().items())
