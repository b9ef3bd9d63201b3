"""What every method of drafting offers: a spec (how a caller names it), a drafter (what it loaded), a drafting (one call).

Knows drafts, the text they continue and the model that will judge them; nothing of how a draft is verified.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache import SlotCache
from ..drafts import Draft, Round
from ..graphs import Lease
from ..law import Law
from ..lengths import DraftLength, Length
from ..recurrent import runner_for
from ..runtime import CachedModel, Masks
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
        target: the target as it is run in this call, with the KV of all committed tokens but the last; for drafters
            that draft with parts of it. Whatever they write behind the committed slots they must forget again
            (`cache.rewind`) before they return or raise.
        lease: how models are run in this call, for drafters that have captured passes (`graphs.Graphs`).
    """

    attention_mask: torch.Tensor | None
    law: Law
    length: Length
    limit: int
    target: CachedModel
    lease: Lease = field(default_factory=Lease)

    @property
    def vocab_size(self) -> int:
        """Of the target's logits, in this call: a target may be resized between two."""
        return self.target.model.config.get_text_config(decoder=True).vocab_size


class Drafting:
    """The state of one drafter during one `generate`."""

    def propose(self, text: Text, budget: int) -> Draft:
        """What may follow the committed text, on the text's device: at most `budget` (at least 1) tokens deep.

        A tree may have more nodes than that: depth is what the context, max_length and the caller's draft length limit;
        slots for further nodes are found.
        """
        raise NotImplementedError

    def observe(self, round: Round) -> None:
        """What became of the last draft, or of another drafter's: called after every round, those without a draft included."""


class Drafter:
    """A loaded method, shared by all calls; it keeps nothing of one call that could change the law of another."""

    model: PreTrainedModel | None = None
    """A model of its own that drafts, if it has one."""

    @property
    def models(self) -> list[PreTrainedModel]:
        """All models of its own."""
        return [] if self.model is None else [self.model]

    @property
    def modules(self) -> list[nn.Module]:
        """All modules of its own, models and heads: they move with the target."""
        return list(self.models)

    def save(self, folder: Path) -> None:
        """Write the heads that were loaded, so that the spec reads them from there; for drafters that have heads."""
        raise NotImplementedError

    def start(self, call: Call) -> Drafting:
        """The state for one `generate`. Cheap: work is done in `propose`, where a failure costs speed only."""
        raise NotImplementedError

    def start_length(self, policy: DraftLength, earlier: Length | None = None) -> Length:
        """The policy's memory for one `generate`; drafters made of several need one for each. earlier: of the model's last
        call of the kind, if there was one."""
        return policy.start(earlier)

    def run_target(self, model: PreTrainedModel, cache: SlotCache, masks: Masks) -> CachedModel:
        """How the target is run while this drafts for it, over the slots of `cache`, with the `masks` it reads; drafters that
        share its passes have a way of their own."""
        return runner_for(model)(model, cache, masks)


class Spec(Protocol):
    """How a caller writes down a method: a frozen dataclass, stored with a saved pair.

    Those of this package say what kind of method they are, for the table of methods in the documentation: `trained`, somebody
    has to train it for the target; `trees`, it can propose token trees; `has_law`, sampled drafts come with q. None says
    that it depends on what they are made of.
    """

    def load(self, target: Target, **kwargs: Any) -> Drafter:
        """The drafter for this target. Raises ValueError for what cannot work together."""
        ...
