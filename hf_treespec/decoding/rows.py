"""What has been generated so far, row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..transfer import to_device
from .stopping import Stopping

#: Columns allocated behind the prompt at first; they double when they are full.
_FIRST_COLUMNS = 1024


class Rows:
    """The rows of one call: their tokens, where each stopped, and what the caller asked to get back.

    A row may run ahead of the others; nothing it has generated is shown to the streamer before all rows reached it.

    Args:
        input_ids: Prompt, long `[B, L0]`.
        stopping: The call's stopping rules.
        pad_token_id: Token that finished rows go on with.
        streamer: The caller's streamer, if any.
        keep_scores: Keep processed scores of each token.
        keep_logits: Keep raw logits of each token.
        keep_hidden: Keep hidden states of each token.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        stopping: Stopping,
        pad_token_id: int,
        streamer: Any = None,
        keep_scores: bool = False,
        keep_logits: bool = False,
        keep_hidden: bool = False,
    ) -> None:
        self.batch_size, self.prompt_length = input_ids.shape
        self.stopping = stopping
        columns = min(max(stopping.max_length, self.prompt_length + 1), self.prompt_length + _FIRST_COLUMNS)
        self.sequences = input_ids.new_full((self.batch_size, columns), pad_token_id)
        self.sequences[:, : self.prompt_length] = input_ids
        self.tokens: list[list[int]] = [[] for _ in range(self.batch_size)]
        self.scores: list[list[torch.Tensor]] | None = [[] for _ in self.tokens] if keep_scores else None
        self.logits: list[list[torch.Tensor]] | None = [[] for _ in self.tokens] if keep_logits else None
        self.hidden: list[list[tuple[torch.Tensor, ...]]] | None = [[] for _ in self.tokens] if keep_hidden else None
        self._joined_scores: list[torch.Tensor] = []
        self._stopped_at: list[int | None] = [None] * self.batch_size
        self._pad = pad_token_id
        self._streamer = streamer
        self._streamed = 0

    def live(self) -> list[int]:
        """Rows that still generate.

        Where finished rows do not become padding they generate on until the last row stops, as they do in plain
        decoding.
        """
        if self.stopping.pads:
            return [row for row, stop in enumerate(self._stopped_at) if stop is None]
        steps = self.steps
        wanted = max(1, self.stopping.max_length - self.prompt_length) if steps is None else steps
        return [row for row, tokens in enumerate(self.tokens) if len(tokens) < wanted]

    @property
    def steps(self) -> int | None:
        """Generation steps of the whole call, known once every row has stopped."""
        stops = [stop for stop in self._stopped_at if stop is not None]
        return max(stops) if len(stops) == self.batch_size else None

    def wanted(self) -> int:
        """Most tokens any live row may still generate."""
        return max(self.stopping.max_length - self.prompt_length - len(self.tokens[row]) for row in self.live())

    def ids(self, rows: list[int] | None, step: int) -> torch.Tensor:
        """Sequences before step `step`, long `[R, L0 + step]`; None = all rows, a view."""
        ids = self.sequences[:, : self.prompt_length + step]
        return ids if rows is None else ids[rows]

    def append(self, members: list[int], tokens: list[int], everyone: bool) -> list[bool]:
        """Appends a token to each member (all at one step) and says which of them generate no further.

        Args:
            members: Rows that get a token.
            tokens: Their tokens.
            everyone: Show criteria the whole batch instead of the members.
        """
        step = len(self.tokens[members[0]])
        column = self.prompt_length + step
        if column >= self.sequences.shape[1]:
            padding = self.sequences.new_full(self.sequences.shape, self._pad)
            self.sequences = torch.cat([self.sequences, padding], dim=1)
        if len(members) == 1:
            self.sequences[members[0], column] = tokens[0]
        else:
            self.sequences[members, column] = to_device(tokens, self.sequences.device)
        for row, token in zip(members, tokens, strict=True):
            self.tokens[row].append(token)
        shown = None if everyone or len(members) == self.batch_size else members
        if self.stopping.reads_tokens:
            newest = tokens if shown is not None or len(members) == self.batch_size else self._newest(step)
            scores = self._scores_so_far(step + 1)
            stops = self.stopping.stops(newest, self.ids(shown, step + 1), scores)
            if len(stops) != len(members):
                stops = [stops[row] for row in members]
        else:
            stops = self.stopping.stops(tokens, self.sequences[:0, : column + 1], None)
        for row, stop in zip(members, stops, strict=True):
            if stop and self._stopped_at[row] is None:
                self._stopped_at[row] = step + 1
        live = set(self.live())
        return [row not in live for row in members]

    def _scores_so_far(self, steps: int) -> tuple[torch.Tensor, ...] | None:
        if self.scores is None:
            return None
        for step in range(len(self._joined_scores), steps):
            self._joined_scores.append(torch.stack([row[min(step, len(row) - 1)] for row in self.scores]))
        return tuple(self._joined_scores[:steps])

    def _newest(self, step: int) -> list[int]:
        return [tokens[step] if len(tokens) > step else self._pad for tokens in self.tokens]

    def stopped(self, row: int) -> bool:
        """Whether a criterion has stopped the row."""
        return self._stopped_at[row] is not None

    def stream(self) -> None:
        """Shows the streamer every step that all rows have reached."""
        if self._streamer is None:
            return
        reached = [
            len(tokens)
            for row, tokens in enumerate(self.tokens)
            if not (self.stopping.pads and self._stopped_at[row] is not None)
        ]
        # Known while rows that do not become padding still generate up to it.
        if self.steps is not None:
            reached.append(self.steps)
        steps = min(reached)
        for column in range(self.prompt_length + self._streamed, self.prompt_length + steps):
            self._streamer.put(self.sequences[:, column].cpu())
        self._streamed = max(self._streamed, steps)

    def result(self) -> torch.Tensor:
        """Finished sequences, long `[B, L0 + steps]`."""
        assert self.steps is not None
        return self.sequences[:, : self.prompt_length + self.steps].contiguous()


def by_step(kept: list[list[Any]] | None, steps: int, join: Callable[[list[Any]], Any]) -> tuple[Any, ...] | None:
    """What rows kept for their tokens, joined over the rows for each of the first `steps` steps.

    A row that finished early repeats its last entry: what plain decoding reports there belongs to padding.
    """
    if kept is None:
        return None
    return tuple(join([row[min(step, len(row) - 1)] for row in kept]) for step in range(steps))
