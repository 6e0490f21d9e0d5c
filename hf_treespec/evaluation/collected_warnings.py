"""Warnings of many calls, collected while ways of decoding are measured and told once for each of them."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

_PACKAGE = __name__.partition(".")[0]
_NUMBER = re.compile(r"\d+(\.\d+)?")


class CollectedWarnings:
    """Warnings that this package logged, by the arm that was decoding.

    Attributes:
        messages: For each arm, its warnings by kind, in order; of one kind are those that differ in numbers alone.
    """

    def __init__(self) -> None:
        self.messages: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))

    @contextmanager
    def of(self, arm: str) -> Iterator[None]:
        """Collects what is warned of inside instead of showing it. Other levels and packages are shown as ever."""
        logger, collector = logging.getLogger(_PACKAGE), _Collector(self.messages[arm])
        shown = logger.propagate
        logger.addHandler(collector)
        logger.propagate = False
        try:
            yield
        finally:
            logger.propagate = shown
            logger.removeHandler(collector)

    def lines(self) -> list[str]:
        """A line for each kind of warning of each arm: the last one, and how many there were."""
        return [
            f"{arm}: {messages[-1]}" + (f" The last of {len(messages)} such warnings." if messages[1:] else "")
            for arm, kinds in self.messages.items()
            for messages in kinds.values()
        ]


class _Collector(logging.Handler):
    """Keeps warnings, and hands everything else on to where it went before."""

    def __init__(self, kinds: defaultdict[str, list[str]]) -> None:
        super().__init__()
        self.kinds = kinds

    def emit(self, record: logging.LogRecord) -> None:
        """Receives a record of this package."""
        if record.levelno == logging.WARNING:
            message = record.getMessage()
            self.kinds[_NUMBER.sub("N", message)].append(message)
        else:
            logging.getLogger().handle(record)
