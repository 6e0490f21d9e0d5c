"""Draft lattices and the trees chosen from them. Torch only."""

from .draft_tree import DraftTree
from .expansion import expand
from .lattice import DraftLattice

__all__ = ["DraftLattice", "DraftTree", "expand"]
