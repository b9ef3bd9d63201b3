"""Every method of drafting, as the end-to-end tests call it: one line a method, run over all architectures.

Knows the strings and specs that a caller writes; nothing of what the tests ask of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from architectures import Architecture, half_right
from transformers import PreTrainedModel

from assisted import Merged

__all__ = ["METHODS", "Method"]


@dataclass(frozen=True)
class Method:
    """A way to draft.

    Args:
        name: of the tests.
        draft: what is passed as `draft=` for a target.
        refuses: whether this method can't serve an architecture, and says so when it is loaded.
        accepts: whether some drafted token can be expected to be right over 24 new tokens of a random model.
    """

    name: str
    draft: Callable[[PreTrainedModel], Any]
    refuses: Callable[[Architecture], bool] = lambda architecture: False
    accepts: bool = True


METHODS = [
    Method("draft-model", half_right),
    Method("merged", lambda target: Merged((half_right(target), half_right(target, 2)))),
]
