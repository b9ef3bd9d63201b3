"""What to expect of each draft length: recorded rounds walked through again in shorter drafts, priced by measured costs.

Knows rounds and costs; nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..bench.statistics import Interval, speedup
from ..lengths.costs import Costs
from .recording import Step

__all__ = ["Drafts", "Expected", "Token", "expect", "half_as_wrong", "marks", "tree_columns"]

_NO_END = 10**6  # of a draft that is as long as it was asked to be


@dataclass(frozen=True)
class Token:
    """A token of the text, as a draft would meet it.

    Args:
        agrees: the drafter proposes it, wherever a draft that gets here began.
        behind: where it does not: how many tokens a draft has from here on, all of them wrong. 0: nothing was proposed.
    """

    agrees: bool
    behind: int = 0


@dataclass(frozen=True)
class Drafts:
    """What a drafter costs and does, as far as it was recorded.

    Args:
        calls: the text of each call, token by token.
        costs: seconds of the target's passes, and of a drafted token (or of a whole draft: `blocks`).
        blocks: a draft takes as long whatever its length.
        columns: of trees, the tokens that a pass checks by the draft's depth, 0 first: means. None for chains.
    """

    calls: tuple[tuple[Token, ...], ...]
    costs: Costs
    blocks: bool
    columns: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Expected:
    """Of one draft length.

    Args:
        length: tokens asked for; 0 drafts nothing.
        tokens_per_pass: of the target, its own token included.
        milliseconds_per_token: in a long text; reading the prompt is left out.
        speedup: over plain decoding, with what prompts differ by.
    """

    length: int
    tokens_per_pass: float
    milliseconds_per_token: float
    speedup: Interval


def marks(rounds: Sequence[Step], longest: int) -> tuple[Token, ...]:
    """The text of a call, from its rounds.

    What was accepted agrees. The token behind a draft that was accepted as a whole, and was as long as was asked for, is
    taken to agree as well: nobody asked. longest: tokens that were asked for.
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
    """Decode the texts again with drafts of another length. plain_seconds: of a token, plainly."""
    plain, ours, tokens, passes = [], [], 0, 0
    for text in drafts.calls:
        rounds = _walk(text, length)
        plain.append(plain_seconds * len(text))
        ours.append(sum(_seconds(drafts, length, drafted) for drafted in rounds))
        tokens += len(text)
        passes += len(rounds)
    return Expected(length, tokens / passes, 1e3 * sum(ours) / tokens, speedup([plain], [ours]))


def half_as_wrong(drafts: Drafts) -> Drafts:
    """The same drafter if every second token that it gets wrong, or proposes nothing for, were right."""
    calls = []
    for text in drafts.calls:
        wrong = [place for place, token in enumerate(text) if not token.agrees]
        right = set(wrong[::2])
        calls.append(tuple(Token(True) if place in right else token for place, token in enumerate(text)))
    return replace(drafts, calls=tuple(calls))


def _walk(text: Sequence[Token], length: int) -> list[int]:
    """Tokens drafted in each round."""
    rounds, place = [], 0
    while place < len(text):
        end = min(place + length, len(text))
        agreed = place
        while agreed < end and text[agreed].agrees:
            agreed += 1
        accepted = agreed - place
        cut_short = accepted < length and agreed < len(text)
        rounds.append(min(length, accepted + text[agreed].behind) if cut_short else length)
        place = agreed + 1  # the target's own token
    return rounds


def _seconds(drafts: Drafts, length: int, drafted: int) -> float:
    """Of a round."""
    costs = drafts.costs
    draft = costs.draft if drafts.blocks and length else costs.draft * length
    columns = drafted if drafts.columns is None else round(drafts.columns[min(drafted, len(drafts.columns) - 1)])
    return draft + costs.verify_seconds(1 + columns)


def tree_columns(rounds: Sequence[Step], longest: int) -> tuple[float, ...] | None:
    """What `Drafts.columns` says of recorded rounds; a tree cut at some depth keeps the nodes above."""
    trees = [one.levels or (1,) * one.drafted for one in rounds if one.drafted]
    if not any(one.levels for one in rounds):
        return None
    return tuple(sum(sum(levels[:depth]) for levels in trees) / len(trees) for depth in range(longest + 1))
