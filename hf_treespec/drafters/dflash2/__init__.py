"""DFlash 2: DFlash with convolutions along the block and a selector of candidate paths (z-lab and Inco AI, 2026)."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ..auto import register
from .configuration_dflash2 import DFlash2Config
from .convolution import DynamicConvolution
from .modeling_dflash2 import DFlash2Drafter
from .selector import CandidateSelector
from .session import DFlash2Session

AutoConfig.register(DFlash2Config.model_type, DFlash2Config, exist_ok=True)
AutoModel.register(DFlash2Config, DFlash2Drafter, exist_ok=True)
AutoModelForCausalLM.register(DFlash2Config, DFlash2Drafter, exist_ok=True)
register(DFlash2Drafter)

__all__ = ["CandidateSelector", "DFlash2Config", "DFlash2Drafter", "DFlash2Session", "DynamicConvolution"]
