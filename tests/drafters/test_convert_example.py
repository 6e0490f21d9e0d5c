"""`examples/convert_speculators.py` as written, on checkpoints of speculators."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from dialect_models import published

from hf_treespec import AutoDrafter

EXAMPLE = Path(__file__).parents[2] / "examples" / "convert_speculators.py"


@pytest.mark.parametrize("name", ["speculators", "speculators_anchor", "zlab"])
def test_what_is_converted_is_the_same_drafter(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, output = published(tmp_path / "source", name), tmp_path / "converted"
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name, str(source), str(output)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert json.loads((output / "config.json").read_text())["model_type"] == "treespec_dflash"
    drafter, converted = AutoDrafter.from_pretrained(source), AutoDrafter.from_pretrained(output)
    assert type(converted) is type(drafter)
    kept = converted.state_dict()
    assert kept.keys() == drafter.state_dict().keys()
    assert all(torch.equal(kept[name], tensor) for name, tensor in drafter.state_dict().items())
