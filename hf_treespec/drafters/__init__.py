"""Drafters: small models that propose the tokens a target then verifies."""

from .auto import AutoDrafter, families, find_family, register
from .base import BlockDrafter, DraftSession, DraftState, ExtraRows, TargetModules

families()

__all__ = [
    "AutoDrafter",
    "BlockDrafter",
    "DraftSession",
    "DraftState",
    "ExtraRows",
    "TargetModules",
    "families",
    "find_family",
    "register",
]
