"""Hands a pair over to a serving engine: the files it reads, the command that starts it, and a README (`assisted handover`)."""

from __future__ import annotations

from .engines import ENGINES
from .package import Handover, hand_over

__all__ = ["ENGINES", "Handover", "hand_over"]
