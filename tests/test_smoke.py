"""A short round through the public surface, for every supported transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import batch, build, prompt
from pairs import PROMPT, build_pair, save_pair
from transformers import pipeline

import hf_treespec
from hf_treespec.evaluation import verify

pytestmark = pytest.mark.smoke

REGIMES = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 0}}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("shape", ["tree", "chain"])
@pytest.mark.parametrize("inputs", [prompt(), batch()], ids=["one row", "batch"])
def test_same_tokens_as_plain_decoding(regime: str, shape: str, inputs: dict[str, torch.Tensor]):
    target, drafter, _ = build_pair()
    result = verify(target, drafter.with_options(budget=6, shape=shape), inputs, max_new_tokens=24, **REGIMES[regime])
    assert result.identical
    assert result.report is not None
    assert result.report.drafted_rounds > 0


@pytest.mark.parametrize("family", ["gemma3", "qwen3_moe"])
def test_windows_and_experts(family: str):
    from hf_treespec.drafters.dflash import DFlashConfig, DFlashDrafter

    target = build(family)
    config = DFlashConfig.for_target(
        target.config, num_hidden_layers=1, block_size=4, mask_token_id=2, target_layer_ids=[0, 2]
    )
    torch.manual_seed(0)
    assert verify(target, DFlashDrafter(config).eval(), batch(), max_new_tokens=24, do_sample=False).identical


def test_save_load_and_pipeline(tmp_path: Path):
    target_path, drafter_path = save_pair(build_pair(), tmp_path)
    drafter = hf_treespec.AutoDrafter.from_pretrained(drafter_path)
    for name, tensor in build_pair()[1].state_dict().items():
        assert torch.equal(tensor, drafter.state_dict()[name]), name
    arguments = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    plain = pipeline("text-generation", target_path, device="cpu")(PROMPT, **arguments)
    assisted = pipeline("text-generation", target_path, assistant_model=drafter_path, device="cpu")
    assert isinstance(assisted.assistant_model, type(drafter))
    assert assisted(PROMPT, **arguments) == plain
    assert assisted.assistant_model.last_report.target_forwards > 0
