"""Times of the rounds, stage by stage."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

STAGES = ("propose", "expand", "verify", "walk", "commit")


#: A stage's name, its start and its end.
_Span = tuple[str, torch.cuda.Event, torch.cuda.Event]


@dataclass
class RoundTimes:
    """Milliseconds of one round: of each stage, and of all of it."""

    stages: dict[str, float] = field(default_factory=dict)
    total: float = 0.0


class StageClock:
    """Times rounds and their stages: wall clock on CPU, events on CUDA, which nobody waits for.

    Args:
        device: Device the stages run on.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._running = RoundTimes()
        self._events: list[_Span] = []
        #: Rounds that the device may not have finished yet: their stages, start and end.
        self._open: deque[tuple[list[_Span], torch.cuda.Event, torch.cuda.Event]] = deque()
        self._finished: deque[RoundTimes] = deque()

    @contextmanager
    def round(self) -> Iterator[None]:
        """Times a block of code as one round, with the stages in it."""
        if self._cuda:
            start, self._events = _event(), []
            yield
            self._open.append((self._events, start, _event()))
        else:
            self._running, began = RoundTimes(), time.perf_counter()
            yield
            self._running.total = 1e3 * (time.perf_counter() - began)
            self._add(self._running)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time of a block of code to a stage of the round."""
        if self._cuda:
            start = _event()
            yield
            self._events.append((name, start, _event()))
        else:
            began = time.perf_counter()
            yield
            stages = self._running.stages
            stages[name] = stages.get(name, 0.0) + 1e3 * (time.perf_counter() - began)

    def finished(self) -> Iterator[RoundTimes]:
        """The rounds that have become known since the last call, in order, without waiting for the device."""
        self._read(wait=False)
        while self._finished:
            yield self._finished.popleft()

    def seconds(self) -> dict[str, float]:
        """Seconds of each stage over all rounds. Waits for the device where there is one."""
        self._read(wait=True)
        return dict(self._seconds)

    def _read(self, wait: bool) -> None:
        while self._open:
            events, start, end = self._open[0]
            if wait:
                end.synchronize()
            elif not end.query():
                return
            self._open.popleft()
            times = RoundTimes(total=start.elapsed_time(end))
            for name, first, last in events:
                times.stages[name] = times.stages.get(name, 0.0) + first.elapsed_time(last)
            self._add(times)

    def _add(self, times: RoundTimes) -> None:
        for name, milliseconds in times.stages.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + milliseconds / 1e3
        self._finished.append(times)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
