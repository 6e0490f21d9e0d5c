"""The corpus behind the embedded models: the Python standard library's own sources.

A corpus is described by a *manifest*: every file with its SHA-256, the module it belongs to and its split. The split
is by module (a module and its tests stand on the same side), so text of a held-out module was never trained on.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, PAD, MASK = "<|endoftext|>", "<|pad|>", "<|mask|>"

_SKIPPED_FOLDERS = {"site-packages", "encodings", "pydoc_data", "lib2to3", "ensurepip", "cjkencodings", "crashers"}
_HELD_OUT_PERCENT = 5
_MAX_BYTES = 200_000
_SHARED_LINES = 0.6


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus.

    Attributes:
        path: Path below the standard library's folder, with forward slashes.
        sha256: Hash of the file's bytes.
        module: Top-level module the file belongs to; `test/test_json/…` belongs to `json`.
        split: `"train"` or `"held_out"`.
    """

    path: str
    sha256: str
    module: str
    split: str


def module_of(path: str) -> str:
    """Top-level module of a path below the standard library; a test belongs to what it tests."""
    parts = path.removesuffix(".py").split("/")
    if parts[0] == "test" and len(parts) > 1:
        return parts[1].removeprefix("test_").lstrip("_")
    return parts[0].lstrip("_")


def split_of(module: str) -> str:
    """Side of the split a module stands on, by a hash of its name: the same on every machine."""
    bucket = int.from_bytes(hashlib.sha256(module.encode()).digest()[:4], "big") % 100
    return "held_out" if bucket < _HELD_OUT_PERCENT else "train"


def build_manifest(root: Path | None = None) -> list[SourceFile]:
    """Lists the usable sources below `root` (default: this interpreter's standard library), in path order.

    Left out: files that are no UTF-8, larger than 200 kB or mostly data (a line above 400 characters), and
    near-duplicates: files that share 60 % of their distinctive lines with one earlier file.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    owners: dict[int, list[int]] = {}
    kept: list[SourceFile] = []
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        if _SKIPPED_FOLDERS.intersection(relative.parts) or relative.parts[0].startswith("config-"):
            continue
        data = file.read_bytes()
        text = _decode(data)
        if text is None:
            continue
        lines = {hash(line.strip()) for line in text.splitlines() if len(line.strip()) >= 20}
        shared = Counter(owner for line in lines for owner in owners.get(line, ()))
        if lines and shared and shared.most_common(1)[0][1] >= _SHARED_LINES * len(lines):
            continue
        for line in lines:
            owners.setdefault(line, []).append(len(kept))
        path = relative.as_posix()
        module = module_of(path)
        kept.append(SourceFile(path, hashlib.sha256(data).hexdigest(), module, split_of(module)))
    return kept


def _decode(data: bytes) -> str | None:
    if not 200 <= len(data) <= _MAX_BYTES:
        return None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if max(len(line) for line in text.splitlines()) > 400 or sum(c > "\x7f" for c in text) > 0.02 * len(text):
        return None
    return text


def save_manifest(files: Iterable[SourceFile], path: Path) -> None:
    """Writes a manifest, one JSON object a line."""
    path.write_text("".join(json.dumps(asdict(file)) + "\n" for file in files))


def read_texts(files: Iterable[SourceFile], split: str, root: Path | None = None) -> Iterator[str]:
    """Texts of one split, in manifest order.

    Raises:
        ValueError: A file's hash is not the manifest's.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    for file in files:
        if file.split != split:
            continue
        data = (root / file.path).read_bytes()
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise ValueError(f"{file.path} is not the manifest's file (its SHA-256 differs); rebuild the manifest.")
        yield data.decode("utf-8")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer whose mask token is an ordinary row of the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        mask_token=MASK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def tokenize(texts: Iterable[str], tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Concatenates texts as token ids, each led by the end-of-text token. Shape `[tokens]`, uint16."""
    start = tokenizer.bos_token_id
    pieces: list[int] = []
    for text in texts:
        pieces.append(start)
        pieces.extend(tokenizer(text, verbose=False)["input_ids"])
    return np.asarray(pieces, dtype=np.uint16)
