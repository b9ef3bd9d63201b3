"""The expected speedup of each draft length: recorded rounds replayed with shorter drafts and priced with measured costs.

Knows rounds and costs; knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..bench.statistics import Interval, speedup
from ..lengths.cost_model import Costs
from .recording import Step

__all__ = ["Drafts", "Expected", "Token", "expect", "half_as_wrong", "marks", "tree_columns"]

_NO_END = 10**6  # wrong tokens of a draft of the full length


@dataclass(frozen=True)
class Token:
    """A token of the text, as a draft proposes it or not.

    Args:
        agrees: every draft that reaches this token proposes it.
        wrong: otherwise: the number of tokens that a draft has from here on, all wrong; 0 if nothing was proposed.
    """

    agrees: bool
    wrong: int = 0


@dataclass(frozen=True)
class Drafts:
    """The recorded costs and drafts of a drafter.

    Args:
        calls: the text of each call, token by token.
        costs: seconds of the target's forward passes, and of a drafted token (of a whole draft if `blocks`).
        blocks: a draft takes the same time for every length.
        columns: for trees, the mean number of drafted tokens in a pass by depth of the draft, from 0. None for chains.
    """

    calls: tuple[tuple[Token, ...], ...]
    costs: Costs
    blocks: bool
    columns: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Expected:
    """The forecast for one draft length.

    Args:
        length: requested tokens per draft; 0 drafts nothing.
        tokens_per_pass: per forward pass of the target, with its own token.
        milliseconds_per_token: in a long text, without the prompt.
        speedup: over the baseline, with the spread over prompts.
    """

    length: int
    tokens_per_pass: float
    milliseconds_per_token: float
    speedup: Interval


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
    plain, ours, tokens, passes = [], [], 0, 0
    for text in drafts.calls:
        rounds = _walk(text, length)
        plain.append(plain_seconds * len(text))
        ours.append(sum(_seconds(drafts, length, drafted) for drafted in rounds))
        tokens += len(text)
        passes += len(rounds)
    return Expected(length, tokens / passes, 1e3 * sum(ours) / tokens, speedup([plain], [ours]))


def half_as_wrong(drafts: Drafts) -> Drafts:
    """The same drafter, with every second token that it gets wrong, or does not propose, made right."""
    calls = []
    for text in drafts.calls:
        wrong = [index for index, token in enumerate(text) if not token.agrees]
        right = set(wrong[::2])
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


def _seconds(drafts: Drafts, length: int, drafted: int) -> float:
    """The time of a round."""
    costs = drafts.costs
    draft = costs.draft if drafts.blocks and length else costs.draft * length
    columns = drafted if drafts.columns is None else round(drafts.columns[min(drafted, len(drafts.columns) - 1)])
    return draft + costs.verify_seconds(1 + columns)


def tree_columns(rounds: Sequence[Step], longest: int) -> tuple[float, ...] | None:
    """`Drafts.columns` of recorded rounds; a tree that is cut at some depth keeps the nodes above."""
    trees = [one.levels or (1,) * one.drafted for one in rounds if one.drafted]
    if not any(one.levels for one in rounds):
        return None
    return tuple(sum(sum(levels[:depth]) for levels in trees) / len(trees) for depth in range(longest + 1))
