"""TreeFlash: DFlash with a head that looks back one token (arXiv 2606.03819)."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ..auto import register
from .approximation import ARApproximation
from .configuration_treeflash import TreeFlashConfig
from .modeling_treeflash import TreeFlashDrafter
from .session import TreeFlashSession

AutoConfig.register(TreeFlashConfig.model_type, TreeFlashConfig, exist_ok=True)
AutoModel.register(TreeFlashConfig, TreeFlashDrafter, exist_ok=True)
AutoModelForCausalLM.register(TreeFlashConfig, TreeFlashDrafter, exist_ok=True)
register(TreeFlashDrafter)

__all__ = ["ARApproximation", "TreeFlashConfig", "TreeFlashDrafter", "TreeFlashSession"]
