"""Finds the family a drafter checkpoint belongs to.

A family is a subpackage of `hf_treespec.drafters` that calls `register` when it is imported.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..configuration import TreeSpecConfig
from ..sources import ModelFiles, find_source
from .base import BlockDrafter
from .checkpoint import Checkpoint
from .pairs import find_pair

logger = logging.get_logger(__name__)


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
    # A family that refines another one is asked first: its checkpoints look like the other's with more in them.
    for family in sorted(families(), key=lambda family: len(family.__mro__), reverse=True):
        if cast(DrafterFamily, family).recognises(dict(config), tensor_names):
            return family
    return None


def family_of(source: str) -> type[BlockDrafter] | None:
    """The drafter class of a folder or Hub id, from its `config.json` alone; None where that is no drafter's.

    Raises:
        LocalEntryNotFoundError: It is not in the cache, and the Hub cannot or may not be asked.
    """
    path = ModelFiles(source).find("config.json")
    try:
        config = json.loads(path.read_bytes()) if path is not None else None
    except ValueError:
        return None
    return find_family(config) if isinstance(config, dict) else None


class AutoDrafter:
    """Loads a drafter of whichever family it belongs to."""

    @classmethod
    def from_pretrained(
        cls,
        id_or_path: str | Path,
        target: PreTrainedModel | None = None,
        *,
        subfolder: str | None = None,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        **kwargs: Any,
    ) -> BlockDrafter:
        """Loads a drafter from a folder or the Hub.

        Not the same as `AutoModel`, which knows only this package's own format: of a checkpoint in another dialect it
        may make a model of random weights without an error.

        Code in a repository is never run and pickled weights are never opened; see `hf_treespec.drafters.checkpoint`
        for what else is checked before anything is built. All files come from one commit. Once they are in the cache,
        the Hub is asked only what commit a branch stands for, and nothing if `revision` is a commit.

        Args:
            id_or_path: Folder or Hub id.
            target: The model to draft for. With it the pair is checked at once, and the drafter put on the device of
                the target's head unless `device_map` says where.
            subfolder: Folder within the repository.
            revision: Branch, tag or commit.
            cache_dir: Folder of the cache.
            token: Who asks the Hub; by default who is logged in, False = nobody.
            local_files_only: Whether to take files from the cache only.
            force_download: Whether to download what is in the cache already.
            kwargs: Passed on to the family's `from_pretrained`: `dtype`, `device_map` and more. By default the
                drafter keeps the dtype of its checkpoint, whatever the target's: float16 may overflow in it.

        Raises:
            FileNotFoundError: There is no such folder, or no model in it; or it is not in the cache and the Hub
                cannot be asked (huggingface_hub's `LocalEntryNotFoundError`).
            HfHubHTTPError: The Hub refuses: `GatedRepoError`, `RepositoryNotFoundError`, `RevisionNotFoundError`.
            CheckpointError: The checkpoint is malformed, or not one that may be opened.
            TypeError: An argument is of another function.
            ValueError: No family recognises it, or it does not fit the target.
        """
        if kwargs.pop("trust_remote_code", None):
            raise ValueError(
                "trust_remote_code=True was passed, but AutoDrafter runs no code from a repository: each dialect it "
                f"loads is implemented in this package ({_known_families()}). Leave it out."
            )
        if isinstance(target, (str, os.PathLike)):
            raise TypeError(
                f"`target` is a loaded model, to check the drafter against, got {target!r}; load it, or leave it out."
            )
        if "device" in kwargs:
            raise TypeError(f"device={kwargs['device']!r}: use `device_map`, or `.to()` on the drafter.")
        source = find_source(id_or_path)
        files = ModelFiles(
            source,
            subfolder=subfolder,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            local_files_only=local_files_only,
            force_download=force_download,
        )
        checkpoint = Checkpoint(files)
        # The configuration alone rules most repositories out, so that weights are fetched only for a likely drafter.
        family = find_family(checkpoint.config)
        if family is not None:
            checkpoint.read_shapes()
            family = find_family(checkpoint.config, frozenset(checkpoint.shapes))
        if family is None:
            for known in families():
                reason = known.refusal(checkpoint.config)
                if reason is not None:
                    raise ValueError(f"{checkpoint}: {reason}")
            raise ValueError(
                f"{checkpoint} is no drafter this package knows: model_type {checkpoint.config.get('model_type')!r}, "
                f"architectures {checkpoint.config.get('architectures')}. Known families: {_known_families()}."
            )
        checkpoint.check_family(family)
        options = kwargs.keys() & {field.name for field in fields(TreeSpecConfig)}
        # Fields of the configuration are overridden, as `from_pretrained` does everywhere.
        misplaced = sorted(options - inspect.signature(family.config_class).parameters.keys())
        if misplaced:
            raise TypeError(
                f"{', '.join(misplaced)}: options of decoding are not part of a checkpoint. Set them on the drafter: "
                f"`drafter.with_options({misplaced[0]}={kwargs[misplaced[0]]!r})`."
            )
        drafter = cast(BlockDrafter, family.from_pretrained(files.folder, **kwargs))
        drafter.config.name_or_path = drafter.name_or_path = source
        if target is not None:
            drafter.check_target(target)
            if kwargs.get("device_map") is None:
                drafter.to(drafting_device(target))
        return drafter

    @classmethod
    def for_target(
        cls, target: PreTrainedModel | str | Path, *, dialect: str | None = None, **kwargs: Any
    ) -> BlockDrafter:
        """Loads the published drafter of a target; which one, `hf_treespec.drafters.pairs` knows.

        Args:
            target: A loaded model, whose fit is then checked at once, or its Hub id or folder.
            dialect: Which of several drafters, such as `"treeflash"`.
            kwargs: Passed on to `from_pretrained`.

        Raises:
            ValueError: No drafter is known for it; the message has near matches and how to train one.
        """
        pair = find_pair(target, dialect)
        logger.info(f"{pair.drafter} drafts for {', '.join(pair.targets)} ({pair.source}).")
        loaded = target if isinstance(target, PreTrainedModel) else None
        return cls.from_pretrained(pair.drafter, target=loaded, **kwargs)


def drafting_device(target: PreTrainedModel) -> torch.device:
    """The device that a target's head computes on, where its drafter is nearest to what it borrows."""
    head = target.get_output_embeddings()
    if head is None:
        return target.device
    hook = getattr(head, "_hf_hook", None)  # of accelerate, where weights are dispatched or offloaded
    device = getattr(hook, "execution_device", None)
    return torch.device(device) if device is not None else next(head.parameters()).device


def _known_families() -> str:
    return ", ".join(family.__name__ for family in families())
