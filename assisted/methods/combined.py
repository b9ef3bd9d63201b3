"""Several drafters for one target: in each round, the one with the highest expected token rate drafts. The value of a draft is
estimated from the outcomes of earlier ones.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedModel

from ..core.drafts import Draft, Round
from ..core.text import Text
from ..engine.needs import NOTHING
from ..engine.prepared import CallSettings
from ..lengths.base import Columns, DraftLength, Length
from ..lengths.cost_model import KEEP_LOCAL, PRIOR, DecayedMean
from .shared.base import Call, Drafter, Drafting, Spec, Target
from .shared.registry import parse, read, register

TRIED = 3  # rounds after which a drafter's averages are used
CERTAIN = 2.0  # while some drafter has fewer rounds, a draft with this many expected tokens is used,
SURE = 0.75  # or with this share of the tokens that it may have: before its costs are known, these are few

FILLED = 0.2  # guess of the accepted share of what is added to a draft


@dataclass(frozen=True)
class Several(Spec):
    """The specs that are made of several others."""

    trained = has_q = None
    trees: ClassVar[bool | None] = None
    too_few: ClassVar[str] = "is not a combination"

    drafters: tuple[Any, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "drafters", tuple(self.drafters))
        if len(self.drafters) < 2:
            raise ValueError(f"draft: {list(self.drafters)} {self.too_few}; name at least two drafters")

    def parts(self) -> Sequence[Spec]:
        return [parse(draft) for draft in self.drafters]

    def chosen(self, target: Target) -> Spec:
        return replace(self, drafters=tuple(part.chosen(target) for part in self.parts()))

    def written(self, folder: str) -> dict[str, Any]:
        parts = [part.written(f"{folder}-{number}") for number, part in enumerate(self.parts())]
        return {**super().written(folder), "drafters": parts}

    @classmethod
    def read(cls, fields: dict[str, Any], pair: Path) -> Spec:
        return super().read({**fields, "drafters": tuple(read(part, pair) for part in fields["drafters"])}, pair)

    def save(self, drafter: Any, path: Path, tokenizer: Any) -> None:
        for number, (part, member) in enumerate(zip(self.parts(), drafter.members, strict=True)):
            part.save(member, path.with_name(f"{path.name}-{number}"), tokenizer)


@register("combined")
@dataclass(frozen=True)
class Combined(Several):
    """Several drafters in order, the cheapest first: `["suffix", "zoo:draft"]`.

    In each round they are asked in this order. Some drafters estimate the number of accepted tokens in advance (n-gram and
    suffix, which copy earlier text at almost no cost). Their draft is skipped if a later drafter is expected to yield more
    tokens per second. Useful for text with repetitions: these are copied, and the model drafts the rest.

    Args:
        drafters: as strings or specs, at least two.
        fill: let the drafters that copy text continue the drafts of the others, for the same forward pass of the target. The
            draft length limits the whole.
    """

    title = "Several drafters in turns"

    fill: bool = True

    def load(self, target: Target, **kwargs: Any) -> CombinedDrafter:
        """Load all drafters. Raises ValueError if one does not fit the target or another drafter."""
        return CombinedDrafter([part.load(target, **kwargs) for part in self.parts()], self.fill)


class CombinedDrafter(Drafter):
    """Loaded drafters, in the order in which they are asked. fill: see `Combined`."""

    def __init__(self, members: list[Drafter], fill: bool = False):
        self.members = members
        # a draft that the target has half read would have to be read again
        self.filled = {number for number, member in enumerate(members) if fill and not member.needs.split}
        self.needs = functools.reduce(operator.or_, (member.needs for member in members), NOTHING)

    @property
    def models(self) -> list[PreTrainedModel]:
        return [model for member in self.members for model in member.models]

    @property
    def modules(self) -> list[nn.Module]:
        return [module for member in self.members for module in member.modules]

    def capture_ahead(self, rows: int, longest: int) -> None:
        for member in self.members:
            member.capture_ahead(rows, longest)

    def start_length(self, policy: DraftLength, earlier: Length | None = None) -> Length:
        """One draft length per drafter, because their costs and acceptance rates differ."""
        before = earlier.members if isinstance(earlier, CombinedLength) else [None] * len(self.members)
        return CombinedLength(
            [
                old.following(member.start_length(policy, old.length)) if old else Member(member.start_length(policy))
                for member, old in zip(self.members, before, strict=True)
            ]
        )

    def start(self, call: Call) -> Drafting:
        length = call.length
        assert isinstance(length, CombinedLength)
        earlier = call.before(CombinedDrafting)
        before = {} if earlier is None else {number: weakref.ref(one) for number, one in earlier.draftings.items()}
        draftings = [
            drafter.start(replace(call, length=member.length, earlier=before.get(number)))
            for number, (member, drafter) in enumerate(zip(length.members, self.members, strict=True))
        ]
        return CombinedDrafting(length.members, draftings, call.settings, self.filled)


@dataclass
class Member:
    """A drafter of a combination, with averages over the rounds in which it drafted.

    accepted: tokens per round. kept: accepted tokens, of those that it estimated in advance. seconds: per round. filled:
    accepted tokens per position that others added to its drafts.
    """

    length: Length
    budget: int = 0
    rounds: int = 0
    accepted: DecayedMean = field(default_factory=DecayedMean)
    kept: DecayedMean = field(default_factory=DecayedMean)
    seconds: DecayedMean = field(default_factory=DecayedMean)
    filled: DecayedMean = field(default_factory=DecayedMean)

    def rate(self, accepted: float | None = None) -> float:
        """Tokens per second in its rounds. accepted: expected accepted tokens of a given draft instead of the average."""
        return (1 + (self.accepted.mean() if accepted is None else accepted)) / max(self.seconds.mean(), 1e-9)

    def promise(self, expected: float) -> float:
        """The drafter's own estimate of accepted tokens, corrected by the accuracy of its earlier estimates."""
        return expected * self.kept.mean(1.0) if self.rounds >= TRIED else expected

    def depth_to_fill(self, draft: Draft, budget: int) -> int:
        """How deep others may continue its draft: not at all where the positions cost more than they are expected to save."""
        costs, width = self.length.costs, draft.width
        if costs is None or width >= budget:
            return budget
        cost = costs.verify_seconds(1 + budget) - costs.verify_seconds(1 + width)
        return budget if (budget - width) * self.filled.mean(FILLED, PRIOR) > cost * self.rate() else 0

    def learn(self, accepted: float, expected: float, seconds: float) -> None:
        self.rounds += 1
        self.accepted.add(accepted, keep=KEEP_LOCAL)
        self.kept.add(accepted, expected, KEEP_LOCAL)
        self.seconds.add(seconds, keep=KEEP_LOCAL)

    def following(self, length: Length) -> Member:
        """For the next call: the same past, with that call's length."""
        averages = {name: getattr(self, name).faded() for name in ("accepted", "kept", "seconds", "filled")}
        return replace(self, length=length, **averages)


