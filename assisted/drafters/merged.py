"""SpecInfer (2305.09781): the chains of several drafters, merged into one token tree a row, verified in one pass.

Knows drafters by their interface. Where the target cannot verify trees, the first drafter's chains are used alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..drafts import Draft
from ..law import Law
from ..lengths import DraftLength, Fixed, Length
from ..text import Text
from .base import Call, Drafting, Target
from .combined import CombinedDrafter, load_all

__all__ = ["Merged", "MergedDrafter", "merge"]


@dataclass(frozen=True)
class Merged:
    """Several drafters guess, the target checks all their guesses at once: `Merged(["zoo:draft", "suffix"])`.

    Worth its price where the drafters err in different places and a pass over more tokens costs little more (a GPU, one
    row). Each of them drafts what it takes for most probable; the target's own choice decides, so that the law of the
    output is the target's for any tree, at any temperature.

    Args:
        drafters: what drafts, as strings or specs. At least two.
    """

    drafters: tuple[Any, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "drafters", tuple(self.drafters))
        if len(self.drafters) < 2:
            raise ValueError(f"draft: {list(self.drafters)} cannot be merged; name at least two drafters")

    def load(self, target: Target, **kwargs: Any) -> MergedDrafter:
        """Load every drafter. Raises ValueError for those that do not fit the target or each other."""
        return MergedDrafter(load_all(self.drafters, target, **kwargs))


class MergedDrafter(CombinedDrafter):
    """Loaded drafters whose proposals become one tree."""

    def start(self, call: Call) -> Drafting:
        argmax = replace(call, law=Law(call.law.processors, do_sample=False), length=Fixed().start())
        members = self.members if call.target.masks.trees else self.members[:1]
        return MergedDrafting([member.start(argmax) for member in members])

    def start_length(self, policy: DraftLength, earlier: Length | None = None) -> Length:
        """One length for the tree: how deep its chains are."""
        return policy.start(earlier)


class MergedDrafting(Drafting):
    """All members at work on the same text."""

    def __init__(self, members: list[Drafting]):
        self.members = members

    def propose(self, text: Text, budget: int) -> Draft:
        return merge([member.propose(text, budget) for member in self.members])

    def observe(self, draft: Draft, logits: torch.Tensor, accepted: list[int]) -> None:
        for member in self.members:
            member.observe(draft, logits, accepted)


def merge(drafts: list[Draft]) -> Draft:
    """One tree a row of several drafts' chains or trees; what they share on the way from the root is there once.

    Nodes keep the order in which they were met, parents first. Returns a draft without q.
    """
    rows = len(drafts[0].lengths)
    merged: list[tuple[list[int], list[int]]] = []
    for row in range(rows):
        tokens: list[int] = []
        parents: list[int] = []
        known: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        for draft in drafts:
            _insert(draft, row, tokens, parents, known)
        merged.append((tokens, parents))
    width = max(len(tokens) for tokens, _ in merged)
    device = drafts[0].tokens.device
    blank = [0] * width
    return Draft(
        tokens=torch.tensor([(t + blank)[:width] for t, _ in merged], device=device).view(rows, width).long(),
        lengths=torch.tensor([len(t) for t, _ in merged], device=device),
        parents=torch.tensor([(p + blank)[:width] for _, p in merged], device=device).view(rows, width).long(),
    )


def _insert(draft: Draft, row: int, tokens: list[int], parents: list[int], known: dict[tuple[int, int], int]) -> None:
    count = int(draft.lengths[row])
    own = draft.tokens[row, :count].tolist()
    above = range(-1, count - 1) if draft.parents is None else draft.parents[row, :count].tolist()
    node_of = {-1: -1}  # a node of this draft -> the node of the tree
    for number, (token, parent) in enumerate(zip(own, above, strict=True)):
        place = (node_of[parent], token)
        if place not in known:
            known[place] = len(tokens)
            tokens.append(token)
            parents.append(node_of[parent])
        node_of[number] = known[place]
