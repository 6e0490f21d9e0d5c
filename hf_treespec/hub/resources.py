"""Folders that lie beside the package in a checkout and inside it in a wheel."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable

_PACKAGE = "hf_treespec"


def resource_folder(name: str) -> Traversable:
    """The folder `model_cards` or `hub_configs`.

    Raises:
        FileNotFoundError: The installation lacks it.
    """
    package = files(_PACKAGE)
    for folder in (package / f"_{name}", package / ".." / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"This installation has no {name}: {package} holds no _{name}. Reinstall hf-treespec from a wheel or a "
        "complete checkout."
    )
