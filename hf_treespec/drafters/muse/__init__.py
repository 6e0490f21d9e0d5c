"""Muse: the DFlash drafter of Muse Glimmer, transformers' `MuseGlimmerAssistantModel`."""

from ..auto import register
from .configuration_muse import MuseConfig
from .modeling_muse import MuseDrafter

# No class is registered with transformers' Auto classes: there the model type is that of its own model.
register(MuseDrafter)

__all__ = ["MuseConfig", "MuseDrafter"]
