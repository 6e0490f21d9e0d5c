"""DFlash: block diffusion drafting (arXiv 2602.06036)."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ..auto import register
from .configuration_dflash import DFlashConfig
from .modeling_dflash import DFlashDrafter
from .session import DFlashSession

AutoConfig.register(DFlashConfig.model_type, DFlashConfig, exist_ok=True)
AutoModel.register(DFlashConfig, DFlashDrafter, exist_ok=True)
AutoModelForCausalLM.register(DFlashConfig, DFlashDrafter, exist_ok=True)
register(DFlashDrafter)

__all__ = ["DFlashConfig", "DFlashDrafter", "DFlashSession"]
