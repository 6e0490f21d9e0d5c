"""How many nodes a round verifies. Pure: fed with numbers, knows no model."""

from .acceptance import CalibratedAcceptance, ReliabilityBin
from .bastion import BastionPolicy
from .calibration import Calibration
from .controller import BudgetController, best_prefix, best_rate
from .corrections import ForwardKind
from .latency import LatencyModel, LatencyPoint
from .policy import BudgetPolicy, FixedBudget, RoundRecord
from .profiles import ProfileKey, ProfileStore
from .roofline import AttentionLayers, DevicePeak, Workload, measure_peak

__all__ = [
    "AttentionLayers",
    "BastionPolicy",
    "BudgetController",
    "BudgetPolicy",
    "CalibratedAcceptance",
    "Calibration",
    "DevicePeak",
    "FixedBudget",
    "ForwardKind",
    "LatencyModel",
    "LatencyPoint",
    "ProfileKey",
    "ProfileStore",
    "ReliabilityBin",
    "RoundRecord",
    "Workload",
    "best_prefix",
    "best_rate",
    "measure_peak",
]
