"""The published dialects of DFlash checkpoints: how each is told and turned into this package's fields.

Tensors need no conversion: in every dialect they have the names that `DFlashDrafter` gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import convert_deepspec, convert_dflash, convert_speculators


@dataclass(frozen=True)
class Dialect:
    """One way to write a DFlash checkpoint.

    Attributes:
        recognises: Whether a `config.json` is written in it.
        convert: Fields of `DFlashConfig` from a `config.json` and the names of the tensors beside it.
    """

    recognises: Callable[[Mapping[str, Any]], bool]
    convert: Callable[[Mapping[str, Any], frozenset[str]], dict[str, Any]]


#: The narrower ones first.
DIALECTS = (
    Dialect(convert_speculators.is_speculators, convert_speculators.convert_config),
    Dialect(convert_deepspec.is_deepspec, convert_deepspec.convert_config),
    Dialect(convert_dflash.is_zlab, convert_dflash.convert_config),
)

#: How the names of the tensors begin.
TENSORS = ("layers.", "fc.", "hidden_norm.", "norm.", "embed_tokens.", "lm_head.", "hidden_dim_adapter.")
#: What else speculators writes: the reduced vocabulary, and copies of the target's modules, which are left out.
SPECULATORS_TENSORS = ("t2d", "d2t", "verifier_norm.", "verifier_lm_head.")


def find_dialect(config: Mapping[str, Any]) -> Dialect | None:
    """The dialect of a `config.json`; None = this package's own format, or no DFlash drafter."""
    return next((dialect for dialect in DIALECTS if dialect.recognises(config)), None)


def fits(tensor_names: frozenset[str]) -> bool:
    """Whether a checkpoint's tensors are those of a DFlash drafter; no names = unknown, hence yes."""
    known = TENSORS + SPECULATORS_TENSORS
    return not tensor_names or ("fc.weight" in tensor_names and all(name.startswith(known) for name in tensor_names))
