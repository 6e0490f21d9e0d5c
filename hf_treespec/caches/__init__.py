"""Caches that verify a tree in one forward and keep the accepted path of it in place."""

from .capabilities import UnsupportedCacheError, grow_static
from .commit import TreeCache, scratch_forward, takes_trees
from .tree_layers import TreeLayer, TreeStaticLayer

__all__ = [
    "TreeCache",
    "TreeLayer",
    "TreeStaticLayer",
    "UnsupportedCacheError",
    "grow_static",
    "scratch_forward",
    "takes_trees",
]
