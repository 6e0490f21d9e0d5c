"""The DFlash drafter: a few Qwen3 layers that denoise a block of mask tokens over the target's features.

Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv 2602.06036). The context, one fused
feature a position, enters every layer as keys and values only; queries are the rows of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    rotate_half,
)

from .. import checks
from ..base import BlockDrafter, TargetModules
from ..loading import LoudLoading
from ..rotary import DraftRotaryEmbedding
from ..vocabulary import DraftVocabulary
from . import convert_deepspec
from .block_attention import block_mask, grouped_attention
from .configuration_dflash import DFlashConfig
from .dialects import find_dialect, fits
from .session import DFlashSession

#: What a layer's queries see: `(layer, queries [B, Hq, S, D], keys, values [B, Hkv, T + S, D]) -> [B, Hq, S, D]`,
#: where the T new context rows stand before the S block rows.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class DFlashAttention(nn.Module):
    """Projections of one layer. What the queries attend to is the caller's: a cache, a session or the trainer."""

    def __init__(self, config: DFlashConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        bias, width = config.attention_bias, config.hidden_size
        self.q_proj = nn.Linear(width, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, width, bias=bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def keys_values(
        self, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values `[B, Hkv, T, D]` of `rows` `[B, T, H]`, `cos` and `sin` `[B, T, D]`."""
        heads = (*rows.shape[:-1], -1, self.head_dim)
        keys = self.k_norm(self.k_proj(rows).view(heads)).transpose(1, 2)
        return rotate(keys, cos, sin), self.v_proj(rows).view(heads).transpose(1, 2)

    def forward(
        self,
        hidden: torch.Tensor,
        context: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        batch, rows, _ = hidden.shape
        queries = self.q_norm(self.q_proj(hidden).view(batch, rows, -1, self.head_dim)).transpose(1, 2)
        queries = rotate(queries, cos[:, -rows:], sin[:, -rows:])
        # Context and block share their projections, so one pass serves both.
        sources = hidden if context is None else torch.cat([context, hidden], dim=1)
        mixed = attend(self.layer, queries, *self.keys_values(sources, cos, sin))
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, rows, -1))


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates `[B, heads, T, D]` by the angles of `cos` and `sin` `[B, T, D]`.

    `apply_rotary_pos_emb` for one tensor, since queries and keys stand at different positions here.
    """
    return heads * cos.unsqueeze(1) + rotate_half(heads) * sin.unsqueeze(1)


class DFlashLayer(nn.Module):
    """One decoder layer: attention over context and block, then the MLP."""

    def __init__(self, config: DFlashConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config, layer)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden: torch.Tensor,
        context: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), context, cos, sin, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class FeatureAdapter(nn.Module):
    """One projection of every feature layer's output to the drafter's width (JetSpec)."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.target_hidden_size, config.hidden_size, bias=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Outputs of feature layers `[..., H_target]`, or several of them side by side, at the width H."""
        width = self.proj.in_features
        return cast(torch.Tensor, self.proj(features.unflatten(-1, (-1, width)))).flatten(-2)


class DFlashDrafter(LoudLoading, BlockDrafter):
    """Drafts the rest of a block in one forward from the features of the positions before it.

    Tensor names are those of the published checkpoints (see `dialects`), which `from_pretrained` loads as they are.
    The model borrows the target's input embedding and head, unless its checkpoint ships its own.
    """

    config_class: type[DFlashConfig] = DFlashConfig
    config: DFlashConfig
    main_input_name = "noise_embeds"
    layer_class: ClassVar[type[DFlashLayer]] = DFlashLayer
    _no_split_modules: ClassVar[list[str]] = ["DFlashLayer"]
    rules: ClassVar[Sequence[checks.Rule]] = (
        checks.decoder_only,
        checks.lends_modules,
        checks.widths,
        checks.feature_layers,
        checks.vocabulary,
        checks.draft_vocabulary,
        checks.special_tokens,
        checks.mask_token,
        checks.rotary_embedding,
        checks.attention_windows,
        checks.precision,
        checks.trained_target,
        checks.embeddings,
        checks.logits,
    )
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^verifier_(norm|lm_head)\."]

    #: Default decoding options of this drafter, and the report of the last call that used it.
    treespec_config: Any = None
    last_report: Any = None

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(self.layer_class(config, layer) for layer in range(config.num_hidden_layers))
        width = config.hidden_size if config.feature_adapter else config.target_hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * width, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DraftRotaryEmbedding(config)
        self.hidden_dim_adapter = FeatureAdapter(config) if config.feature_adapter else None
        vocabulary = config.vocab_size or 0
        columns = config.draft_vocab_size or vocabulary
        self.embed_tokens = nn.Embedding(vocabulary, config.hidden_size) if config.own_embedding else None
        self.lm_head = nn.Linear(config.hidden_size, columns, bias=False) if config.own_head else None
        reduced = config.draft_vocab_size is not None
        #: Token of each column of the head, less the column, long `[draft_vocab_size]`.
        self.register_buffer("d2t", torch.zeros(columns, dtype=torch.long) if reduced else None)
        #: Which tokens have a column, bool `[vocab_size]`.
        self.register_buffer("t2d", torch.arange(vocabulary) < columns if reduced else None)
        self.post_init()

    @classmethod
    def recognises(cls, config: dict[str, Any], tensor_names: frozenset[str] = frozenset()) -> bool:
        """Whether a checkpoint is one of this family, from its `config.json` and, where known, its tensors."""
        if config.get("model_type") == DFlashConfig.model_type:
            return True
        if "treeflash_config" in config or find_dialect(config) is None:
            return False
        return cls.refusal(config) is None and fits(tensor_names)

    @classmethod
    def refusal(cls, config: dict[str, Any]) -> str | None:
        return convert_deepspec.refusal(config)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Loads a drafter in this package's format or a published dialect; see `LoudLoading.from_pretrained`.

        Raises:
            ValueError: Tensors are missing, unexpected or have another shape, or `d2t` and `t2d` contradict each
                other; the message names them.
        """
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        ids, present = model.target_ids, model.own("t2d")
        if ids is not None and ids.sort().values.tolist() != present.nonzero().flatten().tolist():
            raise ValueError(
                "d2t and t2d contradict each other: the token of column i is i + d2t[i], and these must be the "
                f"{int(present.sum())} distinct tokens that t2d marks. A d2t of token ids instead of offsets does not "
                "fit; subtract the column from each."
            )
        return loaded

    @property
    def drafted_depths(self) -> int:
        return self.config.drafted_depths

    def own(self, name: str) -> Any:
        """A module or tensor that a checkpoint may have beyond the layers; None where this one has it not."""
        return getattr(self.backbone, name, None)

    @property
    def target_ids(self) -> torch.Tensor | None:
        """Token of each column of its own head, long `[draft_vocab_size]`; None = they are the same."""
        d2t = self.own("d2t")
        return None if d2t is None else d2t + torch.arange(len(d2t), device=d2t.device)

    def borrow(self, target: PreTrainedModel) -> TargetModules:
        """The embedding and the head to draft with: the target's, and in their place what this drafter has itself."""
        return DraftVocabulary(
            target,
            self.own("embed_tokens"),
            self.own("lm_head"),
            self.target_ids,
            input_scale=self.config.input_embedding_scale,
            output_multiplier=self.config.output_multiplier,
            softcap=self.config.final_logit_softcapping,
        )

    def fuse(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Contribution `[B, T, H]` of the `index`-th feature layer's output `[B, T, H_target]` to the features."""
        width = self.fc.in_features // len(self.config.target_layer_ids)
        weight = self.fc.weight[:, index * width : (index + 1) * width]
        return F.linear(self.adapt(hidden.to(weight.device, weight.dtype)), weight)

    def adapt(self, features: torch.Tensor) -> torch.Tensor:
        """Feature layers' outputs, one or several side by side, at the width that `fc` takes."""
        adapter = self.own("hidden_dim_adapter")
        return features if adapter is None else adapter(features)

    def fuse_all(self, features: torch.Tensor) -> torch.Tensor:
        """Context rows `[B, T, H]` of the feature layers' outputs, concatenated, `[B, T, layers · H_target]`."""
        return self.hidden_norm(self.fc(self.adapt(features.to(self.fc.weight.dtype))))

    def decode(
        self, block: torch.Tensor, context: torch.Tensor | None, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Final hidden states of block rows, `[B, S, H]`: `denoise`, then the final norm."""
        return self.norm(self.denoise(block, context, positions, attend))

    def denoise(
        self, block: torch.Tensor, context: torch.Tensor | None, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Last layer's hidden states of block rows, before the final norm, `[B, S, H]`.

        Args:
            block: Embeddings of the block rows, `[B, S, H]`.
            context: New context rows, `hidden_norm` of the features, `[B, T, H]`; None where there are none.
            positions: Positions of the context rows, then of the block rows, long `[B, T + S]`.
            attend: What each layer's queries see.
        """
        cos, sin = self.rotary_emb(block, positions)
        for layer in self.layers:
            block = layer(block, context, cos, sin, attend)
        return block

    def project_context(
        self, context: torch.Tensor, positions: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Every layer's keys and values `[B, Hkv, T, D]` of context rows `[B, T, H]`, without drafting."""
        cos, sin = self.rotary_emb(context, positions)
        for layer in self.layers:
            yield cast(DFlashLayer, layer).self_attn.keys_values(context, cos, sin)

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """One draft forward by the protocol of transformers' `DFlashCache`: append context and block, crop the block.

        Args:
            noise_embeds: Embeddings of the anchor and the masks, `[B, S, H]`.
            context_hidden_states: Features of the newly committed positions, the feature layers' outputs
                concatenated, `[B, T, layers · H_target]`.
            position_ids: Their positions, then the block's, long `[B, T + S]`; counted on from the cache when None.
            attention_mask: 1 for every real column of cache, context and block, `[B, columns]`; None = all.
            cache: Where keys and values of earlier rounds are; the caller crops the block off again.

        Raises:
            ValueError: The drafter has its own embedding or head, or predicts from the anchor's row: that loop takes
                the target's, and leaves the row out.
        """
        config = self.config
        if config.own_embedding or config.own_head or config.sample_from_anchor:
            raise ValueError(
                "transformers' DFlash loop drafts with the target's embedding and head from the masks' rows; this "
                f"drafter has own_embedding={config.own_embedding}, own_head={config.own_head}, sample_from_anchor="
                f"{config.sample_from_anchor}. Leave out speculation_type, and this package's own loop drafts."
            )
        cache = cache if cache is not None else kwargs.get("past_key_values")
        return self._append_and_decode(noise_embeds, context_hidden_states, position_ids, attention_mask, cache)

    def _append_and_decode(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
    ) -> BaseModelOutput:
        context = self.fuse_all(context_hidden_states)
        block = noise_embeds.to(context.dtype)
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(seen, seen + context.shape[1] + block.shape[1], device=block.device)[None]

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            if cache is not None:
                keys, values = cache.update(keys, values, layer)
            columns = torch.arange(keys.shape[2], device=keys.device)
            valid = None if attention_mask is None else attention_mask[:, -len(columns) :].bool()
            mask = block_mask(
                columns[None, -queries.shape[2] :],
                columns[None],
                valid,
                self.config.layer_window(layer),
                self.config.layer_is_causal(layer),
                self.config.window_from,
            )
            return grouped_attention(queries, keys, values, mask)

        return BaseModelOutput(last_hidden_state=self.decode(block, context, position_ids, attend))

    @torch.no_grad()
    def probe(self) -> torch.Tensor:
        """Hidden states `[1, block_size, H]` of a block over four random features."""
        config, weight = self.config, self.fc.weight
        generator = torch.Generator().manual_seed(0)
        width = len(config.target_layer_ids) * config.target_hidden_size
        block = torch.randn(1, config.block_size, config.hidden_size, generator=generator).to(weight)
        features = torch.randn(1, 4, width, generator=generator).to(weight)
        return self._append_and_decode(block, features).last_hidden_state

    def start(self, target: PreTrainedModel, batch_size: int, max_length: int) -> Any:
        """Opens a session for one `generate` call; see `DFlashSession`."""
        return DFlashSession(self, target, batch_size, max_length)
