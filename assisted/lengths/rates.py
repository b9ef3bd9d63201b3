"""How often guesses that come with a probability are right: learned from what became of earlier ones.

Knows numbers, on the host: a few dozen guesses a round cost less there than the calls of tensors. Nothing of what makes the
guesses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import torch

from .estimates import MEMORY

__all__ = ["Rates"]

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
_BINS = len(_EDGES) + 1
_RANKS = 3  # the best guess, the second, all others
_CELLS = _RANKS * _BINS
_POOLED, _OWN = 2.0, 4.0  # weight of the word that is given beside what was seen, of all levels and of one


class Rates:
    """How often a guess is right, by its probability, its rank among the guesses at its place, and a level.

    A head gives its guesses probabilities without knowing the distribution that they are judged by: a greedy target
    takes the best guess far more often than a head says that was trained on the target's distribution. Nor does it always know
    which tokens come between. Before anything is learned a guess is taken at its word; the past fades round by round.

    Args:
        levels: kinds of places that are counted apart and lean on each other while little was seen of one.
    """

    def __init__(self, levels: int = 1):
        self.levels = levels
        # of each cell, those of a level side by side
        self._right = [0.0] * (levels * _CELLS)
        self._seen = [0.0] * (levels * _CELLS)
        self._lines: tuple[list[float], list[float]] | None = None

    @property
    def seen(self) -> torch.Tensor:
        """How many guesses were seen, what has faded left out, by level and by rank and probability, [levels, cells]."""
        return torch.tensor(self._seen).view(self.levels, _CELLS)

    def at(self, probabilities: Sequence[float], level: int = 0) -> list[float]:
        """The rate of each guess at one place, best first. What is impossible, or no number, stays impossible."""
        base, slope = self._fitted()
        found = []
        for rank, probability in enumerate(probabilities):
            cell = _cell(probability, rank, level)
            found.append(base[cell] + slope[cell] * probability if probability > 0 else 0.0)
        return found

    def of(self, probabilities: torch.Tensor, level: int | torch.Tensor = 0) -> torch.Tensor:
        """`at` for many places, shaped as they are. probabilities: [..., k] float32. level: of all, or [..., 1] int64."""
        places, levels = _places(probabilities, level)
        rates = [self.at(place, level) for place, level in zip(places, levels, strict=True)]
        return torch.tensor(rates, device=probabilities.device).view(probabilities.shape)

    def learn(self, outcomes: Iterable[tuple[Sequence[float], int, Sequence[bool]]]) -> None:
        """What became of a round's guesses: at each place that the text came to their probabilities, best first, the level,
        and which of them were right. Called once for all of them."""
        self._right = [count * MEMORY for count in self._right]
        self._seen = [count * MEMORY for count in self._seen]
        self._lines = None
        for probabilities, level, which in outcomes:
            for rank, (probability, was_right) in enumerate(zip(probabilities, which, strict=True)):
                cell = _cell(probability, rank, level)
                self._seen[cell] += 1
                self._right[cell] += was_right

    def see(
        self, probabilities: torch.Tensor, level: int | torch.Tensor, right: torch.Tensor, asked: torch.Tensor
    ) -> None:
        """`learn` of tensors.

        probabilities, level: as in `of`. right: [..., k] bool, the guesses that were. asked: [...] bool, places that the
        text came to; nothing is learned of others.
        """
        places, levels = _places(probabilities, level)
        right_of, asked_of = right.reshape(-1, right.shape[-1]).tolist(), asked.flatten().tolist()
        outcomes = zip(places, levels, right_of, asked_of, strict=True)
        self.learn((place, level, which) for place, level, which, counts in outcomes if counts)

    def _fitted(self) -> tuple[list[float], list[float]]:
        """For each cell, base and slope of its rate over the probability."""
        lines = self._lines  # another thread may learn meanwhile
        if lines is None:
            base, slope = [], []
            of_all = [sum(self._right[cell::_CELLS]) for cell in range(_CELLS)]
            seen_of_all = [sum(self._seen[cell::_CELLS]) + _POOLED for cell in range(_CELLS)]
            for cell, (right, seen) in enumerate(zip(self._right, self._seen, strict=True)):
                lean = _OWN / seen_of_all[cell % _CELLS] / (seen + _OWN)
                base.append(right / (seen + _OWN) + lean * of_all[cell % _CELLS])
                slope.append(lean * _POOLED)
            lines = self._lines = base, slope
        return lines


def _cell(probability: float, rank: int, level: int) -> int:
    return bisect_right(_EDGES, probability) + _BINS * min(rank, _RANKS - 1) + _CELLS * level


def _places(probabilities: torch.Tensor, level: int | torch.Tensor) -> tuple[list[list[float]], list[int]]:
    """The probabilities at each place and its level."""
    levels = torch.as_tensor(level).expand(*probabilities.shape[:-1], 1)
    return probabilities.reshape(-1, probabilities.shape[-1]).tolist(), levels.flatten().tolist()
