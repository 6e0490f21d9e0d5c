"""The package as a whole: its layers, what importing it costs, what ships with it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

import hf_treespec

ROOT = Path(hf_treespec.__file__).parent

#: Rank of each part; a part imports from its own rank or below. Those of rank 0 serve all.
RANKS = {
    "configuration": 0,
    "compat": 0,
    "transfer": 0,
    "resources": 0,
    "sources": 0,
    "trees": 1,
    "budget": 2,
    "attention": 2,
    "caches": 2,
    "drafters": 3,
    "decoding": 4,
    "hub": 5,
    "training": 5,
    "evaluation": 5,
    "embedded": 5,
    "cli": 6,
}


def part_of(module: str) -> str:
    """Part of the package a module such as `hf_treespec.trees.lattice` belongs to; empty for the package itself."""
    return module.split(".")[1] if "." in module else ""


def imported_modules(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Absolute names of this package's modules that a source imports, wherever in the file it does."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "hf_treespec")
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            name = ".".join(part for part in (base, node.module) if part)
            if name == "hf_treespec":
                yield from (f"{name}.{alias.name}" for alias in node.names)
            elif name.split(".")[0] == "hf_treespec":
                yield name


def edges() -> Iterator[tuple[str, str, str]]:
    """`(file, part, imported part)` of every import between two parts."""
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT.parent)
        is_package = path.name == "__init__.py"
        module = ".".join((relative.parent if is_package else relative.with_suffix("")).parts)
        for imported in imported_modules(path.read_text(encoding="utf-8"), module, is_package):
            source, target = part_of(module), part_of(imported)
            if source and target in RANKS and source != target:
                yield str(relative), source, target


def test_every_part_has_a_rank():
    parts = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert parts - {"__init__"} <= RANKS.keys()


def test_layers_import_downward():
    upward = [edge for edge in edges() if RANKS[edge[1]] < RANKS[edge[2]]]
    assert not upward


def test_parts_do_not_import_each_other_in_circles():
    graph: dict[str, set[str]] = {}
    for _, source, target in edges():
        graph.setdefault(source, set()).add(target)

    def reach(part: str) -> set[str]:
        seen: set[str] = set()
        queue = [part]
        while queue:
            for target in graph.get(queue.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    queue.append(target)
        return seen

    assert not [part for part in graph if part in reach(part)]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from ..decoding.report import GenerationReport", ["hf_treespec.decoding.report"]),
        ("from .. import decoding", ["hf_treespec.decoding"]),
        ("from . import lattice", ["hf_treespec.trees"]),
        ("from .lattice import DraftLattice", ["hf_treespec.trees.lattice"]),
        ("def f():\n    import hf_treespec.cli", ["hf_treespec.cli"]),
        ("import torch\nfrom transformers import Cache", []),
    ],
)
def test_the_layer_check_sees_imports(line: str, found: list[str]):
    assert list(imported_modules(line, "hf_treespec.trees.expansion", is_package=False)) == found


def test_only_the_command_line_knows_its_framework():
    sources = {path: path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}
    found = {path.relative_to(ROOT).parts[0] for path, source in sources.items() if "import typer" in source}
    assert found == {"cli"}


def test_importing_stays_light():
    """Beyond transformers and torch, importing the package loads only itself and the standard library."""
    script = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase
import hf_treespec
from accelerate.state import AcceleratorState, PartialState
loaded = sorted(sys.modules)
import hf_treespec.cli
states = [bool(AcceleratorState._shared_state), bool(PartialState._shared_state)]
print(json.dumps([loaded, sorted(sys.modules), *states]))
"""
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    modules, with_commands, accelerator_state, partial_state = json.loads(output.splitlines()[-1])
    heavy = {"matplotlib", "evaluate", "datasets", "pandas", "typer", "rich", "pytest"}
    assert not heavy & {name.split(".")[0] for name in modules}
    own = {part_of(name) for name in modules if name.startswith("hf_treespec.")}
    assert not own & {"training", "evaluation", "hub", "cli"}
    # Each command imports what it needs when it runs, so that `--help` is quick.
    own = {part_of(name) for name in with_commands if name.startswith("hf_treespec.")}
    assert "cli" in own
    assert not own & {"training", "evaluation", "hub"}
    assert not accelerator_state
    assert not partial_state


def test_types_ship():
    assert files("hf_treespec").joinpath("py.typed").is_file()
