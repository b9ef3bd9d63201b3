"""Prompt lookup: what followed the last n tokens when they last occurred. One hash table a row, and a back-off.

Knows the row's own text; needs no model. Known from transformers' `prompt_lookup_num_tokens`, which copies the first
occurrence; the most recent one is right more often, in loops and in edits above all.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

from ..lengths.faded import Faded
from .base import Call, Drafter, Spec, Target
from .lookup import NOTHING, Lookup, Proposal

__all__ = ["NGram", "NGramDrafter", "NGramIndex"]

LONGEST_PAUSE = 16  # rounds
MEMORY = 0.9  # share of the past in the measured acceptance of each n
PRIOR = 2.0  # tokens, half of them right: what is taken for measured at first


@dataclass(frozen=True)
class NGram(Spec):
    """Copies what followed the same n tokens when they last occurred: `"ngram"`, `"ngram:3"`.

    The simplest drafter there is. Good for answers that quote their prompt: edits, summaries, extraction. `Suffix` weighs
    all occurrences and is better at most else.

    Args:
        max_ngram: tokens that must match, tried first. Longer is right more often and matches less.
        min_ngram: down to this many; 1 proposes something for every token that occurred before.
    """

    name: ClassVar[str] = "ngram"
    trained: ClassVar[bool | None] = False
    trees: ClassVar[bool | None] = False
    has_q: ClassVar[bool | None] = False

    max_ngram: int = 4
    min_ngram: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"max_ngram: {self.max_ngram} with min_ngram {self.min_ngram} matches nothing; give 1 <= min <= max"
            )

    @classmethod
    def named(cls, rest: str) -> NGram:
        """The spec behind `"ngram"` or `"ngram:3"`, the number being max_ngram."""
        if not rest:
            return cls()
        if not rest.isdecimal():
            raise ValueError(f"draft: 'ngram:{rest}' is not known; give a number of tokens, as in 'ngram:3'")
        return cls(int(rest), min(int(rest), cls.min_ngram))

    def load(self, target: Target, **kwargs: object) -> NGramDrafter:
        """Nothing to load."""
        return NGramDrafter(self)


class NGramDrafter(Drafter):
    """Keeps nothing between calls.

    Args:
        spec: the options.
    """

    def __init__(self, spec: NGram):
        self.spec = spec

    def start(self, call: Call) -> NGramDrafting:
        return NGramDrafting(self.spec, call)


class NGramIndex:
    """Where every n-gram of a growing text last occurred. A few dictionary entries a token, whatever the length.

    Args:
        smallest, largest: the lengths of n-grams that are kept.
    """

    def __init__(self, smallest: int, largest: int):
        self.sizes = range(largest, smallest - 1, -1)
        self.text: list[int] = []
        self.behind: dict[tuple[int, ...], int] = {}  # n-gram -> where it last ended with a token behind it

    def append(self, token: int) -> None:
        """The text grows: only now does the n-gram at its end have a continuation."""
        text = self.text
        end = len(text)
        for n in self.sizes:
            if n <= end:
                self.behind[tuple(text[end - n :])] = end
        text.append(token)

    def match(self) -> tuple[int, int] | None:
        """(n, where the continuation begins) of the longest, most recent match of the text's end, if there is any."""
        text = self.text
        for n in self.sizes:
            if n <= len(text) and (place := self.behind.get(tuple(text[-n:]))) is not None:
                return n, place
        return None

    def continuation(self, place: int, count: int) -> list[int]:
        """`count` tokens from `place` on; what reaches the end of the text goes on with itself, as a loop does."""
        period = self.text[place : place + count]
        return (period * (count // len(period) + 1))[:count]


class Backoff:
    """How much to propose after misses: half as much after each, then pauses that double; all again after a success."""

    def __init__(self) -> None:
        self.misses = 0
        self.pause = 0

    def allowed(self, budget: int) -> int:
        """Tokens that may be proposed this round. Called once a round."""
        if self.pause:
            self.pause -= 1
            return 0
        return max(1, budget >> self.misses)

    def learn(self, accepted: int) -> None:
        """A proposal was judged."""
        self.misses = 0 if accepted else self.misses + 1
        self.pause = min(LONGEST_PAUSE, (1 << max(0, self.misses - 2)) - 1)


class NGramDrafting(Lookup):
    """The rows' indexes during one `generate`, and how often matches of each length turned out right.

    A proposal is judged by the text that came instead of by the verdict: so it is also when another drafter's was verified.
    """

    def __init__(self, spec: NGram, call: Call):
        super().__init__(call)
        self.spec = spec
        self.indexes: dict[int, NGramIndex] = {}
        self.backoffs: dict[int, Backoff] = {}
        self.waiting: dict[int, tuple[int, list[int]]] = {}  # row -> n and the proposal that is not judged yet
        self.right = {n: Faded(PRIOR / 2, PRIOR) for n in range(spec.min_ngram, spec.max_ngram + 1)}

    def read(self, row: int, tokens: list[int]) -> None:
        if row not in self.indexes:
            self.indexes[row] = NGramIndex(self.spec.min_ngram, self.spec.max_ngram)
            self.backoffs[row] = Backoff()
        for token in tokens:
            self.indexes[row].append(token)
        if row in self.waiting:
            self._learn(row, *self.waiting.pop(row), tokens)

    def look_up(self, row: int, budget: int) -> Proposal:
        index = self.indexes[row]
        found = index.match()
        allowed = 0 if found is None else self.backoffs[row].allowed(budget)
        if found is None or not allowed:
            return NOTHING
        n, place = found
        tokens = index.continuation(place, allowed)
        self.waiting[row] = n, tokens
        rate = self.right[n].mean()
        return Proposal(tokens, sum(rate**depth for depth in range(1, allowed + 1)))

    def _learn(self, row: int, n: int, proposed: list[int], came: list[int]) -> None:
        pairs = zip(proposed, came, strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.backoffs[row].learn(right)
        # what lies behind the first wrong token, or behind what came, was not judged
        self.right[n].add(right, min(right + 1, len(proposed), len(came)), MEMORY)
