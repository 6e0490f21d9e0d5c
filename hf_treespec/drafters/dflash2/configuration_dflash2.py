"""Configuration of the DFlash 2 drafter."""

from __future__ import annotations

from typing import Any

from ..dflash import DFlashConfig
from ..fields import COUNT, check_fields
from .convert_dflash2 import convert_config, is_published


class DFlash2Config(DFlashConfig):
    """What a DFlash 2 drafter is: a DFlash drafter, convolutions along its block, and a selector of candidates.

    The defaults of the four sizes are those of the published checkpoints.

    Args:
        conv_kernel_size: Taps of a convolution: the rows of the block, itself included, that a row mixes.
        conv_group_size: Neighbouring channels that share the input-dependent part of a kernel.
        selector_rank: Width of the selector's codebooks.
        selector_top_k: Candidates of each depth that the selector chooses among; both M and K of the lattice.
        kwargs: Fields of `DFlashConfig`; a drafter needs `vocab_size`, and has no embedding or head of its own.

    Raises:
        ValueError: A value contradicts another one.
    """

    model_type = "treespec_dflash2"

    def __init__(
        self,
        conv_kernel_size: int = 2,
        conv_group_size: int = 16,
        selector_rank: int = 256,
        selector_top_k: int = 16,
        **kwargs: Any,
    ) -> None:
        self.conv_kernel_size = conv_kernel_size
        self.conv_group_size = conv_group_size
        self.selector_rank = selector_rank
        self.selector_top_k = selector_top_k
        super().__init__(**kwargs)

    def _validate_fields(self) -> None:
        sizes = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        check_fields(vars(self), dict.fromkeys(sizes, COUNT))
        super()._validate_fields()
        foreign = [name for name in ("own_embedding", "own_head", "sample_from_anchor") if getattr(self, name)]
        if foreign:
            raise ValueError(
                f"{foreign} of a DFlash 2 drafter are true; the method takes the target's embedding and head, whose "
                "tokens the codebooks are of, and drafts from the masks' rows alone. Leave them out."
            )
        if self.conv_kernel_size > self.block_size:
            raise ValueError(
                f"conv_kernel_size is {self.conv_kernel_size}; a convolution has at least one tap and at most one for "
                f"each of the {self.block_size} rows of a block."
            )
        if self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"conv_group_size is {self.conv_group_size}; it must divide hidden_size ({self.hidden_size})."
            )
        for layer, kind in enumerate(self.layer_types):
            # The method bounds a row's view of the rows ahead of it too, which says something only in such a window.
            short = kind == "sliding_attention" and (self.sliding_window or 0) < self.block_size
            if short and not self.layer_is_causal(layer):
                raise ValueError(
                    f"sliding_window ({self.sliding_window}) of layer {layer}, which is not causal, is below "
                    f"block_size ({self.block_size}); the rows of a block must see each other."
                )

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads `config.json`, in this package's format or in the published one."""
        config_dict, unused = super(DFlashConfig, cls).get_config_dict(*args, **kwargs)
        return (convert_config(config_dict) if is_published(config_dict) else config_dict), unused
