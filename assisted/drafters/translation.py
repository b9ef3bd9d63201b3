"""Text between two tokenizers: what is committed in the draft's tokens, what is drafted in the target's.

Knows vocabularies and text, nothing of models. A row's text is cut anew behind the last settled place only, so that a round
costs the same however long the context is.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

import torch

from ..loading.vocabulary import Vocabulary, shared_tokens

__all__ = ["TranslatedText", "Translation"]

_OPEN = 64  # characters that may lie behind the last settled place before another one is looked for
_KEPT = 32  # characters that further text may still cut in another way


class Translation:
    """What two vocabularies have in common; immutable.

    Attributes:
        to_draft: [V] int64, the draft's id of each target token; the draft's vocabulary size where it has none.
        mute: [V'] float32, minus infinity for draft tokens that say nothing the target could say, 0 for the others.
        specials, ends: special tokens that both know, target id -> draft id and back.
        nothing: a draft token to begin with where a text has none.

    Raises ValueError where they share no text.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary):
        self.target, self.draft = target, draft
        shared = shared_tokens(target, draft)
        self.to_draft = torch.full((target.size,), draft.size)
        self.to_draft[list(shared)] = torch.tensor(list(shared.values()))
        self.specials = {ours: theirs for ours, theirs in shared.items() if target.pieces[ours] is None}
        self.ends = {theirs: ours for ours, theirs in self.specials.items()}
        says = [bool(piece) or number in self.ends for number, piece in enumerate(draft.pieces)]
        self.mute = torch.zeros(draft.size).masked_fill(~torch.tensor(says), float("-inf"))
        self.nothing = draft.end or 0


class TranslatedText:
    """One row's committed text in the draft's tokens.

    Invariant: `tokens` is what the draft's tokenizer makes of the text; its first `settled` tokens stay whatever follows.

    Attributes:
        tokens: draft ids, at least one.
        settled: how many of them further text can't change.
        read: how many target tokens were read.
    """

    def __init__(self, translation: Translation):
        self.translation = translation
        self.tokens = list(translation.draft.prefix)
        self.settled = len(self.tokens)
        self.read = 0
        self._open = ""  # the text behind the settled tokens
        self._first = True  # nothing has been read yet but what the draft doesn't see
        self._look = _OPEN
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._cut()

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
        self._cut()
        if len(self._open) > self._look:
            self._settle()

    def said(self, drafted: list[int]) -> list[int]:
        """The draft's tokens behind this text in the target's, up to the first special token, which ends them.

        They are cut on their own: what is committed is committed, though together with them it might be cut differently.
        """
        target, draft = self.translation.target, self.translation.draft
        data, end = bytearray(), []
        for token in drafted:
            piece = draft.pieces[token]
            if piece is None:
                end = [self.translation.ends[token]] if token in self.translation.ends else []
                break
            data += piece
        rest = 0  # of a character that the committed text has begun
        while self._pending and rest < len(data) and data[rest] & 0xC0 == 0x80:
            rest += 1
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(data[rest:]))
        return target.byte_tokens(bytes(data[:rest])) + target.continuation_tokens(text) + end

    @property
    def _pending(self) -> bytes:
        """The bytes of a character that has begun but not ended."""
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
        self._cut()
        self._open, self._look = "", _OPEN
        known = self.translation.specials.get(token)
        target, draft = self.translation.target, self.translation.draft
        if self._first and (token in target.prefix or known is None or known in draft.prefix):
            return  # the draft's tokenizer begins a text in its own way
        if self._first:
            del self.tokens[self.settled :]  # what stands for no text at all
        self.settled = len(self.tokens)
        if known is not None:
            self.tokens.append(known)
            self.settled += 1

    def _cut(self) -> None:
        draft = self.translation.draft
        self.tokens[self.settled :] = self._cut_as(self._open) + draft.byte_tokens(self._pending)
        self.tokens = self.tokens or [self.translation.nothing]

    def _cut_as(self, text: str) -> list[int]:
        """The tokens of a text that stands where the open text does."""
        draft = self.translation.draft
        begins = self.settled == len(draft.prefix)
        return draft.tokens(text) if begins else draft.continuation_tokens(text)

    def _settle(self) -> None:
        """Look for a place in the open text where both sides can be cut on their own; the tokens before it are settled."""
        draft, text, whole = self.translation.draft, self._open, self._cut_as(self._open)
        kept = len(text) - _KEPT
        for place in (text.rfind(" ", 0, kept), text.rfind("\n", 0, kept), *range(kept, kept - 4, -1)):
            if place <= 0:
                continue
            behind = draft.continuation_tokens(text[place:])
            before = len(whole) - len(behind)
            if whole[before:] == behind and self._cut_as(text[:place]) == whole[:before]:
                self.settled += before
                self._open = text[place:]
                self._look = _OPEN
                return
        self._look = 2 * len(text)
