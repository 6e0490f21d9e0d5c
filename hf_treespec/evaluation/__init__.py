"""Measuring and checking: the demo, the benchmark, and the comparison with plain decoding."""

from .verification import Difference, Verification, verify

__all__ = ["Difference", "Verification", "verify"]
