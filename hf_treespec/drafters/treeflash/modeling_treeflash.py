"""The TreeFlash drafter: a DFlash drafter whose depths are corrected for the token before them (arXiv 2606.03819)."""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from ..dflash import DFlashDrafter
from ..loading import is_loading
from ..rotary import DraftRotaryEmbedding
from .approximation import ARApproximation
from .configuration_treeflash import TreeFlashConfig
from .session import TreeFlashSession

_OF_A_FILE = ("model_type", "architectures", "transformers_version", "_name_or_path")


class TreeFlashDrafter(DFlashDrafter):
    """A DFlash drafter under `model`, and the head `ar_approximation` beside it (None = plain DFlash).

    Tensor names are those of the published checkpoints, which `from_pretrained` loads as they are.
    """

    config_class: type[TreeFlashConfig] = TreeFlashConfig
    config: TreeFlashConfig

    def __init__(self, config: TreeFlashConfig) -> None:
        # Not DFlashDrafter's: its modules live in the backbone here, where published checkpoints have them.
        super(DFlashDrafter, self).__init__(config)
        self.model = DFlashDrafter(config)
        self.ar_approximation = ARApproximation(config) if config.ar_approximation else None
        self.post_init()

    @classmethod
    def from_dflash(cls, dflash: DFlashDrafter, *, share: bool = False, **options: Any) -> Self:
        """An untrained TreeFlash drafter on a DFlash drafter's weights; until it is trained it drafts the same.

        Args:
            dflash: The drafter to start from; its device and dtype are kept.
            share: Whether to use its very tensors instead of a copy.
            options: Fields of `TreeFlashConfig`.

        Raises:
            ValueError: It is of another family, whose tensors and configuration a TreeFlash checkpoint cannot hold.
        """
        if type(dflash) is not DFlashDrafter:
            raise ValueError(
                f"a TreeFlash drafter starts from a DFlashDrafter, not from a {type(dflash).__name__}; pass a DFlash "
                "drafter or train one for the target."
            )
        fields = {name: value for name, value in dflash.config.to_dict().items() if name not in _OF_A_FILE}
        with torch.device("meta"):
            drafter = cls(cls.config_class(**{**fields, **options}))
        backbone = dflash.with_options()
        drafter.model = backbone if share else copy.deepcopy(backbone)
        if drafter.ar_approximation is not None:
            head = drafter.ar_approximation.to_empty(device=dflash.device).to(dflash.dtype)
            head.apply(drafter._init_weights)
        return drafter.train(dflash.training)

    @classmethod
    def recognises(cls, config: dict[str, Any], tensor_names: frozenset[str] = frozenset()) -> bool:
        """Whether a checkpoint is one of this family, from its `config.json` and, where known, its tensors."""
        if config.get("model_type") == TreeFlashConfig.model_type:
            return True
        if "treeflash_config" not in config:
            return False
        parts = ("model.", "ar_approximation.")
        return not tensor_names or (
            "model.fc.weight" in tensor_names and all(name.startswith(parts) for name in tensor_names)
        )

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        return self.model.layers

    @property
    def fc(self) -> nn.Linear:  # type: ignore[override]
        return self.model.fc

    @property
    def hidden_norm(self) -> nn.RMSNorm:  # type: ignore[override]
        return self.model.hidden_norm

    @property
    def norm(self) -> nn.RMSNorm:  # type: ignore[override]
        return self.model.norm

    @property
    def rotary_emb(self) -> DraftRotaryEmbedding:  # type: ignore[override]
        return self.model.rotary_emb

    @property
    def backbone(self) -> DFlashDrafter:
        return self.model

    @property
    def weights(self) -> nn.Module:
        # Not the backbone, which a DFlash drafter may share.
        return self.ar_approximation or self.model

    def correct(self, previous_embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states corrected for the token before them, `[..., H]`, still to pass the final norm.

        Args:
            previous_embeddings: The target's embeddings of the previous tokens, `[..., M, H]` or `[..., H]`.
            hidden: Last layer's states before the final norm (`denoise`); `[..., 1, H]` for M parents.
        """
        if self.ar_approximation is None:
            return hidden.expand(torch.broadcast_shapes(previous_embeddings.shape, hidden.shape))
        corrected: torch.Tensor = self.ar_approximation(
            previous_embeddings, hidden, self.ar_approximation.project(self.norm(hidden))
        )
        return corrected

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # A tensor that a checkpoint lacks keeps its NaN.
        if self.ar_approximation is not None and module is self.ar_approximation.d and not is_loading():
            init.zeros_(self.ar_approximation.d.weight)

    def start(self, target: PreTrainedModel, batch_size: int, max_length: int) -> Any:
        """Opens a session for one `generate` call: a `TreeFlashSession`, or DFlash's where there is no head."""
        if self.ar_approximation is None:
            return super().start(target, batch_size, max_length)
        return TreeFlashSession(self, target, batch_size, max_length)
