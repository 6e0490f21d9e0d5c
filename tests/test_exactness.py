"""Assisted decoding equals plain decoding, token for token, whatever is combined with whatever.

One test body runs over a covering design of the matrix below (every pair of values of any two axes, and the listed
triples), and over the full product with `-m matrix`. `-s -k covers` prints the coverage table.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from covering import Cell, covered, covering, interactions, product
from models import FAMILIES, VOCAB, batch, decoder_layers, dflash, hook_count, prompt, target, treeflash
from parity import GREEDY, SAMPLED, Inputs, Run, assert_same, eos_tokens, run
from rigged import BLOCK, RiggedDrafter, rigged, rows_of

import hf_treespec  # noqa: F401  (teaches generate() about drafters)
from hf_treespec.decoding.sampling import scores_only
from hf_treespec.decoding.walk import Walk

NEW_TOKENS = 20

AXES: dict[str, list[Any]] = {
    "family": list(FAMILIES),
    "attention": ["eager", "sdpa", "treespec"],
    "cache": ["dynamic", "static", "quantized"],
    "shape": ["chain", 2, 4, 8, 16, 33, 64],
    "draft": ["perfect", "half", "wrong", "branched", "dflash", "treeflash"],
    "batch": [1, 4],
    "mode": ["greedy", "sampled"],
}
EXCLUSIONS = {
    "the family supports no such attention": lambda cell: cell["attention"] not in FAMILIES[cell["family"]].attentions,
    "QuantizedCache takes full attention only": lambda cell: (
        cell["cache"] == "quantized" and FAMILIES[cell["family"]].sliding
    ),
}
TOGETHER = [
    ("family", "attention", "cache"),
    ("family", "cache", "shape"),
    ("family", "batch", "draft"),
    ("family", "batch", "mode"),
    ("shape", "draft", "batch"),
    ("cache", "batch", "mode"),
    ("cache", "shape", "batch"),
    ("draft", "batch", "mode"),
]

CELLS = product(AXES, EXCLUSIONS)
GROUPS = interactions(list(AXES), TOGETHER)
DESIGN = covering(CELLS, GROUPS)


def name(cell: Cell) -> str:
    return "-".join(str(value) for value in cell.values())


def options_of(cell: Cell) -> dict[str, Any]:
    """Arguments of `generate` that plain and assisted decoding share."""
    options = {"max_new_tokens": NEW_TOKENS, **(SAMPLED if cell["mode"] == "sampled" else GREEDY)}
    if cell["cache"] != "dynamic":
        options["cache_implementation"] = cell["cache"]
    if cell["cache"] == "quantized":
        options["cache_config"] = {"backend": "fp8"}
    return options


@functools.cache
def reference(family: str, attention: str, cache: str, rows: int, mode: str) -> tuple[Inputs, dict[str, Any], Run]:
    """Inputs, arguments and plain run of a cell; in a batch, rows stop at different steps."""
    model = target(family, attention)
    inputs = prompt(11, seed=5) if rows == 1 else batch(seed=6)
    options = options_of({"cache": cache, "mode": mode})
    plain = run(model, inputs, seed=3, **options)
    if rows > 1:
        options["eos_token_id"] = eos_tokens(plain.sequences, inputs["input_ids"].shape[1], NEW_TOKENS)
        plain = run(model, inputs, seed=3, **options)
    return inputs, options, plain


def make_drafter(cell: Cell, rows: list[list[int]]) -> Any:
    if cell["draft"] == "dflash":
        return dflash(cell["family"], cell["attention"])
    if cell["draft"] == "treeflash":
        return treeflash(cell["family"], cell["attention"])
    kind, slots = ("half", 4) if cell["draft"] == "branched" else (cell["draft"], 1)
    return rigged(rows, kind, slots=slots, seed=sum(map(ord, name(cell))))


def check(cell: Cell) -> None:
    """The one test body: the same tokens, generator, counts and features; nothing left behind."""
    model = target(cell["family"], cell["attention"])
    inputs, options, plain = reference(cell["family"], cell["attention"], cell["cache"], cell["batch"], cell["mode"])
    rows = rows_of(plain.sequences, inputs, options.get("eos_token_id", ()))
    shape = {"shape": "chain", "budget": BLOCK} if cell["shape"] == "chain" else {"budget": cell["shape"]}
    drafter = make_drafter(cell, rows).with_options(**shape)
    hooks = hook_count(model)
    assisted = run(model, inputs, seed=3, assistant_model=drafter, **options)

    tied = assert_same(plain, assisted, model, inputs, options, seed=3)
    assert hook_count(model) == hooks, "hooks were left on the target"
    report = drafter.last_report
    assert report.reason is None, report.reason
    assert report.target_forwards == report.rounds + 1
    assert 1 <= report.mean_nodes <= shape["budget"]
    if tied:
        return
    generated = [len(row) - int(mask.sum()) for row, mask in zip(rows, inputs["attention_mask"], strict=True)]
    assert report.tokens == sum(generated)
    if isinstance(drafter, RiggedDrafter):
        check_rigged(cell, drafter, model, rows, generated)


def check_rigged(cell: Cell, drafter: RiggedDrafter, model: Any, rows: list[list[int]], generated: list[int]) -> None:
    report, rig = drafter.last_report, drafter.rig
    (session,) = rig.sessions
    assert session.closed >= 1, "the session was left open"
    assert len(rig.proposals) == report.drafted_rounds
    if cell["draft"] == "wrong":
        assert report.acceptance_length == 1.0
        assert report.rounds == max(generated) - 1
    if cell["draft"] == "perfect" and cell["shape"] == "chain" and cell["batch"] == 1:
        assert report.rounds == -(-(generated[0] - 1) // BLOCK), "a perfect chain fills every block"
    if cell["cache"] != "quantized":
        check_features(session, rig, model, rows)


def check_features(session: Any, rig: Any, model: Any, rows: list[list[int]]) -> None:
    """Every feature a session got is the hidden state of a plain forward over the finished sequence."""
    for row, tokens in enumerate(rows):
        features = session.features(row)
        assert len(features) >= rig.calls[-1]["positions"][row] - (not session.alive(row, len(tokens) - 1))
        expected = hidden_states(model, tokens[: len(features)], session.feature_layers)
        worst = (features[: len(expected)] - expected).abs().max()
        scale = max(1.0, float(expected.abs().max()))
        assert worst <= 5e-5 * scale, f"row {row}: features off by {worst:.1e} (values up to {scale:.1f})"


@torch.no_grad()
def hidden_states(model: Any, tokens: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """Outputs of decoder layers over a whole sequence, side by side, `[T, H · layers]`."""
    seen: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            seen[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [decoder_layers(model)[layer].register_forward_hook(keep(layer)) for layer in layers]
    try:
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat([seen[layer][0] for layer in layers], -1)


@pytest.mark.parametrize("cell", DESIGN, ids=name)
def test_design(cell: Cell) -> None:
    check(cell)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The full product, made only where it was asked for: collecting it takes longer than many a test."""
    if "any_cell" in metafunc.fixturenames:
        expression = metafunc.config.getoption("markexpr") or ""
        asked = "matrix" in expression and "not matrix" not in expression
        metafunc.parametrize("any_cell", CELLS if asked else CELLS[:1], ids=name)


