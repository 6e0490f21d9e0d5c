"""Every backend computes attention and its lse; lse layouts of kernels that are not here are faked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from hf_treespec.attention.backends import (
    Backend,
    FlashBackend,
    MathBackend,
    SdpaBackend,
    align_bias,
    cast_mask,
    choose_backend,
)
from hf_treespec.attention.interface import split_attention

LOWEST = torch.finfo(torch.float32).min
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def inputs(
    batch: int = 2, heads: int = 8, groups: int = 2, rows: int = 6, columns: int = 29, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """Query, key, value and an additive mask in which no row is blind; all views with strides, as caches give."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, rows, heads, 16, generator=generator).transpose(1, 2)
    key, value = (torch.randn(batch, groups, columns + 9, 16, generator=generator)[:, :, :columns] for _ in range(2))
    hidden = torch.rand(batch, 1, rows + 3, columns + 7, generator=generator) < 0.4
    hidden[..., columns - 1] = False
    mask = torch.zeros(hidden.shape).masked_fill(hidden, LOWEST)[:, :, :rows, :columns]
    return query, key, value, mask


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    repeats = query.shape[1] // key.shape[1]
    key, value = key.double().repeat_interleave(repeats, 1), value.double().repeat_interleave(repeats, 1)
    scores = query.double() @ key.transpose(-1, -2) * scale
    scores = scores if mask is None else scores + mask.double()
    return (scores.softmax(-1) @ value).float(), scores.logsumexp(-1).float()


def flash(layout: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """A flash kernel in plain operations that lays its lse out as one of the real ones does."""

    def kernel(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = reference(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), None, scale)
        heads = lse.shape[1]
        lse = {
            "[B, H, N]": lambda: lse,
            "[B, H, N, 1]": lambda: lse.unsqueeze(-1),
            "[B, H, padded N]": lambda: F.pad(lse, (0, -lse.shape[2] % 32), value=float("inf")),
            "[H, T]": lambda: lse.transpose(0, 1).reshape(heads, -1),
            "[T, H]": lambda: lse.transpose(1, 2).reshape(-1, heads),
        }[layout]()
        return out.transpose(1, 2), lse

    return kernel


BACKENDS: dict[str, Backend] = {"math": MathBackend(), "sdpa": SdpaBackend()}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_and_lse(name: str, groups: int, masked: bool) -> None:
    query, key, value, mask = inputs(groups=groups)
    for given in [mask, mask[:1], mask.expand(-1, 8, -1, -1)] if masked else [None]:
        out, lse = BACKENDS[name].attend(query, key, value, given, 0.3)
        expected, expected_lse = reference(query, key, value, given, 0.3)
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=2e-6)


@pytest.mark.parametrize("layout", ["[B, H, N]", "[B, H, N, 1]", "[B, H, padded N]", "[H, T]", "[T, H]"])
@pytest.mark.parametrize("groups", [2, 8])
def test_lse_layouts_of_flash_kernels(layout: str, groups: int) -> None:
    query, key, value, _ = inputs(groups=groups)
    out, lse = FlashBackend(flash(layout)).attend(query, key, value, None, 0.3)
    expected, expected_lse = reference(query, key, value, None, 0.3)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=2e-6)


def test_flash_refuses_masks() -> None:
    query, key, value, mask = inputs()
    with pytest.raises(ValueError, match="no mask"):
        FlashBackend(flash("[B, H, N]")).attend(query, key, value, mask, 0.3)


@pytest.mark.parametrize("name", BACKENDS)
def test_blind_rows_have_no_weight_and_no_nan(name: str) -> None:
    query, key, value, mask = inputs()
    mask = mask.clone()
    mask[:, :, 2] = LOWEST
    out, lse = BACKENDS[name].attend(query, key, value, mask, 0.3)
    assert bool(out.isfinite().all())
    assert bool((lse[:, :, 2] < -1e38).all())
    if name == "math":
        out, lse = MathBackend().attend(query, key, value, mask.masked_fill(mask < 0, -torch.inf), 0.3)
        assert not out[:, :, 2].any()
        assert bool((lse[:, :, 2] == -torch.inf).all())


