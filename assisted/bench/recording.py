"""Draft lengths to measure with: one that writes down what became of every round, and one that never drafts.

Knows lengths and drafters by their interfaces; nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..cache import SlotCache
from ..drafters import Call, Drafter, Drafting
from ..drafts import Draft
from ..lengths import Costs, DraftLength, Length
from ..modeling import AssistedModelForCausalLM
from ..runtime import CachedModel, Masks
from ..text import Text

__all__ = ["Never", "Recorded", "Round", "watched"]


@dataclass(frozen=True)
class Round:
    """One round of a single row.

    Args:
        asked: tokens that the drafter was asked for one by one, or 1 where it proposes a block at once.
        drafted, accepted, committed: tokens of the row; a tree's nodes count as drafted.
        draft_seconds, verify_seconds: of the two steps, as the package measures them.
        levels: of a tree, its nodes by depth; None for a chain.
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
        tokens: to ask for in every round.
        waits: let every drafted token wait for the device, so that seconds are those of the draft.
        costs: for drafters that size their trees by them.

    Attributes:
        calls: the rounds of each call.
        draft: what was proposed in the round that is on, where a model is `watched`.
    """

    tokens: int
    waits: bool = False
    costs: Costs | None = None
    calls: list[list[Round]] = field(default_factory=list)
    draft: Draft | None = None
    _last: object = None

    def begin(self) -> None:
        """A call begins. (A drafter made of several starts a length for each.)"""
        self.calls.append([])

    def start(self, earlier: Length | None = None) -> Length:
        return _Recording(self)

    def see(self, rows: list[tuple[int, int, int]], asked: int, draft_seconds: float, verify_seconds: float) -> None:
        if rows is self._last:  # told to every member of a combination, where none of them proposed anything
            return
        self._last = rows
        drafted, accepted, committed = rows[0]
        levels, self.draft = _levels(self.draft), None
        self.calls[-1].append(Round(asked, drafted, accepted, committed, draft_seconds, verify_seconds, levels))


class _Recording(Length):
    def __init__(self, policy: Recorded):
        self.policy = policy
        self.needs_law = policy.waits
        self.costs = policy.costs
        self.asked = 0

    def budget(self) -> int:
        self.asked = 1
        return self.policy.tokens

    def another(self, position: int) -> bool:
        self.asked += 1
        return True

    def go_on(self, position: int, q: torch.Tensor) -> torch.Tensor:
        q[0, 0].item()
        return super().go_on(position, q)

    def observe(self, rows: list[tuple[int, int, int]], draft_seconds: float, verify_seconds: float) -> None:
        self.policy.see(rows, self.asked, draft_seconds, verify_seconds)


def watched(model: AssistedModelForCausalLM, policy: Recorded) -> AssistedModelForCausalLM:
    """The same pair, whose drafts the policy is shown: what a length is told of a tree is its number of nodes alone."""
    drafter = _Watched(model.drafter, policy)
    same = AssistedModelForCausalLM(
        model.config, model.target, model.spec, drafter, model.draft_length, model.tokenizer
    )
    same.fast, same.graphs = model.fast, model.graphs
    return same


class _Watched(Drafter):
    def __init__(self, drafter: Drafter, policy: Recorded):
        self.drafter, self.policy = drafter, policy

    @property
    def models(self) -> list[PreTrainedModel]:
        return self.drafter.models

    @property
    def modules(self) -> list[nn.Module]:
        return self.drafter.modules

    def start(self, call: Call) -> Drafting:
        return _WatchedDrafting(self.drafter.start(call), self.policy)

    def start_length(self, policy: DraftLength, earlier: Length | None = None) -> Length:
        return self.drafter.start_length(policy, earlier)

    def run_target(self, model: PreTrainedModel, cache: SlotCache, masks: Masks) -> CachedModel:
        return self.drafter.run_target(model, cache, masks)


class _WatchedDrafting(Drafting):
    def __init__(self, drafting: Drafting, policy: Recorded):
        self.drafting, self.policy = drafting, policy

    def propose(self, text: Text, budget: int) -> Draft:
        self.policy.draft = self.drafting.propose(text, budget)
        return self.policy.draft

    def observe(self, *args: Any) -> None:
        self.drafting.observe(*args)


def _levels(draft: Draft | None) -> tuple[int, ...] | None:
    """Nodes by depth of a tree of one row."""
    if draft is None or draft.parents is None:
        return None
    depths = draft.depths()[0, : int(draft.lengths[0])]
    return tuple(torch.bincount(depths, minlength=1)[1:].tolist())


@dataclass(frozen=True)
class Never:
    """This package's loop without drafts: what is gained by the way passes are run, not by drafting."""

    def start(self, earlier: Length | None = None) -> Length:
        return _Nothing()


class _Nothing(Length):
    def budget(self) -> int:
        return 0
