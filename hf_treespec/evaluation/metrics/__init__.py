"""The benchmark's figures as metrics of the `evaluate` library (extra `eval`), computed without the Hub.

from hf_treespec.evaluation.metrics import AcceptanceLength

AcceptanceLength().compute(committed=[40, 64], rounds=[10, 16])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .acceptance_length import AcceptanceLength
    from .child_accuracy import ChildAccuracy
    from .speedup import Speedup
    from .token_match import TokenMatch
    from .top_k_coverage import TopKCoverage
    from .total_variation import TotalVariation

_MODULES = {
    "AcceptanceLength": "acceptance_length",
    "ChildAccuracy": "child_accuracy",
    "Speedup": "speedup",
    "TokenMatch": "token_match",
    "TopKCoverage": "top_k_coverage",
    "TotalVariation": "total_variation",
}

__all__ = ["AcceptanceLength", "ChildAccuracy", "Speedup", "TokenMatch", "TopKCoverage", "TotalVariation"]


def __getattr__(name: str) -> Any:
    """Imports a metric, and with it `evaluate`, when it is asked for."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name in ("evaluate", "datasets"):
            raise ImportError("Metrics need the `evaluate` library: pip install 'hf-treespec[eval]'.") from error
        raise
