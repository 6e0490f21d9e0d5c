"""The walk: plain decoding on logits that are already computed.

The token of a node is what plain `generate` would pick from that node's logits with that node's own prefix. The walk
goes to the child that holds it; the first token without a child is the bonus. The draft's probabilities never decide.
"""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList

from ..trees import DraftTree
from .rows import Rows
from .sampling import Picker, for_rows, row_wise, scores_only


class Walk:
    """Walks verified trees and appends what plain decoding would have generated.

    Args:
        rows: The rows of the call.
        processors: The user's logits processors.
        picker: How a token is picked from processed scores.
        lockstep: Make all rows of a batch take the same number of steps a round, for caches that need it.
    """

    def __init__(self, rows: Rows, processors: LogitsProcessorList, picker: Picker, lockstep: bool = False) -> None:
        self._rows = rows
        self._processors = processors
        self._picker = picker
        self._alone = row_wise(processors) and rows.stopping.rows_alone
        self.lockstep = rows.batch_size > 1 and (lockstep or not self._alone)
        #: Whether what is picked at a node depends on nothing but its scores and its step.
        self._by_scores = (
            scores_only(processors) and picker.replays and not rows.stopping.reads_tokens and not self.lockstep
        )
        self._at_once = (
            self._by_scores and rows.scores is None and rows.logits is None and rows.sequences.device.type != "cpu"
        )

    def __call__(
        self, tree: DraftTree, logits: torch.Tensor, hidden: tuple[torch.Tensor, ...] | None = None
    ) -> list[list[int]]:
        """Walks every live row from its root.

        Args:
            tree: The verified trees.
            logits: Target logits of every node, `[B, N, V]`.
            hidden: Hidden states of every node by layer, each `[B, N, H]`, where the caller wants them back.

        Returns:
            The nodes visited by each row, root first; empty for rows that are finished.
        """
        if self._at_once:
            return self._walk_picked(tree, logits, hidden)
        return self._walk_lazily(tree, logits, hidden)

    def _walk_lazily(
        self, tree: DraftTree, logits: torch.Tensor, hidden: tuple[torch.Tensor, ...] | None
    ) -> list[list[int]]:
        rows = self._rows
        paths: list[list[int]] = [[] for _ in range(rows.batch_size)]
        children = tree.children()
        frontier = dict.fromkeys(rows.live(), 0)
        while frontier:
            following: dict[int, int] = {}
            missing = False
            for members in [list(frontier)] if self._by_scores else _by_step(rows, frontier):
                tokens = self._pick(logits, frontier, members)
                for row in members:
                    paths[row].append(frontier[row])
                    if rows.hidden is not None and hidden is not None:
                        node = frontier[row]
                        # Copies: a view would keep every node's hidden states alive.
                        rows.hidden[row].append(tuple(h[row : row + 1, node : node + 1].clone() for h in hidden))
                done = self._append(members, tokens)
                for row, token, finished in zip(members, tokens, done, strict=True):
                    if not finished:
                        child = children[row].get((frontier[row], token))
                        if child is None:
                            missing = True
                        else:
                            following[row] = child
            frontier = {} if self.lockstep and missing else following
        return paths

    def _append(self, members: list[int], tokens: list[int]) -> list[bool]:
        """Gives each member its token and says which of them generate no further."""
        rows = self._rows
        if not self._by_scores:
            return rows.append(members, tokens, everyone=not self._alone)
        # Rows may stand at different steps.
        return [rows.append([row], [token], everyone=False)[0] for row, token in zip(members, tokens, strict=True)]

    def _pick(self, logits: torch.Tensor, nodes: dict[int, int], members: list[int]) -> list[int]:
        """The token of each member at its node; members are at one step unless nothing but scores counts."""
        rows = self._rows
        steps = [len(rows.tokens[row]) for row in members]
        device = rows.sequences.device
        if rows.batch_size == 1:
            chosen, raw = None, logits[:, nodes[0]]
        elif self._alone:
            chosen, raw = members, logits[members, [nodes[row] for row in members]]
        else:
            every = [nodes.get(row, 0) for row in range(rows.batch_size)]
            chosen, raw = None, logits[list(range(rows.batch_size)), every]
        raw = raw.to(device=device, dtype=torch.float32, copy=True)
        processors = self._processors if chosen is None else for_rows(self._processors, chosen)
        scores = processors(rows.sequences[:1, :1] if self._by_scores else rows.ids(chosen, steps[0]), raw)
        picked = self._picker.pick(scores, steps if len(set(steps)) > 1 else steps[0], chosen).tolist()
        if chosen is None and rows.batch_size > 1:
            picked = [picked[row] for row in members]
        for index, row in enumerate(members):
            place = index if chosen is not None else row
            if rows.scores is not None:
                rows.scores[row].append(scores[place])
            if rows.logits is not None:
                rows.logits[row].append(raw[place])
        return picked

    def _walk_picked(
        self, tree: DraftTree, logits: torch.Tensor, hidden: tuple[torch.Tensor, ...] | None
    ) -> list[list[int]]:
        rows = self._rows
        batch, nodes = tree.tokens.shape
        device = rows.sequences.device
        raw = logits.to(device=device, dtype=torch.float32, copy=True).view(batch * nodes, -1)
        scores = self._processors(rows.sequences[:1, :1], raw).view(batch, nodes, -1)
        live = rows.live()
        first = [len(tokens) for tokens in rows.tokens]
        lowest = min(first[row] for row in live)
        first = [step if row in live else lowest for row, step in enumerate(first)]
        tree_table = torch.stack([tree.tokens, tree.parents, tree.depths]).to(device)
        picked = self._picker.pick_nodes(scores, tree_table[2], first, tree.deepest)
        # The round's one host read: everything the walk needs, packed.
        table = torch.stack([tree_table[0], tree_table[1], picked]).tolist()
        paths: list[list[int]] = [[] for _ in range(batch)]
        for row in live:
            tokens, parents, picks = table[0][row], table[1][row], table[2][row]
            children = {(parents[node], tokens[node]): node for node in range(nodes - 1, 0, -1) if parents[node] >= 0}
            node: int | None = 0
            while node is not None:
                paths[row].append(node)
                if rows.hidden is not None and hidden is not None:
                    rows.hidden[row].append(tuple(h[row : row + 1, node : node + 1].clone() for h in hidden))
                (done,) = rows.append([row], [picks[node]], everyone=False)
                node = None if done else children.get((node, picks[node]))
        return paths


def _by_step(rows: Rows, frontier: dict[int, int]) -> list[list[int]]:
    """The rows under way, those at one step together, the earliest step first."""
    steps: dict[int, list[int]] = {}
    for row in frontier:
        steps.setdefault(len(rows.tokens[row]), []).append(row)
    return [steps[step] for step in sorted(steps)]
