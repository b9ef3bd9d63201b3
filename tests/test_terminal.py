"""What the commands show at a terminal."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from assisted.cli.terminal import Loading, Wrapped, dimmed


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def wrapped(*pieces: str, columns: int = 10) -> str:
    stream = io.StringIO()
    out = Wrapped(stream, columns)
    for piece in pieces:
        print(piece, end="", file=out)  # type: ignore[arg-type]
    print(file=out)  # type: ignore[arg-type]
    return stream.getvalue()


def test_lines_break_between_words() -> None:
    assert wrapped("one two th", "ree four") == "one two \nthree four\n"
    assert wrapped("0123456789 a") == "0123456789\na\n"
    assert wrapped("  x = 1\n    y") == "  x = 1\n    y\n"  # text that fits stays as it is
    assert wrapped("a 0123456789abcdef") == "a \n0123456789abcdef\n"  # nothing is lost of a word that is too long


def test_colours_take_no_room_and_wide_characters_take_two() -> None:
    assert wrapped("one \x1b[36mtwo\x1b[0m abc") == "one \x1b[36mtwo\x1b[0m \nabc\n"
    assert wrapped("漢字漢字漢字") == "漢字漢字漢\n字\n"


def test_notes_are_dimmed_at_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert dimmed("a", Terminal()) == "\x1b[2ma\x1b[0m"
    assert dimmed("a", io.StringIO()) == "a"
    monkeypatch.setenv("NO_COLOR", "1")
    assert dimmed("a", Terminal()) == "a"


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_the_sign_of_loading_ends_with_the_first_word(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal: Any = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    with Loading():
        while "loading" not in terminal.getvalue():
            pass
        print("word", file=getattr(sys, name))
        assert sys.stdout is sys.stderr is terminal
    assert terminal.getvalue().endswith("\r\x1b[Kword\n")


def test_without_a_terminal_there_is_no_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Loading():
        assert sys.stderr is stream
    assert stream.getvalue() == ""
