"""Several drafters for one target: each round the one that is worth most drafts, the cheap ones are asked first.

Knows drafters and lengths by their interfaces; what a draft is worth it learns from what became of earlier ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedModel

from ..drafts import Draft, Round
from ..engine.cache import SlotCache
from ..engine.runner import CachedModel, Masks, Runnable
from ..lengths.base import DraftLength, Length
from ..text import Text
from .base import Call, Drafter, Drafting, Spec, Target
from .registry import parse, read

__all__ = ["Combined", "CombinedDrafter"]

MEMORY = 0.9  # share of an average that a round leaves as it was
TRIED = 3  # rounds of a drafter after which its averages are believed
CERTAIN = 2.0  # expected tokens that a cheap draft is taken for while the others are still unmeasured


@dataclass(frozen=True)
class Combined(Spec):
    """Several drafters in order, the cheapest first: `["suffix", "zoo:draft"]`.

    Each round they are asked in this order. A drafter that knows what its proposal is worth before the target has seen it
    (n-gram, suffix: a copy of earlier text, at no cost) is passed over where a later one is expected to bring more tokens a
    second. Useful where text repeats in places: the copies come from the text, the rest from the model.

    Args:
        drafters: what drafts, as strings or specs. At least two; at most one of them may draft with the target's own
            layers or hidden states.
    """

    name: ClassVar[str] = "combined"
    trained: ClassVar[bool | None] = None
    trees: ClassVar[bool | None] = None
    has_q: ClassVar[bool | None] = None

    drafters: tuple[Any, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "drafters", tuple(self.drafters))
        if len(self.drafters) < 2:
            raise ValueError(f"draft: {list(self.drafters)} is no combination; name at least two drafters")

    def parts(self) -> Sequence[Spec]:
        return [parse(draft) for draft in self.drafters]

    def written(self, folder: str) -> dict[str, Any]:
        parts = [part.written(f"{folder}-{place}") for place, part in enumerate(self.parts())]
        return {"method": self.name, "drafters": parts}

    @classmethod
    def read(cls, fields: dict[str, Any], pair: Path) -> Spec:
        return cls(tuple(read(part, pair) for part in fields["drafters"]))

    def save(self, drafter: Any, path: Path, tokenizer: Any) -> None:
        for place, (part, member) in enumerate(zip(self.parts(), drafter.members, strict=True)):
            part.save(member, path.with_name(f"{path.name}-{place}"), tokenizer)

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

    @property
    def modules(self) -> list[nn.Module]:
        return [module for member in self.members for module in member.modules]

    def start_length(self, policy: DraftLength, earlier: Length | None = None) -> Length:
        """A length for every drafter: what one drafter's tokens cost says nothing of another's."""
        before = earlier.members if isinstance(earlier, CombinedLength) else [None] * len(self.members)
        return CombinedLength(
            [
                replace(old, length=member.start_length(policy, old.length))
                if old
                else Member(member.start_length(policy))
                for member, old in zip(self.members, before, strict=True)
            ]
        )

    def start(self, call: Call) -> Drafting:
        length = call.length
        assert isinstance(length, CombinedLength)
        draftings = [
            drafter.start(replace(call, length=member.length))
            for member, drafter in zip(length.members, self.members, strict=True)
        ]
        return CombinedDrafting(length.members, draftings)

    def run_target(self, model: PreTrainedModel | Runnable, cache: SlotCache, masks: Masks) -> CachedModel:
        """As the one member that has a way of its own wants it."""
        return runs_target(self.members).run_target(model, cache, masks)


def load_all(drafters: tuple[Any, ...], target: Target, **kwargs: Any) -> list[Drafter]:
    """Every drafter of a list. Raises ValueError where two of them want to run the target in their own way."""
    members = [parse(draft).load(target, **kwargs) for draft in drafters]
    if sum(_has_own_way(member) for member in members) > 1:
        raise ValueError("draft: only one drafter of a list may draft with the target's own layers or hidden states")
    return members


def runs_target(members: list[Drafter]) -> Drafter:
    """The member that has a way of its own to run the target; the first, if none has."""
    return next((member for member in members if _has_own_way(member)), members[0])


def _has_own_way(member: Drafter) -> bool:
    if isinstance(member, CombinedDrafter):
        return any(map(_has_own_way, member.members))
    return type(member).run_target is not Drafter.run_target


@dataclass
class Member:
    """A drafter among others, and what its drafts have brought so far (averages that forget)."""

    length: Length
    budget: int = 0
    rounds: int = 0
    accepted: float = 0.0
    expected: float = 0.0
    seconds: float = 0.0

    def rate(self, accepted: float | None = None) -> float:
        """Tokens a second of a round of its own; for a proposal in hand, with what is accepted of that."""
        return (1 + (self.accepted if accepted is None else accepted)) / max(self.seconds, 1e-9)

    def promise(self, expected: float) -> float:
        """Accepted tokens of a proposal that says to expect so many, corrected by how such estimates came out."""
        return expected * (self.accepted / self.expected) if self.rounds >= TRIED and self.expected > 0 else expected

    def learn(self, accepted: float, expected: float, seconds: float) -> None:
        keep = MEMORY if self.rounds >= TRIED else self.rounds / (self.rounds + 1)
        self.rounds += 1
        self.accepted = keep * self.accepted + (1 - keep) * accepted
        self.expected = keep * self.expected + (1 - keep) * expected
        self.seconds = keep * self.seconds + (1 - keep) * seconds


class CombinedLength(Length):
    """The lengths of all members. Each one hears of the rounds in which it drafted, and of those in which nobody did."""

    def __init__(self, members: list[Member]):
        self.members = members

    @property
    def predicted_speedup(self) -> float | None:  # type: ignore[override]
        return max((m.length.predicted_speedup for m in self.members if m.length.predicted_speedup), default=None)

    def budget(self, unfinished: Sequence[int]) -> int:
        for member in self.members:
            member.budget = member.length.budget(unfinished)
        return max(member.budget for member in self.members)

    def observe(self, round: Round) -> None:
        if not round.draft.member:  # none of them drafted
            for member in self.members:
                member.length.observe(round)
            return
        number, *rest = round.draft.member
        chosen, expected = self.members[number], round.draft.expected
        chosen.length.observe(replace(round, draft=replace(round.draft, member=tuple(rest))))
        accepted = round.mean(round.accepted)
        chosen.learn(accepted, accepted if expected is None else expected, round.draft_seconds + round.verify_seconds)

    def end(self) -> None:
        for member in self.members:
            member.length.end()


class CombinedDrafting(Drafting):
    """Who drafts this round.

    Args:
        members: what is known of each drafter.
        draftings: of the same, in the same order.
    """

    def __init__(self, members: list[Member], draftings: list[Drafting]):
        self.members = members
        self.draftings = dict(enumerate(draftings))  # that have not failed

    def propose(self, text: Text, budget: int) -> Draft:
        for number, drafting in list(self.draftings.items()):
            member = self.members[number]
            if member.budget < 1:
                continue
            try:
                draft = drafting.propose(text, min(budget, member.budget))
            except Exception as error:
                self._lose(number, error)
                continue
            later = [self.members[other] for other in self.draftings if other > number]
            if draft.width and _is_worth_it(draft.expected, member, later):
                return replace(draft, member=(number, *draft.member))
        return Draft.empty(text.rows, text.ids.device)

    def parts(self) -> Sequence[Drafting]:
        return list(self.draftings.values())

    def observe(self, round: Round) -> None:
        for drafting in self.draftings.values():
            drafting.observe(round)

    def _lose(self, number: int, error: Exception) -> None:
        """Go on without a drafter that failed; without any left, the failure is the loop's to report."""
        if len(self.draftings) == 1:
            raise error
        name = type(self.draftings.pop(number)).__name__
        warnings.warn(f"{name} failed ({type(error).__name__}: {error}); the other drafters go on.", stacklevel=2)


def _is_worth_it(expected: float | None, member: Member, later: list[Member]) -> bool:
    """Whether what a member proposed, of which so many tokens are expected to be accepted, beats what the later ones may be
    expected to bring."""
    later = [other for other in later if other.budget > 0]
    if expected is None or not later:  # it has no estimate before the target has seen it, or there is nobody else
        return True
    promised = member.promise(expected)
    if member.rounds < TRIED or any(other.rounds < TRIED for other in later):
        return promised >= CERTAIN
    return member.rate(promised) >= max(other.rate() for other in later)
