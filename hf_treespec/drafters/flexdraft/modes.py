"""Which of the two modes a round drafts in, learned from what rounds cost.

Both modes give the same draft, so a round commits as many tokens in either: the cheaper one is the better one.
"""

from __future__ import annotations

import statistics
import weakref
from collections import deque
from typing import Literal

from torch import nn

Mode = Literal["parallel", "sequential"]

#: Rounds of a mode that its cost is the median of: few, so that growing contexts are followed.
_REMEMBERED = 7
#: Rounds of each mode before the modes are compared.
_FIRST = 3
#: Rounds from one try of the dearer mode to the next.
_INTERVAL = 24


class ModeCosts:
    """Recent times of rounds in each mode, and the choice they lead to.

    Args:
        guess: The mode to begin with.
    """

    def __init__(self, guess: Mode) -> None:
        self._times: dict[Mode, deque[float]] = {
            "parallel": deque(maxlen=_REMEMBERED),
            "sequential": deque(maxlen=_REMEMBERED),
        }
        self.best: Mode = guess
        self._rounds = 0

    def choose(self) -> Mode:
        """The mode of the coming round: the cheaper one, but each a few times at first and the other now and then."""
        self._rounds += 1
        other: Mode = "sequential" if self.best == "parallel" else "parallel"
        for mode in (self.best, other):
            if len(self._times[mode]) < _FIRST:
                return mode
        return other if self._rounds % _INTERVAL == 0 else self.best

    def prefers(self, mode: Mode) -> bool:
        """Whether a mode is known to be the cheaper one."""
        return mode == self.best and all(len(times) >= _FIRST for times in self._times.values())

    def record(self, mode: Mode, seconds: float) -> None:
        """Learns what a round in a mode took, from the start of its verification to the start of the next one."""
        self._times[mode].append(seconds)
        if all(len(times) >= _FIRST for times in self._times.values()):
            costs = {name: statistics.median(times) for name, times in self._times.items()}
            self.best = min(costs, key=lambda name: costs[name])


#: What was learned, by the drafter's weights, then by everything that moves the costs much.
_LEARNED: weakref.WeakKeyDictionary[nn.Module, dict[tuple[object, ...], ModeCosts]] = weakref.WeakKeyDictionary()


def costs_of(weights: nn.Module, circumstances: tuple[object, ...], guess: Mode) -> ModeCosts:
    """What calls with a drafter have learned in this process under the same circumstances."""
    return _LEARNED.setdefault(weights, {}).setdefault(circumstances, ModeCosts(guess))
