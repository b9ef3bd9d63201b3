"""The base of drafters that look up continuations in the text, on the host, where tokens are Python ints: reading committed
tokens, and turning proposals into a Draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from ...core.drafts import Draft
from ...core.text import Text
from .base import Call, Drafting
from .trees import continued, from_lists, rows_of

__all__ = ["Backoff", "Lookup", "Proposal", "as_draft", "right"]

LONGEST_PAUSE = 16  # rounds


@dataclass(frozen=True)
class Proposal:
    """A proposal for one row.

    Args:
        tokens: of the nodes, parents first.
        expected: expected number of accepted tokens.
        parents: the parent of each node, -1 for the last committed token; None for a chain.
    """

    tokens: list[int]
    expected: float = 0.0
    parents: list[int] | None = None

    def first(self, count: int) -> Proposal:
        """The first tokens of a chain."""
        return self if len(self.tokens) <= count else Proposal(self.tokens[:count], min(self.expected, count))


NOTHING = Proposal([])


class Backoff:
    """How much to propose: half as much after each miss, then pauses of doubling length; everything after a success."""

    def __init__(self) -> None:
        self.misses = 0
        self.pause = 0

    def allowed(self, budget: int) -> int:
        """Number of tokens that may be proposed in this round. Called once per round."""
        if self.pause:
            self.pause -= 1
            return 0
        return max(1, budget >> self.misses)

    def learn(self, accepted: int) -> None:
        """A proposal was judged. accepted: number of its tokens that were right."""
        self.misses = 0 if accepted else self.misses + 1
        self.pause = min(LONGEST_PAUSE, (1 << max(0, self.misses - 2)) - 1)


class Lookup(Drafting):
    """Reads each committed token of each row once, without padding, and makes a draft of one proposal per row.

    A subclass overrides `read`, `look_up` and `look_up_after`.
    """

    def __init__(self, call: Call):
        self.call = call
        self.text: Text | None = None
        self.seen: list[int] | None = None  # number of columns read, per row
        self.backoffs: dict[int, Backoff] = {}  # by row: for what it adds to the drafts of others
        self.added: dict[int, tuple[list[int], list[int]]] = {}  # row -> a chain and what was added to it, until judged

    def read(self, row: int, tokens: list[int]) -> None:
        """Receive the tokens that were committed to a row since the last call; at first, its prompt."""
        raise NotImplementedError

    def look_up(self, row: int, budget: int) -> Proposal:
        """Propose a continuation of an unfinished row, at most `budget` tokens deep."""
        raise NotImplementedError

    def look_up_after(self, row: int, drafted: Sequence[int], budget: int) -> list[int]:
        """A chain that continues a row and the tokens that were drafted for it, at most `budget` tokens."""
        raise NotImplementedError

    def propose(self, text: Text, budget: int) -> Draft:
        self.catch_up(text)
        proposals = [NOTHING] * text.rows
        unfinished = text.unfinished
        for row in unfinished:
            room = text.max_length - text.lengths[row] - 1
            if room > 0:
                proposals[row] = self.look_up(row, min(budget, room))
        if len(unfinished) > 1 and all(proposal.parents is None for proposal in proposals):
            width = self.call.length.fit([len(proposals[row].tokens) for row in unfinished])
            proposals = [proposal.first(width) for proposal in proposals]
        expected = sum(proposals[row].expected for row in unfinished) / len(unfinished)
        return as_draft(proposals, text.ids.device, expected)

    def fill(self, text: Text, draft: Draft, budget: int) -> Draft:
        """The chains of another drafter, continued; trees are returned as they are."""
        if draft.parents is not None:
            return draft
        self.catch_up(text)
        rows = rows_of(draft)
        for row in text.unfinished:
            drafted = rows[row]
            backoff = self.backoffs.setdefault(row, Backoff())
            room = min(budget, text.max_length - text.lengths[row] - 1) - len(drafted)
            allowed = backoff.allowed(room) if drafted and room > 0 else 0
            if allowed and (more := self.look_up_after(row, drafted, allowed)):
                self.added[row] = drafted, more
                rows[row] = drafted + more
        return continued(draft, rows) if self.added else draft

    def renew(self, text: Text, row: int, call: Call) -> None:
        """Read a row's new text, from nothing."""
        if self.seen is None:
            self.seen = [0] * text.rows
        self.backoffs.pop(row, None)
        self.added.pop(row, None)
        self.read(row, text.ids[row, : text.lengths[row]].tolist())
        self.seen[row] = text.lengths[row]

    def catch_up(self, text: Text) -> None:
        """Read what was committed since the last call, with one transfer to the host."""
        self.text = text
        if self.seen is None:
            self.seen = [text.prompt_length] * text.rows
            encoded = self.call.encoded  # whose text is copied from as well
            before = [[]] * text.rows if encoded is None else encoded.tokens(self.call.vocab_size)
            for row, tokens in enumerate(text.prompts(self.call.attention_mask)):
                self.read(row, before[row] + tokens)
        for row, tokens in enumerate(text.since(self.seen)):
            if tokens:
                self.read(row, tokens)
            drafted, added = self.added.pop(row, ((), ()))
            came = tokens[len(drafted) :]
            if added and came and tokens[: len(drafted)] == drafted:
                self.backoffs[row].learn(right(added, came))
        self.seen = list(text.lengths)


def right(proposed: Sequence[int], came: Sequence[int]) -> int:
    """How many of the proposed tokens came, until the first other one."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(proposed, came, strict=False)))


def as_draft(proposals: list[Proposal], device: torch.device | str, expected: float | None = None) -> Draft:
    """Combine the proposals of all rows into one draft on `device`, without q; a tree if any is one. expected: see `Draft`."""
    if not any(proposal.tokens for proposal in proposals):
        return Draft.empty(len(proposals), device)
    tokens, parents = [p.tokens for p in proposals], None
    if any(p.parents is not None for p in proposals):
        parents = [list(range(-1, len(p.tokens) - 1)) if p.parents is None else p.parents for p in proposals]
    return from_lists(tokens, parents, device, expected)
