"""The small target and its drafters that come in the package, to try everything without a download."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..drafters import AutoDrafter
from ..drafters.base import BlockDrafter

_FOLDER = Path(__file__).parent


def path(name: str) -> Path:
    """Folder of an embedded model: `"target"`, or a drafter family.

    Raises:
        FileNotFoundError: The installation lacks it.
    """
    folder = _FOLDER / name
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"The embedded model `{name}` is not in this installation (no weights in {folder}). Reinstall "
            "hf-treespec from a wheel or a complete checkout, or train the pair with examples/train_embedded.py."
        )
    return folder


def load(
    dtype: torch.dtype | None = None, device: torch.device | str | None = None, *, family: str = "dflash"
) -> tuple[PreTrainedModel, BlockDrafter, PreTrainedTokenizerBase]:
    """Loads the embedded target, one of its drafters and their tokenizer.

    Args:
        dtype: Of both models; float32 by default (they lie on disk in float16).
        device: Where to put them; the CPU by default.
        family: Drafter family, the name of its folder.

    Raises:
        FileNotFoundError: The installation lacks the files.
    """
    paths = [path("target"), path(family)]
    dtype, device = dtype or torch.float32, device or "cpu"
    target = AutoModelForCausalLM.from_pretrained(paths[0], dtype=dtype, local_files_only=True).to(device)
    drafter = AutoDrafter.from_pretrained(paths[1], dtype=dtype, local_files_only=True).to(device)
    return target, drafter, AutoTokenizer.from_pretrained(paths[0], local_files_only=True)
