"""What was measured, kept from one process to the next: small JSON files in the Hugging Face cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

#: Version of the files' format.
FORMAT = 4
#: Seconds after which a profile is measured again: drivers, clocks and neighbours change.
MAX_AGE = 90 * 24 * 3600
_ENVIRONMENT = "HF_TREESPEC_PROFILES"
_VERSIONS = ("torch", "transformers", "hf_treespec")

# Of the process: profiles that could not be written, and files that were warned about.
_kept: dict[Path, dict[str, Any]] = {}
_warned: set[tuple[Path, str]] = set()


@dataclass(frozen=True)
class ProfileKey:
    """What a profile is true for.

    Args:
        device: Name of the device.
        target: Shape of the target: type, layers, widths.
        drafter: Shape of the drafter.
        dtype: Dtype of the target.
        kv_dtype: Dtype of the cached K/V.
        attention: Attention implementation.
        threads: Threads a CPU computes with; 0 where that means nothing.
        torch: Version of the library.
        transformers: Version of the library.
        hf_treespec: Version of the library.
    """

    device: str
    target: str
    drafter: str
    dtype: str
    kv_dtype: str
    attention: str
    threads: int
    torch: str
    transformers: str
    hf_treespec: str

    @property
    def file_name(self) -> str:
        """A readable name that a hash makes unique; versions are left out, so that an update replaces the file."""
        fields = {name: value for name, value in asdict(self).items() if name not in _VERSIONS}
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]
        words = "-".join((self.device, self.target, self.drafter, self.dtype, self.attention))
        return f"{re.sub(r'[^a-z0-9.]+', '-', words.lower()).strip('-.')[:96]}-{digest}.json"


class ProfileStore:
    """A folder of profiles. Nothing that is wrong with it is an error: what cannot be read is measured again.

    Args:
        folder: Where the files lie; by default `$HF_TREESPEC_PROFILES`, or `treespec/profiles` in the Hugging Face
            cache.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = Path(folder) if folder is not None else _default_folder()

    def path(self, key: ProfileKey) -> Path:
        """The file of a profile, there or not."""
        return self.folder / key.file_name

    def load(self, key: ProfileKey) -> dict[str, Any] | None:
        """The profile stored for `key`; None, after a warning if there is a file, where it has to be measured."""
        path = self.path(key)
        if path in _kept:
            return _kept[path]["profile"] if _kept[path]["key"] == asdict(key) else None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _warn(path, f"cannot be read ({type(error).__name__}); measured again")
            return None
        fault = _fault(content, key)
        if fault:
            _warn(path, f"{fault}; measured again")
            return None
        profile: dict[str, Any] = content["profile"]
        return profile

    def save(self, key: ProfileKey, profile: dict[str, Any]) -> None:
        """Stores a profile in one step: readers see the old file or the new one, and the last writer wins.

        Args:
            key: What the profile is true for.
            profile: Anything JSON holds, finite numbers only.
        """
        path = self.path(key)
        content = {"format": FORMAT, "created": time.time(), "key": asdict(key), "profile": profile}
        text = json.dumps(content, indent=1, allow_nan=False)
        temporary = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, path)  # noqa: PTH105
        except OSError as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)  # noqa: PTH108
            _kept[path] = content
            _warn(path, f"cannot be written ({error.strerror}); it is kept until the process ends")
        else:
            _kept.pop(path, None)


def _default_folder() -> Path:
    chosen = os.environ.get(_ENVIRONMENT)
    if chosen:
        return Path(chosen).expanduser()
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "treespec" / "profiles"


def _fault(content: Any, key: ProfileKey) -> str:
    """What is wrong with a file's content, in words; empty for nothing."""
    if not isinstance(content, dict) or not isinstance(content.get("key"), dict):
        return "is not a profile"
    if content.get("format") != FORMAT:
        return f"has format {content.get('format')}, not {FORMAT}"
    if not isinstance(content.get("profile"), dict) or not isinstance(content.get("created"), int | float):
        return "is not a profile"
    wanted = asdict(key)
    found = content["key"]
    different = sorted(name for name in wanted.keys() | found.keys() if found.get(name) != wanted.get(name))
    if set(different) - set(_VERSIONS):
        return f"belongs to another {different[0]}"
    if different:
        return "was measured with " + ", ".join(f"{name} {found.get(name)}" for name in different)
    if abs(time.time() - content["created"]) > MAX_AGE:
        return "is too old"
    return ""


def _warn(path: Path, fault: str) -> None:
    if (path, fault) not in _warned:
        _warned.add((path, fault))
        logger.warning(f"The profile {path} {fault}.")
