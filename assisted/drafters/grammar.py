"""Drafting with a grammar: tokens that the text of any legal continuation begins with are drafted without a forward pass of a
draft, after another drafter's tokens or instead of them.

Knows grammars and drafters by their interfaces. Every guess is verified as any draft is, so it only costs speed if it is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ..distribution import Distribution
from ..drafts import Draft, Round
from ..grammar import Grammar
from ..lengths.base import Length
from ..text import Text
from .base import Drafting
from .combined import of_continued
from .trees import from_lists

FREE = 16  # tokens that may be guessed where the policy sets no limit of the caller's
FEW = 256  # most tokens that a grammar may allow where one is guessed
_SURE, _LOSS = 4, 2  # most points that a remembered token may have, and those that a miss costs
_SPACES = str.maketrans("ĠĊĉč▁", " \n\t\r ")  # as the tokens of byte-level and sentencepiece vocabularies have them


def guided(drafting: Drafting, length: Length, distribution: Distribution, tokenizer: Any) -> tuple[Drafting, Length]:
    """The drafting and the draft length of a call, with guesses from its grammar if it has one. tokenizer: the target's or None."""
    grammar = next(iter(distribution.grammars.values()), None)
    if grammar is None:
        return drafting, length
    around = GuidedLength(length)
    return GuidedDrafting(drafting, around, grammar, Guesses(tokenizer)), around


class GuidedLength(Length):
    """A draft length that allows for guesses. What it is told of a round leaves them out.

    Attributes:
        given: what the policy allows the drafter in this round.
    """

    def __init__(self, length: Length):
        self.length = length
        self.given = self.idle = 0  # idle: rounds without a draft, in a row

    @property
    def predicted_speedup(self) -> float | None:  # type: ignore[override]
        return self.length.predicted_speedup

    def budget(self, unfinished: Sequence[int]) -> int:
        self.given = self.length.budget(unfinished)
        if self.length.is_limit:
            return self.given
        self.idle = 0 if self.given else self.idle + 1
        return max(self.given, 0 if self.idle == 1 else FREE)  # a single one measures a pass over one token

    def observe(self, round: Round) -> None:
        self.length.observe(replace(of_continued(round), drafted=round.drafted))


class GuidedDrafting(Drafting):
    """Cuts another drafting's chains where they leave the grammar, and continues them with guesses.

    Args:
        drafting: the other one, which sees its own drafts only.
        length: has its draft length.
    """

    def __init__(self, drafting: Drafting, length: GuidedLength, grammar: Grammar, guesses: Guesses):
        self.drafting, self.length, self.grammar, self.guesses = drafting, length, grammar, guesses
        self.text: Text | None = None
        self.before: list[int] = []  # the rows' lengths when the draft was made
        self.proposed: Draft | None = None

    def parts(self) -> Sequence[Drafting]:
        return [self.drafting]

    def propose(self, text: Text, budget: int) -> Draft:
        own = min(budget, self.length.given)
        draft = self.drafting.propose(text, own) if own > 0 else Draft.empty(text.rows, text.ids.device)
        self.text, self.before, self.proposed = text, list(text.lengths), None
        if draft.parents is not None:
            return draft
        rows = [row[:count] for row, count in zip(draft.tokens.tolist(), draft.lengths.tolist(), strict=True)]
        found = [list(row) for row in rows]
        for row in text.unfinished:
            room = min(budget, text.max_length - text.lengths[row] - 1)
            found[row] = self._guided(row, text, rows[row], room, draft.q is None)
        if found == rows:
            return draft
        self.proposed = guided = replace(_as_draft(found, draft), continued=draft, member=draft.member)
        return guided

    def observe(self, round: Round) -> None:
        if self.text is not None:
            for row in round.unfinished:
                self._learn(row, self.text, round.kept[row])
        self.drafting.observe(of_continued(round) if round.draft.is_that_of(self.proposed) else round)

    def _guided(self, row: int, text: Text, drafted: list[int], room: int, may_cut: bool) -> list[int]:
        """A row's chain, at most `room` tokens. may_cut: its tokens were not drawn from a distribution."""
        grammar, last = self.grammar, int(text.ids[row, text.lengths[row] - 1])
        grammar.read(row, text.ids[row], text.lengths[row])
        found: list[int] = []
        for token in drafted:
            if may_cut and not self._allows(row, tuple(found), token):
                break
            found.append(token)
        while len(found) < room:
            mask = grammar.mask(row, tuple(found))
            token = None if mask is None else self.guesses.after(mask, found[-1] if found else last)
            if token is None:
                break
            found.append(token)
        return found

    def _allows(self, row: int, path: tuple[int, ...], token: int) -> bool:
        mask = self.grammar.mask(row, path)
        return mask is not None and token < len(mask) and bool(mask[token])

    def _learn(self, row: int, text: Text, count: int) -> None:
        """Remember what came where the grammar allows little."""
        start = self.before[row]
        last, *new = text.ids[row, start - 1 : start + count].tolist()
        for number, token in enumerate(new):
            mask = self.grammar.known(row, tuple(new[:number]))
            if mask is not None:
                self.guesses.learn(mask, last, token)
            last = token


