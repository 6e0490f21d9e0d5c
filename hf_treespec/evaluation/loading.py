"""Loading a target, its drafter and its tokenizer by the names that the command line takes."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .. import embedded
from ..drafters import AutoDrafter
from ..drafters.auto import family_of
from ..drafters.base import BlockDrafter
from ..sources import find_source

_EMBEDDED = "embedded"


def load_pair(
    target: str, drafter: str, *, dtype: torch.dtype | None = None, device: str | None = None
) -> tuple[PreTrainedModel, BlockDrafter, PreTrainedTokenizerBase]:
    """Loads a pair from Hub ids or paths, or the one in the package.

    Args:
        target: Hub id, path, or `"embedded"`.
        drafter: Hub id, path, `"embedded"` or `"embedded:FAMILY"`.
        dtype: Of both models; by default the target's own, or float32 for the embedded pair. A drafter is never cast
            to float16, in which its activations may overflow: it keeps its own dtype then.
        device: By default the GPU where there is one.

    Raises:
        FileNotFoundError: A path leads nowhere, or there is no such embedded model.
        ValueError: The target is a drafter.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    name, _, family = drafter.partition(":")
    if target == name == _EMBEDDED:
        return embedded.load(dtype, device, family=family or "dflash")
    if target == _EMBEDDED:
        dtype = dtype or torch.float32
    source = find_target(target)
    assistant = load_drafter(drafter, dtype=dtype, device=device)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype or "auto").to(device)
    return model, assistant, AutoTokenizer.from_pretrained(source)


def find_target(target: str) -> str:
    """A target's folder or Hub id, after a look at its `config.json`.

    Args:
        target: Hub id, path, or `"embedded"`.

    Raises:
        FileNotFoundError: A path leads nowhere, or the Hub cannot be reached, which transformers takes half a minute
            to find out.
        ValueError: It is a drafter, of which `AutoModelForCausalLM` may make a model of random weights.
    """
    source = str(embedded.path("target")) if target == _EMBEDDED else find_source(target)
    family = family_of(source)
    if family is not None:
        raise ValueError(
            f"The target {target!r} is a drafter ({family.__name__}). Give the causal LM that it was trained for."
        )
    return source


def load_drafter(drafter: str, *, dtype: torch.dtype | None = None, device: str | None = None) -> BlockDrafter:
    """Loads a drafter alone, as `load_pair` does.

    Args:
        drafter: Hub id, path, `"embedded"` or `"embedded:FAMILY"`.
        dtype: Of its weights.
        device: By default the GPU where there is one.

    Raises:
        FileNotFoundError: A path leads nowhere.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    name, _, family = drafter.partition(":")
    if name == _EMBEDDED:
        return embedded.load_drafter(dtype, device, family=family or "dflash")
    kept = "auto" if dtype in (None, torch.float16) else dtype
    return AutoDrafter.from_pretrained(find_source(drafter), dtype=kept).to(device)
