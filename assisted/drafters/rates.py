"""How often guesses that come with a probability are right: learned from what became of earlier ones.

Knows numbers; nothing of what makes the guesses.
"""

from __future__ import annotations

from ..estimates import Reliability, confidence_bin

__all__ = ["Rates"]


class Rates:
    """For each level of a draft, how often a guess of some probability is right once the path to it was.

    A head gives its guesses probabilities without knowing which tokens come between: where these are known to be right, it
    is right more often, and under another law than it was trained on, more or less often. Before anything is learned, the
    guess is taken at its word.
    """

    def __init__(self) -> None:
        self.reliability = Reliability()

    def of(self, level: int, probabilities: list[float]) -> list[float]:
        """The rate of each guess of a level (0-based)."""
        return [self.reliability.accept(confidence_bin(p), level) for p in probabilities]

    def see(self, level: int, probabilities: list[float], right: int | None) -> None:
        """Which guess of a level was right, None for no one."""
        self.reliability.round += 1
        for rank, p in enumerate(probabilities):
            self.reliability.see(confidence_bin(p), level, rank == right)
