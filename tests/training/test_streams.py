"""Text files as token streams."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_treespec.training.corpus import train_tokenizer
from hf_treespec.training.streams import documents, token_stream

TEXTS = ["def f():\n    return 1\n", "x = [1, 2]\n"]


def test_documents_of_files(tmp_path: Path):
    plain, records = tmp_path / "a.py", tmp_path / "b.jsonl"
    plain.write_text(TEXTS[0])
    records.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXTS))
    assert list(documents([plain, records])) == [TEXTS[0], *TEXTS]


@pytest.mark.parametrize("line", ['{"body": "x"}', '{"text": 3}', "[1]"])
def test_a_record_without_text_is_named(tmp_path: Path, line: str):
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps({"text": "x"}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"line 2 of .*b\.jsonl has no `text`"):
        list(documents([path]))


def test_documents_end_with_the_end_token():
    tokenizer = train_tokenizer(TEXTS, 300)
    stream = token_stream([TEXTS[0], "", TEXTS[1]], tokenizer)
    expected = [token for text in TEXTS for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    assert stream.tolist() == expected
