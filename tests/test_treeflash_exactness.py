"""Assisted decoding with a TreeFlash drafter equals plain decoding, whichever of its options shape the draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import target, treeflash
from parity import assert_same, run
from test_exactness import check, reference

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {"head": "full"},
    "candidates": {"head": "candidates", "head_candidates": 9},
    "dead ends go on": {"dead_end_discount": 0.5},
    "one parent": {"num_parents": 1},
}


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("shape", ["chain", 2, 8, 33, 64])
def test_shapes(family: str, rows: int, mode: str, shape: str | int) -> None:
    cell = {"family": family, "attention": "sdpa", "cache": "dynamic", "shape": shape, "draft": "treeflash"}
    check({**cell, "batch": rows, "mode": mode})


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_options(name: str, rows: int, mode: str, shape: str) -> None:
    model = target("qwen3", "sdpa")
    inputs, options, plain = reference("qwen3", "sdpa", "dynamic", rows, mode)
    drafter = treeflash("qwen3", "sdpa", **OPTIONS[name]).with_options(shape=shape, budget=16)
    assisted = run(model, inputs, seed=3, assistant_model=drafter, **options)
    assert_same(plain, assisted, model, inputs, options, seed=3)
    assert drafter.last_report.reason is None


def test_a_bf16_drafter() -> None:
    model = target("qwen3", "sdpa")
    inputs, options, plain = reference("qwen3", "sdpa", "dynamic", 4, "sampled")
    drafter = treeflash("qwen3", "sdpa", num_parents=6).to(torch.bfloat16).with_options(budget=16)
    assisted = run(model, inputs, seed=3, assistant_model=drafter, **options)
    assert_same(plain, assisted, model, inputs, options, seed=3)


def test_some_drafts_are_accepted() -> None:
    """Random as they are, large trees hold the target's token now and then: accepted paths are compared too."""
    model = target("qwen3", "sdpa")
    inputs, options, plain = reference("qwen3", "sdpa", "dynamic", 1, "greedy")
    drafter = treeflash("qwen3", "sdpa", num_parents=16).with_options(budget=64)
    assisted = run(model, inputs, seed=3, assistant_model=drafter, **options)
    assert_same(plain, assisted, model, inputs, options, seed=3)
    assert drafter.last_report.acceptance_length > 1
