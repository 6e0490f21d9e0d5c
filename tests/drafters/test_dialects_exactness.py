"""Assisted decoding with a drafter of each published dialect equals plain decoding."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from dialect_models import DIALECTS, golden_target, published, target_of
from golden_inputs import VOCAB
from parity import GREEDY, SAMPLED, Inputs, Run, assert_same, run

from hf_treespec.drafters import AutoDrafter
from hf_treespec.drafters.dflash import DFlashDrafter
from hf_treespec.drafters.treeflash import TreeFlashDrafter

NEW_TOKENS = 14


@functools.cache
def inputs_of(rows: int) -> Inputs:
    ids = torch.randint(0, VOCAB - 1, (rows, 9), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


@functools.cache
def plain(width: int, rows: int, mode: str) -> tuple[Run, dict[str, Any]]:
    options = {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0, **(SAMPLED if mode == "sampled" else GREEDY)}
    return run(golden_target(width), inputs_of(rows), seed=3, **options), options


def check(drafter: DFlashDrafter, shape: str, rows: int, mode: str) -> None:
    """The one test body: the same tokens and generator, drafted and not plain."""
    target, budget = target_of(drafter), drafter.drafted_depths + 1 if shape == "chain" else 12
    expected, options = plain(target.config.hidden_size, rows, mode)
    view = drafter.with_options(shape=shape, budget=budget)
    assisted = run(target, inputs_of(rows), seed=3, assistant_model=view, **options)
    assert_same(expected, assisted, target, inputs_of(rows), options, seed=3)
    report = view.last_report
    assert report.reason is None
    assert report.rounds > 0
    assert len(report.acceptance_by_depth) <= drafter.drafted_depths


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 3])
def test_tokens_are_plain_decodings(tmp_path: Path, name: str, shape: str, mode: str, rows: int):
    check(AutoDrafter.from_pretrained(published(tmp_path, name)).eval(), shape, rows, mode)


@pytest.mark.parametrize("name", ["speculators", "deepspec"])
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_under_a_treeflash_head(tmp_path: Path, name: str, mode: str):
    backbone = AutoDrafter.from_pretrained(published(tmp_path, name)).eval()
    assert isinstance(backbone, DFlashDrafter)
    drafter = TreeFlashDrafter.from_dflash(backbone, num_parents=4)
    torch.nn.init.normal_(drafter.ar_approximation.d.weight, std=0.3)
    check(drafter, "tree", 1, mode)


def test_drafts_from_the_anchor_on_are_accepted_to_the_whole_block(tmp_path: Path):
    """Where target and drafter say one token whatever came before, a round commits a block and the bonus token."""
    drafter = AutoDrafter.from_pretrained(published(tmp_path, "deepspec")).eval()
    target, said = target_of(drafter), 100.0 * torch.nn.functional.one_hot(torch.tensor(7), VOCAB)
    heads = (target.get_output_embeddings(), drafter.lm_head)
    handles = [head.register_forward_hook(lambda module, args, logits: logits + said) for head in heads]
    try:
        view = drafter.with_options(shape="chain", budget=drafter.drafted_depths + 1)
        run(target, inputs_of(1), assistant_model=view, max_new_tokens=11, do_sample=False, pad_token_id=0)
    finally:
        for handle in handles:
            handle.remove()
    assert view.last_report.acceptance_length == drafter.config.block_size + 1
