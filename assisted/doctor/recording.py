"""A draft length for measuring, which records every round.

Knows lengths by their interface; knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..drafts import Draft, Round
from ..lengths.base import Length
from ..lengths.cost_model import Costs

__all__ = ["Recorded", "Step"]


@dataclass(frozen=True)
class Step:
    """One round of a single row, without its tensors.

    Args:
        asked: tokens requested from the drafter one by one, or 1 if it proposes a block at once.
        drafted, accepted, committed: tokens of the row; all nodes of a tree count as drafted.
        draft_seconds, verify_seconds: of the two steps, as the package measures them.
        levels: nodes of a tree by depth; None for a chain.
    """

    asked: int
    drafted: int
    accepted: int
    committed: int
    draft_seconds: float
    verify_seconds: float
    levels: tuple[int, ...] | None = None


@dataclass(eq=False)
class Recorded:
    """The policy. One object serves several calls of one row each.

    Args:
        tokens: requested in every round.
        waits: wait for the device after every drafted token, so that its time counts as drafting.
        costs: for drafters that choose the size of their trees by costs.

    Attributes:
        calls: the rounds of each call.
    """

    tokens: int
    waits: bool = False
    costs: Costs | None = None
    calls: list[list[Step]] = field(default_factory=list)
    _last: Round | None = None

    def begin(self) -> None:
        """Begin a call. (`start` would not do: a combined drafter starts a length for each member.)"""
        self.calls.append([])

    def start(self, earlier: Length | None = None) -> Length:
        return _Recording(self)

    def see(self, round: Round, asked: int) -> None:
        if (
            round is self._last
        ):  # every member of a combined drafter observes a round in which none of them proposed anything
            return
        self._last = round
        counts = round.drafted[0], round.accepted[0], round.kept[0]
        seconds = round.draft_seconds, round.verify_seconds
        self.calls[-1].append(Step(asked, *counts, *seconds, _levels(round.draft)))


class _Recording(Length):
    def __init__(self, policy: Recorded):
        self.policy = policy
        self.needs_q = policy.waits
        self.costs = policy.costs
        self.asked = 0

    def budget(self, unfinished: Sequence[int]) -> int:
        self.asked = 1
        return self.policy.tokens

    def another(self, position: int) -> bool:
        self.asked += 1
        return True

    def go_on(self, position: int, q: torch.Tensor, drawn: bool = False) -> torch.Tensor:
        q[0, 0].item()
        return super().go_on(position, q)

    def observe(self, round: Round) -> None:
        self.policy.see(round, self.asked)


def _levels(draft: Draft) -> tuple[int, ...] | None:
    """Number of nodes at each depth of a tree, of one row."""
    if draft.parents is None:
        return None
    depths = draft.depths()[0, : int(draft.lengths[0])]
    return tuple(torch.bincount(depths, minlength=1)[1:].tolist())
