"""Ratios of times with their uncertainty, and how much a text repeats itself. Knows only numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 2000  # of the bootstrap
INSIDE = 0.95  # share of the draws inside an interval


@dataclass(frozen=True)
class Interval:
    """A ratio and the 95% bootstrap interval around it.

    Args:
        ratio: the median over repeats.
        low, high: 95% of the draws lie between these.
    """

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}]"


def speedup(plain: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> Interval:
    """How many times faster one is than the baseline.

    plain, other: [R, N] seconds of R repeats over the same N prompts (or batches), measured in turns. Each repeat gives the
    ratio of the seconds over all prompts; the result is the median of these. The bootstrap draws prompts and repeats with
    replacement, for both sides of a ratio alike, so that a slowdown of both cancels.

    Raises ValueError for tables of different or empty shapes.
    """
    a, b = np.asarray(plain, dtype=float), np.asarray(other, dtype=float)
    if a.shape != b.shape or a.ndim != 2 or not a.size:
        raise ValueError(f"other: seconds of shape {b.shape} cannot be compared with {a.shape}; both must be [R, N]")
    repeats, prompts = a.shape
    rng = np.random.default_rng(0)
    rows = rng.integers(repeats, size=(DRAWS, repeats, 1))
    columns = rng.integers(prompts, size=(DRAWS, 1, prompts))
    drawn = np.median(a[rows, columns].sum(-1) / b[rows, columns].sum(-1), -1)
    low, high = np.quantile(drawn, [(1 - INSIDE) / 2, (1 + INSIDE) / 2])
    return Interval(float(np.median(a.sum(1) / b.sum(1))), float(low), float(high))


def repeated_share(completions: Sequence[Sequence[int]], n: int = 4) -> float:
    """The share of the n-grams that occurred before in the same one of `completions`. Small models loop, and loops flatter
    drafters."""
    grams = [[tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)] for tokens in completions]
    total = sum(map(len, grams))
    return 1 - sum(len(set(g)) for g in grams) / total if total else 0.0
