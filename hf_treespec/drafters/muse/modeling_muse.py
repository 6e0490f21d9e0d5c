"""The Muse drafter: a DFlash drafter whose features pass an encoder of their own name.

Layers, features, block and attention are DFlash's; see `transformers.models.muse_glimmer_assistant` for the original.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..dflash import DFlashDrafter
from ..dflash.modeling_dflash import DFlashLayer
from ..rotary import DraftRotaryEmbedding
from .configuration_muse import MuseConfig

#: End of the architecture's name; servers put something in front of it.
ARCHITECTURE = "MuseGlimmerAssistantModel"


class MuseEncoder(nn.Module):
    """Fuses the feature layers' outputs."""

    def __init__(self, config: MuseConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, config.hidden_size, bias=False)
        self.output_norm_enc = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class MuseDrafter(DFlashDrafter):
    """DFlash's drafter with the tensor names and the `config.json` of transformers' `MuseGlimmerAssistantModel`.

    Either class loads what the other one saved.
    """

    config_class: type[MuseConfig] = MuseConfig
    config: MuseConfig

    def __init__(self, config: MuseConfig) -> None:
        # Not DFlashDrafter's: features are fused in the encoder here, where published checkpoints have it.
        super(DFlashDrafter, self).__init__(config)
        self.layers = nn.ModuleList(DFlashLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.encoder = MuseEncoder(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DraftRotaryEmbedding(config)
        self.post_init()

    @classmethod
    def recognises(cls, config: dict[str, Any], tensor_names: frozenset[str] = frozenset()) -> bool:
        """Whether a checkpoint is one of this family, from its `config.json` and, where known, its tensors."""
        names = config.get("architectures") or ()
        if config.get("model_type") != MuseConfig.model_type and not any(n.endswith(ARCHITECTURE) for n in names):
            return False
        return not tensor_names or "encoder.fc.weight" in tensor_names

    @property
    def fc(self) -> nn.Linear:  # type: ignore[override]
        return self.encoder.fc

    @property
    def hidden_norm(self) -> nn.RMSNorm:  # type: ignore[override]
        return self.encoder.output_norm_enc