class Guesses:
    """Guesses the next token from what a grammar allows, and from what came in this text where it allowed the same."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.texts: dict[int, str] = {}
        self.came: dict[tuple[bytes, int | None], tuple[int, int]] = {}  # by mask and last token: a token and its points

    def after(self, mask: torch.Tensor, last: int) -> int | None:
        """The token that probably follows; None if that is open. mask: [n] bool, the allowed tokens."""
        key = _key(mask)
        for place in ((key, last), (key, None)):
            token, points = self.came.get(place, (0, 0))
            if points > 0:
                return token
        allowed = mask.nonzero().flatten().tolist() if int(mask.sum()) <= FEW else []
        if len(allowed) < 2:
            return allowed[0] if allowed else None
        return None if self.tokenizer is None else self._forced(allowed, last)

    def learn(self, mask: torch.Tensor, last: int, token: int) -> None:
        """A token came after `last`, where `mask` was allowed."""
        key = _key(mask)
        few = int(mask.sum()) <= FEW
        for place in ((key, last), (key, None))[: 1 + few]:
            known, points = self.came.get(place, (token, 0))
            points = min(points + 1, _SURE) if known == token else points - _LOSS
            self.came[place] = (known, points) if points > 0 else (token, int(few))

    def _forced(self, allowed: list[int], last: int) -> int | None:
        """The longest token of the text that every continuation begins with, whitespace aside; None if they differ.

        The text gets a space after commas and colons, as most JSON has it.
        """
        texts = {token: self._text(token) for token in allowed}
        bare = {"".join(text.split()) for text in texts.values()}
        longest = max(bare, key=len)
        if not longest or not all(map(longest.startswith, bare)):
            return None
        spaced = longest.replace(",", ", ").replace(":", ": ")
        if self._text(last).endswith((",", ":")):
            spaced = " " + spaced
        fits = [token for token, text in texts.items() if text and spaced.startswith(text)]
        return max(fits, key=lambda token: len(texts[token]), default=None)

    def _text(self, token: int) -> str:
        if token not in self.texts:
            self.texts[token] = str(self.tokenizer.convert_ids_to_tokens(token) or "").translate(_SPACES)
        return self.texts[token]


def _key(mask: torch.Tensor) -> bytes:
    """Equal for equal masks."""
    return mask.numpy().tobytes()


def _as_draft(rows: list[list[int]], draft: Draft) -> Draft:
    """Chains that begin as a draft's, with its q, which is one-hot for the tokens added."""
    found, q = from_lists(rows, None, draft.tokens.device), draft.q
    if q is not None:
        certain = F.one_hot(found.tokens, q.shape[-1]).to(q.dtype)
        is_drafted = torch.arange(found.width, device=q.device) < draft.lengths[:, None]
        q = F.pad(q, (0, 0, 0, found.width - q.shape[1])).where(is_drafted[:, :, None], certain)
    return replace(found, q=q, expected=draft.expected)
