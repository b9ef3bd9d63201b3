"""An average in which the past fades: acceptance rates and prices are measured with it while text is written.

Knows numbers alone.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Faded"]


@dataclass(slots=True)
class Faded:
    """A ratio of two sums in which the past fades: accepted tokens to drafted tokens, for example, or seconds to tokens.

    Before an observation is added, both sums are multiplied by a factor of at most 1, `keep`.

    Args:
        total: sum of the observed values.
        weight: sum of their weights.
    """

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float = 1.0, keep: float = 1.0) -> None:
        """Take in one more observation. keep: share of the past that remains."""
        self.total = keep * self.total + value
        self.weight = keep * self.weight + weight

    def mean(self, prior: float = 0.0, strength: float = 0.0, keep: float = 1.0) -> float:
        """The average, once the past has faded to `keep` and `strength` observations of `prior` have been added."""
        return (keep * self.total + strength * prior) / (keep * self.weight + strength)

    def copy(self, keep: float = 1.0) -> Faded:
        """An average of its own with the same past, faded to `keep`."""
        return Faded(keep * self.total, keep * self.weight)
