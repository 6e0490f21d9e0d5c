"""The built wheel, unpacked somewhere else, is complete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SCRIPT = """
import json, sys
import hf_treespec
from hf_treespec.hub.custom_generate import generate_with
from hf_treespec.hub.publishing import write_custom_generate
from hf_treespec.hub.resources import resource_folder
from hf_treespec import embedded
from pathlib import Path

out = Path(sys.argv[1])
out.mkdir()
write_custom_generate("acme/drafter", out)
print(json.dumps({
    "package": hf_treespec.__file__,
    "template": (resource_folder("model_cards") / "drafter.md").read_text(encoding="utf-8"),
    "hub_configs": sorted(path.name for path in resource_folder("hub_configs").iterdir()),
    "card": (embedded.path("dflash") / "README.md").is_file(),
    "code": (out / "custom_generate" / "generate.py").read_text(encoding="utf-8"),
}))
"""


@pytest.mark.slow
def test_an_installed_wheel_finds_what_lies_beside_the_package(tmp_path: Path):
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    place = tmp_path / "place"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q", "--target", str(place)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "out")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["package"]).is_relative_to(place)
    assert found["template"] == (ROOT / "model_cards" / "drafter.md").read_text(encoding="utf-8")
    assert found["hub_configs"] == sorted(path.name for path in (ROOT / "hub_configs").iterdir())
    assert found["card"]
    assert '"acme/drafter"' in found["code"]
