"""When to stop drafting, and when not to draft at all: the policies, what they measure, and their names."""

from .adaptive import Adaptive
from .base import DraftLength, Length
from .cost_model import COLUMN, Costs
from .policies import Confidence, Fixed, from_dict, policies, resolve, to_dict

__all__ = [
    "COLUMN",
    "Adaptive",
    "Confidence",
    "Costs",
    "DraftLength",
    "Fixed",
    "Length",
    "from_dict",
    "policies",
    "resolve",
    "to_dict",
]
