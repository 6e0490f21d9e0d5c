"""Calibration of drafted logits by the bonus token (FlexDraft, arXiv 2605.20022).

Mask rows are computed before the token they follow is known: the first of a group stands in its place. Once the walk
has found it, the bonus token, a small network adds what it says about every drafted depth.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LogitsProcessor


class BonusCalibration(nn.Sequential):
    """`[bonus embedding | hidden] → Linear → SiLU → Linear → bias over the vocabulary`.

    Tensor names and the order of the inputs are those of the released checkpoints. Any block drafter can use it: all
    it needs are the states its head reads.

    Args:
        hidden_size: Width H of embedding and states.
        vocab_size: Width V of the bias.
        rank: Width between the two.
    """

    def __init__(self, hidden_size: int, vocab_size: int, rank: int) -> None:
        super().__init__(nn.Linear(2 * hidden_size, rank), nn.SiLU(), nn.Linear(rank, vocab_size))
        self.hidden_size = hidden_size

    def silence(self) -> None:
        """Makes the bias zero, as that of an untrained calibration is."""
        nn.init.zeros_(self[2].weight)  # type: ignore[arg-type]
        nn.init.zeros_(self[2].bias)  # type: ignore[arg-type]

    def forward(self, bonus: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """The additive bias `[..., V]`; the leading dimensions of the arguments broadcast.

        Args:
            bonus: The target's embedding of the bonus token, `[..., H]`.
            hidden: States behind the final norm, `[..., H]`.
        """
        first, activation, last = self[0], self[1], self[2]
        assert isinstance(first, nn.Linear)
        weight = first.weight
        # The half that depends on the bonus token is the same for every depth.
        mixed = F.linear(bonus.to(weight), weight[:, : self.hidden_size], first.bias)
        mixed = mixed + F.linear(hidden.to(weight), weight[:, self.hidden_size :])
        bias: torch.Tensor = last(activation(mixed))
        return bias

    def bind(self, hidden: torch.Tensor, bonus: torch.Tensor) -> BonusCalibrationLogitsProcessor:
        """The calibration as a logits processor over given states; see `BonusCalibrationLogitsProcessor`.

        Args:
            hidden: States of the drafted depths behind the final norm, `[D, H]`.
            bonus: The target's embedding of the bonus token, `[H]`.
        """
        return BonusCalibrationLogitsProcessor(self, hidden, bonus)


class BonusCalibrationLogitsProcessor(LogitsProcessor):
    """Calibrated logits of every depth, in the interface of transformers' processors.

    Rows are ordered (depth, candidate): with C rows a depth, row `d · C + c` belongs to depth d, 0-based.
    """

    def __init__(self, calibration: BonusCalibration, hidden: torch.Tensor, bonus: torch.Tensor) -> None:
        self.calibration, self.hidden, self.bonus = calibration, hidden, bonus

    @torch.no_grad()
    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores `[D · C, V]` with the bias added.

        Args:
            input_ids: Not read.
            scores: Uncalibrated scores, `[D · C, V]`.

        Raises:
            ValueError: The rows are no multiple of the depths bound.
        """
        rows, depths = scores.shape[0], self.hidden.shape[0]
        if rows % depths:
            raise ValueError(f"{rows} rows are no multiple of the {depths} depths bound; rows are (depth, candidate).")
        bias = self.calibration(self.bonus, self.hidden).repeat_interleave(rows // depths, 0)
        return scores + bias.to(scores)
