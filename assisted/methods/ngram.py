"""Prompt lookup: copies what followed the most recent occurrence of the last n tokens. One hash table per row, with back-off.

transformers' `prompt_lookup_num_tokens` copies the first occurrence; the most recent one is accepted more often, above all in
loops and edits. LLMA (arXiv 2304.04487) copies what followed a match, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..lengths.cost_model import KEEP_LOCAL, PRIOR, DecayedMean
from .shared.base import Call, Drafter, Spec, Target
from .shared.lookup import NOTHING, Backoff, Lookup, Proposal, right
from .shared.registry import register


@register("ngram")
@dataclass(frozen=True)
class NGram(Spec):
    """Copies what followed the most recent occurrence of the last n tokens: `"ngram"`, `"ngram:3"`.

    This is the simplest drafter. It suits answers that quote their prompt: edits, summaries, extraction. `Suffix` weighs all
    occurrences and is better for most other text.

    Args:
        max_ngram: the largest n, tried first. Longer matches are rarer, but their continuations are accepted more often.
        min_ngram: the smallest n. With 1, every token that occurred before is a match.
    """

    title = "n-gram"
    crosses = True
    acceptance = (0.05, 0.6)
    sample = served_as = "ngram"

    max_ngram: int = 4
    min_ngram: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"max_ngram: {self.max_ngram} with min_ngram {self.min_ngram} matches nothing; give 1 <= min <= max"
            )

    @classmethod
    def named(cls, rest: str) -> NGram:
        """The spec for `"ngram"` or `"ngram:3"`, where the number is max_ngram."""
        if not rest:
            return cls()
        if not rest.isdecimal():
            raise ValueError(f"draft: 'ngram:{rest}' is not known; give a number of tokens, as in 'ngram:3'")
        return cls(int(rest), min(int(rest), cls.min_ngram))

    def load(self, target: Target, **kwargs: object) -> NGramDrafter:
        """Nothing to load."""
        return NGramDrafter(self)


class NGramDrafter(Drafter):
    """Has no state between calls. spec: the options."""

    def __init__(self, spec: NGram):
        self.spec = spec

    def start(self, call: Call) -> NGramDrafting:
        return NGramDrafting(self.spec, call)


class NGramIndex:
    """The latest occurrence of each n-gram in a growing text; n from `smallest` to `largest`. One entry per token and n."""

    def __init__(self, smallest: int, largest: int):
        self.sizes = range(largest, smallest - 1, -1)
        self.text: list[int] = []
        self.following: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its last occurrence

    def append(self, token: int) -> None:
        """Append a token. It is now the continuation of the n-grams that the text ended with."""
        text = self.text
        end = len(text)
        for n in self.sizes:
            if n <= end:
                self.following[tuple(text[end - n :])] = end
        text.append(token)

    def match(self, drafted: Sequence[int] = ()) -> tuple[int, int] | None:
        """(n, start of the continuation) of the most recent match with the largest n; None if there is no match.

        drafted: tokens that follow the text."""
        end = [*self.text[-self.sizes.start :], *drafted]
        for n in self.sizes:
            if n <= len(end) and (start := self.following.get(tuple(end[-n:]))) is not None:
                return n, start
        return None

    def continuation(self, start: int, count: int, drafted: Sequence[int] = ()) -> list[int]:
        """`count` tokens from `start` on. A copy that reaches the end of the text continues with itself, as a loop does.

        drafted: tokens that follow the text."""
        period = [*self.text[start : start + count], *drafted][:count]
        return (period * (count // len(period) + 1))[:count]


class NGramDrafting(Lookup):
    """The rows' indexes during one `generate`, and the acceptance of matches of each length.

    Proposals are judged by the committed text. So they can be judged even if another drafter's draft was verified.
    """

    def __init__(self, spec: NGram, call: Call):
        super().__init__(call)
        self.spec = spec
        self.indexes: dict[int, NGramIndex] = {}
        self.pauses: dict[int, Backoff] = {}
        self.waiting: dict[int, tuple[int, list[int]]] = {}  # row -> n and the proposal, until it is judged
        self.right = {n: DecayedMean() for n in range(spec.min_ngram, spec.max_ngram + 1)}

    def read(self, row: int, tokens: list[int]) -> None:
        if row not in self.indexes:
            self.indexes[row] = NGramIndex(self.spec.min_ngram, self.spec.max_ngram)
            self.pauses[row] = Backoff()
        for token in tokens:
            self.indexes[row].append(token)
        if row in self.waiting:
            self._learn(row, *self.waiting.pop(row), tokens)

    def look_up(self, row: int, budget: int) -> Proposal:
        index = self.indexes[row]
        found = index.match()
        allowed = 0 if found is None else self.pauses[row].allowed(budget)
        if found is None or not allowed:
            return NOTHING
        n, start = found
        tokens = index.continuation(start, allowed)
        self.waiting[row] = n, tokens
        rate = self.right[n].mean(0.5, PRIOR)
        return Proposal(tokens, sum(rate**depth for depth in range(1, allowed + 1)))

    def look_up_after(self, row: int, drafted: Sequence[int], budget: int) -> list[int]:
        index = self.indexes[row]
        found = index.match(drafted)
        return [] if found is None else index.continuation(found[1], budget, drafted)

    def _learn(self, row: int, n: int, proposed: list[int], came: list[int]) -> None:
        hits = right(proposed, came)
        self.pauses[row].learn(hits)
        # tokens after the first wrong one, or after the end of the text, were not judged
        self.right[n].add(hits, min(hits + 1, len(proposed), len(came)), KEEP_LOCAL)
