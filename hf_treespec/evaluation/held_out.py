"""Prompts from the modules that the embedded models were not trained on, read from the interpreter's own library.

Which modules are held out is written in the embedded pair's manifest. A prompt is the text before a place where there
is something to write: a function's body, the rest of a docstring, the body of a test.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import sysconfig
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

from ..training.corpus import SourceFile

#: Characters of a prompt at most, cut at the beginning of a line; and at least.
_WINDOW, _SHORTEST = 1000, 200
#: Lines that must be there to write.
_MIN_LINES = 4


def load_slice(name: str, limit: int | None = None, root: Path | None = None) -> tuple[list[str], tuple[str, ...]]:
    """Prompts of one slice, the same on every machine with the same Python.

    Files whose hash is not the manifest's, as under another version of Python, are used all the same: the split is by
    module, so they were not trained on either. But their prompts are not those of other people's results, and a note
    says so.

    Args:
        name: Key of `SLICES`.
        limit: Number of prompts; all by default.
        root: The standard library's folder; this interpreter's by default.

    Returns:
        The prompts, spread evenly over the files, and notes.

    Raises:
        ValueError: None of the held-out files is there.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    in_tests, places = SLICES[name]
    queues: list[list[str]] = []
    missing, differing = [], []
    for file in sorted(held_out_files(), key=lambda file: _rank(file.path)):
        if (file.path.startswith("test/")) != in_tests:
            continue
        path = root / file.path
        if not path.is_file():
            missing.append(file.path)
            continue
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != file.sha256:
            differing.append(file.path)
        text = data.decode("utf-8").replace("\r\n", "\n")
        found = sorted(set(places(text)), key=lambda place: _rank(f"{file.path}:{place}"))
        queues.append([prompt for place in found if (prompt := _window(text, place))])
    # In turns, so that no large file crowds out the others.
    longest = max(map(len, queues), default=0)
    prompts = [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)][:limit]
    if not prompts:
        raise ValueError(
            f"None of the held-out files of {name!r} is in {root}; give other prompts, such as a JSONL file."
        )
    notes = tuple(
        f"{len(paths)} held-out files {what} under Python {platform.python_version()}, so these are not the prompts "
        f"of other versions: {', '.join(paths[:3])}{', …' if len(paths) > 3 else ''}"
        for what, paths in (("are not the manifest's (SHA-256)", differing), ("are missing", missing))
        if paths
    )
    return prompts, notes


def held_out_files() -> list[SourceFile]:
    """Files of the embedded pair's manifest that stand on the held-out side."""
    lines = files("hf_treespec").joinpath("embedded/manifest.jsonl").read_text(encoding="utf-8").splitlines()
    return [file for file in (SourceFile(**json.loads(line)) for line in lines) if file.split == "held_out"]


def _rank(key: str) -> bytes:
    """A place in an order that is as good as random and the same everywhere."""
    return hashlib.sha256(key.encode()).digest()


def _window(text: str, end: int) -> str | None:
    """The whole lines before a place; None where there are too few."""
    begin = max(0, end - _WINDOW)
    if begin:
        begin = text.find("\n", begin) + 1
    return text[begin:end] if end - begin >= _SHORTEST else None


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _bodies(text: str, wanted: Callable[[Function], bool]) -> Iterator[int]:
    """Where the bodies of functions begin, behind their docstrings."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Function) and wanted(node):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if body and (node.end_lineno or 0) - body[0].lineno + 1 >= _MIN_LINES and body[0].lineno > node.lineno:
                yield _line_start(text, body[0].lineno)


def function_bodies(text: str) -> Iterator[int]:
    """Where the bodies of functions begin."""
    return _bodies(text, lambda node: True)


def test_bodies(text: str) -> Iterator[int]:
    """Where the bodies of test methods begin."""
    return _bodies(text, lambda node: node.name.startswith("test"))


def docstrings(text: str) -> Iterator[int]:
    """Where docstrings of several lines go on after their first line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node) is not None:
            string = node.body[0]
            if (string.end_lineno or 0) - string.lineno + 1 >= _MIN_LINES:
                yield _line_start(text, string.lineno + 1)


def _line_start(text: str, line: int) -> int:
    """Offset of a line, counted from 1."""
    return sum(len(before) + 1 for before in text.split("\n")[: line - 1])


#: Whether the files of a slice are tests, and the places in them.
SLICES: dict[str, tuple[bool, Callable[[str], Iterator[int]]]] = {
    "stdlib-functions": (False, function_bodies),
    "stdlib-docstrings": (False, docstrings),
    "stdlib-tests": (True, test_bodies),
}
