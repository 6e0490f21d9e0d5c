"""Configuration of the Muse drafter."""

from __future__ import annotations

from typing import Any

from ..dflash import DFlashConfig
from ..fields import COUNT, check_fields

#: Values of `MuseGlimmerAssistantConfig` for the fields that a `config.json` leaves out.
DEFAULTS: dict[str, Any] = {
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "sliding_window": 2048,
    "bos_token_id": 200000,
    "eos_token_id": 200001,
    "pad_token_id": 200018,
    "block_size": 16,
    "mask_token_id": 201818,
    "target_layer_ids": [1, 13, 25, 37, 49],
}
ROPE_THETA = 500_000.0


class MuseConfig(DFlashConfig):
    """What a Muse drafter is: `MuseGlimmerAssistantConfig` of transformers, whose `config.json` it reads and writes.

    Differs from a DFlash drafter's in its defaults and in how a sliding window counts.

    Args:
        layer_types: All `"sliding_attention"` when None.
        sliding_window: How far from a query of a sliding layer a position may lie, both ways; at least
            `block_size - 1`.
        target_layer_ids: The published drafter's when None.
        fields: Fields of `DFlashConfig`; those left out are the published drafter's.

    Raises:
        ValueError: A value contradicts another one.
    """

    model_type = "muse_glimmer_assistant"

    def __init__(self, **fields: Any) -> None:
        fields = {**DEFAULTS, **fields}
        check_fields(fields, {"num_hidden_layers": COUNT})
        fields["layer_types"] = fields.get("layer_types") or ["sliding_attention"] * fields["num_hidden_layers"]
        if fields["target_layer_ids"] is None:
            fields["target_layer_ids"] = DEFAULTS["target_layer_ids"]
        theta = fields.pop("rope_theta", ROPE_THETA)
        rope = {"rope_type": "default", "rope_theta": theta, **(fields.get("rope_parameters") or {})}
        super().__init__(**{**fields, "rope_parameters": rope})

    def _validate_fields(self) -> None:
        super()._validate_fields()
        sliding = self.sliding_window if "sliding_attention" in self.layer_types else None
        if sliding is not None and sliding < self.block_size - 1:
            raise ValueError(
                f"sliding_window ({self.sliding_window}) is below block_size - 1 ({self.block_size - 1}); the rows of "
                "a block see each other. Use the drafter's own config.json."
            )

    def layer_window(self, layer: int) -> int | None:
        # transformers' two-way mask bounds the distance, which counts one position less than a window does.
        windows = [self.draft_window]
        if self.sliding_window is not None and self.layer_types[layer] == "sliding_attention":
            windows.append(self.sliding_window + 1)
        return min((window for window in windows if window), default=None)

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads `config.json`, which the architecture alone may name as one of this family."""
        config_dict, unused = super().get_config_dict(*args, **kwargs)
        return {**config_dict, "model_type": cls.model_type}, unused
