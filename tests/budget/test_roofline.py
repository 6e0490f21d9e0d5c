"""Workloads counted from tiny models against counts by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hf_treespec.budget import DevicePeak, Workload, measure_peak

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}
#: Elements of a layer's matrices: q, k, v, o and the three of the MLP.
ATTENTION, MLP, HEAD = 32 * 32 * 2 + 32 * 16 * 2, 3 * 32 * 48, 64 * 32
NORMS = 2 * (2 * 32 + 2 * 8) + 32


@pytest.mark.parametrize("tied", [True, False])
def test_a_dense_model(tied: bool) -> None:
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=tied)).to(torch.bfloat16)
    work = Workload.from_model(model)
    elements = 2 * (ATTENTION + MLP) + HEAD
    assert work.row_flops == 2 * elements
    assert work.weight_bytes == 2 * (elements + NORMS)  # the embedding is looked up, not read
    assert work.experts == 0
    assert work.flops(4, 100, 3) == 3 * 4 * 2 * elements + 2 * 3 * 4 * (100 + 4) * 4 * 4 * 8
    # Two bytes, K and V, two heads of eight, of both layers.
    assert work.bytes(1, 101) - work.bytes(1, 100) == 2 * 2 * 2 * 8 * 2
    assert Workload.from_model(model, kv_dtype=torch.int8).attention[0].column_bytes == 2 * 2 * 8
    rows = torch.arange(1, 6).double()
    torch.testing.assert_close(work.flops(rows, 7)[3], torch.tensor(work.flops(4, 7)).double())


def test_a_mixture_reads_the_experts_that_rows_reach() -> None:
    sizes = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
    work = Workload.from_model(Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **sizes)))
    experts = 2 * 8 * 3 * 32 * 16
    assert (work.experts, work.experts_per_row, work.expert_bytes) == (8, 2, 4 * experts)
    assert work.row_flops == 2 * (2 * (ATTENTION + 8 * 32) + HEAD + experts * 2 / 8)
    one, two = (work.bytes(n, 0) - work.weight_bytes - n * work.row_bytes for n in (1, 2))
    columns = 2 * 2 * 2 * 8 * 4
    assert one - columns == pytest.approx(4 * experts * 2 / 8)
    assert two - 2 * columns == pytest.approx(4 * experts * (1 - 0.75**2))


def test_sliding_layers_see_their_window() -> None:
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SHAPE, layer_types=kinds, sliding_window=16)
    work = Workload.from_model(Gemma3ForCausalLM(config))
    assert {group.window: group.layers for group in work.attention} == {16: 1, None: 1}
    assert work.bytes(1, 200) - work.bytes(1, 100) == 100 * 2 * 2 * 8 * 4


def test_nodes_may_cost_several_rows() -> None:
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    work, without = Workload.from_model(model, riding_per_node=2), Workload.from_model(model)
    assert work.flops(2, 50, riding=True) == without.flops(6, 50)
    assert work.bytes(2, 50, riding=True) == without.bytes(6, 50)
    assert work.flops(2, 50) == without.flops(2, 50)


def test_an_unknown_architecture_reads_all_matrices() -> None:
    work = Workload.from_model(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2, bias=False)))
    assert work.flops(3, 1000, 2) == 6 * 2 * (32 + 8)
    assert work.weight_bytes == 4 * (32 + 4 + 8)
    assert work.attention == ()


def test_packed_weights_count_with_their_own_bytes() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_features, self.out_features = 16, 8
            self.register_buffer("qweight", torch.zeros(16 * 8 // 8, dtype=torch.int32))
            self.register_buffer("scales", torch.zeros(8, dtype=torch.float16))

    work = Workload.from_model(nn.Sequential(Packed()))
    assert work.row_flops == 2 * 16 * 8
    assert work.weight_bytes == 16 * 4 + 8 * 2


def test_the_peak_is_measured_once() -> None:
    peak = measure_peak("cpu", torch.float32)
    assert isinstance(peak, DevicePeak)
    assert 1e7 < peak.flops_per_second < 1e16
    assert 1e7 < peak.bytes_per_second < 1e14
    assert measure_peak("cpu", torch.float32) is peak
