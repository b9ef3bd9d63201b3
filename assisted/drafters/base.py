"""What every method of drafting offers: a spec (how a caller names it), a drafter (what it loaded), a drafting (one call).

Knows drafts and the text they continue; nothing of how a draft is verified.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafts import Draft
from ..law import Law
from ..lengths import Length
from ..text import Text

__all__ = ["Call", "Drafter", "Drafting", "Spec", "Target"]


@dataclass(frozen=True)
class Target:
    """What a spec may know of the target it drafts for.

    Args:
        model: the target, not to be changed.
        tokenizer: its tokenizer, None when none was found or given.
        path: where it was loaded from, None for a model made in memory.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None = None
    path: str | None = None


@dataclass(frozen=True)
class Call:
    """One `generate`, as a drafter sees it.

    Args:
        attention_mask: [B, P] of the prompt, None when nothing is padding.
        law: how the target's logits become a token; what only committed prefixes may be shown to is left out.
        length: when to stop drafting.
        limit: the most tokens a row may come to hold.
    """

    attention_mask: torch.Tensor | None
    law: Law
    length: Length
    limit: int


class Drafting(Protocol):
    """The state of one drafter during one `generate`."""

    def propose(self, text: Text, budget: int) -> Draft:
        """At most `budget` (at least 1) nodes a row behind the committed text, on the text's device."""
        ...

    def observe(self, draft: Draft, accepted: list[int]) -> None:
        """How many tokens of each row's last draft became text."""
        ...


class Drafter(Protocol):
    """A loaded method, shared by all calls; it keeps no state of any of them."""

    @property
    def model(self) -> PreTrainedModel:
        """The model that drafts; it moves with the target and is saved beside it."""
        ...

    def start(self, call: Call) -> Drafting:
        """The state for one `generate`. Cheap: work is done in `propose`, where a failure costs speed only."""
        ...


class Spec(Protocol):
    """How a caller writes down a method: a frozen dataclass, stored with a saved pair."""

    def load(self, target: Target, **kwargs: Any) -> Drafter:
        """The drafter for this target. Raises ValueError for what cannot work together."""
        ...
