"""Where models are loaded from: folders and Hub ids."""

from __future__ import annotations

import os
from pathlib import Path


def find_source(name: str | Path) -> str:
    """A model's folder, `~` expanded, or its Hub id as it is.

    A name that can only be a path is told from a Hub id here, since the Hub would call it a malformed id.

    Raises:
        FileNotFoundError: It is a path, and there is nothing.
    """
    source = os.path.expanduser(name)  # noqa: PTH111  (pathlib raises where there is no such user)
    is_path = isinstance(name, Path) or str(name).startswith((".", "~", os.sep)) or source.count(os.sep) > 1
    if is_path and not Path(source).exists():
        raise FileNotFoundError(f"There is no folder {str(name)!r}. Give one that exists, or a Hub id `owner/name`.")
    return source


def is_hub_id(name: str) -> bool:
    """Whether a model's name is a Hub id `owner/name` rather than a folder."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()
