"""Loading the models that a command names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import errors_in_a_line
from .options import Precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..drafters.base import BlockDrafter


def load(
    target: str, drafter: str, dtype: Precision, device: str | None
) -> tuple[PreTrainedModel, BlockDrafter, PreTrainedTokenizerBase]:
    """Target, drafter and tokenizer."""
    from transformers.utils.logging import disable_progress_bar

    from ..evaluation.loading import load_pair

    disable_progress_bar()
    with errors_in_a_line():
        return load_pair(target, drafter, dtype=dtype.torch_dtype(), device=device)


def load_beside(drafters: dict[str, str], dtype: Precision, device: str | None) -> dict[str, BlockDrafter]:
    """Further drafters for the same target, by name."""
    from ..evaluation.loading import load_drafter

    with errors_in_a_line():
        return {
            name: load_drafter(source, dtype=dtype.torch_dtype(), device=device) for name, source in drafters.items()
        }
