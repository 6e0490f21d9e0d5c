"""What only a GPU can show: the same tokens there, near ties in bfloat16, and one host read a round."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from models import batch, build, dflash, prompt
from parity import GREEDY, SAMPLED, run

from hf_treespec.evaluation.verification import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NEW = 32


def pair(family: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    model = build(family, attention).to("cuda", dtype)
    return model, copy.deepcopy(dflash(family)).to("cuda", dtype)


def on_gpu(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in inputs.items()}


@pytest.fixture(autouse=True)
def full_float32() -> Any:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("attention", ["eager", "sdpa", "treespec"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_moe"])
def test_same_tokens_and_generator(family: str, attention: str, rows: int, options: dict[str, Any]) -> None:
    model, drafter = pair(family, attention)
    inputs = on_gpu(prompt() if rows == 1 else batch())
    options = {**options, "max_new_tokens": NEW}
    plain = run(model, inputs, **options)
    state = torch.cuda.get_rng_state()
    assisted = run(model, inputs, assistant_model=drafter, **options)
    assert torch.equal(plain.sequences, assisted.sequences)
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.parametrize("disable_compile", [True, False])
def test_static_cache(disable_compile: bool) -> None:
    """Compilation, which a GPU turns on for static caches, leaves rounds as they are."""
    model, drafter = pair("qwen3")
    options = {**GREEDY, "max_new_tokens": NEW, "cache_implementation": "static"}
    plain = run(model, on_gpu(prompt()), disable_compile=True, **options)
    assisted = run(model, on_gpu(prompt()), assistant_model=drafter, disable_compile=disable_compile, **options)
    assert torch.equal(plain.sequences, assisted.sequences)


@pytest.mark.parametrize(
    ("dtype", "drafter_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float16, torch.bfloat16)],
)
def test_half_precision_differs_in_near_ties_only(dtype: torch.dtype, drafter_dtype: torch.dtype) -> None:
    model, drafter = pair("qwen3", dtype=dtype)
    drafter.to(drafter_dtype)
    for seed in range(4):
        result = verify(model, drafter, on_gpu(prompt(seed=seed)), max_new_tokens=NEW)
        assert result.passed, result


def test_the_host_reads_the_device_once_a_round() -> None:
    """Synchronisations the CUDA runtime reports while rounds run; prefill and the end of the call have their own."""
    model, drafter = pair("qwen3")
    inputs = on_gpu(prompt())
    model.generate(**inputs, assistant_model=drafter, **GREEDY, max_new_tokens=4)

    def synchronisations(new_tokens: int) -> tuple[int, int]:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model.generate(**inputs, assistant_model=drafter, **GREEDY, max_new_tokens=new_tokens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found = [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]
        return len(found), drafter.last_report.rounds

    short, few = synchronisations(8)
    long, many = synchronisations(NEW)
    assert long - short <= many - few
