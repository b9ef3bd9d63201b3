"""The drafting methods, one file each, and the registry that turns a caller's `draft=` into one of them.

| word     | what it is                                         | how long it lives              | who makes it           |
|----------|----------------------------------------------------|--------------------------------|------------------------|
| Spec     | a method with its options: a frozen dataclass      | like any value; saved in pairs | the caller, or `parse` |
| Drafter  | the loaded method: its weights, and what it learns | as long as the model           | `Spec.load`            |
| Drafting | its state: KV slots, what it has read and proposed | one `generate`                 | `Drafter.start`        |
| Draft    | the tokens proposed for each row, a chain or tree  | one round                      | `Drafting.propose`     |
"""

# Methods are registered in the order in which tables list them.
# ruff: noqa: I001
from __future__ import annotations

from .base import Call, Drafter, Drafting, Spec, Target
from .registry import METHODS, parse, read, register, require_fitting
from .suffix import Suffix
from .ngram import NGram
from .recycle import TokenRecycling
from .early_exit import EarlyExit
from .layer_skip import LayerSkip
from .quantized_self import QuantizedSelf
from .draft_model import DraftModel, DraftTree, Pard
from .medusa import Medusa
from .eagle import Eagle
from .mtp import MTP
from .block import DFlash
from .assistant import Assistant
from .candidate_generator import Candidates
from .combined import Combined
from .merged import Merged
from .auto import Auto
from .model_drafter import ModelDrafter

__all__ = [
    "METHODS",
    "MTP",
    "Assistant",
    "Auto",
    "Call",
    "Candidates",
    "Combined",
    "DFlash",
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
    "Pard",
    "QuantizedSelf",
    "Spec",
    "Suffix",
    "Target",
    "TokenRecycling",
    "parse",
    "read",
    "register",
    "require_fitting",
]
