"""Beginnings of Python files for the demo, written for it: none stands in the corpus of the embedded models.

A prompt's seed is the first, from its place in the list on, whose plain continuation at temperature 0.8 has all of 128
tokens and repeats at most a fifth of its 4-grams: texts that end at once or loop say little about speed. Only plain
decoding was looked at.
"""

from __future__ import annotations

PROMPTS: dict[str, str] = {
    "argparse script": '''"""Count the words of text files."""

import argparse
import sys


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="files to read")
    parser.add_argument("-q", "--quiet", action="store_true",
''',
    "stack tests": """import unittest


class StackTests(unittest.TestCase):

    def setUp(self):
        self.stack = Stack()

    def test_push(self):
        self.stack.push(1)
        self.stack.push(2)
        self.assertEqual(len(self.stack), 2)

    def test_pop(self):
""",
    "ring buffer": '''class RingBuffer:
    """A buffer of fixed size that forgets its oldest items."""

    def __init__(self, size):
        if size <= 0:
            raise ValueError("size must be positive")
        self._items = [None] * size
        self._start = 0
        self._count = 0

    def append(self, item):
        """Add an item at the end."""
''',
    "tokenizer of arithmetic": '''import re

TOKEN = re.compile(r"\\s*(?:(\\d+)|(.))")


class ParseError(Exception):
    """Raised when an expression cannot be parsed."""


class Parser:

    def __init__(self, text):
        self.text = text
        self.pos = 0

    def next_token(self):
        match = TOKEN.match(self.text, self.pos)
        if match is None:
            raise ParseError(self.text)
''',
    "asyncio workers": """import asyncio


async def worker(name, queue, results):
    while True:
        item = await queue.get()
        try:
            results.append((name, item * 2))
        finally:
            queue.task_done()


async def main():
    queue = asyncio.Queue()
    results = []
    tasks = []
    for i in range(3):
""",
    "dataclass": """from dataclasses import dataclass, field


@dataclass
class Account:
    owner: str
    balance: float = 0.0
    history: list = field(default_factory=list)

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
""",
    "logging setup": '''import logging
import sys

logger = logging.getLogger(__name__)


def setup_logging(level=logging.INFO, filename=None):
    """Configure the root logger."""
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    if filename is not None:
        handler = logging.FileHandler(filename)
    else:
''',
    "configuration reader": '''import os


class Settings:
    """Settings of a program, read from lines of the form name = value."""

    def __init__(self, path):
        self.path = path
        self.values = {}
        if os.path.exists(path):
            self.read()

    def read(self):
        with open(self.path, encoding="utf-8") as f:
            for lineno, line in enumerate(f, 1):
                line = line.strip()
                if not line or line.startswith("#"):
''',
    "error tests": """import unittest


class ConvertTests(unittest.TestCase):

    def test_valid(self):
        self.assertEqual(convert("12"), 12)
        self.assertEqual(convert("-7"), -7)
        self.assertEqual(convert(" 3 "), 3)

    def test_invalid(self):
        self.assertRaises(ValueError, convert, "")
        self.assertRaises(ValueError, convert, "x")
        with self.assertRaises(TypeError):
""",
    "context manager": '''import os
import shutil
import tempfile


class WorkingDirectory:
    """Context manager that changes into a temporary directory."""

    def __init__(self, prefix="work"):
        self.prefix = prefix
        self.path = None

    def __enter__(self):
        self.old = os.getcwd()
        self.path = tempfile.mkdtemp(prefix=self.prefix)
        os.chdir(self.path)
        return self.path

    def __exit__(self, exc_type, exc_value, traceback):
''',
    "linked list": """class Node:
    __slots__ = ("value", "next")

    def __init__(self, value, next=None):
        self.value = value
        self.next = next


class LinkedList:

    def __init__(self, iterable=()):
        self.head = None
        self.size = 0
        for value in iterable:
            self.append(value)

    def __len__(self):
        return self.size

    def __iter__(self):
""",
    "line server": '''import socket
import threading


class LineServer(threading.Thread):
    """Serve lines of text to one client at a time."""

    def __init__(self, host="localhost", port=0):
        super().__init__(daemon=True)
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.sock.bind((host, port))
        self.sock.listen(1)
        self.port = self.sock.getsockname()[1]

    def run(self):
''',
    "interval arithmetic": '''class Interval:
    """A closed interval of numbers."""

    def __init__(self, low, high):
        if low > high:
            raise ValueError("low must not exceed high")
        self.low = low
        self.high = high

    def __repr__(self):
        return f"{self.__class__.__name__}({self.low!r}, {self.high!r})"

    def __eq__(self, other):
        if not isinstance(other, Interval):
            return NotImplemented
''',
    "file walk": '''import os
import sys


def find_files(root, suffix=".txt"):
    """Yield the paths of all files below root with the given suffix."""
    for dirpath, dirnames, filenames in os.walk(root):
        dirnames.sort()
        for name in sorted(filenames):
            if name.endswith(suffix):
                yield os.path.join(dirpath, name)


def main():
    if len(sys.argv) < 2:
''',
    "mock tests": """import io
import unittest
from unittest import mock


class ReporterTest(unittest.TestCase):

    def setUp(self):
        self.output = io.StringIO()
        self.reporter = Reporter(self.output)

    def test_empty(self):
        self.reporter.finish()
        self.assertEqual(self.output.getvalue(), "")

    def test_one_line(self):
""",
    "enumeration": '''import enum


class Color(enum.Enum):
    RED = 1
    GREEN = 2
    BLUE = 3

    @classmethod
    def parse(cls, name):
        """Return the member of the given name, whatever its case."""
        try:
            return cls[name.upper()]
        except KeyError:
''',
}

SEEDS: dict[str, int] = {
    "argparse script": 0,
    "stack tests": 4,
    "ring buffer": 2,
    "tokenizer of arithmetic": 4,
    "asyncio workers": 5,
    "dataclass": 5,
    "logging setup": 7,
    "configuration reader": 8,
    "error tests": 8,
    "context manager": 9,
    "linked list": 13,
    "line server": 11,
    "interval arithmetic": 12,
    "file walk": 14,
    "mock tests": 14,
    "enumeration": 15,
}
