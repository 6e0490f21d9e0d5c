"""Configuration of the FlexDraft drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

from ..fields import COUNT, LAYERS, NOT_NEGATIVE, TOKENS, Kind, check_fields
from .convert_flexdraft import convert_config, is_released
from .layout import AttentionLayout


def _are_layouts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(layout, Mapping)
        and all(isinstance(shapes, Mapping) and all(map(_is_shape, shapes.values())) for shapes in layout.values())
        for layout in value
    )


def _is_shape(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(COUNT.holds, value))


_KINDS = {
    **dict.fromkeys(("hidden_size", "vocab_size", "block_size"), COUNT),
    **dict.fromkeys(("num_target_layers", "calibration_rank"), COUNT.or_none()),
    "target_layer_ids": LAYERS,
    "attention_layouts": Kind("a list of objects, projections' tensors by name with their shapes", _are_layouts),
    "initializer_range": NOT_NEGATIVE,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), TOKENS.or_none()),
}


class FlexDraftConfig(PreTrainedConfig):
    """What a FlexDraft drafter is: attention projections for mask rows in a target's last layers (arXiv 2605.20022).

    Args:
        hidden_size: The target's width H.
        vocab_size: The target's vocabulary V.
        num_target_layers: Decoder layers of the target; None = unknown, then the last of `target_layer_ids`.
        target_layer_ids: The layers mask rows pass through, 0-based: the target's last ones, without a gap. They enter
            at the first, `split_layer`.
        attention_layouts: Projections and norms of each of those layers as the target names them, with the shapes of
            their tensors (`{"q_proj": {"weight": [out, in]}, …}`); one entry stands for all layers alike.
        block_size: Rows of a block, the one in the place of the anchor included: `block_size - 1` tokens are drafted.
        calibration_rank: Width of the network that calibrates with the bonus token; None = there is none.
        initializer_range: Standard deviation of fresh weights.

    Raises:
        ValueError: A value contradicts another one.
    """

    model_type = "treespec_flexdraft"

    def __init__(
        self,
        hidden_size: int = 512,
        vocab_size: int = 32_000,
        num_target_layers: int | None = None,
        target_layer_ids: Sequence[int] = (0,),
        attention_layouts: Sequence[AttentionLayout] | None = None,
        block_size: int = 16,
        calibration_rank: int | None = 256,
        initializer_range: float = 0.02,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.target_layer_ids = list(target_layer_ids) if isinstance(target_layer_ids, Sequence) else target_layer_ids
        self.block_size = block_size
        self.calibration_rank = calibration_rank
        self.initializer_range = initializer_range
        self.pad_token_id, self.bos_token_id, self.eos_token_id = pad_token_id, bos_token_id, eos_token_id
        self.attention_layouts = list(attention_layouts or [_square_layout(hidden_size)])
        check_fields({"num_target_layers": num_target_layers, **vars(self)}, _KINDS)
        self.num_target_layers = num_target_layers or self.target_layer_ids[-1] + 1
        self.num_hidden_layers = len(self.target_layer_ids)
        self._validate_fields()
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            **{name: value for name, value in kwargs.items() if name != "num_hidden_layers"},
        )

    def _validate_fields(self) -> None:
        ids, count = self.target_layer_ids, len(self.target_layer_ids)
        if ids != list(range(ids[0], ids[0] + count)):
            raise ValueError(f"target_layer_ids are the target's last layers without a gap, 0-based; got {ids}.")
        if ids[-1] != self.num_target_layers - 1:
            raise ValueError(
                f"target_layer_ids end with {ids[-1]}, but the last of {self.num_target_layers} target layers is "
                f"{self.num_target_layers - 1}; mask rows pass through all layers from the first they enter."
            )
        if len(self.attention_layouts) not in (1, count):
            raise ValueError(
                f"{len(self.attention_layouts)} attention_layouts for {count} layers; give one for each, or one for "
                "all."
            )
        if self.block_size < 2:
            raise ValueError(f"block_size is {self.block_size}; a block of at least 2 rows drafts a token.")

    @property
    def split_layer(self) -> int:
        """Decoder layer at which mask rows enter, 0-based."""
        return self.target_layer_ids[0]

    def layout(self, index: int) -> AttentionLayout:
        """Projections and norms of the `index`-th of `target_layer_ids`."""
        return self.attention_layouts[0 if len(self.attention_layouts) == 1 else index]

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads `config.json`, in this package's format or in the released one."""
        config_dict, unused = super().get_config_dict(*args, **kwargs)
        return (convert_config(config_dict) if is_released(config_dict) else config_dict), unused


def _square_layout(width: int) -> AttentionLayout:
    names: Mapping[str, None] = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"))
    return {name: {"weight": [width, width]} for name in names}
