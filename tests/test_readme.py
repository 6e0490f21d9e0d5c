"""What the README promises: its examples run, its flags and options exist."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import typer

import hf_treespec
from hf_treespec.cli import app

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_examples_with_the_embedded_pair_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    first = next(index for index, block in enumerate(blocks) if "embedded.load()" in block)
    names: dict[str, Any] = {}
    for block in blocks[first:]:
        exec(block, names)
    assert names["quick"].last_report is not names["drafter"].last_report
    assert max(names["quick"].last_report.nodes_history) == 16
    assert max(names["drafter"].last_report.nodes_history) == 16, "the generation config's options count"
    assert "class Stack" in capsys.readouterr().out


def test_every_option_is_in_the_table() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)) == {
        field.name for field in dataclasses.fields(hf_treespec.TreeSpecConfig)
    }


@pytest.mark.parametrize(
    ("command", "important"),
    [
        ("demo", {"--family", "--threads", "--prompts", "--repeats"}),
        ("bench", {"--data", "--arms", "--batch-sweep", "--quick", "--json", "--csv", "--plots"}),
        ("calibrate", {"--contexts", "--repeats", "--again", "--plots"}),
    ],
)
def test_flags_are_named_and_exist(command: str, important: set[str]) -> None:
    (part,) = re.findall(rf"^- `{command}`: .*(?:\n  .*)*", README, re.MULTILINE)
    named = set(re.findall(r"--[a-z-]+", part))
    group: Any = typer.main.get_command(app)
    known = {name for parameter in group.commands[command].params for name in parameter.opts}
    assert important <= named <= known
