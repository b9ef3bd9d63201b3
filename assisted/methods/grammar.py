"""Drafting with a grammar: tokens that the text of any legal continuation begins with are drafted without a forward pass of a
draft, after another drafter's tokens or instead of them.

Knows grammars and drafters by their interfaces. Every guess is verified as any draft is, so it only costs speed if it is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..core.drafts import Draft, Round
from ..core.text import Text
from ..distribution import Distribution
from ..lengths.base import Length
from .combined import of_continued
from .shared.base import Call, Drafting
from .shared.trees import continued, first_paths, from_lists, merge, rows_of

FREE = 16  # tokens that may be drafted where the policy's number is no limit of the caller's
FEW = 256  # most tokens that a grammar may allow where one of them is guessed
_LEAST = 0.2  # probability of a path below which nothing is added to it
_SURE, _LOSS = 4, 2  # most points that a remembered token may have, and those that a miss costs
# How often guesses were right in 36 answers of SmolLM2-135M-Instruct under three libraries' grammars
_CAME_HERE, _CAME_OFTEN, _CAME, _CAME_IN_PROSE = 0.85, 0.9, 0.5, 0.4
_FORCED, _SPACED, _FIRST_SPACE = 0.9, 0.5, 0.25
_NARROW = 32  # allowed tokens, for what came once elsewhere
_SPACES = str.maketrans("ĠĊĉč▁", " \n\t\r ")  # as the tokens of byte-level and sentencepiece vocabularies have them


def guided(
    drafting: Drafting,
    length: Length,
    distribution: Distribution,
    tokenizer: Any,
    splits: bool,
    tell: Callable[[int, str], None],
) -> tuple[Drafting, Length]:
    """The drafting and the draft length of a call, with guesses from its grammar if it has one.

    tokenizer: the target's, None if there is none. splits: the target has half read the drafts when they are proposed. tell:
    called with a row and the reason if the row gets no drafts any more.
    """
    if not distribution.may_have_grammars:
        return drafting, length
    around = GuidedLength(length, distribution)
    return GuidedDrafting(drafting, around, Guesses(tokenizer), tell, splits), around


class GuidedLength(Length):
    """A draft length that allows for guesses. What it is told of a round leaves them out.

    Attributes:
        given: what the policy allows the drafter in this round.
    """

    def __init__(self, length: Length, distribution: Distribution):
        self.length, self.distribution = length, distribution
        self.given = self.idle = 0  # idle: rounds without a draft, in a row

    @property
    def predicted_speedup(self) -> float | None:  # type: ignore[override]
        return self.length.predicted_speedup

    def budget(self, unfinished: Sequence[int]) -> int:
        self.given = self.length.budget(unfinished)
        if self.length.is_limit or not self.guides(unfinished):
            return self.given
        self.idle = 0 if self.given else self.idle + 1
        return max(self.given, 0 if self.idle == 1 else FREE)  # a single one measures a pass over one token

    def guides(self, rows: Sequence[int]) -> bool:
        """Whether one of these rows has a grammar."""
        return any(self.distribution.grammar(row)[0] is not None for row in rows)

    def observe(self, round: Round) -> None:
        own = round.draft.continued
        if own is not None and not own.width:  # all of it was guessed
            self.length.observe_other(round)
        else:
            self.length.observe(replace(of_continued(round), drafted=round.drafted))

    def renew(self, row: int) -> None:
        self.length.renew(row)


class GuidedDrafting(Drafting):
    """Cuts another drafting's chains where they leave the grammar, and continues them with guesses.

    Args:
        drafting: the other one, which sees its own drafts only.
        length: has its draft length, and the rows' grammars.
        tell: see `guided`.
        splits: what it proposes is not changed, because the target would have to read it again.
    """

    def __init__(
        self,
        drafting: Drafting,
        length: GuidedLength,
        guesses: Guesses,
        tell: Callable[[int, str], None],
        splits: bool = False,
    ):
        self.drafting, self.length, self.guesses, self.splits, self.tell = drafting, length, guesses, splits, tell
        self.failed: set[int] = set()  # rows whose matcher raised after drafted tokens: without these, it may go on
        self.grammar = length.distribution.grammar
        self.text: Text | None = None
        self.before: list[int] = []  # the rows' lengths when the draft was made
        self.proposed: Draft | None = None

    def parts(self) -> Sequence[Drafting]:
        return [self.drafting]

    def renew(self, text: Text, row: int, call: Call) -> None:
        self.failed.discard(row)
        self.drafting.renew(text, row, call)

    def propose(self, text: Text, budget: int) -> Draft:
        own = min(budget, self.length.given)
        draft = self.drafting.propose(text, own) if own > 0 else Draft.empty(text.rows, text.ids.device)
        self.text, self.before, self.proposed = text, list(text.lengths), None
        for row in text.unfinished:
            grammar, own = self.grammar(row)
            if grammar is not None and own in grammar.raised:  # while the other drafting asked for masks
                self._fail(row, grammar.raised[own])
        if (self.splits and draft.width) or not self.length.guides(text.unfinished):
            return draft
        if draft.parents is not None:
            return self._without_failed(draft) if draft.q is not None else self._around(text, draft, budget)
        rows = rows_of(draft)
        found = self._chains(text, rows, budget, draft.q is None)
        if found == rows:
            return draft
        self.proposed = replace(continued(draft, found), expected=draft.expected, member=draft.member)
        return self.proposed

    def observe(self, round: Round) -> None:
        if self.text is not None:
            for row in round.unfinished:
                self._learn(row, self.text, round.kept[row])
        mine = round.draft.is_that_of(self.proposed) and of_continued(round)
        self.drafting.observe(mine if mine and mine.draft.width else round)

    def _around(self, text: Text, draft: Draft, budget: int) -> Draft:
        """A tree, with guesses after the committed text and at the end of its most probable path."""
        paths = first_paths(draft)
        nothing: list[list[int]] = [[] for _ in paths]
        chains = [self._chains(text, rows, budget, True) for rows in (paths, nothing)]
        draft = self._without_failed(draft)
        if chains == [paths, nothing]:
            return draft
        for row in self.failed:
            chains[0][row] = []
        guessed = [from_lists(rows, None, draft.tokens.device) for rows in chains]
        return replace(merge([draft, *guessed]), expected=draft.expected, member=draft.member)

    def _chains(self, text: Text, rows: list[list[int]], budget: int, may_cut: bool) -> list[list[int]]:
        """Chains of all rows, continued; those of rows that have ended stay as they are."""
        found = list(rows)
        for row in text.unfinished:
            room = min(budget, text.max_length - text.lengths[row] - 1)
            try:
                found[row] = [] if row in self.failed else self._guided(row, text, rows[row], room, may_cut)
            except Exception as error:  # of a library, or of the caller's matcher
                self._fail(row, error)
                found[row] = []
        return found

    def _fail(self, row: int, error: Exception) -> None:
        if row not in self.failed:
            self.failed.add(row)
            self.tell(row, f"Drafting failed ({type(error).__name__}: {error}); continuing without drafts.")

    def _without_failed(self, draft: Draft) -> Draft:
        """A tree without nodes in rows whose matcher has failed."""
        if not self.failed or draft.parents is None:
            return draft
        lengths, parents, rows = draft.lengths.clone(), draft.parents.clone(), sorted(self.failed)
        lengths[rows], parents[rows] = 0, -1
        return replace(draft, lengths=lengths, parents=parents)

    def _guided(self, row: int, text: Text, drafted: list[int], room: int, may_cut: bool) -> list[int]:
        """A row's chain, at most `room` tokens. may_cut: its tokens were not drawn from a distribution."""
        grammar, own = self.grammar(row)
        if grammar is None:
            return drafted
        last = int(text.ids[row, text.lengths[row] - 1])
        grammar.read(own, text.ids[row], text.lengths[row])
        found: list[int] = []
        for token in drafted:
            if may_cut and not _allows(grammar.mask(own, tuple(found)), token):
                break
            found.append(token)
        share = 1.0
        while len(found) < room and not grammar.is_over(own, tuple(found)):
            mask = grammar.mask(own, tuple(found))
            guess = None if mask is None else self.guesses.after(mask, found[-1] if found else last)
            if guess is None or share * guess[1] < _LEAST:
                break
            found.append(guess[0])
            share *= guess[1]
        return found

    def _learn(self, row: int, text: Text, count: int) -> None:
        """Remember what came where the grammar allows little."""
        (grammar, own), start = self.grammar(row), self.before[row]
        if grammar is None:
            return
        last, *new = text.ids[row, start - 1 : start + count].tolist()
        for number, token in enumerate(new):
            mask = grammar.known(own, tuple(new[:number]))
            if mask is not None:
                self.guesses.learn(mask, last, token)
            last = token


