"""Tree-speculative decoding for Hugging Face transformers: faster `generate()`, the same tokens.

Importing the package registers its drafters and teaches `generate()` and text-generation pipelines to take one as
`assistant_model`.
"""

from __future__ import annotations

from . import embedded
from .configuration import TreeSpecConfig
from .decoding import GenerationReport, UnsupportedRequestError, install, uninstall
from .drafters.auto import AutoDrafter

__version__ = "0.1.0"
__all__ = [
    "AutoDrafter",
    "GenerationReport",
    "TreeSpecConfig",
    "UnsupportedRequestError",
    "embedded",
    "install",
    "uninstall",
]

install()
