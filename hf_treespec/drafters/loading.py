"""Loading a drafter's weights so that nothing can go missing quietly."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from .checks import Status, finite

_LOADING: ContextVar[bool] = ContextVar("hf_treespec_loading", default=False)
#: transformers replaces functions of torch while it loads, for all threads, and puts back what it found: of two loads
#: at the same time, the second would put back the first one's replacements for good.
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def _loading() -> Iterator[None]:
    token = _LOADING.set(True)
    try:
        yield
    finally:
        _LOADING.reset(token)


def is_loading() -> bool:
    """Whether weights are being initialised because a checkpoint lacks them."""
    return _LOADING.get()


class LoudLoading:
    """Mixin for a `PreTrainedModel`: `from_pretrained` raises where transformers warns.

    A tensor missing from the checkpoint would otherwise be drawn at random and only cost acceptance. As a second guard
    such a tensor is filled with NaN. A model built from a configuration is initialised as usual.
    """

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Loads a drafter; see `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: Tensors are missing, unexpected or have another shape, or float16 does not hold them; the
                message names them.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs["ignore_mismatched_sizes"] = True
        # Else transformers takes pickled weights where there are no others.
        kwargs.setdefault("use_safetensors", True)
        with _ONE_AT_A_TIME, _loading():
            model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        found = {
            "missing": info["missing_keys"],
            "unexpected": info["unexpected_keys"],
            "misshaped": [f"{name} {[*has]} instead of {[*wants]}" for name, has, wants in info["mismatched_keys"]],
        }
        problems = [f"{what}: {', '.join(sorted(names))}" for what, names in found.items() if names]
        if problems:
            raise ValueError(
                f"the checkpoint does not fit {cls.__name__} with its config.json. Tensors {'; '.join(problems)}. "
                "Use the checkpoint's own config.json, or the class its architecture names."
            )
        for finding in finite(model):
            if finding.status is Status.wrong:
                raise ValueError(str(finding))
        return (model, info) if wants_info else model

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[misc]
        if is_loading():
            for parameter in module.parameters(recurse=False):
                init.constant_(parameter, torch.nan)
