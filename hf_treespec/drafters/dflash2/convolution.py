"""The convolution that lets the rows of a block know each other beyond attention (DFlash 2).

Sources: PyPI `dflash` 0.1.0 (MIT), which the golden outputs of the tests were made with; the DFlash 2 page of
vllm-project/speculators for the border of the block and the initialisation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from .configuration_dflash2 import DFlash2Config


class DynamicConvolution(nn.Module):
    """A short causal convolution before and after a sublayer, with kernels that depend on the sublayer's input.

    With x the normalised input of the sublayer, g(c) the group of channel c and t the row in its block,

        y[t, c] = Σ_o (base[0, o, c] + delta[t, 0, o, g(c)]) · x[t − o, c]
        z[t, c] = Σ_o (base[1, o, c] + delta[t, 1, o, g(c)]) · sublayer(y)[t − o, c]

    where `delta = kernel_projection(x)`: the kernels of both sides come from the same input. Rows before the first of
    the block, the anchor, count as zero: blocks never mix, and the context is not convolved at all. Of a block cut
    short nothing changes in the rows that are left.

    A fresh module is the identity around its sublayer.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        width = config.hidden_size
        self.block_size, self.taps = config.block_size, config.conv_kernel_size
        self.groups = width // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, width))
        self.kernel_projection = nn.Linear(width, 2 * self.taps * self.groups, bias=False)

    def forward(self, rows: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The sublayer between its two convolutions, `[B, S, H]`.

        Args:
            rows: Its normalised input: one block or the head of one, or whole blocks one after the other, `[B, S, H]`.
            sublayer: Maps `[B, S, H]` to `[B, S, H]`.
        """
        blocks = rows.unflatten(1, (-1, min(self.block_size, rows.shape[1])))
        before, after = self.kernels(blocks).unbind(-3)
        mixed = sublayer(convolve(blocks, before).view_as(rows))
        return convolve(mixed.view_as(blocks), after).view_as(rows)

    def kernels(self, rows: torch.Tensor) -> torch.Tensor:
        """Kernels before and after the sublayer, `[..., 2, taps, H]`, for its normalised input `[..., H]`."""
        delta = self.kernel_projection(rows).unflatten(-1, (2, self.taps, self.groups, 1))
        return (self.base_kernel.unflatten(-1, (self.groups, -1)) + delta).flatten(-2)


def convolve(rows: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    """Convolves rows `[..., S, H]` along S, each with its own kernel `[..., S, taps, H]`; before the first are zeros.

    Tap o of a row's kernel is what the row o places before it is multiplied by.
    """
    mixed = kernels[..., 0, :] * rows
    for tap in range(1, min(kernels.shape[-2], rows.shape[-2])):
        mixed = mixed + kernels[..., tap, :] * F.pad(rows[..., :-tap, :], (0, 0, tap, 0))
    return mixed
