"""Assisted decoding with a DFlash 2 drafter equals plain decoding."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from dflash2_models import tiny_dflash2
from models import target
from parity import assert_same, run
from test_exactness import reference

from hf_treespec.drafters.dflash2 import DFlash2Drafter

OPTIONS: dict[str, dict[str, Any]] = {
    "scaled": {"input_embedding_scale": 1.5, "output_multiplier": 0.5, "final_logit_softcapping": 3.0},
    "one candidate": {"selector_top_k": 1},
    "sliding": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8},
}


@functools.cache
def dflash2(family: str, **options: Any) -> DFlash2Drafter:
    """A drafter of random weights for a family's target; lists in `options` come as tuples."""
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
    fields = {"block_size": 8, "mask_token_id": 3, "target_layer_ids": [0, 2]}
    return tiny_dflash2(target(family, "sdpa"), **{**fields, **options})


def compare(family: str, rows: int, mode: str, drafter: DFlash2Drafter) -> Any:
    """Runs both and compares them token for token; returns the report of the assisted run."""
    model = target(family, "sdpa")
    inputs, options, plain = reference(family, "sdpa", "dynamic", rows, mode)
    assisted = run(model, inputs, seed=3, assistant_model=drafter, **options)
    assert_same(plain, assisted, model, inputs, options, seed=3)
    assert drafter.last_report.reason is None
    return drafter.last_report


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_shapes(family: str, rows: int, mode: str, shape: str) -> None:
    compare(family, rows, mode, dflash2(family).with_options(shape=shape, budget=16))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_options(name: str, mode: str) -> None:
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in OPTIONS[name].items()}
    compare("qwen3", 4, mode, dflash2("qwen3", **options).with_options(budget=16))


def test_a_bf16_drafter() -> None:
    drafter = copy.deepcopy(dflash2("qwen3")).to(torch.bfloat16)
    compare("qwen3", 4, "sampled", drafter.with_options(budget=16))


def test_some_drafts_are_accepted() -> None:
    """Random as they are, large trees hold the target's token now and then: accepted paths are compared too."""
    report = compare("qwen3", 1, "greedy", dflash2("qwen3", selector_top_k=40).with_options(budget=64))
    assert report.acceptance_length > 1
