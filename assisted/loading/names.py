"""Names as people type them: what a misspelled one may have meant, and the short names of dtypes."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def closest(word: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """The known word that is spelled most like `word`; None if none is. alike: of 1, how similar it has to be."""
    return next(iter(get_close_matches(word, list(known), 1, alike)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: a suggestion, or nothing."""
    found = closest(word, known)
    return "" if found is None else f"; did you mean {found!r}?"
