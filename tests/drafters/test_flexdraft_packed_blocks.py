"""Packed blocks: the drafts of many places in one forward, with a gradient to the drafter alone."""

from __future__ import annotations

import copy

import pytest
import torch
from flexdraft_models import BLOCK, dense_group, tiny_flexdraft
from models import VOCAB, build, hook_count, target
from transformers import PreTrainedModel

from hf_treespec.drafters.flexdraft import packed_blocks
from hf_treespec.drafters.flexdraft.layout import decoder_of

LENGTH = 19
ANCHORS = torch.tensor([[1, 4, 12], [2, 9, 13]])


def texts() -> torch.Tensor:
    return torch.randint(2, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def model_of(family: str) -> PreTrainedModel:
    return target(family, "eager" if family == "gpt_oss" else "sdpa")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_sliding", "mistral", "gemma3", "phi3", "gpt_oss"])
def test_blocks_are_what_decoding_drafts(family: str) -> None:
    model, ids = model_of(family), texts()
    drafter = tiny_flexdraft(model)
    with torch.no_grad():
        packed = packed_blocks(drafter, model, ids, ANCHORS)
        teacher = decoder_of(model)[0](input_ids=ids, use_cache=False).last_hidden_state
    assert packed.drafted.shape == (2, 3, BLOCK - 1, 64)
    torch.testing.assert_close(packed.teacher, teacher, rtol=0, atol=2e-5)
    for row in range(2):
        for block, anchor in enumerate(ANCHORS[row].tolist()):
            hidden, _ = dense_group(model, drafter, ids[row, :anchor].tolist())
            expected = decoder_of(model)[0].norm(hidden).detach()[1:]
            torch.testing.assert_close(packed.drafted[row, block], expected, rtol=0, atol=3e-5)
    assert hook_count(model) == 0


def test_as_many_rows_as_heads() -> None:
    """Gemma 3 with rows and heads of one number: they are still told apart."""
    model = build("gemma3", num_attention_heads=8, num_key_value_heads=4)
    drafter = tiny_flexdraft(model, block_size=2)
    with torch.no_grad():
        packed = packed_blocks(drafter, model, texts()[:1, :6], torch.tensor([[3]]))
    hidden, _ = dense_group(model, drafter, texts()[0, :3].tolist())
    expected = decoder_of(model)[0].norm(hidden).detach()[1:]
    torch.testing.assert_close(packed.drafted[0, 0], expected, rtol=0, atol=3e-5)


def test_the_gradient_goes_to_the_drafter_alone() -> None:
    model = build("qwen3").requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    drafter, ids = tiny_flexdraft(model), texts()
    packed = packed_blocks(drafter, model, ids, ANCHORS)
    assert not packed.teacher.requires_grad
    bonus = model.get_input_embeddings()(ids.gather(1, ANCHORS))[:, :, None]
    logits = model.get_output_embeddings()(packed.drafted) + drafter.anchor_bias_mlp(bonus, packed.drafted)
    logits.logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in drafter.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_attention_without_additive_masks_is_refused() -> None:
    model = build("qwen3")
    drafter = tiny_flexdraft(model)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2"):
        packed_blocks(drafter, model, texts(), ANCHORS)
