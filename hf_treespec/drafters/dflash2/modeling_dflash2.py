"""The DFlash 2 drafter: a DFlash drafter with convolutions round its sublayers and a selector of candidates.

z-lab and Inco AI, 2026 (inco.ai/blog/dflash2). Facts and mathematics are those of the public code, PyPI `dflash` 0.1.0
(MIT), checked against its outputs, and of vllm-project/vllm#52816; both read the published checkpoints
`z-lab/Qwen3.8-27B-DFlash2` and `z-lab/Muse-Glimmer-30B-DFlash2`. Beside DFlash's tensors there are

    layers.{i}.attention_conv.base_kernel               [2, taps, H]
    layers.{i}.attention_conv.kernel_projection.weight  [2 · taps · H / group size, H]
    layers.{i}.mlp_conv.…                               likewise
    candidate_selector.predecessor_codebook             [V, r]
    candidate_selector.successor_codebook               [V, r]
    candidate_selector.hidden_projection.weight         [r, H]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel
from transformers import initialization as init

from .. import checks
from ..base import BlockDrafter
from ..dflash import DFlashConfig, DFlashDrafter
from ..dflash.modeling_dflash import Attend, DFlashLayer
from ..loading import is_loading
from .configuration_dflash2 import DFlash2Config
from .convert_dflash2 import is_published
from .convolution import DynamicConvolution
from .selector import CandidateSelector
from .session import DFlash2Session

_PARTS = ("layers.", "fc.", "hidden_norm.", "norm.", "candidate_selector.")


class DFlash2Layer(DFlashLayer):
    """DFlash's decoder layer, a convolution round each of its two sublayers."""

    def __init__(self, config: DFlashConfig, layer: int) -> None:
        super().__init__(config, layer)
        assert isinstance(config, DFlash2Config)
        self.attention_conv = DynamicConvolution(config)
        self.mlp_conv = DynamicConvolution(config)

    def forward(
        self,
        hidden: torch.Tensor,
        context: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        def attention(rows: torch.Tensor) -> torch.Tensor:
            mixed: torch.Tensor = self.self_attn(rows, context, cos, sin, attend)
            return mixed

        hidden = hidden + self.attention_conv(self.input_layernorm(hidden), attention)
        return hidden + self.mlp_conv(self.post_attention_layernorm(hidden), self.mlp)


def wide_range(drafter: BlockDrafter, target: PreTrainedModel | None = None) -> Iterator[checks.Finding]:
    """No part of the drafter is in float16, whose range the method leaves.

    The features of real text drive the residual stream of the published drafters beyond it: drafts turn into NaN and
    nothing is accepted (vllm-project/vllm#55250, bstnxbt/dflash-mlx#60). Random features, which `checks.finite` looks
    at, may not show it.
    """
    halves = [name for name, parameter in drafter.named_parameters() if parameter.dtype == torch.float16]
    if not halves:
        yield checks.Finding("precision", checks.Status.fits, str(drafter.dtype).removeprefix("torch."))
        return
    yield checks.Finding(
        "precision",
        checks.Status.wrong,
        f"{len(halves)} tensors of the drafter are float16 ({halves[0]}, …)",
        "a DFlash 2 drafter overflows in it and none of its drafts are accepted",
        "Load it with dtype=torch.bfloat16 or dtype=torch.float32, or cast it with .to(torch.bfloat16); the target "
        "may keep its dtype.",
    )


class DFlash2Drafter(DFlashDrafter):
    """Drafts a block as DFlash does, and scores its candidates in pairs of neighbouring depths.

    Tensor names are those of the published checkpoints, which `from_pretrained` loads as they are.

    A drafter in float16 is refused, at loading and when it is attached; see `wide_range`.
    """

    config_class: type[DFlash2Config] = DFlash2Config
    config: DFlash2Config
    layer_class: ClassVar[type[DFlashLayer]] = DFlash2Layer
    rules: ClassVar[Sequence[checks.Rule]] = tuple(
        wide_range if rule is checks.precision else rule for rule in DFlashDrafter.rules
    )
    _no_split_modules: ClassVar[list[str]] = ["DFlash2Layer"]

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Loads a drafter; see `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: Tensors are missing, unexpected or have another shape, or it would be in float16.
        """
        loaded = super().from_pretrained(*args, **kwargs)
        for finding in wide_range(loaded[0] if isinstance(loaded, tuple) else loaded):
            if finding.status is checks.Status.wrong:
                raise ValueError(str(finding))
        return loaded

    @classmethod
    def recognises(cls, config: dict[str, Any], tensor_names: frozenset[str] = frozenset()) -> bool:
        """Whether a checkpoint is one of this family, from its `config.json` and, where known, its tensors."""
        if config.get("model_type") == DFlash2Config.model_type:
            return True
        if not is_published(config):
            return False
        return not tensor_names or (
            "candidate_selector.successor_codebook" in tensor_names
            and all(name.startswith(_PARTS) for name in tensor_names)
        )

    def start(self, target: PreTrainedModel, batch_size: int, max_length: int) -> Any:
        """Opens a session for one `generate` call; see `DFlash2Session`."""
        return DFlash2Session(self, target, batch_size, max_length)

    def _init_weights(self, module: torch.nn.Module) -> None:
        super()._init_weights(module)
        # A tensor that a checkpoint lacks keeps its NaN.
        if is_loading():
            return
        if isinstance(module, DynamicConvolution):
            identity = torch.zeros_like(module.base_kernel)
            identity[:, 0] = 1.0
            init.copy_(module.base_kernel, identity)
            init.zeros_(module.kernel_projection.weight)
        elif isinstance(module, CandidateSelector):
            init.normal_(module.predecessor_codebook, std=self.config.initializer_range)
            init.zeros_(module.successor_codebook)