class CombinedLength(Length):
    """The draft lengths of all members. Each observes its own rounds and those without a draft, and notes those of others."""

    def __init__(self, members: list[Member]):
        self.members = members

    @property
    def predicted_speedup(self) -> float | None:  # type: ignore[override]
        return max((m.length.predicted_speedup for m in self.members if m.length.predicted_speedup), default=None)

    @property
    def is_limit(self) -> bool:  # type: ignore[override]
        return any(member.length.is_limit for member in self.members)

    def prompt_read(
        self, room: int, prompt_seconds: float = 0.0, columns: Columns | None = None, is_short: bool = False
    ) -> None:
        for member in self.members:
            member.length.prompt_read(room, prompt_seconds, columns, is_short)

    def budget(self, unfinished: Sequence[int]) -> int:
        for member in self.members:
            member.budget = member.length.budget(unfinished)
        return max(member.budget for member in self.members)

    def observe(self, round: Round) -> None:
        if not round.draft.member:  # a round without a draft
            for member in self.members:
                member.length.observe(round)
            return
        number, *rest = round.draft.member
        chosen, expected = self.members[number], round.draft.expected
        for member in self.members:
            if member is not chosen:
                member.length.observe_other(round)
        own = of_continued(round)
        chosen.length.observe(replace(own, drafted=round.drafted, draft=replace(own.draft, member=tuple(rest))))
        accepted = round.mean(round.accepted)
        chosen.learn(accepted, accepted if expected is None else expected, round.draft_seconds + round.verify_seconds)
        added = max(round.drafted) - max(own.drafted)  # after rounds without, what was known fades
        chosen.filled.add(accepted - round.mean(own.accepted), added, KEEP_LOCAL)

    def observe_other(self, round: Round) -> None:
        for member in self.members:
            member.length.observe_other(round)

    def renew(self, row: int) -> None:
        for member in self.members:
            member.length.renew(row)

    def end(self) -> None:
        for member in self.members:
            member.length.end()


