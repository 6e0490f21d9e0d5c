"""Attention over draft trees: masks, exact merging, and the functions transformers calls."""

from .interface import ARMED, TreeAttention, armed, install, uninstall
from .masks import LayerKind, TreeMasks, layer_kinds, tree_mask
from .merging import apply_sinks, merge

__all__ = [
    "ARMED",
    "LayerKind",
    "TreeAttention",
    "TreeMasks",
    "apply_sinks",
    "armed",
    "install",
    "layer_kinds",
    "merge",
    "tree_mask",
    "uninstall",
]
