"""The TreeFlash drafter: a DFlash backbone and a head that conditions every slot on the token before it.

"TreeFlash" (arXiv 2606.03819).
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from ...trees import DraftLattice
from ..base import BlockDrafter, TargetModules
from ..dflash import DFlashDrafter, DFlashSession
from ..loading import LoudLoading
from .approximation import ARApproximation
from .conditional_lattice import conditional_lattice
from .configuration_treeflash import TreeFlashConfig


class TreeFlashDrafter(LoudLoading, BlockDrafter):
    """Drafts a block in one forward and, in one more light layer, what follows each of M tokens of every depth.

    Tensor names are the published ones: the backbone under `model.`, the head under `ar_approximation.`.
    """

    config_class = TreeFlashConfig
    config: TreeFlashConfig
    main_input_name = "noise_embeds"
    _no_split_modules: ClassVar[list[str]] = ["DFlashLayer"]

    def __init__(self, config: TreeFlashConfig) -> None:
        super().__init__(config)
        self.model = DFlashDrafter(config)
        self.ar_approximation: ARApproximation | None = None
        if config.ar_approximation is not None:
            is_gated = config.ar_approximation == "swiglu"
            self.ar_approximation = ARApproximation(config.hidden_size, config.intermediate_size, is_gated)
        self.post_init()

    @classmethod
    def recognises(cls, config: dict[str, Any], tensor_names: frozenset[str] = frozenset()) -> bool:
        """Whether a checkpoint is one of this family, from its `config.json` and, where known, its tensors."""
        return config.get("model_type") == TreeFlashConfig.model_type or "treeflash_config" in config

    @classmethod
    def from_dflash(cls, drafter: DFlashDrafter, **options: Any) -> TreeFlashDrafter:
        """A drafter with a copy of a DFlash drafter's weights and an untrained head: it drafts exactly as before.

        Args:
            drafter: The DFlash drafter.
            **options: Fields of `TreeFlashConfig` beside those of the backbone.
        """
        fields = {name: value for name, value in drafter.config.to_dict().items() if name not in _FAMILY_FIELDS}
        made = cls(TreeFlashConfig(**{**fields, **options}))
        made.model.load_state_dict(drafter.state_dict())
        made.treespec_config = copy.deepcopy(drafter.treespec_config)
        return made.to(drafter.device, drafter.dtype).eval()

    @property
    def backbone(self) -> DFlashDrafter:
        """The model that denoises blocks."""
        return self.model

    def correct(self, previous: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Last hidden states given the previous token, before the norm, `[..., H]`.

        Args:
            previous: Embeddings of the previous tokens, `[..., H]`.
            hidden: The slots' last hidden states before the norm, `[..., H]`.
        """
        if self.ar_approximation is None:
            return hidden
        return self.ar_approximation(previous, hidden, self.ar_approximation.of_slots(self.model.norm(hidden)))

    def lattice(
        self, modules: TargetModules, hidden: torch.Tensor, anchors: torch.Tensor, width: int, temperature: float = 1.0
    ) -> DraftLattice:
        """What a denoised block proposes, given the token before; arguments as for `DFlashDrafter.lattice`."""
        if self.ar_approximation is None:
            return self.model.lattice(modules, hidden, anchors, width, temperature)
        config = self.config
        return conditional_lattice(
            self.ar_approximation,
            self.model.norm,
            modules,
            hidden,
            anchors,
            parents=config.num_parents,
            candidates=config.num_candidates,
            width=width,
            temperature=temperature,
            discount=config.dead_end_discount,
        )

    def check_target(self, target: PreTrainedModel) -> None:
        """Checks that this drafter can draft for `target`; see `DFlashDrafter.check_target`."""
        self.model.check_target(target)

    def start(self, target: PreTrainedModel, batch_size: int, max_length: int) -> DFlashSession:
        """Opens a session for one `generate` call; see `DFlashSession`."""
        return DFlashSession(self.model, target, batch_size, max_length, self.lattice)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ARApproximation):
            init.zeros_(module.d.weight)


#: Fields of a saved configuration that say which family it is.
_FAMILY_FIELDS = ("model_type", "architectures", "transformers_version", "auto_map", "_name_or_path")
