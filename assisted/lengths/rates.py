"""How often guesses that come with a probability are right, learned from the outcomes of earlier ones.

Knows numbers, not what makes the guesses. Runs on the host, where a few dozen guesses a round cost less than calls of tensor
operations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .estimates import MEMORY

__all__ = ["Rates"]

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
_BINS = len(_EDGES) + 1
_RANKS = 3  # the best guess, the second best, and all others
_CELLS = _RANKS * _BINS
_POOLED, _OWN = 2.0, 4.0  # observations that the prior counts for: in the rate of all levels, and in that of one


class Rates:
    """How often a guess is right, by its probability, its rank among the guesses at its position, and its level.

    The probabilities of a head are not acceptance rates. A greedy target accepts the best guess far more often than a head
    predicts that was trained on the target's distribution; and some heads guess a token without reading the ones before it.
    Before anything is learned, the probability of a guess is taken as its rate. The past fades with every round.

    Args:
        levels: kinds of positions that are counted separately. While there are few observations of one, the rates of all
            count for it, too.
    """

    def __init__(self, levels: int = 1):
        self.levels = levels
        # how many guesses were right, and how many were seen, by cell; the cells of a level are adjacent. Both lists are
        # replaced at once: calls in several threads learn, and more right guesses than seen ones would be a rate above 1.
        self._counts = [0.0] * (levels * _CELLS), [0.0] * (levels * _CELLS)
        self._lines: tuple[Any, list[float], list[float]] | None = None  # of which counts, base and slope

    @property
    def seen(self) -> torch.Tensor:
        """How many guesses were observed, faded: [levels, cells], a cell for each rank and bin of probabilities."""
        return torch.tensor(self._counts[1]).view(self.levels, _CELLS)

    def at(self, probabilities: Sequence[float], level: int = 0) -> list[float]:
        """The rate of each guess at one position, best first. It is 0 where the probability is 0 or not a number. It is at
        most 1: by rounding alone, a path could otherwise become more probable than its beginning."""
        base, slope = self._fitted()
        found = []
        for rank, probability in enumerate(probabilities):
            cell = _cell(probability, rank, level)
            found.append(min(1.0, base[cell] + slope[cell] * probability) if probability > 0 else 0.0)
        return found

    def of(self, probabilities: torch.Tensor, level: int | torch.Tensor = 0) -> torch.Tensor:
        """`at` for many positions; the result is shaped like `probabilities`.

        probabilities: [..., k] float32. level: one for all, or [..., 1] int64.
        """
        levels = torch.as_tensor(level).expand(*probabilities.shape[:-1], 1).flatten().tolist()
        guesses = probabilities.reshape(-1, probabilities.shape[-1]).tolist()
        rates = [self.at(best, level) for best, level in zip(guesses, levels, strict=True)]
        return torch.tensor(rates, device=probabilities.device).view(probabilities.shape)

    def learn(self, outcomes: Iterable[tuple[Sequence[float], int, Sequence[bool]]]) -> None:
        """Take in the outcome of a round. Called once per round, with all guesses.

        outcomes: for each position that the text reached, the probabilities of the guesses, best first; the level; and which
        guesses were right.
        """
        right, seen = ([count * MEMORY for count in counts] for counts in self._counts)
        for probabilities, level, which in outcomes:
            for rank, (probability, was_right) in enumerate(zip(probabilities, which, strict=True)):
                cell = _cell(probability, rank, level)
                seen[cell] += 1
                right[cell] += was_right
        self._counts = right, seen

    def _fitted(self) -> tuple[list[float], list[float]]:
        """For each cell, base and slope of its rate as a function of the probability."""
        lines, counts = self._lines, self._counts  # another thread may call `learn` meanwhile
        if lines is None or lines[0] is not counts:
            base, slope = [], []
            of_all = [sum(counts[0][cell::_CELLS]) for cell in range(_CELLS)]
            seen_of_all = [sum(counts[1][cell::_CELLS]) + _POOLED for cell in range(_CELLS)]
            for cell, (right, seen) in enumerate(zip(*counts, strict=True)):
                lean = _OWN / seen_of_all[cell % _CELLS] / (seen + _OWN)
                base.append(right / (seen + _OWN) + lean * of_all[cell % _CELLS])
                slope.append(lean * _POOLED)
            lines = self._lines = counts, base, slope
        return lines[1:]


def _cell(probability: float, rank: int, level: int) -> int:
    return bisect_right(_EDGES, probability) + _BINS * min(rank, _RANKS - 1) + _CELLS * level
