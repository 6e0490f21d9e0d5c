"""Tree-speculative decoding for Hugging Face transformers: faster `generate()`, the same tokens.

Importing the package registers its drafters and teaches `generate()` and text-generation pipelines to take one as
`assistant_model`.
"""

from __future__ import annotations

from typing import Any

from . import embedded
from .configuration import TreeSpecConfig
from .decoding import GenerationReport, UnsupportedRequestError, install, uninstall
from .drafters.auto import AutoDrafter
from .drafters.base import BlockDrafter

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


def _publish(drafter: BlockDrafter, repo_id: str, **options: Any) -> Any:
    from .hub import publish

    return publish(drafter, repo_id, **options)


BlockDrafter.publisher = _publish
install()
