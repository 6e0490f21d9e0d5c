"""What a rule comes to, and what a rule is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..base import BlockDrafter


class Status(StrEnum):
    """What became of a rule."""

    fits = "fits"
    slow = "slow"
    wrong = "wrong"
    unchecked = "not checked"


@dataclass(frozen=True)
class Finding:
    """What a rule came to.

    Attributes:
        rule: What it is about, in a word or two.
        status: Whether it holds.
        found: The values found.
        wanted: What they should be; empty where the rule holds.
        fix: What to do; empty where the rule holds.
    """

    rule: str
    status: Status
    found: str
    wanted: str = ""
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.found}; {self.wanted}. {self.fix}" if self.wanted else self.found


#: A rule looks at a pair; the target's weights may be on the meta device.
Rule = Callable[[BlockDrafter, PreTrainedModel], Iterable[Finding]]


def fits(rule: str, found: str) -> Finding:
    """A rule that holds."""
    return Finding(rule, Status.fits, found)


def text_config(target: PreTrainedModel) -> PreTrainedConfig:
    """The configuration of a target's decoder, be it nested or the target's own."""
    return target.config.get_text_config()


def own(drafter: BlockDrafter, name: str) -> Any:
    """The drafter's own embedding or head, where its checkpoint has one."""
    return getattr(drafter.backbone, name, None)
