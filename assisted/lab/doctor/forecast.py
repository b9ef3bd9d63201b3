"""The expected speedup of each draft length: rounds are recorded, replayed with shorter drafts and priced with measured costs.

Knows rounds, lengths by their interface, and costs; knows nothing of models.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...core.drafts import Round
from ...lengths.base import Length
from ...lengths.cost_model import Costs
from ..bench.statistics import Interval, speedup

_NO_END = 10**6  # wrong tokens of a draft of the full length


@dataclass(frozen=True)
class Step:
    """One round of a single row, without its tensors."""

    asked: int  # tokens requested from the drafter one by one, or 1 if it proposes a block at once
    drafted: int  # all nodes of a tree
    accepted: int
    committed: int
    draft_seconds: float  # as the package measures them
    verify_seconds: float
    levels: tuple[int, ...] | None = None  # nodes of a tree by depth; None for a chain
    first_seconds: float = 0.0  # until more than one token was asked for

    @property
    def of_draft(self) -> tuple[float, float]:
        """Seconds of what comes once in a draft, such as reading the tokens that were accepted, and of each token."""
        each = self.draft_seconds / self.asked
        if self.asked == 1 or self.first_seconds < each:  # asked for all tokens before it drafted any
            return 0.0, each
        later = (self.draft_seconds - self.first_seconds) / (self.asked - 1)
        return max(0.0, self.first_seconds - later), later


class Recorded(Length):
    """A draft length that records every round. It is its own state: one object serves several calls of one row each, and every
    member of a combined drafter.

    Args:
        tokens: requested in every round.
        waits: wait for the device after every drafted token, so that its time counts as drafting.
        costs: for drafters that choose the size of their trees by costs.

    Attributes:
        calls: the rounds of each call.
    """

    def __init__(self, tokens: int, waits: bool = False, costs: Costs | None = None):
        self.tokens, self.needs_q, self.costs = tokens, waits, costs
        self.calls: list[list[Step]] = []
        self.asked, self.began, self.first = 0, 0.0, 0.0
        self.last: Round | None = None

    def begin(self) -> None:
        """Begin a call. (`start` would not do: a combined drafter starts a length for each member.)"""
        self.calls.append([])

    def start(self, earlier: Length | None = None) -> Length:
        return self

    def budget(self, unfinished: Sequence[int]) -> int:
        self.asked, self.began, self.first = 1, time.perf_counter(), 0.0
        return self.tokens

    def run_again(self, position: int) -> bool:
        self.first = self.first or time.perf_counter() - self.began
        self.asked += 1
        return True

    def go_on(self, position: int, q: torch.Tensor, drawn: bool = False) -> torch.Tensor:
        q[0, 0].item()
        return super().go_on(position, q)

    def observe(self, round: Round) -> None:
        if (
            round is self.last
        ):  # every member observes a round in which no member of a combined drafter proposed anything
            return
        self.last = round
        counts = round.drafted[0], round.accepted[0], round.kept[0]
        levels = None
        if round.draft.parents is not None:
            depths = round.draft.depths()[0, : int(round.draft.lengths[0])]
            levels = tuple(torch.bincount(depths, minlength=1)[1:].tolist())
        spent = round.draft_seconds, round.verify_seconds
        self.calls[-1].append(Step(self.asked, *counts, *spent, levels, min(self.first, round.draft_seconds)))


@dataclass(frozen=True)
class Token:
    """A token of the text, as a draft proposes it or not."""

    agrees: bool  # every draft that reaches this token proposes it
    wrong: int = 0  # otherwise: tokens that a draft has from here on, all wrong; 0 if nothing was proposed


@dataclass(frozen=True)
class Drafts:
    """The recorded costs and drafts of a drafter."""

    calls: tuple[tuple[Token, ...], ...]  # the text of each call
    costs: Costs  # seconds of the target's forward passes, and of a drafted token (of a whole draft if `blocks`)
    blocks: bool  # a draft takes the same time for every length
    columns: tuple[float, ...] | None = None  # of trees: mean drafted tokens in a pass by depth of the draft, from 0
    once: float = 0.0  # seconds that come once in a draft, beside its tokens


@dataclass(frozen=True)
class Expected:
    """The forecast for one draft length."""

    length: int  # requested tokens per draft; 0 drafts nothing
    tokens_per_pass: float  # per forward pass of the target, with its own token
    milliseconds_per_token: float  # in a long text, without the prompt
    speedup: Interval  # over the baseline, with the spread over prompts


@dataclass(frozen=True)
class Spent:
    """Where the time of calls goes after their prompts."""

    passes: int  # of the target
    draft: float  # seconds
    verify: float
    other: float = 0.0  # what the forecast leaves out


def marks(rounds: Sequence[Step], longest: int) -> tuple[Token, ...]:
    """The text of a call, from its rounds. longest: requested tokens per draft.

    Accepted tokens agree. After a fully accepted draft of the requested length, the next token is assumed to agree as well,
    because no draft was requested for it.
    """
    found: list[Token] = []
    for round in rounds:
        found += [Token(True)] * round.accepted
        if round.committed == round.accepted:  # the text ended in the draft
            continue
        depth = round.drafted if round.levels is None else len(round.levels)
        full = depth >= (longest if round.asked == 1 else round.asked)
        if round.accepted < depth:
            found.append(Token(False, _NO_END if full else depth - round.accepted))
        else:
            found.append(Token(full and round.drafted > 0))
    return tuple(found)


def expect(drafts: Drafts, length: int, plain_seconds: float) -> Expected:
    """Replay the texts with drafts of another length. plain_seconds: the baseline's time per token."""
    spent = [spend(drafts, text, length) for text in drafts.calls]
    ours = [one.draft + one.verify for one in spent]
    plain = [plain_seconds * len(text) for text in drafts.calls]
    tokens = sum(map(len, drafts.calls))
    passes = sum(one.passes for one in spent)
    return Expected(length, tokens / passes, 1e3 * sum(ours) / tokens, speedup([plain], [ours]))


