"""Decoding with draft trees: one room for each step of a round."""

from .integration import install, uninstall
from .report import GenerationReport
from .support import UnsupportedRequestError

__all__ = ["GenerationReport", "UnsupportedRequestError", "install", "uninstall"]
