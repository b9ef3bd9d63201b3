"""The drafting methods, one file each, and the registry that turns a caller's `draft=` into one of them.

Methods are registered in the order in which tables list them.
"""

# ruff: noqa: I001
from __future__ import annotations

from .base import Call, Drafter, Drafting, Spec, Target
from .registry import METHODS, parse, read, register
from .suffix import Suffix
from .ngram import NGram
from .recycle import TokenRecycling
from .early_exit import EarlyExit
from .layer_skip import LayerSkip
from .quantized_self import QuantizedSelf
from .draft_model import DraftModel
from .draft_tree import DraftTree
from .medusa import Medusa
from .eagle import Eagle
from .combined import Combined
from .merged import Merged
from .model_drafter import ModelDrafter

__all__ = [
    "METHODS",
    "Call",
    "Combined",
    "DraftModel",
    "DraftTree",
    "Drafter",
    "Drafting",
    "Eagle",
    "EarlyExit",
    "LayerSkip",
    "Medusa",
    "Merged",
    "ModelDrafter",
    "NGram",
    "QuantizedSelf",
    "Spec",
    "Suffix",
    "Target",
    "TokenRecycling",
    "parse",
    "read",
    "register",
]
