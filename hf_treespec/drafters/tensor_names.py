"""The names of a checkpoint's tensors, without loading them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.utils import cached_file

#: Arguments of `from_pretrained` that say where files are.
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


def read_tensor_names(id_or_path: str, **hub_kwargs: Any) -> frozenset[str]:
    """Names of a checkpoint's safetensors tensors; empty where it has none."""
    optional = {**hub_kwargs, "_raise_exceptions_for_missing_entries": False}
    index = cached_file(id_or_path, "model.safetensors.index.json", **optional)
    if index is not None:
        return frozenset(json.loads(Path(index).read_text())["weight_map"])
    weights = cached_file(id_or_path, "model.safetensors", **optional)
    if weights is None:
        return frozenset()
    with safe_open(weights, framework="pt") as tensors:
        return frozenset(tensors.keys())
