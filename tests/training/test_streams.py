"""Text files as token streams."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hf_treespec.training.corpus import train_tokenizer
from hf_treespec.training.streams import PromptStream, documents, prompt_stream

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
    with pytest.raises(ValueError, match=r"line 2 of .*b\.jsonl has neither `text` nor `turns`"):
        list(documents([path]))


def test_documents_end_with_the_end_token():
    tokenizer = train_tokenizer(TEXTS, 300)
    stream = prompt_stream([TEXTS[0], "", TEXTS[1]], tokenizer)
    expected = [token for text in TEXTS for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    assert stream.tokens.tolist() == expected
    assert stream.ends.tolist() == list(range(1, len(expected) + 1))


def test_chats_end_where_the_target_answers(tmp_path: Path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"turns": [text, "and then?"]}) + "\n" for text in TEXTS))
    tokenizer = train_tokenizer(TEXTS, 300)
    lengths = [len(tokenizer(text)["input_ids"]) for text in TEXTS]
    assert prompt_stream(documents([path]), tokenizer).ends.tolist() == [lengths[0], sum(lengths)]
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}return"
    stream = prompt_stream(documents([path]), tokenizer)
    assert tokenizer.decode(stream.tokens[: stream.ends[0]]) == TEXTS[0] + "return"


def test_splitting_holds_the_end_out():
    stream = PromptStream(np.arange(100), np.asarray([10, 40, 60, 80, 100]))
    train, held_out = stream.split(0.4, 20)
    assert train.tokens.tolist() == list(range(60))
    assert train.ends.tolist() == [40, 60]
    assert held_out.tokens.tolist() == list(range(60, 100))
    assert held_out.ends.tolist() == [20, 40]
    with pytest.raises(ValueError, match="too few"):
        stream.split(0.4, 50)
