"""The draft tree: a prefix-closed set of nodes, parent before child, the anchor at the root."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class DraftTree:
    """A batch of draft trees, one a row, padded to one number of nodes.

    Node 0 of a row is its root, the anchor. Rows with fewer nodes are padded with dummies: parent −1, depth 0, the
    anchor's token, log score −inf, seeing only themselves. Nodes stand in expansion order, so a prefix of a tree is a
    tree.

    Attributes:
        tokens: Long `[B, N]`.
        parents: Index of each node's parent, −1 for the root, long `[B, N]`.
        depths: Depth of each node, 0 for the root, long `[B, N]`.
        log_scores: Log of the path score ρ, float32 `[B, N]`; 0 for the root.
        sizes: Real nodes of each row; an upper bound where only the device knows (the dummies' log score tells).
        deepest: No node is deeper than this.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        parents: torch.Tensor,
        depths: torch.Tensor,
        log_scores: torch.Tensor,
        sizes: Sequence[int],
        deepest: int | None = None,
    ) -> None:
        self.tokens = tokens
        self.parents = parents
        self.depths = depths
        self.log_scores = log_scores
        self.sizes = list(sizes)
        self.deepest = tokens.shape[1] - 1 if deepest is None else min(deepest, tokens.shape[1] - 1)

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float]]],
        device: torch.device | str = "cpu",
    ) -> DraftTree:
        """Builds a batch from host lists `(tokens, parents, log_scores)` a row, root first, parent before child.

        Raises:
            ValueError: A parent does not come before its child.
        """
        width = max(len(tokens) for tokens, _, _ in rows)
        packed: list[list[list[int]]] = [[], [], []]
        scores: list[list[float]] = []
        for tokens, parents, log_scores in rows:
            depths: list[int] = []
            for node, parent in enumerate(parents):
                if not parent < node or (parent < 0) != (node == 0):
                    raise ValueError(f"node {node} has parent {parent}; a parent must come before its child")
                depths.append(0 if parent < 0 else depths[parent] + 1)
            padding = width - len(tokens)
            packed[0].append([*tokens, *[tokens[0]] * padding])
            packed[1].append([*parents, *[-1] * padding])
            packed[2].append([*depths, *[0] * padding])
            scores.append([*log_scores, *[float("-inf")] * padding])
        integers = torch.tensor(packed, dtype=torch.long, device=device)
        log_rho = torch.tensor(scores, dtype=torch.float32, device=device)
        deepest = max(max(depths) for depths in packed[2])
        return cls(integers[0], integers[1], integers[2], log_rho, [len(tokens) for tokens, _, _ in rows], deepest)

    @classmethod
    def root(cls, anchors: torch.Tensor) -> DraftTree:
        """Trees of the anchors alone, from long `[B]`: a plain step."""
        tokens = anchors.view(-1, 1)
        zeros = torch.zeros_like(tokens)
        return cls(tokens, zeros - 1, zeros, zeros.float(), [1] * len(tokens))

    def __len__(self) -> int:
        """Nodes of a row N, the root and padding included."""
        return self.tokens.shape[1]

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    def prefix(self, nodes: int) -> DraftTree:
        """The trees of each row's first `nodes` nodes."""
        if nodes >= len(self):
            return self
        cut = [tensor[:, :nodes] for tensor in (self.tokens, self.parents, self.depths, self.log_scores)]
        return DraftTree(cut[0], cut[1], cut[2], cut[3], [min(size, nodes) for size in self.sizes], self.deepest)

    def scores(self) -> torch.Tensor:
        """Path scores ρ, float32 `[B, N]`: 1 at the root, 0 for dummies."""
        return self.log_scores.exp()

    def ancestors(self) -> torch.Tensor:
        """Which nodes each node sees: itself and its ancestors, bool `[B, N, N]` (row sees column)."""
        nodes = len(self)
        if nodes == 1:
            return torch.ones(self.batch_size, 1, 1, dtype=torch.bool, device=self.tokens.device)
        seen = torch.eye(nodes, dtype=torch.bool, device=self.tokens.device).repeat(self.batch_size, 1, 1)
        if seen.device.type == "cpu":
            for row, (mask, parents) in enumerate(zip(seen.numpy(), self.parents.tolist(), strict=True)):
                for node in range(1, self.sizes[row]):
                    if parents[node] >= 0:
                        mask[node] |= mask[parents[node]]
            return seen
        # Squaring the "sees" relation doubles the reach of every node: no host read, log2(N) small products.
        batch = torch.arange(self.batch_size, device=seen.device)[:, None]
        columns = torch.arange(nodes, device=seen.device)
        seen[batch, columns, torch.where(self.parents >= 0, self.parents, columns)] = True
        for _ in range((nodes - 1).bit_length()):
            seen = seen.float() @ seen.float() > 0
        return seen

    def children(self) -> list[dict[tuple[int, int], int]]:
        """Maps `(node, token)` to the child of that node holding that token, a dict a row, on the host."""
        tables: list[dict[tuple[int, int], int]] = []
        for size, tokens, parents in zip(self.sizes, self.tokens.tolist(), self.parents.tolist(), strict=True):
            tables.append({(parents[node], tokens[node]): node for node in range(1, size) if parents[node] >= 0})
        return tables
