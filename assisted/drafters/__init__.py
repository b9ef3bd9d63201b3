"""The drafting methods, one file each, and the registry that turns a caller's `draft=` into one of them."""

from __future__ import annotations

from .base import Call, Drafter, Drafting, Spec, Target
from .combined import Combined
from .draft_model import DraftModel
from .draft_tree import DraftTree
from .eagle import Eagle
from .early_exit import EarlyExit
from .layer_skip import LayerSkip
from .medusa import Medusa
from .merged import Merged
from .model_drafter import ModelDrafter
from .ngram import NGram
from .quantized_self import QuantizedSelf
from .recycle import TokenRecycling
from .registry import METHODS, parse, read
from .suffix import Suffix

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
]

for _spec in (
    DraftModel,
    DraftTree,
    QuantizedSelf,
    EarlyExit,
    LayerSkip,
    NGram,
    Suffix,
    TokenRecycling,
    Medusa,
    Eagle,
    Combined,
    Merged,
):
    METHODS[_spec.name] = _spec
