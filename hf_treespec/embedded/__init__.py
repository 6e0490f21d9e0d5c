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
        FileNotFoundError: There is none of that name, or the installation lacks it.
    """
    folder = _FOLDER / name
    if not folder.is_dir() and (known := sorted(entry.parent.name for entry in _FOLDER.glob("*/config.json"))):
        raise FileNotFoundError(f"There is no embedded model `{name}`; there are {', '.join(known)}.")
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
    folder = path("target")
    drafter = load_drafter(dtype, device, family=family)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=drafter.dtype, local_files_only=True)
    target = target.to(drafter.device)
    return target, drafter, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def load_drafter(
    dtype: torch.dtype | None = None, device: torch.device | str | None = None, *, family: str = "dflash"
) -> BlockDrafter:
    """Loads one of the embedded drafters alone; see `load`.

    Raises:
        FileNotFoundError: The installation lacks the files.
    """
    source, kept = path(family), dtype or torch.float32
    drafter: BlockDrafter = AutoDrafter.from_pretrained(source, dtype=kept, local_files_only=True).to(device or "cpu")
    return drafter
