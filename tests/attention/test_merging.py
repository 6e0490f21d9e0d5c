"""Merging parts of attention is exact, also where a part is hidden."""

from __future__ import annotations

import pytest
import torch

from hf_treespec.attention.merging import apply_sinks, merge


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = (query.double() @ key.double().transpose(-1, -2)) * 3
    lse = scores.logsumexp(-1)
    return ((scores - lse.unsqueeze(-1)).exp() @ value.double()).float(), lse.float()


def tensors(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, length, 8, generator=generator) for length in lengths]


def test_parts_merge_to_the_whole() -> None:
    query, key, value = tensors(5, 12, 12)
    parts = [attention(query, key[:, :, part], value[:, :, part]) for part in (slice(0, 9), slice(9, 12))]
    out, lse = merge(*parts)
    expected, expected_lse = attention(query, key, value)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.float32).min])
def test_a_hidden_part_has_no_weight_whatever_it_holds(hidden: float) -> None:
    query, key, value = tensors(5, 12, 12)
    seen = attention(query, key, value)
    unseen = (torch.full_like(seen[0], float("nan")), torch.full_like(seen[1], hidden))
    for parts in ((seen, unseen), (unseen, seen)):
        out, lse = merge(*parts)
        torch.testing.assert_close(out, seen[0], rtol=0, atol=0)
        torch.testing.assert_close(lse, seen[1], rtol=0, atol=0)


def test_nothing_seen_is_zero() -> None:
    out = torch.full((1, 1, 2, 4), float("nan"))
    lse = torch.full((1, 1, 2), float("-inf"))
    merged, merged_lse = merge((out, lse), (out, lse))
    assert merged.tolist() == torch.zeros(1, 1, 2, 4).tolist()
    assert merged_lse.tolist() == lse.tolist()


def test_sinks_are_one_more_column_without_a_value() -> None:
    query, key, value = tensors(5, 12, 12)
    sinks = torch.tensor([-1.0, 0.5, 4.0])
    scores = (query.double() @ key.double().transpose(-1, -2)) * 3
    column = sinks.double().view(1, -1, 1, 1).expand(2, -1, 5, 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    out, lse = apply_sinks(*attention(query, key, value), sinks)
    torch.testing.assert_close(out, (weights @ value.double()).float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, torch.cat([scores, column], -1).logsumexp(-1).float(), rtol=0, atol=1e-5)
    hidden = torch.full_like(lse, float("-inf"))
    assert not apply_sinks(out, hidden, sinks)[0].any()


def test_half_precision_parts_merge_in_float32() -> None:
    query, key, value = tensors(5, 12, 12)
    out, lse = attention(query, key, value)
    merged, _ = merge((out.bfloat16(), lse), (out, torch.full_like(lse, float("-inf"))))
    torch.testing.assert_close(merged, out.bfloat16().float(), rtol=0, atol=0)
    assert apply_sinks(merged.bfloat16(), lse, torch.zeros(3))[0].dtype == torch.bfloat16
