"""Several drafters for one target: each round the one that is worth most drafts, the cheap ones are asked first.

Knows drafters by their interface and the clock; what a draft is worth it learns from what became of earlier ones.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..cache import SlotCache
from ..drafts import Draft
from ..lengths import Length
from ..runtime import CachedModel, Masks
from ..text import Text
from .base import Call, Drafter, Drafting, Target

__all__ = ["Combined", "CombinedDrafter"]

MEMORY = 0.9  # share of an average that a round leaves as it was
TRIED = 3  # rounds of a drafter after which its averages are believed
CERTAIN = 2.0  # expected tokens that a cheap draft is taken for while the others are still unmeasured


@dataclass(frozen=True)
class Combined:
    """Several drafters in order, the cheapest first: `["suffix", "zoo:draft"]`.

    Each round they are asked in this order. A drafter that knows what its proposal is worth before the target has seen it
    (n-gram, suffix: a copy of earlier text, at no cost) is passed over where a later one is expected to bring more tokens a
    second. Useful where text repeats in places: the copies come from the text, the rest from the model.

    Args:
        drafters: what drafts, as strings or specs. At least two; at most one of them may draft with the target's own layers.
    """

    drafters: tuple[Any, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "drafters", tuple(self.drafters))
        if len(self.drafters) < 2:
            raise ValueError(f"draft: {list(self.drafters)} is no combination; name at least two drafters")

    def load(self, target: Target, **kwargs: Any) -> CombinedDrafter:
        """Load every drafter. Raises ValueError for those that do not fit the target or each other."""
        return CombinedDrafter(load_all(self.drafters, target, **kwargs))


class CombinedDrafter(Drafter):
    """Loaded drafters, in the order in which they are asked."""

    def __init__(self, members: list[Drafter]):
        self.members = members

    @property
    def models(self) -> list[PreTrainedModel]:
        return [model for member in self.members for model in member.models]

    def start(self, call: Call) -> Drafting:
        return CombinedDrafting(start_all(self.members, call))

    def run_target(self, model: PreTrainedModel, cache: SlotCache, masks: Masks) -> CachedModel:
        """As the one member that has a way of its own wants it."""
        return runs_target(self.members).run_target(model, cache, masks)


def load_all(drafters: tuple[Any, ...], target: Target, **kwargs: Any) -> list[Drafter]:
    """Every drafter of a list. Raises ValueError where two of them want to run the target in their own way."""
    from . import parse  # the registry knows this module

    members = [parse(draft).load(target, **kwargs) for draft in drafters]
    if sum(_has_own_way(member) for member in members) > 1:
        raise ValueError("draft: only one drafter of a list may draft with the target's own layers")
    return members


def runs_target(members: list[Drafter]) -> Drafter:
    """The member that has a way of its own to run the target; the first, if none has."""
    return next((member for member in members if _has_own_way(member)), members[0])


def _has_own_way(member: Drafter) -> bool:
    if isinstance(member, CombinedDrafter):
        return any(map(_has_own_way, member.members))
    return type(member).run_target is not Drafter.run_target


def start_all(members: list[Drafter], call: Call) -> list[Member]:
    """Every drafter at work, each with a length of its own: what one drafter's tokens cost says nothing of another's."""
    started = []
    for member in members:
        length = call.policy.start()
        started.append(Member(member.start(replace(call, length=length)), length))
    return started


@dataclass
class Member:
    """A drafter at work among others, and what its drafts have brought so far (averages that forget)."""

    drafting: Drafting
    length: Length
    rounds: int = 0
    accepted: float = 0.0
    expected: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    @property
    def knows_worth(self) -> bool:
        """Whether its proposals come with an estimate and cost next to nothing."""
        return self.drafting.expected is not None

    def rate(self, accepted: float | None = None) -> float:
        """Tokens a second of a round of its own; for a proposal in hand, with what is accepted of that."""
        seconds = self.draft_seconds + self.verify_seconds
        return (1 + (self.accepted if accepted is None else accepted)) / max(seconds, 1e-9)

    def promise(self) -> float:
        """Accepted tokens to expect of the proposal in hand: its own estimate, corrected by how such estimates came out."""
        said = self.drafting.expected or 0.0
        return said * (self.accepted / self.expected) if self.rounds >= TRIED and self.expected > 0 else said

    def learn(self, accepted: float, expected: float, draft_seconds: float, verify_seconds: float) -> None:
        keep = MEMORY if self.rounds >= TRIED else self.rounds / (self.rounds + 1)
        self.rounds += 1
        for name, value in (
            ("accepted", accepted),
            ("expected", expected),
            ("draft_seconds", draft_seconds),
            ("verify_seconds", verify_seconds),
        ):
            setattr(self, name, keep * getattr(self, name) + (1 - keep) * value)


class CombinedDrafting(Drafting):
    """Who drafts this round, and what became of it."""

    def __init__(self, members: list[Member]):
        self.members = members
        self.chosen: Member | None = None
        self.unfinished: list[int] = []
        self.draft_seconds = 0.0
        self.proposed_at: float | None = None  # None between rounds

    def propose(self, text: Text, budget: int) -> Draft:
        self.chosen, self.draft_seconds = None, 0.0
        self.unfinished = text.unfinished
        draft = Draft.empty(text.rows, text.ids.device)
        for place, member in enumerate(list(self.members)):
            limit = min(budget, member.length.budget())
            if limit < 1:
                continue
            started = time.perf_counter()
            try:
                draft = member.drafting.propose(text, limit)
            except Exception as error:
                self._lose(member, error)
                continue
            self.draft_seconds = time.perf_counter() - started
            if draft.width and self._is_worth_it(member, self.members[place + 1 :]):
                self.chosen = member
                break
            draft = Draft.empty(text.rows, text.ids.device)
        self.proposed_at = time.perf_counter()
        return draft

    def observe(self, draft: Draft, logits: torch.Tensor, accepted: list[int]) -> None:
        for member in self.members:
            member.drafting.observe(draft, logits, accepted)
        if self.proposed_at is None:  # nobody was asked
            return
        verify_seconds = time.perf_counter() - self.proposed_at
        drafted = draft.lengths.tolist()
        rows = [(drafted[row], accepted[row], accepted[row] + 1) for row in self.unfinished]
        for member in self.members if self.chosen is None else [self.chosen]:
            member.length.observe(rows, self.draft_seconds, verify_seconds)
        if self.chosen is not None:
            mean = sum(accepted[row] for row in self.unfinished) / len(self.unfinished)
            said = self.chosen.drafting.expected
            said = mean if said is None else said
            self.chosen.learn(mean, said, self.draft_seconds, verify_seconds)
        self.proposed_at = None

    def _is_worth_it(self, member: Member, later: list[Member]) -> bool:
        """Whether what this one proposed beats what the later ones may be expected to bring."""
        if not member.knows_worth or not later:
            return True
        promised = member.promise()
        measured = [other for other in later if other.rounds >= TRIED]
        if len(measured) < len(later) or member.rounds < TRIED:
            return promised >= CERTAIN
        return member.rate(promised) >= max(other.rate() for other in measured)

    def _lose(self, member: Member, error: Exception) -> None:
        """Go on without a drafter that failed; without any left, the failure is the loop's to report."""
        if len(self.members) == 1:
            raise error
        self.members.remove(member)
        name = type(member.drafting).__name__
        warnings.warn(f"{name} failed ({type(error).__name__}: {error}); the other drafters go on.", stacklevel=2)