def test_soft_capping() -> None:
    query, key, value, mask = inputs(groups=8)
    scores = (query @ key.transpose(-1, -2) * 0.9 / 2.0).tanh() * 2.0 + mask
    out, lse = MathBackend(softcap=2.0).attend(query, key, value, mask, 0.9)
    torch.testing.assert_close(out, scores.softmax(-1) @ value, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=2e-6)


@pytest.mark.parametrize("groups", [2, 8])
@pytest.mark.parametrize("prefix", [0, 1, 23])
def test_split_equals_dense(groups: int, prefix: int) -> None:
    rows = 6
    query, key, value, mask = inputs(groups=groups, rows=rows, columns=prefix + rows)
    # Row 1 sees nothing of the prefix, as rows beyond a window do.
    mask = mask.clone()
    mask[:, :, 1, :prefix] = LOWEST
    dense = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)
    split = split_attention(query, key, value, mask, rows, 0.3, prefix_visible=False)
    torch.testing.assert_close(split, dense, rtol=0, atol=2e-6)
    mask[..., :prefix] = 0.0
    dense = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)
    # What the mask says of a visible prefix is not read.
    mask[..., :prefix] = LOWEST
    split = split_attention(query, key, value, mask, rows, 0.3, prefix_visible=True)
    torch.testing.assert_close(split, dense, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_split_in_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    query, key, value, mask = inputs()
    dense = reference(query, key, value, mask, 0.3)[0]
    halves = (tensor.to(dtype) for tensor in (query, key, value))
    split = split_attention(*halves, cast_mask(mask, dtype), 6, 0.3, prefix_visible=False)
    assert split.dtype == dtype
    torch.testing.assert_close(split.float(), dense, rtol=0, atol=tolerance)


def test_heads_of_two_sizes_fall_back_to_plain_operations() -> None:
    query, key, value, mask = inputs()
    narrow = value[..., :8]
    assert isinstance(choose_backend(query, narrow, masked=True), MathBackend)
    split = split_attention(query, key, narrow, mask, 6, 0.3, prefix_visible=False)
    torch.testing.assert_close(split, reference(query, key, narrow, mask, 0.3)[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("columns", [8, 13, 16])
@pytest.mark.parametrize("first", [0, 3])
def test_biases_are_aligned_without_needless_copies(columns: int, first: int) -> None:
    whole = torch.randn(2, 1, 5, 64, dtype=torch.float16)
    bias = whole[..., first : first + columns]
    aligned = align_bias(bias)
    torch.testing.assert_close(aligned, bias, rtol=0, atol=0)
    assert aligned.data_ptr() % 16 == 0
    assert all(stride % 8 == 0 for stride in aligned.stride()[:-1])
    assert (aligned.data_ptr() == bias.data_ptr()) == (first == 0)


def test_casting_a_mask_keeps_it_finite() -> None:
    mask = torch.tensor([0.0, LOWEST, -torch.inf])
    for dtype in (torch.float16, torch.bfloat16):
        assert cast_mask(mask, dtype).tolist() == [0.0] + [torch.finfo(dtype).min] * 2


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [2, 8])
@pytest.mark.parametrize("visible", [False, True])
@pytest.mark.parametrize("columns", [7, 64 + 6, 1000 + 6])
def test_split_on_a_gpu(dtype: torch.dtype, groups: int, visible: bool, columns: int) -> None:
    query, key, value, mask = inputs(groups=groups, columns=columns)
    mask = mask.clone()
    if visible:
        mask[..., :-6] = 0.0
    expected = reference(*(tensor.to(dtype).float() for tensor in (query, key, value)), mask, 0.3)[0]
    args = [tensor.to("cuda", dtype) for tensor in (query, key, value)]
    split = split_attention(*args, cast_mask(mask.cuda(), dtype), 6, 0.3, prefix_visible=visible)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(split.float().cpu(), expected, rtol=0, atol=tolerance)


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_gives_the_lse_on_a_gpu(dtype: torch.dtype) -> None:
    query, key, value, _ = inputs(columns=300)
    args = [tensor.to("cuda", dtype) for tensor in (query, key, value)]
    backend = choose_backend(args[0], args[2], masked=False)
    assert isinstance(backend, FlashBackend)
    out, lse = backend.attend(*args, None, 0.3)
    expected, expected_lse = reference(*(tensor.float().cpu() for tensor in args), None, 0.3)
    torch.testing.assert_close(out.float().cpu(), expected, rtol=0, atol=2e-2)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=0, atol=5e-3)
