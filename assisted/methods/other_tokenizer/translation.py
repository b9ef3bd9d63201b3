"""Translation between two tokenizers: committed text into the draft's tokens, and drafts into the target's. Only the text after
the last settled position is tokenized again, so the cost of a round does not depend on the length of the context.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

import torch

from ...loading.vocabulary import Vocabulary, shared_tokens

_OPEN = 64  # number of characters after the last settled position before the next one is searched
_KEPT = 32  # number of last characters whose tokens may still change with further text


class Translation:
    """What two vocabularies have in common; immutable.

    Attributes:
        to_draft: [V] int64, the draft's id of each target token; the draft's vocabulary size if it has none.
        untranslatable: [V'] float32, -inf for draft tokens that have no translation, 0 for the others.
        specials, ends: shared special tokens, target id -> draft id and draft id -> target id.
        nothing: a draft token to begin with if a text has none.

    Raises ValueError if the vocabularies share no text.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary):
        self.target, self.draft = target, draft
        shared = shared_tokens(target, draft)
        self.to_draft = torch.full((target.size,), draft.size)
        self.to_draft[list(shared)] = torch.tensor(list(shared.values()))
        self.specials = {ours: theirs for ours, theirs in shared.items() if target.pieces[ours] is None}
        self.ends = {theirs: ours for ours, theirs in self.specials.items()}
        usable = [bool(piece) or number in self.ends for number, piece in enumerate(draft.pieces)]
        self.untranslatable = torch.zeros(draft.size).masked_fill(~torch.tensor(usable), float("-inf"))
        self.nothing = draft.end or 0


class TranslatedText:
    """One row's committed text in the draft's tokens.

    Invariant: `tokens` is the text as tokenized by the draft's tokenizer; further text cannot change the first `settled` ones.

    Attributes:
        tokens: draft ids, at least one.
        settled: number of tokens that are final.
        read: number of target tokens that were read.
    """

    def __init__(self, translation: Translation):
        self.translation = translation
        self.tokens = list(translation.draft.prefix)
        self.settled = len(self.tokens)
        self.read = 0
        self._open = ""  # the text after the settled tokens
        self._first = True  # nothing has been read yet that the draft sees
        self._look = _OPEN
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokenize()

    def extend(self, tokens: Iterable[int]) -> None:
        """Read more of the target's tokens."""
        target = self.translation.target
        data = bytearray()
        for token in tokens:
            self.read += 1
            piece = target.pieces[token] if token < target.size else b""
            if piece is None:
                self._take(bytes(data))
                data.clear()
                self._take_special(token)
            else:
                data += piece
        self._take(bytes(data))
        self._tokenize()
        if len(self._open) > self._look:
            self._settle()

    def to_target(self, drafted: list[int]) -> list[int]:
        """Translate draft tokens that follow this text into target tokens, up to and including the first special token.

        They are tokenized separately, because committed tokens cannot change, even if the whole text would be tokenized
        differently.
        """
        target, draft = self.translation.target, self.translation.draft
        data, end = bytearray(), []
        for token in drafted:
            piece = draft.pieces[token]
            if piece is None:
                end = [self.translation.ends[token]] if token in self.translation.ends else []
                break
            data += piece
        rest = 0  # number of bytes that continue a character begun in the committed text
        while self._pending and rest < len(data) and data[rest] & 0xC0 == 0x80:
            rest += 1
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(data[rest:]))
        return target.byte_tokens(bytes(data[:rest])) + target.continuation_tokens(text) + end

    @property
    def _pending(self) -> bytes:
        """The bytes of an incomplete character at the end of the text."""
        return self._decoder.getstate()[0]

    def _take(self, data: bytes, final: bool = False) -> None:
        text = self._decoder.decode(data, final)
        if self._first and text:
            self._first = False
            text = text.removeprefix(" ") if self.translation.target.prepends else text
        self._open += text

    def _take_special(self, token: int) -> None:
        self._take(b"", final=True)
        self._decoder.reset()
        self._tokenize()
        self._open, self._look = "", _OPEN
        known = self.translation.specials.get(token)
        target, draft = self.translation.target, self.translation.draft
        if self._first and (token in target.prefix or known is None or known in draft.prefix):
            return  # the draft's tokenizer adds its own prefix
        if self._first:
            del self.tokens[self.settled :]  # the placeholder for no text
        self.settled = len(self.tokens)
        if known is not None:
            self.tokens.append(known)
            self.settled += 1

    def _tokenize(self) -> None:
        draft = self.translation.draft
        self.tokens[self.settled :] = self._tokens_of(self._open) + draft.byte_tokens(self._pending)
        self.tokens = self.tokens or [self.translation.nothing]

    def _tokens_of(self, text: str) -> list[int]:
        """Draft tokens of a text at the position of the open text."""
        draft = self.translation.draft
        begins = self.settled == len(draft.prefix)
        return draft.tokens(text) if begins else draft.continuation_tokens(text)

    def _settle(self) -> None:
        """Find a position in the open text where both sides can be tokenized separately, and settle the tokens before it."""
        draft, text, whole = self.translation.draft, self._open, self._tokens_of(self._open)
        kept = len(text) - _KEPT
        for position in (text.rfind(" ", 0, kept), text.rfind("\n", 0, kept), *range(kept, kept - 4, -1)):
            if position <= 0:
                continue
            after = draft.continuation_tokens(text[position:])
            before = len(whole) - len(after)
            if whole[before:] == after and self._tokens_of(text[:position]) == whole[:before]:
                self.settled += before
                self._open = text[position:]
                self._look = _OPEN
                return
        self._look = 2 * len(text)
