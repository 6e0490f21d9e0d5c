"""Text and prompts in files as one stream of token ids, from which prompts of one length are cut."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

Turns = list[str]


def documents(paths: Iterable[Path]) -> Iterator[str | Turns]:
    """Documents of some files: of a `.jsonl` file each line's `text`, or its `turns`; else the whole file.

    Raises:
        ValueError: A line of a `.jsonl` file has neither.
    """
    for path in paths:
        if path.suffix != ".jsonl":
            yield path.read_text(encoding="utf-8")
            continue
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                found = _document(json.loads(line))
                if found is None:
                    raise ValueError(f"line {number} of {path} has neither `text` nor `turns`.")
                yield found


def _document(record: Any) -> str | Turns | None:
    if not isinstance(record, dict):
        return None
    turns, text = record.get("turns"), record.get("text")
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return turns
    return text if isinstance(text, str) else None


@dataclass(frozen=True)
class PromptStream:
    """Token ids, and where in them a prompt may end.

    Prompts of one length are cut that end there, whatever comes before: of running text anywhere, of chats where the
    target is to answer. A prompt shorter than the cut is led by the one before it.

    Attributes:
        tokens: The ids, `[tokens]`, uint32.
        ends: Rising places, a prompt of length P ending at e being `tokens[e − P : e]`; long `[n]`.
    """

    tokens: np.ndarray
    ends: np.ndarray

    @classmethod
    def anywhere(cls, tokens: np.ndarray) -> PromptStream:
        """Running text."""
        return cls(tokens, np.arange(1, len(tokens)))

    def split(self, share: float, length: int) -> tuple[PromptStream, PromptStream]:
        """The beginning, and the last `share` of the ends, as streams of their own for prompts of `length` tokens.

        Raises:
            ValueError: A side has no prompt of that length.
        """
        held_out = max(1, round(len(self.ends) * share))
        cut = int(self.ends[-held_out - 1]) if len(self.ends) > held_out else 0
        before, behind = self.ends[self.ends <= cut], self.ends[self.ends > cut] - cut
        sides = (
            PromptStream(self.tokens[:cut], before[before >= length]),
            PromptStream(self.tokens[cut:], behind[behind >= length]),
        )
        if not all(len(side.ends) for side in sides):
            raise ValueError(
                f"{len(self.tokens)} tokens are too few for prompts of {length} to train on and to hold out; give "
                "more data or a shorter prompt_length."
            )
        return sides


def prompt_stream(found: Iterable[str | Turns], tokenizer: PreTrainedTokenizerBase) -> PromptStream:
    """Documents as a stream: texts each followed by the end-of-text token, chats up to where the target is to answer.

    Of a chat's turns the first is asked; the answers to it that later turns refer to are not there yet.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    pieces: list[np.ndarray] = []
    ends: list[np.ndarray] = []
    length = 0
    for document in found:
        if isinstance(document, str):
            ids = [*tokenizer(document, verbose=False)["input_ids"], *end] if document else []
            places = np.arange(1, len(ids) + 1)
        else:
            ids = _asked(document, tokenizer)
            places = np.asarray([len(ids)], dtype=np.int64)
        if len(ids):
            pieces.append(np.asarray(ids, dtype=np.uint32))
            ends.append(length + places)
            length += len(ids)
    if not pieces:
        raise ValueError("the data hold no text.")
    return PromptStream(np.concatenate(pieces), np.concatenate(ends).astype(np.int64))


def _asked(turns: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer(turns[0], verbose=False)["input_ids"])
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": turns[0]}],
        add_generation_prompt=True,
        enable_thinking=False,
        return_dict=True,
    )
    return list(encoded["input_ids"])
