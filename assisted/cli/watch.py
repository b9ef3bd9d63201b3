"""Follows an answer while it is generated: which tokens were drafted, accepted and rejected, and what text each adds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch

from ..core.drafts import Round
from ..methods.shared.trees import first_paths

_ACCEPTED, _END = "\x1b[36m", "\x1b[0m"


@dataclass
class Watch:
    """Follows the `generate` of one row: its rounds, through `see`, and its committed tokens, as the streamer."""

    draw: Callable[[Watch], None] = lambda watch: None  # called with this object after every change
    tokens: list[int] = field(default_factory=list)  # committed
    drafted: list[bool] = field(default_factory=list)  # which of them were drafted
    waiting: list[int] = field(default_factory=list)  # drafted tokens that are not verified yet
    rejected: list[int] = field(default_factory=list)  # drafted tokens that the target has just rejected
    _arrived: list[int] = field(default_factory=list)  # committed, but not yet known whether drafted
    _reading: bool = True  # a streamer gets the prompt first

    def put(self, tokens: torch.Tensor) -> None:
        if not self._reading:
            self._arrived += tokens.flatten().tolist()
        self._reading = False

    def end(self) -> None:
        self._settle(len(self._arrived), by_draft=False)
        self.draw(self)

    def see(self, round: Round) -> None:
        """Draw a round in two steps: the draft, and its result."""
        new, accepted = round.kept[0], round.accepted[0]
        self._settle(len(self._arrived) - new, by_draft=False)
        self.waiting = first_paths(round.draft)[0]
        self.draw(self)
        pairs = zip(self.waiting, self._arrived[:accepted], strict=False)
        self.rejected = self.waiting[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]
        self.waiting = []
        self._settle(accepted, by_draft=True)
        self.draw(self)
        self.rejected = []
        self._settle(len(self._arrived), by_draft=False)
        self.draw(self)

    def _settle(self, count: int, by_draft: bool) -> None:
        self.tokens += self._arrived[:count]
        self.drafted += [by_draft] * count
        self._arrived = self._arrived[count:]


class Pieces:
    """The text that each token adds; a character of several tokens comes with the last of them.

    options: for the tokenizer's `decode`.
    """

    def __init__(self, tokenizer: Any, **options: Any):
        self.tokenizer = tokenizer
        self.options = {"clean_up_tokenization_spaces": False, **options}
        self.line: list[int] = []  # the last token that ended a line, and those after it
        self.shown = ""  # their text

    def add(self, token: int) -> str:
        """The text of the next token."""
        self.line.append(token)
        text = self.tokenizer.decode(self.line, **self.options)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        piece, self.shown = text[len(self.shown) :], text
        if piece.endswith("\n"):
            self.line, self.shown = [token], self.tokenizer.decode([token], **self.options)
        return piece


class ColouredStreamer(Watch):
    """Streams one answer to standard output, with colours around the tokens that were drafted and accepted."""

    def __init__(self, tokenizer: Any):
        super().__init__(self._show)
        self.pieces = Pieces(tokenizer, skip_special_tokens=True)
        self.shown = 0

    def end(self) -> None:
        super().end()
        print(flush=True)

    def _show(self, watch: Watch) -> None:
        for token, drafted in zip(self.tokens[self.shown :], self.drafted[self.shown :], strict=True):
            piece = self.pieces.add(token)
            print(f"{_ACCEPTED}{piece}{_END}" if drafted and piece.strip() else piece, end="")
        self.shown = len(self.tokens)
        print(end="", flush=True)