class CombinedDrafting(Drafting):
    """Chooses the drafter of each round. members: the statistics of each drafter. draftings: in the same order. settings: those
    of the call. filled: members whose drafts the others may continue."""

    def __init__(
        self, members: list[Member], draftings: list[Drafting], settings: CallSettings, filled: Collection[int] = ()
    ):
        self.members, self.settings, self.filled = members, settings, filled
        self.proposed: tuple[int, Draft] | None = None  # the drafter of the last draft, and the draft
        self.draftings = dict(enumerate(draftings))  # those that have not failed

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
            if draft.width and _is_worthwhile(draft.expected, member, later):
                draft = self._continued(text, draft, budget, number)
                self.proposed = number, draft
                return replace(draft, member=(number, *draft.member))
        return Draft.empty(text.rows, text.ids.device)

    def _continued(self, text: Text, draft: Draft, budget: int, proposer: int) -> Draft:
        """The draft, continued by the first drafter that finds something. Not one that was looked up, or is continued."""
        budget = self.members[proposer].depth_to_fill(draft, budget)
        if proposer not in self.filled or draft.expected is not None or draft.continued is not None or not budget:
            return draft
        for number, drafting in list(self.draftings.items()):
            if number == proposer or self.members[number].budget < 1:
                continue
            try:
                filled = drafting.fill(text, draft, budget)
            except Exception as error:
                self._lose(number, error)
                continue
            if filled is not draft:
                return filled
        return draft

    def parts(self) -> Sequence[Drafting]:
        return list(self.draftings.values())

    def observe(self, round: Round) -> None:
        proposer, draft = self.proposed or (None, None)
        chosen = proposer if round.draft.is_that_of(draft) else None
        for number, drafting in list(self.draftings.items()):
            try:
                drafting.observe(of_continued(round) if number == chosen else round)
            except Exception as error:
                self._lose(number, error)

    def _lose(self, number: int, error: Exception) -> None:
        """Remove a drafter that failed. If no other is left, or other processes wait for it, raise the error."""
        if len(self.draftings) == 1 or not self.settings.ranks.may_go_on(error):
            raise error
        name = type(self.draftings.pop(number)).__name__
        self.settings.warn(f"{name} failed ({type(error).__name__}: {error}); continuing with the others.")


def of_continued(round: Round) -> Round:
    """The round as the drafter sees it whose chains another one continued: the draft and its counts are its own, everything
    else is that of the whole."""
    own = round.draft.continued
    if own is None:
        return round
    counts = own.lengths.tolist()
    accepted = list(map(min, round.accepted, counts))
    return replace(round, draft=own, drafted=counts, depths=counts, accepted=accepted)


def _is_worthwhile(expected: float | None, member: Member, later: list[Member]) -> bool:
    """Whether a member's draft has a higher expected token rate than the later members.

    expected: the member's own estimate of accepted tokens, None if it has none.
    """
    later = [other for other in later if other.budget > 0]
    if expected is None or not later:
        return True
    promised = member.promise(expected)
    if member.rounds < TRIED or any(other.rounds < TRIED for other in later):
        return promised >= min(CERTAIN, SURE * member.budget)
    return member.rate(promised) >= max(other.rate() for other in later)
