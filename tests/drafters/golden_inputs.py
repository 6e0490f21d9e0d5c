"""Weights and inputs by formula, the same under any torch, which the numbers in `golden/` were computed from.

Each file there holds what the published code of a dialect computed in float32 on a CPU (`made_by` says which release
of which project, under which torch and transformers): the `config.json` and the tensors' shapes as that code writes
them, and the logits of two blocks, or the nodes of a tree. The code was given the tensors of `tensors` below as its
weights, `features` as the target's hidden states, and `rows` as the borrowed embedding and head where it has none of
its own: first the features of positions 0 to 6 and the anchor at 7, then those of 7 to 9 and the anchor at 10.

What was added by hand: JetSpec's adapter narrows features that its code leaves the embedding of, so that checkpoint
has an embedding and a head of its own here; and the speculators one has the embedding that releases before 0.9 wrote.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

VOCAB, WIDTH, BLOCK, MASK = 61, 32, 4, 60
#: Positions of the two anchors, their tokens, and the decoder layers that features are from.
ANCHORS, TOKENS, LAYERS = (7, 10), (5, 17), (1, 3)
#: Tokens of the reduced vocabulary, rising as published code selects them.
REDUCED = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59]


def normal(name: str, shape: Sequence[int], scale: float) -> np.ndarray:
    """Normal numbers of a name, float32; numpy's `RandomState` gives the same in every release."""
    generator = np.random.RandomState(zlib.crc32(name.encode()))
    return (generator.standard_normal(tuple(shape)) * scale).astype(np.float32)


def tensor(name: str, shape: Sequence[int]) -> np.ndarray:
    """A checkpoint's tensor."""
    if name == "d2t":
        return np.array(REDUCED) - np.arange(len(REDUCED))
    if name == "t2d":
        return np.isin(np.arange(VOCAB), REDUCED)
    if "norm" in name:
        return 1.0 + normal(name, shape, 0.2)
    return normal(name, shape, 0.1 if name == "lm_head.weight" else 0.25)


def tensors(shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """A checkpoint's tensors."""
    return {name: tensor(name, shape) for name, shape in shapes.items()}


def features(width: int = WIDTH) -> np.ndarray:
    """Outputs of both feature layers at every position before the second anchor, `[1, 10, 2 · width]`."""
    return normal("features", (1, ANCHORS[1], len(LAYERS) * width), 1.0)


def rows(name: str, width: int = WIDTH) -> np.ndarray:
    """The target's `"embedding"` or `"head"`, `[VOCAB, width]`."""
    return normal(f"target {name}", (VOCAB, width), 0.1 if name == "head" else 0.5)