@pytest.mark.matrix
def test_full_matrix(any_cell: Cell) -> None:
    check(any_cell)


@pytest.mark.parametrize("shape", ["chain", 4, 16, 64])
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("draft", ["half", "branched"])
def test_walks_on_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, draft: str, rows: int, mode: str, shape: str | int
) -> None:
    """The walk that picks every node of a round at once, which an accelerator takes, run here."""
    taken = []
    init, picked = Walk.__init__, Walk._walk_picked

    def at_once(self: Any, call_rows: Any, processors: Any, picker: Any, lockstep: bool = False) -> None:
        init(self, call_rows, processors, picker, lockstep)
        self._at_once = scores_only(processors) and not self.lockstep

    def count(self: Any, *args: Any) -> Any:
        taken.append(1)
        return picked(self, *args)

    monkeypatch.setattr(Walk, "__init__", at_once)
    monkeypatch.setattr(Walk, "_walk_picked", count)
    cell = {"family": "qwen3", "attention": "sdpa", "cache": "dynamic", "shape": shape, "draft": draft, "batch": rows}
    check({**cell, "mode": mode})
    assert taken


def coverage_table() -> str:
    """How many combinations of each group the design holds, of those that exist."""
    lines = [f"{len(DESIGN)} of {len(CELLS)} cells; left out: " + "; ".join(EXCLUSIONS)]
    lines.extend(
        f"{' × '.join(group):32s} {len(covered(DESIGN, group)):4d} of {len(covered(CELLS, group)):4d}"
        for group in GROUPS
    )
    return "\n".join(lines)


def test_the_design_covers_what_it_claims() -> None:
    print("\n" + coverage_table())
    assert 120 <= len(DESIGN) <= 200
    for group in GROUPS:
        assert covered(DESIGN, group) == covered(CELLS, group), group
    for axis, values in AXES.items():
        assert {cell[axis] for cell in DESIGN} == set(values)


def test_references_are_worth_comparing_with() -> None:
    """Rows of the batch end at different steps and the plain runs are not one repeated token."""
    for family in FAMILIES:
        inputs, options, plain = reference(family, FAMILIES[family].attentions[0], "dynamic", 4, "greedy")
        rows = rows_of(plain.sequences, inputs, options["eos_token_id"])
        lengths = [len(row) - int(mask.sum()) for row, mask in zip(rows, inputs["attention_mask"], strict=True)]
        assert len(set(lengths)) >= 3, (family, lengths)
        assert max(lengths) >= 12, (family, lengths)
        assert all(len(set(row)) >= 4 for row in rows), (family, rows)


def test_a_wrong_walk_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself can fail: a target whose logits depend on the number of rows it verifies is caught."""
    model = target("qwen3", "sdpa")
    inputs, options, plain = reference("qwen3", "sdpa", "dynamic", 1, "greedy")
    drafter = rigged(rows_of(plain.sequences, inputs), "half", seed=1).with_options(budget=8)
    drafter.rig.strict = False
    forward = type(model).forward

    @functools.wraps(forward)
    def shifted(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        if 1 < output.logits.shape[1] <= 8:
            output.logits[..., 7] += 100.0
        return output

    monkeypatch.setattr(type(model), "forward", shifted)
    assisted = run(model, inputs, seed=3, assistant_model=drafter, **options)
    monkeypatch.undo()
    with pytest.raises(AssertionError, match="top-2 gap"):
        assert_same(plain, assisted, model, inputs, options, seed=3)


def test_vocabulary_of_the_rig() -> None:
    """Rigged drafts name tokens of the shared tiny targets only."""
    drafter = rigged([])
    assert drafter.config.vocab_size == VOCAB
