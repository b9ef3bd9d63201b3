"""SpecInfer (2305.09781): the chains of several drafters, merged into one token tree a row, verified in one pass.

Knows drafters by their interface. Where the target cannot verify trees, the first drafter's chains are used alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from ..drafts import Draft, Round
from ..engine.host import padded
from ..lengths.base import DraftLength, Length
from ..lengths.policies import Fixed
from ..text import Text
from .base import Call, Drafting, Target
from .combined import Combined, CombinedDrafter, load_all
from .trees import from_lists

__all__ = ["Merged", "MergedDrafter", "merge"]


@dataclass(frozen=True)
class Merged(Combined):
    """Several drafters guess, the target checks all their guesses at once: `Merged(["zoo:draft", "suffix"])`.

    Worth its price where the drafters err in different places and a pass over more tokens costs little more (a GPU, one
    row). Each of them drafts as it does alone: its argmax where the target is greedy, a draw from its own
    distribution where the target samples. The candidates at a node are then tried one after the other, each against
    the distribution that it was drawn from, so that the distribution of the output is the target's.

    Args:
        drafters: what drafts, as strings or specs. At least two.
    """

    name: ClassVar[str] = "merged"
    trained: ClassVar[bool | None] = None
    trees: ClassVar[bool | None] = True
    has_q: ClassVar[bool | None] = None

    drafters: tuple[Any, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "drafters", tuple(self.drafters))
        if len(self.drafters) < 2:
            raise ValueError(f"draft: {list(self.drafters)} cannot be merged; name at least two drafters")

    def load(self, target: Target, **kwargs: Any) -> MergedDrafter:
        """Load every drafter. Raises ValueError for those that do not fit the target or each other."""
        members = load_all(self.drafters, target, **kwargs)
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
        return MergedDrafting([member.start(own) for member in self.members])

    def start_length(self, policy: DraftLength, earlier: Length | None = None) -> Length:
        """One length for the tree: how deep its chains are."""
        return policy.start(earlier)


class MergedDrafting(Drafting):
    """All members at work on the same text."""

    def __init__(self, members: list[Drafting]):
        self.members = members

    def propose(self, text: Text, budget: int) -> Draft:
        return merge([member.propose(text, budget) for member in self.members])

    def parts(self) -> Sequence[Drafting]:
        return self.members

    def observe(self, round: Round) -> None:
        for member in self.members:
            member.observe(round)


def merge(drafts: list[Draft]) -> Draft:
    """One tree a row of several drafts' chains or trees; what they share on the way from the root is there once.

    Nodes keep the order in which they were met, parents first. Where a draft has q the tree has it, too, one-hot for
    drafts without. These come last: candidates that are certain lose nothing by it, and spoil no distribution for the others.
    A token that a second distribution drew at the same place is one more leaf there, since it counts as tried
    against that distribution; what the second draft has behind it hangs on the first.
    """
    drafts = sorted(drafts, key=lambda draft: draft.q is None)
    starts = [0, *itertools.accumulate(draft.width for draft in drafts)]
    rows = []
    for row in range(len(drafts[0].lengths)):
        tree = _Tree()
        for draft, start in zip(drafts, starts, strict=False):
            tree.insert(draft, row, start)
        rows.append(tree)
    device = drafts[0].tokens.device
    merged = from_lists([row.tokens for row in rows], [row.parents for row in rows], device)
    if drafts[0].q is None:
        return merged
    distributions = torch.cat([_laws(draft, drafts[0].q) for draft in drafts], 1)
    origins = padded([row.origins for row in rows], device)[:, :, None]
    return replace(merged, q=distributions.gather(1, origins.expand(-1, -1, distributions.shape[-1])))


@dataclass
class _Tree:
    """One row's tree while it grows: for each node its token, its parent and its column among all drafts' columns."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    known: dict[tuple[int, int], int] = field(default_factory=dict)  # (parent, token) -> the first node there

    def insert(self, draft: Draft, row: int, start: int) -> None:
        """Add a row of a draft whose first column is number `start` among all drafts' columns."""
        count = int(draft.lengths[row])
        own = draft.tokens[row, :count].tolist()
        above = range(-1, count - 1) if draft.parents is None else draft.parents[row, :count].tolist()
        node_of = {-1: -1}  # a node of the draft -> the node of the tree
        for number, (token, parent) in enumerate(zip(own, above, strict=True)):
            place = (node_of[parent], token)
            if place not in self.known or draft.q is not None:
                self.tokens.append(token)
                self.parents.append(node_of[parent])
                self.origins.append(start + number)
            node_of[number] = self.known.setdefault(place, len(self.tokens) - 1)


def _laws(draft: Draft, like: torch.Tensor) -> torch.Tensor:
    """The distributions of a draft's nodes, [B, n, V]: certainty where it has none."""
    if draft.q is not None:
        return draft.q
    return torch.nn.functional.one_hot(draft.tokens.clamp(0, like.shape[-1] - 1), like.shape[-1]).to(like.dtype)