def half_as_wrong(drafts: Drafts) -> Drafts:
    """The same drafter, with every second token that it gets wrong, or does not propose, made right."""
    calls = []
    for text in drafts.calls:
        right = {*[index for index, token in enumerate(text) if not token.agrees][::2]}
        calls.append(tuple(Token(True) if index in right else token for index, token in enumerate(text)))
    return replace(drafts, calls=tuple(calls))


def _walk(text: Sequence[Token], length: int) -> list[int]:
    """Tokens drafted in each round."""
    rounds, start = [], 0
    while start < len(text):
        end = min(start + length, len(text))
        agreed = start
        while agreed < end and text[agreed].agrees:
            agreed += 1
        accepted = agreed - start
        cut_short = accepted < length and agreed < len(text)
        rounds.append(min(length, accepted + text[agreed].wrong) if cut_short else length)
        start = agreed + 1  # the target's own token
    return rounds


def spend(drafts: Drafts, text: Sequence[Token], length: int) -> Spent:
    """Where the time of one of the texts goes with drafts of this length."""
    costs, rounds = drafts.costs, _walk(text, length)
    draft = costs.draft if drafts.blocks and length else costs.draft * length
    draft += drafts.once if length else 0.0
    sizes = drafts.columns
    columns = rounds if sizes is None else [round(sizes[min(drafted, len(sizes) - 1)]) for drafted in rounds]
    return Spent(len(rounds), draft * len(rounds), sum(costs.verify_seconds(1 + each) for each in columns))


def tree_columns(rounds: Sequence[Step], longest: int) -> tuple[float, ...] | None:
    """`Drafts.columns` of recorded rounds; a tree that is cut at some depth keeps the nodes above."""
    if not any(one.levels for one in rounds):
        return None
    trees = [one.levels or (1,) * one.drafted for one in rounds if one.drafted]
    return tuple(sum(sum(levels[:depth]) for levels in trees) / len(trees) for depth in range(longest + 1))
