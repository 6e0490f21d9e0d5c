"""Caches that verify a tree in one forward and keep the accepted path of it in place."""

from .capabilities import UnsupportedCacheError, grow_static
from .commit import TreeCache

__all__ = ["TreeCache", "UnsupportedCacheError", "grow_static"]
