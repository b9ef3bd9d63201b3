"""How often guesses that come with a probability are right, learned from the outcomes of earlier ones. Runs on the host, where
a few dozen guesses a round cost less than calls of tensor operations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from .cost_model import KEEP, PRIOR, DecayedMean

EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)  # finer where rates differ most
_BINS = len(EDGES) + 1
Outcome = tuple[Sequence[float], int, Sequence[bool]]
"""Of a position that the text reached: the probabilities of the guesses, best first; the level; and which were right."""


def confidence_bin(confidence: float) -> int:
    """The bin of a probability."""
    return bisect_right(EDGES, confidence)


class Rates:
    """How often a guess is right, by its probability, its rank among the guesses at its position, and its level.

    The probabilities of a draft are not acceptance rates. A greedy target accepts the best guess far more often than a head
    predicts that was trained on the target's distribution; and some heads guess a token without reading the ones before it.
    Before anything is learned, the probability of a guess is taken as its rate. The past fades with every round.

    Args:
        levels: kinds of positions that are counted separately. While there are few observations of one, the rates of all
            count for it, too.
        ranks: that are counted separately; the last one stands for all others.
    """

    def __init__(self, levels: int = 1, ranks: int = 3):
        self.levels, self.ranks, self.of_level = levels, ranks, ranks * _BINS
        # how many guesses were right, and how many were seen, by cell; the cells of a level are adjacent. Both lists are
        # replaced at once: calls in several threads learn, and more right guesses than seen ones would be a rate above 1.
        self._counts = [0.0] * (levels * self.of_level), [0.0] * (levels * self.of_level)
        self._lines: tuple[Any, list[float], list[float]] | None = None  # of which counts, base and slope

    @property
    def seen(self) -> float:
        """How many guesses were observed, faded."""
        return sum(self._counts[1])

    def at(self, probabilities: Sequence[float], level: int = 0, priors: Sequence[float] | None = None) -> list[float]:
        """The rate of each guess at one position, best first. It is 0 where the probability is 0 or not a number. It is at
        most 1: by rounding alone, a path could otherwise become more probable than its beginning.

        priors: what to assume of each guess as long as little is known; None takes the probabilities.
        """
        base, slope = self.fitted()
        found = []
        for rank, (probability, prior) in enumerate(zip(probabilities, priors or probabilities, strict=True)):
            cell = self._cell(probability, rank, level)
            found.append(min(1.0, base[cell] + slope[cell] * prior) if probability > 0 else 0.0)
        return found

    def learn(self, outcomes: Iterable[Outcome]) -> None:
        """Take in the outcome of a round. Called once per round, with all guesses at the positions that the text reached."""
        right, seen = ([count * KEEP for count in counts] for counts in self._counts)
        for probabilities, level, which in outcomes:
            for rank, (probability, was_right) in enumerate(zip(probabilities, which, strict=True)):
                cell = self._cell(probability, rank, level)
                seen[cell] += 1
                right[cell] += was_right
        self._counts = right, seen

    def fitted(self) -> tuple[list[float], list[float]]:
        """For each cell, base and slope of its rate as a function of the prior. Those of a level are adjacent, of a level those
        of a rank, and of a rank one for each bin."""
        lines, counts = self._lines, self._counts  # another thread may call `learn` meanwhile
        if lines is None or lines[0] is not counts:
            base, slope, size = [], [], self.of_level
            guess = PRIOR / 2  # observations that the prior counts for: half as many as the rate of all levels
            of_all = [sum(counts[0][cell::size]) for cell in range(size)]
            seen_of_all = [sum(counts[1][cell::size]) + guess for cell in range(size)]
            for cell, (right, seen) in enumerate(zip(*counts, strict=True)):
                lean = PRIOR / seen_of_all[cell % size] / (seen + PRIOR)
                base.append(right / (seen + PRIOR) + lean * of_all[cell % size])
                slope.append(lean * guess)
            lines = self._lines = counts, base, slope
        return lines[1:]

    def _cell(self, probability: float, rank: int, level: int) -> int:
        return bisect_right(EDGES, probability) + _BINS * min(rank, self.ranks - 1) + self.of_level * level


class Acceptance:
    """How often a drafted token is accepted once those before it are, by the draft's confidence and the position.

    The guess for a token that is not sampled is the confidence itself. If fewer tokens are rejected than that predicts, it is
    raised at all confidences: a quantized copy of the target is nearly always right, even where it is unsure.

    Attributes:
        rounds: with a draft, so far.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.rates = Rates(levels=5, ranks=1)
        self.rejected = DecayedMean()  # rejected tokens, of those that the confidences predicted
        self.by_position: list[DecayedMean] = []
        self.after: dict[int, list[DecayedMean]] = {}  # the same by what became of the row's last draft
        self.next: dict[int | None, DecayedMean] = {}  # by bin: `accept` of the token after it; None for all bins

    def accept(self, confidence: float, position: int, sampled: bool = False) -> float:
        """The acceptance rate of a token of this confidence at this position (0-based).

        sampled: the token is drawn. Confidence then predicts little before anything is known, and the guess is optimistic: a
        token that is never proposed never shows how often it is accepted.
        """
        return self.rates.at((confidence,), _level(position), (self._guess(confidence, sampled),))[0]

    def chain(self, longest: int, last: int | None = None) -> list[float]:
        """Acceptance rates by position, where no confidence is known. Each is combined with the one before it.

        last: what became of the row's last draft, a number as for `learn`; None if there was none.
        """
        found, above = [], 0.5
        for position in range(longest):
            for seen in (self.by_position, self.after.get(-1 if last is None else last, ())):
                if position < len(seen):
                    above = seen[position].mean(above, PRIOR)
            found.append(above)
        return found

    def following(self, confidence: float, sampled: bool = False) -> float:
        """The expected `accept` of the token after one of this confidence.

        Few drafts continue after tokens of low confidence. There, drafts that continued after other tokens predict better
        than the guess.
        """
        found = max(0.3, self._guess(confidence, sampled))
        for bin in (None, confidence_bin(confidence)):
            if bin in self.next:
                found = self.next[bin].mean(found, PRIOR)
        return found

    def see_following(self, confidence: float, accept: float) -> None:
        """`accept` of the token after one of this confidence."""
        for bin in (None, confidence_bin(confidence)):
            self.next.setdefault(bin, DecayedMean()).add(accept)

    def learn(
        self,
        rows: Sequence[tuple[Sequence[float], int, int]],
        sampled: bool = False,
        last: Sequence[int | None] | None = None,
    ) -> None:
        """Take in the outcome of a round.

        rows: of each row, the confidences of its drafted tokens (empty if they are not known), the number of accepted ones, and
        the number of those that were judged. last: of each row, what became of the draft before; None where there was none.
        """
        self.rounds += 1
        for seen in (self.rejected, *self.by_position, *chain(*self.after.values()), *self.next.values()):
            seen.add(0.0, 0.0, KEEP)
        outcomes: list[Outcome] = []
        for (confidences, accepted, judged), before in zip(rows, last or [None] * len(rows), strict=True):
            tables = [self.by_position] if before is None else [self.by_position, self.after.setdefault(before, [])]
            for position in range(judged):
                right = position < accepted
                if position < len(confidences):
                    confidence = confidences[position]
                    outcomes.append(((confidence,), _level(position), (right,)))
                    self.rejected.add(not right, 1 - _prior(confidence, sampled))
                    continue
                for table in tables:
                    table += [DecayedMean() for _ in range(position + 1 - len(table))]
                    table[position].add(right)
        self.rates.learn(outcomes)

    def _guess(self, confidence: float, sampled: bool) -> float:
        """The acceptance rate of a token of this confidence, as far as it can be told without tokens of the same confidence."""
        return 1 - (1 - _prior(confidence, sampled)) * min(1.0, self.rejected.mean(1.0, 1.0))


def _prior(confidence: float, sampled: bool) -> float:
    return (1 + confidence) / 2 if sampled else confidence


def _level(position: int) -> int:
    """Positions 0, 1, 2 and 3, 4 to 7, and all others."""
    return min(position.bit_length(), 4)
