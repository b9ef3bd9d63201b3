"""What fits on a card and how fast it will be, from a config and the headers of the weights: before anything is downloaded."""

from __future__ import annotations

from .choice import Candidate, Plan, plan
from .devices import CARDS, Device
from .shapes import Shapes, families
from .sizes import Part, Use, parts, recurrent_bytes, weight_bytes

__all__ = [
    "CARDS",
    "Candidate",
    "Device",
    "Part",
    "Plan",
    "Shapes",
    "Use",
    "families",
    "parts",
    "plan",
    "recurrent_bytes",
    "weight_bytes",
]
