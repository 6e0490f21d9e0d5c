"""Finds the family a drafter checkpoint belongs to.

A family is a subpackage of `hf_treespec.drafters` that calls `register` when it is imported.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from transformers import PreTrainedConfig

from ..sources import find_source
from .base import BlockDrafter
from .tensor_names import HUB_ARGUMENTS, read_tensor_names


class DrafterFamily(Protocol):
    """What a registered drafter class offers beside being a `BlockDrafter`."""

    @classmethod
    def recognises(cls, config: dict[str, Any], tensor_names: frozenset[str] = ...) -> bool:
        """Whether a checkpoint is one of this family; no tensor names = unknown."""


_FAMILIES: list[type[BlockDrafter]] = []


def register(family: type[BlockDrafter]) -> None:
    """Makes a drafter class known to `AutoDrafter`. It needs a `recognises` class method (`DrafterFamily`)."""
    if family not in _FAMILIES:
        _FAMILIES.append(family)


def families() -> tuple[type[BlockDrafter], ...]:
    """Every registered drafter class, after importing every subpackage beside this module."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.ispkg:
            importlib.import_module(f"{package}.{module.name}")
    return tuple(_FAMILIES)


def find_family(config: Mapping[str, Any], tensor_names: frozenset[str] = frozenset()) -> type[BlockDrafter] | None:
    """The drafter class of a checkpoint, from its `config.json` and, where known, the names of its tensors."""
    for family in families():
        if cast(DrafterFamily, family).recognises(dict(config), tensor_names):
            return family
    return None


class AutoDrafter:
    """Loads a drafter of whichever family it belongs to."""

    @classmethod
    def from_pretrained(cls, id_or_path: str | Path, **kwargs: Any) -> BlockDrafter:
        """Loads a drafter from a folder or the Hub; remote code is never run.

        Args:
            kwargs: Passed on to the family's `from_pretrained`.

        Raises:
            FileNotFoundError: It is a path, and there is nothing.
            ValueError: No family recognises the checkpoint.
        """
        source = find_source(id_or_path)
        hub_kwargs = {name: kwargs[name] for name in HUB_ARGUMENTS if kwargs.get(name) is not None}
        config, _ = PreTrainedConfig.get_config_dict(source, **hub_kwargs)
        # The configuration alone rules most repositories out, so that weights are fetched only for a likely drafter.
        family = find_family(config)
        if family is not None:
            family = find_family(config, read_tensor_names(source, **hub_kwargs))
        if family is None:
            for known in families():
                reason = known.refusal(config)
                if reason is not None:
                    raise ValueError(f"{source}: {reason}")
            raise ValueError(
                f"{source} is no drafter this package knows: model_type {config.get('model_type')!r}, architectures "
                f"{config.get('architectures')}. Known families: {[known.__name__ for known in families()]}."
            )
        return cast(BlockDrafter, family.from_pretrained(source, **kwargs))
