"""When to stop drafting, and when not to draft at all: the policies, what they measure, and their names."""

from .adaptive import Adaptive
from .base import DraftLength, Length
from .costs import COLUMN, Costs
from .policies import AdaEDL, Confidence, Fixed, Heuristic
from .registry import from_dict, policies, resolve, to_dict

__all__ = [
    "COLUMN",
    "AdaEDL",
    "Adaptive",
    "Confidence",
    "Costs",
    "DraftLength",
    "Fixed",
    "Heuristic",
    "Length",
    "from_dict",
    "policies",
    "resolve",
    "to_dict",
]
