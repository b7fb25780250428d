"""From measured constants to pool sizes: calibrate, simulate, plan, validate. Plain Python without torch."""

from ..costs import CostModel
from .simulate import simulate
from .workload import Request

__all__ = ["CostModel", "Request", "simulate"]
