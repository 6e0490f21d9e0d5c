"""Brute force: a stock cache stepped along every path of a tree, and masks built entry by entry."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Sequence
from typing import Any

import torch
from models import VOCAB, build, target
from transformers import DynamicCache, PreTrainedModel, QuantizedCache, StaticCache
from transformers.cache_utils import Cache, QuantizedLayer

from hf_treespec.attention.masks import LayerKind, layer_kinds
from hf_treespec.caches import TreeCache
from hf_treespec.compat import CACHE_KEYWORD
from hf_treespec.trees import DraftTree

RESIDUAL = 4
CAPACITY = 96


class RoundingLayer(QuantizedLayer):
    """Rounds to 15 levels of each head's largest value so far, so that every flush changes what was stored before."""

    def __init__(self) -> None:
        super().__init__(residual_length=RESIDUAL)

    def _quantize(self, tensor: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
        scale = tensor.abs().amax(dim=(2, 3), keepdim=True) / 7
        return (tensor / scale).round().to(torch.int8), scale

    def _dequantize(self, q_tensor: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return q_tensor[0] * q_tensor[1]


@functools.cache
def model_of(family: str) -> PreTrainedModel:
    if family != "gpt_oss":
        return target(family)
    # In float32 two stock computations of it (with and without a cache) differ by up to 5.4e-5 here, which says more
    # about its experts than about caches.
    model = build(family, "eager").double()
    model.set_experts_implementation("eager")
    return model


def make_cache(kind: str, model: PreTrainedModel, columns: int = CAPACITY) -> Cache:
    config = model.config
    match kind:
        case "dynamic":
            return DynamicCache(config=config)
        case "unconfigured":
            return DynamicCache()
        case "static":
            return StaticCache(config=config, max_cache_len=columns)
        case "fp8":
            return QuantizedCache("fp8", config)
        case _:
            return Cache(layers=[RoundingLayer() for _ in range(config.num_hidden_layers)])


def forward(model: PreTrainedModel, cache: Cache, tokens: torch.Tensor, mask: Any, positions: torch.Tensor) -> Any:
    with torch.no_grad():
        inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, CACHE_KEYWORD: cache}
        return model(**inputs, use_cache=True).logits


def prefill(
    model: PreTrainedModel, cache: Cache, tokens: torch.Tensor, valid: torch.Tensor, chunk: int = 10**6
) -> torch.Tensor:
    """Logits of `tokens`, appended to the cache in chunks; `valid` also covers what the cache holds."""
    positions = (valid.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    past = valid.shape[1] - tokens.shape[1]
    parts = [
        forward(
            model,
            cache,
            tokens[:, first : first + chunk],
            valid[:, : past + first + chunk],
            positions[:, first : first + chunk],
        )
        for first in range(0, tokens.shape[1], chunk)
    ]
    return torch.cat(parts, 1)


def prompts(lengths: Sequence[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded random prompts and their mask, long `[B, S]`."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    tokens = torch.randint(2, VOCAB, (len(lengths), width), generator=generator)
    valid = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return tokens * valid, valid.long()


def random_tree(seed: int, rows: int, nodes: int) -> DraftTree:
    """Random trees that all have paths of one, two and three rows, the third one out of place."""
    chooser = random.Random(seed)
    built = []
    for _ in range(rows):
        parents = [-1, 0, 0, *(chooser.randrange(node) for node in range(3, nodes))]
        parents[-2 if nodes > 4 else -1] = 2
        built.append(([chooser.randrange(2, VOCAB) for _ in parents], parents, [0.0] * nodes))
    return DraftTree.from_rows(built)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def single_row(cache: Cache, row: int) -> Cache:
    """A copy of a stock cache that holds one of its rows."""
    copied = copy.deepcopy(cache)
    for layer in copied.layers:
        for name in ("keys", "values"):
            states = getattr(layer, name)
            if states is not None and states.dim() == 4:
                setattr(layer, name, states[row : row + 1].clone())
        for name in ("_quantized_keys", "_quantized_values"):
            codes, scale = getattr(layer, name, None) or (None, None)
            if codes is not None:
                scale = scale[row : row + 1] if scale.dim() else scale
                setattr(layer, name, (codes[row : row + 1], scale))
    return copied


class PlainRow:
    """One row of plain decoding: a stock cache of its own, stepped a token at a time."""

    def __init__(self, model: PreTrainedModel, cache: Cache, row: int, valid: torch.Tensor) -> None:
        self.model, self.cache = model, single_row(cache, row)
        self.valid = valid[row : row + 1]

    @property
    def length(self) -> int:
        return self.valid.shape[1]

    @property
    def padding(self) -> int:
        return int((self.valid == 0).sum())

    def step(self, token: int) -> torch.Tensor:
        self.valid = torch.nn.functional.pad(self.valid, (0, 1), value=1)
        position = torch.tensor([[self.length - 1 - self.padding]])
        return forward(self.model, self.cache, torch.tensor([[token]]), self.valid, position)[0, -1]

    def node_logits(self, tokens: Sequence[int], parents: Sequence[int], limit: int) -> dict[int, torch.Tensor]:
        """Logits plain decoding computes at every node no deeper than `limit` rows, each branch from a copy."""
        found: dict[int, torch.Tensor] = {}

        def descend(node: int, depth: int, state: PlainRow) -> None:
            branch = copy.copy(state)
            branch.cache = copy.deepcopy(state.cache)
            found[node] = branch.step(tokens[node])
            if depth + 1 < limit:
                for child in (child for child, parent in enumerate(parents) if parent == node):
                    descend(child, depth + 1, branch)

        descend(0, 0, self)
        return found


def brute_mask(
    kind: LayerKind,
    tree: DraftTree,
    lengths: Sequence[int],
    paddings: Sequence[int],
    view: tuple[int, int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Additive mask `[B, 1, N, count + N]`, an entry at a time."""
    offset, count = view
    rows, nodes = tree.tokens.shape
    mask = torch.full((rows, 1, nodes, count + nodes), torch.finfo(dtype).min, dtype=dtype)
    for row in range(rows):
        parents, depths = tree.parents[row].tolist(), tree.depths[row].tolist()
        for node in range(nodes):
            index = lengths[row] + depths[node]
            reach = -1 if kind.window is None else index - kind.window
            for column in range(offset, offset + count):
                if paddings[row] <= column < lengths[row] and column > reach:
                    mask[row, 0, node, column - offset] = 0
            for ancestor in path_to(parents, node):
                if lengths[row] + depths[ancestor] > reach:
                    mask[row, 0, node, count + ancestor] = 0
    return mask


def tree_logits(
    model: PreTrainedModel, cache: Cache, tree_cache: TreeCache, tree: DraftTree, paddings: Sequence[int]
) -> torch.Tensor:
    """One verification forward."""
    config, lengths, nodes = model.config, tree_cache.lengths, len(tree)
    masks: dict[str, torch.Tensor] = {}
    for kind in dict.fromkeys(layer_kinds(config)):
        masks[kind.name] = brute_mask(kind, tree, lengths, paddings, tree_cache.view(kind, nodes), model.dtype)
    keyed = getattr(config, "layer_types", None) is not None
    first = torch.tensor([length - padding for length, padding in zip(lengths, paddings, strict=True)])
    with tree_cache.tree_forward(nodes):
        mask = masks if keyed else next(iter(masks.values()))
        return forward(model, cache, tree.tokens, mask, first[:, None] + tree.depths)
