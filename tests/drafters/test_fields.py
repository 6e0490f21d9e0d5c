"""Fields of configurations: what no drafter can be built from is refused when the configuration is made."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedConfig

from hf_treespec.drafters.dflash import DFlashConfig
from hf_treespec.drafters.dflash2 import DFlash2Config
from hf_treespec.drafters.flexdraft import FlexDraftConfig
from hf_treespec.drafters.muse import MuseConfig
from hf_treespec.drafters.treeflash import TreeFlashConfig

FAMILIES = (DFlashConfig, DFlash2Config, TreeFlashConfig, MuseConfig, FlexDraftConfig)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_layer_ids", []),
        ("target_layer_ids", [1, 1]),
        ("target_layer_ids", [-1]),
        ("target_layer_ids", ["a"]),
        ("target_layer_ids", 5),
        ("hidden_size", 0),
        ("block_size", "16"),
        ("vocab_size", -1),
        ("num_target_layers", True),
        ("initializer_range", float("nan")),
        ("bos_token_id", "x"),
    ],
)
def test_values_that_make_no_drafter(family: type[PreTrainedConfig], field: str, value: Any):
    with pytest.raises(ValueError, match=rf"^{field} is .*; it is "):
        family(**{field: value})


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        (DFlash2Config, "selector_rank", "x"),
        (TreeFlashConfig, "num_parents", 1.5),
        (TreeFlashConfig, "dead_end_discount", "x"),
        (MuseConfig, "num_hidden_layers", None),
        (FlexDraftConfig, "calibration_rank", "x"),
    ],
)
def test_values_that_make_no_drafter_of_a_family(family: type[PreTrainedConfig], field: str, value: Any):
    with pytest.raises(ValueError, match=rf"^{field} is .*; it is "):
        family(**{field: value})


def test_long_values_are_cut_short():
    with pytest.raises(ValueError, match="none twice") as caught:
        DFlashConfig(target_layer_ids=[1] * 1000)
    assert len(str(caught.value)) < 200


def test_special_tokens_that_a_model_does_not_have():
    config = DFlashConfig(pad_token_id=-1, eos_token_id=[3, 7])
    assert (config.pad_token_id, config.eos_token_id) == (-1, [3, 7])
