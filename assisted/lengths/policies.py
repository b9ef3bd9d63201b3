"""Rules from the literature for when to stop drafting. The package's own policy, which measures costs, is in adaptive.py.

Knows numbers and confidences, nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .base import Length


@dataclass(frozen=True)
class Fixed:
    """Always draft the same number of tokens.

    Args:
        tokens: draft length, at least 1.
    """

    tokens: int = 4

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(
                f"draft_length: {self.tokens} is not possible; draft at least 1 token, or pass assisted=False"
            )

    def start(self, earlier: Length | None = None) -> Length:
        """The policy at work: see `DraftLength.start`."""
        return _Fixed(self.tokens)


@dataclass(frozen=True)
class Never:
    """Never draft: this package's loop alone, to measure how much faster its forward passes are without drafting."""

    def start(self, earlier: Length | None = None) -> Length:
        """The policy at work: see `DraftLength.start`."""
        return _Fixed(0)


@dataclass(frozen=True)
class Confidence:
    """Draft until the draft model is unsure: the rule of transformers' `assistant_confidence_threshold`.

    Args:
        threshold: stop before a token whose distribution has no probability of at least this; in [0, 1]. Choose a higher one
            where the draft is slow compared with the target.
        maximum: the most tokens of a round, at least 1.
    """

    threshold: float = 0.4
    maximum: int = 8

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold: {self.threshold} is no probability; give a number in [0, 1]")
        if self.maximum < 1:
            raise ValueError(f"maximum: {self.maximum} is not possible; draft at least 1 token")

    def start(self, earlier: Length | None = None) -> Length:
        """The policy at work: see `DraftLength.start`."""
        return _Confidence(self)


class _Fixed(Length):
    def __init__(self, tokens: int):
        self.tokens = tokens

    def budget(self, unfinished: Sequence[int]) -> int:
        return self.tokens


class _Confidence(Length):
    needs_q = True

    def __init__(self, policy: Confidence):
        self.policy = policy

    def budget(self, unfinished: Sequence[int]) -> int:
        return self.policy.maximum

    def go_on(self, position: int, q: torch.Tensor, drawn: bool = False) -> torch.Tensor:
        if position == 0:  # one token is always proposed
            return super().go_on(position, q)
        return q.amax(-1) >= self.policy.threshold
