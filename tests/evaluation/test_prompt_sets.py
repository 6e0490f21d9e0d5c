"""Prompts: templates, files, the held-out slices; no network."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_treespec.evaluation import held_out
from hf_treespec.evaluation.prompt_sets import HUB_SETS, available_sets, load_prompt_set

ROWS = {
    "openai/gsm8k": {"question": "What is {1} + {2}?", "answer": "3"},
    "HuggingFaceH4/MATH-500": {"problem": "Find $x$.", "solution": ""},
    "openai/openai_humaneval": {"prompt": "f = 1\n", "test": ""},
    "google-research-datasets/mbpp": {"prompt": "Write a function.", "code": ""},
    "HuggingFaceH4/mt_bench_prompts": {"prompt": ["First.", "Second."], "reference": []},
}


SOLVE = "Write a solution to the following problem and make sure that it passes the tests"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None, str]]:
    """A `datasets` library of one row a data set; returns what was loaded."""
    loaded = []

    def load_dataset(path: str, name: str | None = None, *, split: str) -> list[dict[str, object]]:
        loaded.append((path, name, split))
        return [ROWS[path]]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return loaded


@pytest.mark.parametrize(
    ("name", "source", "turns"),
    [
        (
            "gsm8k",
            ("openai/gsm8k", "main", "test"),
            "What is {1} + {2}?\nPlease reason step by step, and put your final answer within \\boxed{}.",
        ),
        (
            "math500",
            ("HuggingFaceH4/MATH-500", None, "test"),
            "Find $x$.\nPlease reason step by step, and put your final answer within \\boxed{}.",
        ),
        (
            "humaneval",
            ("openai/openai_humaneval", None, "test"),
            f"{SOLVE}:\n```python\nf = 1\n\n```",
        ),
        ("mbpp", ("google-research-datasets/mbpp", "sanitized", "test"), "Write a function."),
        ("mt-bench", ("HuggingFaceH4/mt_bench_prompts", None, "train"), ("First.", "Second.")),
    ],
)
def test_hub_sets(hub, name: str, source, turns):
    prompts = load_prompt_set(name)
    assert hub == [source]
    assert prompts.prompts == ((turns,) if isinstance(turns, str) else turns,)
    assert prompts.chat
    assert prompts.name == name


def test_without_the_library(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-treespec\[eval\]'"):
        load_prompt_set("gsm8k")


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="neither a JSONL file") as error:
        load_prompt_set("gsm9k")
    assert all(name in str(error.value) for name in (*HUB_SETS, *held_out.SLICES))
    assert available_sets() == [*held_out.SLICES, *HUB_SETS]


def write(path: Path, lines: list[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_files_keep_all_turns(tmp_path: Path):
    path = write(tmp_path / "talks.jsonl", [{"turns": ["a", "b"]}, {"turns": ["c"], "category": "x"}])
    prompts = load_prompt_set(str(path))
    assert prompts.name == "talks"
    assert prompts.prompts == (("a", "b"), ("c",))


def test_a_part_is_chosen_by_the_seed(tmp_path: Path):
    path = str(write(tmp_path / "many.jsonl", [{"turns": [str(index)]} for index in range(50)]))
    first = load_prompt_set(path, 8).prompts
    # The order of `datasets.Dataset.shuffle(seed=0)`.
    assert [int(turn) for (turn,) in first] == [18, 23, 36, 4, 2, 3, 34, 24]
    assert first == load_prompt_set(path, 8).prompts == load_prompt_set(path, 12).prompts[:8]
    assert first != load_prompt_set(path, 8, seed=1).prompts
    assert len(load_prompt_set(path, 80).prompts) == 50


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"turns": []}', '{"turns": "a"}', '{"turns": [1]}', '{"turns": [""]}']
)
def test_a_bad_line_is_named(tmp_path: Path, line: str):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"turns": ["good"]}\n\n' + line + "\n")
    with pytest.raises(ValueError, match="line 3"):
        load_prompt_set(str(path))


def test_an_empty_file_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="holds no prompts"):
        load_prompt_set(str(write(tmp_path / "empty.jsonl", [])))


# The held-out slices


@pytest.mark.parametrize("name", held_out.SLICES)
def test_slices(name: str):
    prompts = load_prompt_set(name, 12)
    assert prompts.prompts == load_prompt_set(name, 12).prompts
    assert prompts.prompts[:5] == load_prompt_set(name, 5).prompts
    assert len(set(prompts.prompts)) == 12
    assert not prompts.chat
    for (text,) in prompts.prompts:
        assert 200 <= len(text) <= 1000
        assert text.endswith("\n")


def test_slices_read_held_out_modules_only():
    modules = {file.module for file in held_out.held_out_files()}
    assert {file.split for file in held_out.held_out_files()} == {"held_out"}
    assert not modules & {"json", "argparse", "asyncio"}


SOURCE = '''"""Module docstring of one line."""

import os


def f(x):
    """Does f.

    At length,
    over lines.
    """
    a = x
    b = a
    c = b
    return c


def short(): return 1


class TestThings:
    def test_it(self):
        one = 1
        two = 2
        three = 3
        assert one + two == three
'''


def test_places():
    def after(place: int) -> str:
        return SOURCE[place:].splitlines()[0]

    assert [after(place) for place in held_out.function_bodies(SOURCE)] == ["    a = x", "        one = 1"]
    assert [after(place) for place in held_out.test_bodies(SOURCE)] == ["        one = 1"]
    (place,) = held_out.docstrings(SOURCE)
    assert SOURCE[:place].endswith('"""Does f.\n')
    ast.parse(SOURCE)


def test_form_feeds_are_no_lines():
    text = "import os\n\x0c\n" + SOURCE
    (place,) = held_out.test_bodies(text)
    assert text[place:].startswith("        one = 1")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A standard library in which only one held-out file is left, and changed."""
    (tmp_path / "bz2.py").write_text("# padding\n" * 30 + SOURCE)
    return tmp_path


def test_other_files_than_the_manifests_are_told(library: Path):
    prompts, notes = held_out.load_slice("stdlib-functions", root=library)
    assert len(prompts) == 2
    assert "1 held-out files are not the manifest's (SHA-256)" in notes[0]
    assert "bz2.py" in notes[0]
    assert "are missing" in notes[1]


def test_nothing_left_is_an_error(library: Path):
    with pytest.raises(ValueError, match="None of the held-out files of 'stdlib-tests'"):
        held_out.load_slice("stdlib-tests", root=library)
