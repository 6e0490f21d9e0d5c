"""FlexDraft: the target drafts in its own last layers, calibrated by the bonus token (arXiv 2605.20022)."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ..auto import register
from .calibration import BonusCalibration
from .configuration_flexdraft import FlexDraftConfig
from .modeling_flexdraft import FlexDraftDrafter
from .options import FlexDraftOptions
from .packed_blocks import PackedBlocks, packed_blocks
from .session import FlexDraftSession

AutoConfig.register(FlexDraftConfig.model_type, FlexDraftConfig, exist_ok=True)
AutoModel.register(FlexDraftConfig, FlexDraftDrafter, exist_ok=True)
AutoModelForCausalLM.register(FlexDraftConfig, FlexDraftDrafter, exist_ok=True)
register(FlexDraftDrafter)

__all__ = [
    "BonusCalibration",
    "FlexDraftConfig",
    "FlexDraftDrafter",
    "FlexDraftOptions",
    "FlexDraftSession",
    "PackedBlocks",
    "packed_blocks",
]
