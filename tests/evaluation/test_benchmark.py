"""Real measurements of a tiny random pair."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from pairs import PROMPT, VOCAB, Pair, build_pair
from rigged import rigged

from hf_treespec.evaluation import benchmark as module
from hf_treespec.evaluation.arms import ORACLE_GRID
from hf_treespec.evaluation.bench import nodes_histories
from hf_treespec.evaluation.benchmark import Benchmark, Settings
from hf_treespec.evaluation.encoding import encode_text, encode_turns, pad_left
from hf_treespec.evaluation.prompt_sets import PromptSet
from hf_treespec.evaluation.results import ARM_KEYS, as_json
from hf_treespec.evaluation.timing import TimedCall, count_tokens, timed_generate

GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 0}
PROMPTS = PromptSet("code", ((PROMPT,), ("self.items",), ("def pop(self):\n",)), chat=False)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return build_pair()


def build(pair: Pair, arms: list[str], *sets: PromptSet, batch_sizes=(), repeats=1, tokens=10, **generation: Any):
    settings = Settings(tokens, repeats, generation=generation or GREEDY)
    return Benchmark(*pair, sets or (PROMPTS,), arms, settings, batch_sizes)


@pytest.mark.parametrize("generation", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_run(pair: Pair, generation: dict[str, Any]):
    names = ["lookup", "stock-chain", "chain", "tree-6", "beam-6", "static-6", "treeflash-6"]
    bench = build(pair, names, batch_sizes=(2,), repeats=2, **generation)
    calls: list[str] = []
    bench.run(calls.append)
    assert len(calls) == bench.steps == 3 * 2 + 1 * 2
    assert calls == ["code"] * 6 + ["batch 2"] * 2
    report = as_json(bench, target="tiny")
    assert report["environment"]["target"] == "tiny"
    assert report["partial"] is False
    (dataset,), (batch,) = report["datasets"], report["batches"]
    assert (dataset["dataset"], dataset["prompts"], dataset["tokens"]) == ("code", 3, 30)
    assert (batch["batch"], batch["prompts"], batch["tokens"]) == (2, 1, 20)
    for section in (dataset, batch):
        rows = {row["arm"]: row for row in section["arms"]}
        assert list(rows) == ["plain", *names]
        assert all(set(row) == set(ARM_KEYS) for row in rows.values())
        assert "needs a treeflash drafter" in rows["treeflash-6"]["skipped"]
        assert rows["plain"]["speedup"] == 1.0
        assert rows["plain"]["tokens_per_forward"] == 1.0
        for name in ("chain", "tree-6", "beam-6", "static-6"):
            row = rows[name]
            assert row["skipped"] is None
            assert row["greedy_match"] == 1.0
            assert row["speedup"] > 0
            assert row["acceptance_length"] >= 1
            assert row["ms_per_round"]["verify"] > 0
            assert 1 < row["mean_nodes"] <= 6
        for name in ("lookup", "stock-chain"):
            if section is batch:
                assert rows[name]["skipped"] == "decodes one row at a time"
            else:
                assert rows[name]["greedy_match"] == (None if generation is SAMPLED else 1.0)
                assert rows[name]["tokens_per_forward"] >= 1
        assert (rows["plain"]["speedup_ci95"] is None) == (section is batch)


def test_the_oracle_reads_the_trees(pair: Pair):
    bench = build(pair, ["oracle"], tokens=4)
    bench.run()
    rows = {row["arm"]: row for row in as_json(bench)["datasets"][0]["arms"]}
    assert rows["tree-64"]["skipped"] is None
    assert rows["oracle"]["speedup"] > 0
    assert set(rows["oracle"]["oracle_budgets"]) <= set(ORACLE_GRID)


def test_every_arm_takes_every_place(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    bench = build(pair, ["chain", "tree-4"], repeats=3)
    order: list[str] = []

    def generate(target, inputs, *, seed, **options):
        drafter = options.get("assistant_model")
        order.append("plain" if drafter is None else drafter.treespec_config.shape)
        return TimedCall(torch.zeros(1, inputs["input_ids"].shape[1] + 1, dtype=torch.long), 2, 1.0, 0.5, 1, 2)

    monkeypatch.setattr(module, "timed_generate", generate)
    bench.run()
    warm, timed = order[:3], order[3:]
    assert sorted(warm) == ["chain", "plain", "tree"]
    rounds = [tuple(timed[start : start + 3]) for start in range(0, len(timed), 3)]
    assert all(len(set(round_)) == 3 for round_ in rounds)
    for place in range(3):
        assert sorted(round_[place] for round_ in rounds[:3]) == ["chain", "plain", "tree"]


@pytest.mark.parametrize("after", [0, 1, 4, 8, 13])
def test_an_interrupt_keeps_what_all_arms_finished(pair: Pair, monkeypatch: pytest.MonkeyPatch, after: int):
    bench = build(pair, ["chain", "tree-4"], repeats=2)
    done = 0

    def generate(*args: Any, **kwargs: Any) -> TimedCall:
        nonlocal done
        if done == after + 3:  # three warm-up calls
            raise KeyboardInterrupt
        done += 1
        return timed_generate(*args, **kwargs)

    monkeypatch.setattr(module, "timed_generate", generate)
    bench.run()
    report = as_json(bench)
    assert report["partial"] is True
    samples = bench.datasets[0].samples
    assert sum(len(sample.arms["plain"].calls) for sample in samples) == after // 3
    for sample in samples:
        assert len({len(result.calls) for result in sample.arms.values()}) == 1
        assert sample.arms.keys() == {"plain", "chain", "tree-4"}
    (section,) = report["datasets"]
    assert (section["arms"][0]["skipped"] is None) == bool(samples)


def test_an_arm_that_fails_is_skipped_with_its_error(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    bench = build(pair, ["chain", "tree-4"])

    def generate(*args: Any, **options: Any) -> TimedCall:
        drafter = options.get("assistant_model")
        if drafter is not None and drafter.treespec_config.shape == "chain":
            raise RuntimeError("out of luck")
        return timed_generate(*args, **options)

    monkeypatch.setattr(module, "timed_generate", generate)
    bench.run()
    rows = {row["arm"]: row for row in as_json(bench)["datasets"][0]["arms"]}
    assert rows["chain"]["skipped"] == "RuntimeError: out of luck"
    assert rows["tree-4"]["skipped"] is None


def test_an_output_that_differs_is_told(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    bench = build(pair, ["chain"])

    def generate(*args: Any, **options: Any) -> TimedCall:
        call = timed_generate(*args, **options)
        if options.get("assistant_model") is not None:
            call.sequence[0, -1] = (call.sequence[0, -1] + 1) % VOCAB
        return call

    monkeypatch.setattr(module, "timed_generate", generate)
    bench.run()
    row = as_json(bench)["datasets"][0]["arms"][1]
    assert row["greedy_match"] == 0.0
    assert row["mismatches"] == 3


def test_turns_go_on_from_plain_decodings_answer(pair: Pair):
    bench = build(pair, ["chain"], PromptSet("talk", ((PROMPT, "next"),)))
    bench.run()
    first, second = bench.datasets[0].samples
    _, _, tokenizer = pair
    answer = tokenizer.decode(first.arms["plain"].sequence[0, first.inputs["input_ids"].shape[1] :])
    expected = encode_text(tokenizer, f"{PROMPT}\n{answer}\nnext")["input_ids"]
    assert torch.equal(second.inputs["input_ids"], expected)
    assert (first.prompt, second.prompt) == (0, 0)


def test_batches_mix_the_sets_and_need_enough_prompts(pair: Pair):
    other = PromptSet("other", (("x = 1",), ("y = 2",)), chat=False)
    bench = build(pair, ["chain"], PROMPTS, other, batch_sizes=(2, 8))
    firsts = [turns[0] for turns, _ in bench._first_turns()]
    assert firsts == [PROMPT, "x = 1", "self.items", "y = 2", "def pop(self):\n"]
    bench.run()
    assert [len(section.samples) for section in bench.batches] == [2, 0]
    assert as_json(bench)["batches"][1]["arms"][0]["skipped"] == "there are only 5 prompts"


def test_the_end_of_the_text_can_be_ignored(pair: Pair):
    target, _, _ = pair
    inputs = models.prompt()
    plain = timed_generate(target, inputs, seed=0, max_new_tokens=12, **GREEDY)
    # A token that plain decoding is known to write ends the text.
    end = int(plain.sequence[0, inputs["input_ids"].shape[1] + 4])
    ended = timed_generate(target, inputs, seed=0, max_new_tokens=12, eos_token_id=end, pad_token_id=0, **GREEDY)
    assert ended.new_tokens <= 5
    assert timed_generate(target, inputs, seed=0, max_new_tokens=12, eos_token_id=None, **GREEDY).new_tokens == 12


def test_padding_of_finished_rows_is_not_counted():
    rows = torch.tensor([[5, 9, 0, 0], [5, 6, 7, 8], [9, 9, 9, 9], [5, 6, 7, 9]])
    assert count_tokens(rows, 9) == 2 + 4 + 1 + 4
    assert count_tokens(rows, [9, 6]) == 2 + 2 + 1 + 2
    assert count_tokens(rows, None) == 16


@pytest.mark.parametrize("assisted", [False, True])
def test_batches_are_timed_from_the_first_token_of_every_row(assisted: bool):
    target = models.target("qwen3")
    options = {"assistant_model": rigged([]).with_options(budget=4)} if assisted else {}
    call = timed_generate(target, models.batch(), seed=0, max_new_tokens=6, **GREEDY, **options)
    assert (call.new_tokens, call.decode_tokens) == (24, 20)
    assert call.peak_bytes is None
    assert 0 < call.decode_seconds < call.seconds


class Chatty:
    """A tokenizer with a chat template, as far as encoding needs it."""

    chat_template = "yes"

    def apply_chat_template(self, messages, **options):
        self.messages, self.options = messages, options
        ids = torch.tensor([[1, 2, 3]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_chat_templates_get_all_turns_without_thinking():
    tokenizer = Chatty()
    encoded = encode_turns(tokenizer, ["a", "b"], ["answer"])
    assert [message["role"] for message in tokenizer.messages] == ["user", "assistant", "user"]
    assert [message["content"] for message in tokenizer.messages] == ["a", "answer", "b"]
    assert tokenizer.options["enable_thinking"] is False
    assert tokenizer.options["add_generation_prompt"] is True
    assert encoded["input_ids"].tolist() == [[1, 2, 3]]


def test_texts_begin_with_the_begin_token_once(pair: Pair):
    tokenizer = pair[2]
    ids = encode_text(tokenizer, PROMPT)["input_ids"][0].tolist()
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == PROMPT
    assert encode_text(tokenizer, tokenizer.bos_token + PROMPT)["input_ids"][0].tolist() == ids


def test_batches_are_padded_on_the_left(pair: Pair):
    short, long = encode_text(pair[2], "x"), encode_text(pair[2], PROMPT)
    batch = pad_left([short, long], 7)
    width = long["input_ids"].shape[1]
    count = short["input_ids"].shape[1]
    assert batch["input_ids"][0].tolist() == [7] * (width - count) + short["input_ids"][0].tolist()
    assert batch["attention_mask"].sum(1).tolist() == [count, width]


def test_histories_come_from_reports_that_keep_them(pair: Pair):
    bench = build(pair, ["chain", "tree-8"])
    bench.run()
    for result in bench.datasets[0].samples[0].arms.values():
        result.reports = [SimpleNamespace(nodes_history=[4, 8])] if result.reports else []
    assert nodes_histories(bench) == {"chain": [4, 8]}
