"""What every method of drafting offers: a spec (how a caller names it), a drafter (what it loaded), a drafting (one call).

Knows drafts, the text they continue and the model that will judge them; nothing of how a draft is verified.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..distribution import Distribution
from ..drafts import Draft, Round
from ..engine.cache import SlotCache
from ..engine.recurrent import target_runner
from ..engine.runner import CachedModel, CallSettings, Masks, Runnable
from ..lengths.base import DraftLength, Length
from ..loading.files import inside
from ..text import Text

__all__ = ["Call", "Drafter", "Drafting", "HeadSpec", "Spec", "Target"]


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
        distribution: how the target's logits become a token; what only committed prefixes may be shown to is left out.
        length: when to stop drafting.
        limit: the most tokens a row may come to hold.
        target: the target as it is run in this call, with the KV of all committed tokens but the last; for drafters
            that draft with parts of it. Whatever they write behind the committed slots they must forget again
            (`cache.rewind`) before they return or raise.
        settings: how models are run in this call, for drafters that have captured passes (`graphs.Graphs`).
    """

    attention_mask: torch.Tensor | None
    distribution: Distribution
    length: Length
    limit: int
    target: CachedModel
    settings: CallSettings = field(default_factory=CallSettings)

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

    def parts(self) -> Sequence[Drafting]:
        """Those that it is made of, where it is made of several."""
        return ()

    def observe(self, round: Round) -> None:
        """What became of the last draft, or of another drafter's: called after every round, those without a draft included."""


class Drafter:
    """A loaded method, shared by all calls; it keeps nothing of one call that could change the distribution of another."""

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

    def start(self, call: Call) -> Drafting:
        """The state for one `generate`. Cheap: work is done in `propose`, where a failure costs speed only."""
        raise NotImplementedError

    def start_length(self, policy: DraftLength, earlier: Length | None = None) -> Length:
        """The policy's memory for one `generate`; drafters made of several need one for each. earlier: of the model's last
        call of the kind, if there was one."""
        return policy.start(earlier)

    def run_target(self, model: PreTrainedModel | Runnable, cache: SlotCache, masks: Masks) -> CachedModel:
        """How the target is run while this drafts for it, over the slots of `cache`, with the `masks` it reads; drafters that
        share its passes have a way of their own."""
        return target_runner(model, cache, masks)


class Spec:
    """How a caller writes down a method: a frozen dataclass, stored with a saved pair. What is saved are its fields, but for
    those whose metadata says {"saved": False}.

    A spec says what kind of method it is, for the table of methods in the documentation: `trained`, somebody has to train it
    for the target; `trees`, it can propose token trees; `has_q`, sampled drafts come with q. None says that it depends on
    what it is made of.
    """

    name: ClassVar[str]
    """Begins its string, and stands for it in config.json. Where there is a `named(rest)`, that is the spec behind
    `"name:rest"`."""
    trained: ClassVar[bool | None] = False
    trees: ClassVar[bool | None] = False
    has_q: ClassVar[bool | None] = False

    def load(self, target: Target, **kwargs: Any) -> Drafter:
        """The drafter for this target. Raises ValueError for what cannot work together."""
        raise NotImplementedError

    def parts(self) -> Sequence[Spec]:
        """The specs that it is made of, in order: itself, unless there are several."""
        return [self]

    def written(self, folder: str) -> dict[str, Any]:
        """As config.json holds it. folder: in a saved pair, of what `save` writes."""
        fields = [field.name for field in dataclasses.fields(self) if field.metadata.get("saved", True)]  # type: ignore[arg-type]
        values = {name: getattr(self, name) for name in fields}
        plain = {name: value.to_dict() if hasattr(value, "to_dict") else value for name, value in values.items()}
        return {"method": self.name, **plain}

    @classmethod
    def read(cls, fields: dict[str, Any], pair: Path) -> Spec:
        """What `written` wrote. pair: the folder of the saved pair. Raises ValueError for fields that it cannot have."""
        unknown = fields.keys() - {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if unknown:
            raise ValueError(f"draft: {pair / 'config.json'}: {min(unknown)} is no field of {cls.__name__}")
        return cls(**fields)

    def save(self, drafter: Any, path: Path, tokenizer: Any) -> None:
        """Write the model or the heads that `load` returned, for methods that have some, so that `read` finds them.

        drafter: what was loaded. path: the folder. tokenizer: the target's, None where there is none.
        """


class HeadSpec(Spec):
    """A method whose trained heads lie at a path, in a folder of their own in a saved pair."""

    def written(self, folder: str) -> dict[str, Any]:
        return super().written(folder) | {"path": folder}

    @classmethod
    def read(cls, fields: dict[str, Any], pair: Path) -> Spec:
        return super().read(fields | {"path": str(inside(pair, fields["path"], "draft.path"))}, pair)

    def save(self, drafter: Any, path: Path, tokenizer: Any) -> None:
        drafter.save(path)
