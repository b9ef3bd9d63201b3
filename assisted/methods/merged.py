"""SpecInfer (2305.09781): the drafts of several drafters are merged into one token tree per row and verified together. If the
target cannot verify trees, only the first drafter is used.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..core.drafts import Draft, Round
from ..core.text import Text
from ..lengths.base import DraftLength, Length
from ..lengths.policies import Fixed
from .combined import CombinedDrafter, Several
from .shared.base import Call, Drafting, Target
from .shared.registry import register
from .shared.trees import merge


@register("merged")
@dataclass(frozen=True)
class Merged(Several):
    """Several drafters draft, and the target verifies all their drafts in one forward pass: `Merged(["zoo:draft", "suffix"])`.

    Worthwhile if the drafters fail at different positions, and if a forward pass over more tokens costs little more (a GPU, one
    row). Each drafter drafts as it does alone: with argmax if the target is greedy, with samples from its own distribution
    if the target samples. The candidates at a node are then tried in turn, each against the distribution that it was drawn
    from, so that the output follows the target's distribution.

    Args:
        drafters: as strings or specs, at least two.
    """

    title = "Several drafters in one tree"
    trees = True
    too_few: ClassVar[str] = "cannot be merged"

    def load(self, target: Target, **kwargs: Any) -> MergedDrafter:
        """Load all drafters. Raises ValueError if one does not fit the target or another drafter."""
        members = [part.load(target, **kwargs) for part in self.parts()]
        if any(type(member) is CombinedDrafter for member in members):
            raise ValueError(
                "draft: drafters that take turns (a list) cannot be merged with others; name them one by one"
            )
        return MergedDrafter(members)


class MergedDrafter(CombinedDrafter):
    """Loaded drafters whose proposals become one tree."""

    def start(self, call: Call) -> Drafting:
        own = replace(call, length=Fixed().start())
        if not call.target.masks.trees:
            return self.members[0].start(own)
        earlier = call.before(MergedDrafting)
        before = [None] * len(self.members) if earlier is None else list(map(weakref.ref, earlier.members))
        pairs = zip(self.members, before, strict=True)
        return MergedDrafting([member.start(replace(own, earlier=one)) for member, one in pairs])

    def start_length(self, policy: DraftLength, earlier: Length | None = None) -> Length:
        """One draft length, which limits the depth of the tree."""
        return policy.start(earlier)


class MergedDrafting(Drafting):
    """All members draft for the same text."""

    def __init__(self, members: list[Drafting]):
        self.members = members

    def propose(self, text: Text, budget: int) -> Draft:
        return merge([member.propose(text, budget) for member in self.members])

    def parts(self) -> Sequence[Drafting]:
        return self.members

    def observe(self, round: Round) -> None:
        for member in self.members:
            member.observe(round)
