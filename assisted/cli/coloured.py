"""A streamer that shows in colour which tokens of an answer were drafted and accepted.

Knows a tokenizer, the model's rounds and a terminal.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import TextStreamer

from ..drafts import Round

__all__ = ["ColouredStreamer"]

_ACCEPTED, _END = "\x1b[36m", "\x1b[0m"


class ColouredStreamer(TextStreamer):
    """Streams one answer to standard output. `see` must be the model's `watch` during the call.

    Args:
        tokenizer: the target's.
    """

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self.line: list[int] = []  # tokens since the last line break
        self.shown = ""  # their text so far
        self.waiting: list[tuple[int, bool]] = []  # committed tokens, and whether they were drafted
        self.is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Take in committed tokens. A round's tokens are shown once `see` has told which of them were drafted."""
        if self.is_prompt:
            self.is_prompt = False
            return
        self.waiting += [(token, False) for token in value.flatten().tolist()]

    def see(self, round: Round) -> None:
        """Show a round's tokens, which came just before."""
        start, accepted = len(self.waiting) - round.kept[0], round.accepted[0]
        for index in range(max(0, start), start + accepted):
            self.waiting[index] = self.waiting[index][0], True
        self._show()

    def end(self) -> None:
        self._show()
        print(flush=True)

    def _show(self) -> None:
        for token, drafted in self.waiting:
            self.line.append(token)
            text = self.tokenizer.decode(self.line, **self.decode_kwargs)
            if text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character of several tokens comes with the last of them
                continue
            piece, self.shown = text[len(self.shown) :], text
            print(f"{_ACCEPTED}{piece}{_END}" if drafted and piece.strip() else piece, end="", file=sys.stdout)
            if text.endswith("\n"):
                self.line, self.shown = [], ""
        self.waiting = []
        sys.stdout.flush()
