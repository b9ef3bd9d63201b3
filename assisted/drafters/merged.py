"""SpecInfer (2305.09781): the drafts of several drafters are merged into one token tree per row and verified together. If the
target cannot verify trees, only the first drafter is used.
"""

from __future__ import annotations

import itertools
import weakref
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
from .combined import CombinedDrafter, Several
from .registry import register
from .trees import from_lists


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


def merge(drafts: list[Draft]) -> Draft:
    """Merge several drafts (chains or trees) into one tree per row. Common prefixes become common paths.

    Nodes are in the order of insertion, parents first. If any draft has q, the tree has q, with one-hot distributions for the
    drafts without. These drafts are inserted last, which costs one-hot candidates nothing, so that they do not change the
    residual for the others. If drafts with q drew the same token after the same path, each of them adds a
    node, since each was drawn from its own distribution; all descendants are attached to the first of these nodes.
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
    distributions = torch.cat([_distributions(draft, drafts[0].q) for draft in drafts], 1)
    origins = padded([row.origins for row in rows], device)[:, :, None]
    return replace(merged, q=distributions.gather(1, origins.expand(-1, -1, distributions.shape[-1])))


@dataclass
class _Tree:
    """One row's tree under construction: for each node, its token, its parent, and its column in the concatenated drafts."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    known: dict[tuple[int, int], int] = field(default_factory=dict)  # (parent, token) -> the first such node

    def insert(self, draft: Draft, row: int, start: int) -> None:
        """Insert a row of a draft. start: its first column in the concatenated drafts."""
        count = int(draft.lengths[row])
        own = draft.tokens[row, :count].tolist()
        above = range(-1, count - 1) if draft.parents is None else draft.parents[row, :count].tolist()
        node_of = {-1: -1}  # node of the draft -> node of the tree
        for number, (token, parent) in enumerate(zip(own, above, strict=True)):
            child = (node_of[parent], token)
            if child not in self.known or draft.q is not None:
                self.tokens.append(token)
                self.parents.append(node_of[parent])
                self.origins.append(start + number)
            node_of[number] = self.known.setdefault(child, len(self.tokens) - 1)


def _distributions(draft: Draft, like: torch.Tensor) -> torch.Tensor:
    """The distributions of a draft's nodes, [B, n, V]; one-hot if it has no q. like: has the vocabulary size and dtype."""
    if draft.q is not None:
        return draft.q
    return torch.nn.functional.one_hot(draft.tokens.clamp(0, like.shape[-1] - 1), like.shape[-1]).to(like.dtype)
