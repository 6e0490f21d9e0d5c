"""Drafting with a Muse drafter: what it borrows of the target, and the tokens of `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from muse_models import muse_of, tiny_assistant, tiny_muse_target
from parity import GREEDY, SAMPLED, Inputs, assert_same, run
from transformers import PreTrainedModel
from transformers.pipelines import base

import hf_treespec  # noqa: F401  (teaches generate() about drafters)
from hf_treespec.drafters import TargetModules
from hf_treespec.drafters.muse import MuseDrafter
from hf_treespec.drafters.treeflash import TreeFlashDrafter

TARGET = tiny_muse_target()
DRAFTER = muse_of(tiny_assistant(TARGET))
CHAIN: dict[str, Any] = {"shape": "chain", "budget": 5}
TREE: dict[str, Any] = {"budget": 12}


def inputs_of(*lengths: int) -> Inputs:
    """Left-padded rows of random tokens."""
    generator = torch.Generator().manual_seed(4)
    ids, mask = torch.zeros(2, len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(1, 61, (length,), generator=generator)
        mask[row, -length:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def test_c38_the_norm_of_the_embedding_is_left_out():
    """C38: a block's rows are the embedding's as they are stored, while the target reads them normed."""
    embedding = TARGET.get_input_embeddings()
    ids = torch.arange(61)[None]
    assert torch.equal(TargetModules(TARGET).embed(ids, torch.float32)[0], embedding.weight)
    assert not torch.allclose(embedding(ids)[0], embedding.weight, atol=0.1)


def test_c38_draft_logits_are_scaled_and_capped_as_the_targets():
    with torch.no_grad():
        output = TARGET(input_ids=inputs_of(9)["input_ids"], output_hidden_states=True)
        logits = TargetModules(TARGET).logits(output.hidden_states[-1])
    torch.testing.assert_close(logits, output.logits, atol=1e-5, rtol=1e-5)
    assert TARGET.config.get_text_config().output_multiplier != 1.0


def check_tokens(target: PreTrainedModel, shape: dict[str, Any], inputs: Inputs, mode: dict[str, Any]) -> None:
    options = {"max_new_tokens": 16, **mode}
    view = DRAFTER.with_options(**shape)
    plain = run(target, inputs, seed=3, **options)
    assisted = run(target, inputs, seed=3, assistant_model=view, **options)
    assert_same(plain, assisted, target, inputs, options, seed=3)
    assert view.last_report.drafted_rounds > 0
    assert view.last_report.reason is None


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("lengths", [(11,), (5, 17, 9)], ids=["one row", "three rows"])
@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_are_plain_decodings(shape: dict[str, Any], lengths: tuple[int, ...], mode: dict[str, Any]):
    """The target has windows shorter than the sequences, layers without rotation and gated attention."""
    check_tokens(TARGET, shape, inputs_of(*lengths), mode)


@pytest.mark.parametrize("attention", ["eager", "treespec"])
def test_tokens_under_other_attentions(attention: str):
    target = tiny_muse_target()
    target.set_attn_implementation(attention)
    check_tokens(target, TREE, inputs_of(5, 17, 9), GREEDY)


def test_a_tree_finds_more_than_a_chain():
    """Drafts of a small vocabulary are often right, and more so with siblings."""
    target = tiny_muse_target(4)
    drafter = muse_of(tiny_assistant(target))
    inputs = {"input_ids": torch.tensor([[1, 2, 3, 1, 2, 2, 3, 1]]), "attention_mask": torch.ones(1, 8)}
    plain = run(target, inputs, max_new_tokens=30, **GREEDY)
    lengths = []
    for shape in (CHAIN, {"budget": 24}):
        view = drafter.with_options(**shape)
        assisted = run(target, inputs, assistant_model=view, max_new_tokens=30, **GREEDY)
        assert torch.equal(assisted.sequences, plain.sequences)
        lengths.append(view.last_report.acceptance_length)
    assert 1 < lengths[0] < lengths[1]


def test_a_pipeline_takes_it_by_its_path(tmp_path: Path):
    tiny_assistant(TARGET).save_pretrained(tmp_path)
    loaded, assistant_tokenizer = base.load_assistant_model(TARGET, str(tmp_path), None)
    assert isinstance(loaded, MuseDrafter)
    assert assistant_tokenizer is None


def test_treeflash_does_not_start_from_it():
    with pytest.raises(ValueError, match="not from a MuseDrafter"):
        TreeFlashDrafter.from_dflash(DRAFTER)
