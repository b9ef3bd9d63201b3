"""The base of drafters that look up continuations in the text, on the host, where tokens are Python ints: reading committed
tokens, and turning proposals into a Draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..drafts import Draft
from ..text import Text
from .base import Call, Drafting
from .trees import from_lists

__all__ = ["Lookup", "Proposal", "as_draft"]


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


NOTHING = Proposal([])


class Lookup(Drafting):
    """Reads each committed token of each row once, without padding, and makes a draft of one proposal per row.

    A subclass overrides `read` and `look_up`.
    """

    def __init__(self, call: Call):
        self.call = call
        self.seen: list[int] | None = None  # number of columns read, per row

    def read(self, row: int, tokens: list[int]) -> None:
        """Receive the tokens that were committed to a row since the last call; at first, its prompt."""
        raise NotImplementedError

    def look_up(self, row: int, budget: int) -> Proposal:
        """Propose a continuation of an unfinished row, at most `budget` tokens deep."""
        raise NotImplementedError

    def propose(self, text: Text, budget: int) -> Draft:
        self.catch_up(text)
        proposals = [NOTHING] * text.rows
        unfinished = text.unfinished
        for row in unfinished:
            room = text.max_length - text.lengths[row] - 1
            if room > 0:
                proposals[row] = self.look_up(row, min(budget, room))
        expected = sum(proposals[row].expected for row in unfinished) / len(unfinished)
        return as_draft(proposals, text.ids.device, expected)

    def catch_up(self, text: Text) -> None:
        """Read what was committed since the last call, with one transfer to the host."""
        if self.seen is None:
            self.seen = [text.prompt_length] * text.rows
            for row, tokens in enumerate(text.prompts(self.call.attention_mask)):
                self.read(row, tokens)
        for row, tokens in enumerate(text.since(self.seen)):
            if tokens:
                self.read(row, tokens)
        self.seen = list(text.lengths)


def as_draft(proposals: list[Proposal], device: torch.device | str, expected: float | None = None) -> Draft:
    """Combine the proposals of all rows into one draft on `device`, without q; a tree if any is one. expected: see `Draft`."""
    if not any(proposal.tokens for proposal in proposals):
        return Draft.empty(len(proposals), device)
    tokens, parents = [p.tokens for p in proposals], None
    if any(p.parents is not None for p in proposals):
        parents = [list(range(-1, len(p.tokens) - 1)) if p.parents is None else p.parents for p in proposals]
    return from_lists(tokens, parents, device, expected)