class Guesses:
    """Guesses the next token from what a grammar allows, and from what came in this text where it allowed the same."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.texts: dict[int, str] = {}
        self.came: dict[
            tuple[bytes, int | None], tuple[int, int]
        ] = {}  # by mask and last token: a token and its points
        self.spaces: dict[str, str] = {}  # by the last character before it: the space that came where it was allowed

    def after(self, mask: torch.Tensor, last: int) -> tuple[int, float] | None:
        """The token that probably follows `last`, and how probable it is; None if that is open. mask: [n] bool, the allowed
        tokens."""
        key, count = _key(mask), int(mask.sum())
        token, points = self.came.get((key, last), (0, 0))
        if points > 0:
            return token, _CAME_IN_PROSE if count > FEW and points == 1 else _CAME_HERE if points == 1 else _CAME_OFTEN
        token, points = self.came.get((key, None), (0, 0))
        if points > 1:
            return token, _CAME_HERE
        if not 0 < count <= FEW:
            return None
        allowed = mask.nonzero().flatten().tolist()
        if count == 1:
            return allowed[0], 1.0
        forced = None if self.tokenizer is None else self._forced(allowed, last)
        if forced is not None:
            sure = _SPACED if self._text(last)[-1:] in self.spaces else _FIRST_SPACE
            return forced, sure if self._has_space(allowed) else _FORCED
        return (token, _CAME) if points > 0 and count < _NARROW else None

    def learn(self, mask: torch.Tensor, last: int, token: int) -> None:
        """A token came after `last`, where `mask` was allowed."""
        key, few = _key(mask), int(mask.sum()) <= FEW
        if self.tokenizer is not None and few and self._has_space(mask.nonzero().flatten().tolist()):
            text = self._text(token)
            self.spaces[self._text(last)[-1:]] = text[: len(text) - len(text.lstrip())]
        for place in ((key, last), (key, None))[: 1 + few]:
            known, points = self.came.get(place, (token, 0))
            points = min(points + 1, _SURE) if known == token else points - _LOSS
            self.came[place] = (known, points) if points > 0 else (token, 1)

    def _forced(self, allowed: list[int], last: int) -> int | None:
        """The longest token of the text that every continuation begins with, whitespace aside; None if they differ.

        Space is as it was after the same character; at first, there is one after commas and colons.
        """
        texts = {token: self._text(token) for token in allowed}
        bare = {"".join(text.split()) for text in texts.values()}
        longest = max(bare, key=len)
        if not longest or not all(map(longest.startswith, bare)):
            return None
        spaced, end = longest.replace(",", ", ").replace(":", ": "), self._text(last)[-1:]
        spaced = self.spaces.get(end, " " if end in (",", ":") else "") + spaced
        fits = [token for token, text in texts.items() if text and spaced.startswith(text)]
        return max(fits, key=lambda token: len(texts[token]), default=None)

    def _has_space(self, allowed: list[int]) -> bool:
        return any(self._text(token).isspace() for token in allowed)

    def _text(self, token: int) -> str:
        if token not in self.texts:
            self.texts[token] = str(self.tokenizer.convert_ids_to_tokens(token) or "").translate(_SPACES)
        return self.texts[token]


def _allows(mask: torch.Tensor | None, token: int) -> bool:
    return mask is not None and token < len(mask) and bool(mask[token])


def _key(mask: torch.Tensor) -> bytes:
    """Equal for equal masks."""
    return mask.numpy().tobytes()
