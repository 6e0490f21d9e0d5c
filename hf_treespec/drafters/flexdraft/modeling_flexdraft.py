"""The FlexDraft drafter: attention projections by which a target drafts in its last layers (arXiv 2605.20022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from .. import checks
from ..base import BlockDrafter, TargetModules
from ..loading import LoudLoading, is_loading
from .attention_tuning import AttentionTuning
from .calibration import BonusCalibration
from .configuration_flexdraft import FlexDraftConfig
from .convert_flexdraft import UNUSED_TENSORS, is_released
from .layout import AttentionLayout, attention_of, decoder_of, layout_of, projections_of
from .options import FlexDraftOptions
from .rules import same_projections, same_shape, shows_no_rows, takes_mask_rows
from .session import FlexDraftSession

#: Embeddings of so many tokens at a time are averaged for a fresh mask embedding.
_CHUNK = 8192


class TunedNorm(nn.Module):
    """Tensors of a norm inside an attention; the target's own module says how it computes."""

    def __init__(self, shapes: dict[str, list[int]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


class TunedAttention(nn.Module):
    """Projections and norms that mask rows take in one layer, under the target's names for them."""

    def __init__(self, layout: AttentionLayout) -> None:
        super().__init__()
        for name, shapes in layout.items():
            weight = shapes.get("weight", [])
            if len(weight) == 2 and not name.endswith("norm"):
                self.add_module(name, nn.Linear(weight[1], weight[0], bias="bias" in shapes))
            else:
                self.add_module(name, TunedNorm(shapes))


class TunedLayer(nn.Module):
    """What mask rows have of their own in one decoder layer; the rest is the target's."""

    def __init__(self, layout: AttentionLayout) -> None:
        super().__init__()
        self.self_attn = TunedAttention(layout)


class FlexDraftDrafter(LoudLoading, BlockDrafter):
    """The target drafts for itself: mask rows pass its last layers with attention projections of their own.

    Tensor names are those of the released checkpoints, which `from_pretrained` loads as they are; it leaves the
    tensors of a release that drafting never reads (`UNUSED_TENSORS`). The drafter runs only inside its target, so it
    has no `forward`.
    """

    config_class: type[FlexDraftConfig] = FlexDraftConfig
    config: FlexDraftConfig
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = list(UNUSED_TENSORS)
    _no_split_modules: ClassVar[list[str]] = ["TunedLayer"]
    use_of_layers: ClassVar[str] = "drafts in"

    rules: ClassVar[Sequence[checks.Rule]] = (
        checks.decoder_only,
        checks.lends_modules,
        same_shape,
        takes_mask_rows,
        same_projections,
        shows_no_rows,
        checks.special_tokens,
        checks.precision,
        checks.trained_target,
        checks.embeddings,
        checks.logits,
    )

    treespec_config: Any = FlexDraftOptions()
    last_report: Any = None

    def __init__(self, config: FlexDraftConfig) -> None:
        super().__init__(config)
        layers = range(len(config.target_layer_ids))
        self.layers = nn.ModuleList(TunedLayer(config.layout(layer)) for layer in layers)
        self.mask_embedding = nn.Parameter(torch.empty(config.hidden_size))
        self.anchor_bias_mlp = (
            BonusCalibration(config.hidden_size, config.vocab_size, config.calibration_rank)
            if config.calibration_rank
            else None
        )
        self.post_init()

    @property
    def riding_load(self) -> float:
        return self.config.block_size * len(self.layers) / self.config.num_target_layers

    @classmethod
    @torch.no_grad()
    def from_target(cls, target: PreTrainedModel, num_layers: int | None = None, **options: Any) -> Self:
        """An untrained drafter for a target: its projections copied, mask rows an average token, no calibration yet.

        Args:
            target: The target; its dtype is taken over.
            num_layers: Last layers to draft in; None = 10, or a third of a target with fewer than 30.
            options: Further fields of `FlexDraftConfig`, such as `block_size`.

        Raises:
            ValueError: The target has not so many layers, or mask rows cannot pass through them.
        """
        text, (_, layers) = target.config.get_text_config(), decoder_of(target)
        count = num_layers or min(10, max(1, len(layers) // 3))
        if count > len(layers):
            raise ValueError(f"num_layers is {count}, but the target has {len(layers)} layers.")
        attentions = [attention_of(layer) for layer in layers[len(layers) - count :]]
        layouts = [layout_of(attention) for attention in attentions]
        special: dict[str, Any] = {
            name: getattr(text, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")
        }
        config = cls.config_class(
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            num_target_layers=len(layers),
            target_layer_ids=range(len(layers) - count, len(layers)),
            attention_layouts=layouts[:1] if all(layout == layouts[0] for layout in layouts) else layouts,
            **{**special, **options},
        )
        drafter = cls(config)
        drafter.check_target(target)
        for tuned, attention in zip(drafter.layers, attentions, strict=True):
            for name, source in projections_of(attention).items():
                for key, tensor in tuned.self_attn.get_submodule(name).named_parameters():  # type: ignore[union-attr]
                    found = getattr(source, key)
                    if not found.is_floating_point() or found.shape != tensor.shape:
                        raise ValueError(
                            f"the target's {name} is quantised and cannot be copied; make the drafter from the "
                            "unquantised target, it fits the quantised one."
                        )
                    tensor.copy_(found)
        drafter.mask_embedding.copy_(_mean_embedding(target))
        if drafter.anchor_bias_mlp is not None:
            drafter.anchor_bias_mlp.silence()
        return drafter.to(device=target.device, dtype=target.dtype).eval()

    @classmethod
    def recognises(cls, config: dict[str, Any], tensor_names: frozenset[str] = frozenset()) -> bool:
        """Whether a checkpoint is one of this family, from its `config.json` and, where known, its tensors."""
        if config.get("model_type") != FlexDraftConfig.model_type and not is_released(config):
            return False
        return not tensor_names or "mask_embedding" in tensor_names

    def check_target(self, target: PreTrainedModel) -> None:
        # Switches of a target that may be thrown after it was found to fit.
        for finding in shows_no_rows(self, target):
            if finding.status is checks.Status.wrong:
                raise ValueError(str(finding))
        super().check_target(target)

    def calibrated_logits(self, modules: TargetModules, hidden: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Logits of drafted depths, float32 `[…, D, V]`.

        Args:
            modules: The target's embedding and head.
            hidden: States of the depths behind the final norm, `[…, D, H]`.
            anchors: The token each block follows, long `[…]`.
        """
        logits = modules.logits(hidden)
        if self.anchor_bias_mlp is None:
            return logits
        bonus = modules.embed(anchors, hidden.dtype).unsqueeze(-2)
        return logits + self.anchor_bias_mlp(bonus, hidden).to(logits)

    def tuning(self, target: PreTrainedModel, variant: Literal["joint", "twice"] = "joint") -> AttentionTuning:
        """This drafter's hooks for `target`, not yet attached; see `AttentionTuning`."""
        return AttentionTuning(self.layers, target, self.config.split_layer, variant)

    def start(self, target: PreTrainedModel, batch_size: int, max_length: int) -> Any:
        """Opens a session for one `generate` call; see `FlexDraftSession`."""
        return FlexDraftSession(self, target, batch_size, max_length)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # A tensor that a checkpoint lacks keeps its NaN.
        if is_loading():
            return
        if isinstance(module, TunedNorm):
            for name, parameter in module.named_parameters():
                init.constant_(parameter, float(name == "weight"))
        elif isinstance(module, FlexDraftDrafter):
            init.normal_(module.mask_embedding, std=self.config.initializer_range)


def _mean_embedding(target: PreTrainedModel) -> torch.Tensor:
    """The average of all token embeddings, as they enter the first layer, `[H]`."""
    modules = TargetModules(target)
    total = torch.zeros(target.config.get_text_config().hidden_size, dtype=torch.float64)
    for first in range(0, modules.vocab_size, _CHUNK):
        tokens = torch.arange(first, min(first + _CHUNK, modules.vocab_size))
        total += modules.embed(tokens, torch.float32).sum(0).double().cpu()
    return (total / modules.vocab_size).float()
