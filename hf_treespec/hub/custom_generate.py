"""What a published drafter's `custom_generate/generate.py` does."""

from __future__ import annotations

import weakref
from typing import Any

from transformers import PreTrainedModel

from ..drafters import AutoDrafter
from ..drafters.base import BlockDrafter

#: Arguments of `generate` that transformers means for the loading from the Hub.
_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "token")

#: The last drafter loaded for each target, and what it was asked for by.
_loaded: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, BlockDrafter]] = weakref.WeakKeyDictionary()


def generate_with(repo_id: str, model: PreTrainedModel, **arguments: Any) -> Any:
    """Generates with a drafter from the Hub, which is loaded once for a target and moved to its device.

    Args:
        repo_id: The drafter's repository.
        model: The target.
        arguments: Of `generate`; `revision`, `token` and the like say which drafter is loaded, and how.

    Raises:
        ValueError: There is an assistant already.
    """
    hub_arguments = {name: arguments.pop(name) for name in _HUB_ARGUMENTS if name in arguments}
    if arguments.get("assistant_model") is not None:
        raise ValueError(
            f"custom_generate={repo_id!r} brings its own drafter, and assistant_model is given as well. Leave one out."
        )
    wanted = (repo_id, model.device, sorted(hub_arguments.items()))
    known, drafter = _loaded.get(model, (None, None))
    if drafter is None or known != wanted:
        drafter = AutoDrafter.from_pretrained(repo_id, dtype="auto", **hub_arguments).to(model.device)
        _loaded[model] = (wanted, drafter)
    arguments["assistant_model"] = drafter
    # The class's own: an instance whose `generate` is a custom one would come back here.
    return type(model).generate(model, **arguments)
