"""What is shown at a terminal: an answer as it comes, a sign that something loads, dimmed notes, lines broken between words.

Knows standard streams and escape codes.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
from collections.abc import Sequence
from itertools import cycle
from typing import Any
from unicodedata import east_asian_width

_UNITS = re.compile(r"\x1b\[[0-9;]*m|.", re.DOTALL)  # an escape code, which takes no room, or a character
_AFTER, _EVERY = 0.2, 0.1  # seconds


def dimmed(text: str, stream: Any) -> str:
    """The text as a note beside what matters, if the stream is a terminal that may show colours."""
    return f"\x1b[2m{text}\x1b[0m" if stream.isatty() and "NO_COLOR" not in os.environ else text


def columns() -> int | None:
    """Of the terminal that standard output is; None if it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


class Wrapped:
    """A stream for `contextlib.redirect_stdout` that starts a new line where a word would be cut by the terminal's edge.

    A word is written once it has ended. Lines of a text that fit stay as they are.

    Args:
        stream: what is written to.
        columns: of the terminal; None asks it.
    """

    def __init__(self, stream: Any, columns: int | None = None):
        self.stream = stream
        self.columns = columns or shutil.get_terminal_size().columns
        self.column = 0  # where the next character goes
        self.word = ""  # the beginning of a word

    def write(self, text: str) -> int:
        """Take in a piece of text."""
        for unit in _UNITS.findall(text):
            if unit.isspace():
                self._end_word()
                if unit == "\n" or self.column < self.columns:
                    self.stream.write(unit)
                self.column = 0 if unit == "\n" else self.column + 1
            else:
                if _width(unit) == 2:  # scripts without spaces
                    self._end_word()
                self.word += unit
        return len(text)

    def flush(self) -> None:
        """Show what is written so far."""
        self.stream.flush()

    def _end_word(self) -> None:
        width = sum(map(_width, _UNITS.findall(self.word)))
        if self.column and self.column + width > self.columns:
            self.stream.write("\n")
            self.column = 0
        self.stream.write(self.word)
        self.column += width
        self.word = ""


def _width(unit: str) -> int:
    if len(unit) > 1:
        return 0
    return 2 if east_asian_width(unit) in "WF" else 1


def note(text: str) -> None:
    """A remark on standard error; on a terminal it is dimmed, and its lines end between words."""
    out = Wrapped(sys.stderr) if sys.stderr.isatty() else sys.stderr
    print(dimmed(text, sys.stderr), file=out)  # type: ignore[arg-type]


def streamer(model: Any, coloured: bool = False, after: Sequence[int] = ()) -> Any:
    """Shows the text of an answer while it is generated.

    coloured: the drafted and accepted tokens. after: the last token of an answer that goes on, whose text is there already.
    """
    from transformers import TextStreamer

    if coloured:
        from .watch import ColouredStreamer

        made = ColouredStreamer(model.tokenizer)
        for token in after:
            made.pieces.add(token)
        return made
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    shown = TextStreamer(model.tokenizer, skip_prompt=True, **options)
    shown.token_cache, shown.print_len = [*after], len(model.tokenizer.decode([*after], **options))
    return shown


class Loading:
    """A moving sign on standard error, while nothing else is printed: the first word of anybody ends it.

    Without a terminal it does nothing. For use in a `with`.
    """

    def __enter__(self) -> None:
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._show, args=(sys.stderr,), daemon=True)
        self.streams = sys.stdout, sys.stderr
        if sys.stderr.isatty():
            sys.stdout, sys.stderr = (_Ending(stream, self) for stream in self.streams)  # type: ignore[assignment]
            self.thread.start()

    def __exit__(self, *details: Any) -> None:
        self.end()

    def end(self) -> None:
        """Remove the sign."""
        if not self.over.is_set():
            self.over.set()
            if self.thread.is_alive():
                self.thread.join()
            for name, own in zip(("stdout", "stderr"), self.streams, strict=True):
                if isinstance(getattr(sys, name), _Ending):
                    setattr(sys, name, own)

    def _show(self, stream: Any) -> None:
        shown = False
        for sign in cycle("|/-\\"):
            if self.over.wait(_EVERY if shown else _AFTER):
                break
            stream.write(f"\r{sign} loading")
            stream.flush()
            shown = True
        if shown:
            stream.write("\r\x1b[K")
            stream.flush()


class _Ending:
    """A standard stream whose first word ends the sign. What keeps it later writes to the stream itself."""

    def __init__(self, stream: Any, loading: Loading):
        self.stream, self.loading = stream, loading

    def write(self, text: str) -> int:
        self.loading.end()
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
