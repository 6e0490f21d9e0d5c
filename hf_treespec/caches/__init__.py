"""Caches that verify a tree in one forward and keep the accepted path of it in place."""

from .capabilities import UnsupportedCache, grow_static
from .commit import TreeCache

__all__ = ["TreeCache", "UnsupportedCache", "grow_static"]
