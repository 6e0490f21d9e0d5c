"""Configuration of the DFlash drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from transformers import PreTrainedConfig

from ...sources import is_hub_id
from ..feature_layers import spread_layer_ids
from ..fields import ACTIVATION, COUNT, FLAG, LAYERS, NOT_NEGATIVE, POSITIVE, TOKEN, TOKENS, check_fields
from ..rope import check_rope, rope_for_target
from ..tensor_names import HUB_ARGUMENTS, read_tensor_names
from .dialects import find_dialect

LAYER_TYPES = ("full_attention", "sliding_attention")
WINDOW_ORIGINS = ("row", "anchor")
_KINDS = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), COUNT),
    **dict.fromkeys(("num_key_value_heads", "max_position_embeddings", "block_size"), COUNT),
    **dict.fromkeys(("head_dim", "sliding_window", "draft_window", "num_target_layers"), COUNT.or_none()),
    **dict.fromkeys(("target_hidden_size", "vocab_size", "draft_vocab_size"), COUNT.or_none()),
    **dict.fromkeys(("attention_bias", "sample_from_anchor", "feature_adapter", "own_embedding", "own_head"), FLAG),
    **dict.fromkeys(("rms_norm_eps", "input_embedding_scale", "output_multiplier"), POSITIVE.or_none()),
    **dict.fromkeys(("initializer_range", "attention_dropout"), NOT_NEGATIVE),
    "final_logit_softcapping": NOT_NEGATIVE.or_none(),
    "hidden_act": ACTIVATION,
    "mask_token_id": TOKEN,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), TOKENS.or_none()),
}


class DFlashConfig(PreTrainedConfig):
    """What a DFlash drafter is: a few Qwen3 layers that denoise one block of mask tokens (arXiv 2602.06036).

    Args:
        hidden_size: Width H; equal to the target's where its embedding or head is borrowed.
        head_dim: Width of an attention head; `hidden_size // num_attention_heads` when None.
        layer_types: `"full_attention"` or `"sliding_attention"` for each layer; all full when None.
        sliding_window: Positions a query of a sliding layer reaches back, itself included.
        window_from: Where windows are counted from: `"row"`, each block row's own position, itself included, or
            `"anchor"`, so that every row sees the same positions before the anchor.
        is_causal: Whether a block row sees only the block rows up to itself: one value, or one for each layer.
        draft_window: Positions of context that any layer may see, counted like `sliding_window`; None = all.
        block_size: Rows of a block, the anchor included.
        sample_from_anchor: Whether each row predicts the token behind its position, the anchor's row too, so that
            `block_size` tokens are drafted. Otherwise each mask predicts the token at its own, and `block_size - 1`
            are.
        mask_token_id: Token whose embedding fills the undrafted rows.
        target_layer_ids: 0-based decoder layers of the target whose outputs are the features.
        target_hidden_size: Width of those outputs; `hidden_size` when None.
        feature_adapter: Whether one projection shared by all feature layers brings them to `hidden_size` before they
            are fused.
        num_target_layers: Decoder layers of the target; None = unknown.
        vocab_size: The target's vocabulary.
        own_embedding: Whether the drafter has an input embedding of that vocabulary, in place of the target's.
        own_head: Whether it has a head, in place of the target's.
        draft_vocab_size: Tokens its own head tells apart; None = the whole vocabulary.
        input_embedding_scale: What the embedding's rows are multiplied by, and all that happens to them; None = they
            are embedded as the target embeds its own, and rows of an own embedding are left as they are.
        output_multiplier: What the head's logits are multiplied by; None = as the target scales its own, and logits of
            an own head are left as they are.
        final_logit_softcapping: Bound c of the multiplied logits, `c · tanh(logits / c)`; 0 = no bound, None = the
            target's own, and none for an own head.
        target_name_or_path: The target it was trained for; None = not recorded.

    Raises:
        ValueError: A value contradicts another one.
    """

    model_type = "treespec_dflash"

    def __init__(
        self,
        hidden_size: int = 512,
        intermediate_size: int = 1536,
        num_hidden_layers: int = 5,
        num_attention_heads: int = 8,
        num_key_value_heads: int = 4,
        head_dim: int | None = None,
        hidden_act: str = "silu",
        max_position_embeddings: int = 32768,
        initializer_range: float = 0.02,
        rms_norm_eps: float = 1e-6,
        rope_parameters: dict[str, Any] | None = None,
        attention_bias: bool = False,
        attention_dropout: float = 0.0,
        layer_types: Sequence[str] | None = None,
        sliding_window: int | None = None,
        window_from: str = "row",
        is_causal: bool | Sequence[bool] = False,
        draft_window: int | None = None,
        block_size: int = 16,
        sample_from_anchor: bool = False,
        mask_token_id: int = 0,
        target_layer_ids: Sequence[int] | None = None,
        target_hidden_size: int | None = None,
        feature_adapter: bool = False,
        num_target_layers: int | None = None,
        vocab_size: int | None = None,
        own_embedding: bool = False,
        own_head: bool = False,
        draft_vocab_size: int | None = None,
        input_embedding_scale: float | None = None,
        output_multiplier: float | None = None,
        final_logit_softcapping: float | None = None,
        target_name_or_path: str | None = None,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.rms_norm_eps = rms_norm_eps
        self.attention_bias = attention_bias
        self.attention_dropout = attention_dropout
        self.sliding_window = sliding_window
        self.window_from = window_from
        self.draft_window = draft_window
        self.block_size = block_size
        self.sample_from_anchor = sample_from_anchor
        self.mask_token_id = mask_token_id
        self.feature_adapter = feature_adapter
        self.num_target_layers = num_target_layers
        self.vocab_size = vocab_size
        self.own_embedding = own_embedding
        self.own_head = own_head
        self.draft_vocab_size = draft_vocab_size
        self.input_embedding_scale = input_embedding_scale
        self.output_multiplier = output_multiplier
        self.final_logit_softcapping = final_logit_softcapping
        self.target_name_or_path = target_name_or_path
        self.pad_token_id, self.bos_token_id, self.eos_token_id = pad_token_id, bos_token_id, eos_token_id
        check_fields({"head_dim": head_dim, "target_hidden_size": target_hidden_size, **vars(self)}, _KINDS)
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.rope_parameters = dict(rope_parameters or {"rope_type": "default", "rope_theta": 10_000.0})
        self.layer_types = list(layer_types or ["full_attention"] * num_hidden_layers)
        self.is_causal = list(is_causal) if isinstance(is_causal, Sequence) else is_causal
        if target_layer_ids is None:
            layers = num_target_layers
            target_layer_ids = [1] if layers is None else spread_layer_ids(layers, num_hidden_layers)
        self.target_layer_ids = list(target_layer_ids) if isinstance(target_layer_ids, Sequence) else target_layer_ids
        self.target_hidden_size = target_hidden_size or hidden_size
        self._validate_fields()
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            **kwargs,
        )

    def _validate_fields(self) -> None:
        check_fields(vars(self), {"target_layer_ids": LAYERS})
        check_rope(self.rope_parameters)
        unknown = [kind for kind in self.layer_types if kind not in LAYER_TYPES]
        if unknown:
            raise ValueError(f"layer_types names {unknown}; a DFlash layer is one of {list(LAYER_TYPES)}.")
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers.")
        causal = self.is_causal if isinstance(self.is_causal, list) else [self.is_causal] * self.num_hidden_layers
        if not all(isinstance(flag, bool) for flag in causal):
            raise ValueError(
                f"is_causal is {self.is_causal!r}; it is true or false, or a list of that for each layer."
            )
        if len(causal) != self.num_hidden_layers:
            raise ValueError(f"is_causal has {len(causal)} entries for {self.num_hidden_layers} layers.")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError("layer_types names sliding_attention, so sliding_window must be a positive number.")
        if self.block_size < 2:
            raise ValueError(f"block_size is {self.block_size}; a block is an anchor and at least one mask (>= 2).")
        if self.window_from not in WINDOW_ORIGINS:
            raise ValueError(f"window_from is {self.window_from!r}; it is one of {list(WINDOW_ORIGINS)}.")
        if (self.own_embedding or self.own_head) and self.vocab_size is None:
            raise ValueError("own_embedding and own_head need vocab_size, which is None.")
        if self.draft_vocab_size is not None:
            if not self.own_head:
                raise ValueError(f"draft_vocab_size ({self.draft_vocab_size}) needs own_head, which is false.")
            if self.draft_vocab_size > (self.vocab_size or 0):
                raise ValueError(
                    f"draft_vocab_size is {self.draft_vocab_size}; it is from 1 to vocab_size ({self.vocab_size})."
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) is no multiple of num_key_value_heads "
                f"({self.num_key_value_heads})."
            )

    @property
    def first_slot(self) -> int:
        """Block row that predicts depth 1."""
        return 0 if self.sample_from_anchor else 1

    @property
    def drafted_depths(self) -> int:
        """Depths D that a block covers."""
        return self.block_size - self.first_slot

    def layer_window(self, layer: int) -> int | None:
        """Positions a query of this layer reaches back, itself included; None = all."""
        windows = [self.draft_window]
        if self.layer_types[layer] == "sliding_attention":
            windows.append(self.sliding_window)
        return min((window for window in windows if window), default=None)

    def layer_is_causal(self, layer: int) -> bool:
        """Whether a block row of this layer sees only the block rows up to itself."""
        return self.is_causal if isinstance(self.is_causal, bool) else self.is_causal[layer]

    @classmethod
    def for_target(
        cls,
        target_config: PreTrainedConfig,
        *,
        num_hidden_layers: int,
        block_size: int,
        mask_token_id: int,
        target_layer_ids: Sequence[int] | None = None,
        **overrides: Any,
    ) -> Self:
        """Configuration of a drafter for a target: the target's widths, vocabulary and special tokens.

        Args:
            target_config: The target's configuration; its text part is used.
            target_layer_ids: Feature layers; `spread_layer_ids` when None.
            overrides: Any other field of the configuration.
        """
        text = target_config.get_text_config()
        fields: dict[str, Any] = {
            "hidden_size": text.hidden_size,
            "intermediate_size": getattr(text, "intermediate_size", None) or 3 * text.hidden_size,
            "num_attention_heads": text.num_attention_heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
            "head_dim": getattr(text, "head_dim", None),
            "max_position_embeddings": getattr(text, "max_position_embeddings", 32768),
            "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
            "rope_parameters": rope_for_target(text),
            "target_hidden_size": text.hidden_size,
            "num_target_layers": text.num_hidden_layers,
            "vocab_size": text.vocab_size,
            "pad_token_id": text.pad_token_id,
            "bos_token_id": text.bos_token_id,
            "eos_token_id": text.eos_token_id,
        }
        name = getattr(target_config, "_name_or_path", None)
        if name and is_hub_id(name):
            fields["target_name_or_path"] = name
        return cls(
            num_hidden_layers=num_hidden_layers,
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=target_layer_ids,
            **{**fields, **overrides},
        )

    @classmethod
    def get_config_dict(cls, id_or_path: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads `config.json`, in this package's format or in a published dialect.

        What a published checkpoint ships beyond the layers, its tensors alone say: their names are read too.
        """
        config_dict, unused = super().get_config_dict(id_or_path, **kwargs)
        dialect = find_dialect(config_dict)
        if dialect is None:
            return config_dict, unused
        where = {name: kwargs[name] for name in HUB_ARGUMENTS if kwargs.get(name) is not None}
        return dialect.convert(config_dict, read_tensor_names(id_or_path, **where)), unused
