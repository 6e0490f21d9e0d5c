"""Text files as one stream of token ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase


def documents(paths: Iterable[Path]) -> Iterator[str]:
    """Documents of some files: each line's `text` field of a `.jsonl` file, else the whole file.

    Raises:
        ValueError: A line of a `.jsonl` file has no `text`.
    """
    for path in paths:
        if path.suffix != ".jsonl":
            yield path.read_text(encoding="utf-8")
            continue
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                record = json.loads(line) if line.strip() else {"text": ""}
                if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                    raise ValueError(f"line {number} of {path} has no `text`")
                yield record["text"]


def token_stream(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Texts as token ids, one after the other, each followed by the end-of-text token. Shape `[tokens]`, uint32."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    pieces = [[*tokenizer(text, verbose=False)["input_ids"], *end] for text in texts if text]
    return np.asarray([token for piece in pieces for token in piece], dtype=np.uint32)
