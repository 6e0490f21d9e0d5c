"""How many nodes a round verifies. Pure: fed with numbers, knows no model."""

from .controller import FixedBudget

__all__ = ["FixedBudget"]
