"""Rules from the literature for when to stop drafting. The package's own policy, which measures costs, is in adaptive.py.

Knows numbers and confidences, nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..drafts import Round
from .base import Length

__all__ = ["AdaEDL", "Confidence", "Fixed", "Heuristic", "Never"]


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


@dataclass(frozen=True)
class Heuristic:
    """Draft two tokens more after a fully accepted draft, and one less after any other: the schedule of transformers'
    `num_assistant_tokens_schedule="heuristic"`. In a batch, the drafts of all rows have to be accepted.

    Args:
        start_tokens: draft length of the first round, at least 1.
        maximum: the most tokens of a round, at least `start_tokens`.
    """

    start_tokens: int = 5
    maximum: int = 20

    def __post_init__(self) -> None:
        if self.start_tokens < 1:
            raise ValueError(f"start_tokens: {self.start_tokens} is not possible; draft at least 1 token")
        if self.maximum < self.start_tokens:
            raise ValueError(f"maximum: {self.maximum} is less than start_tokens, {self.start_tokens}")

    def start(self, earlier: Length | None = None) -> Length:
        """The policy at work: see `DraftLength.start`."""
        return _Heuristic(self, earlier)


@dataclass(frozen=True)
class AdaEDL:
    """Draft while a lower bound on the acceptance rate stays above a threshold. The bound is computed from the entropy of the
    draft's distribution. 2410.18351.

    Drafting stops before a token if 1 - sqrt(gamma * H(q)) < threshold, H in nats. After every round the threshold moves by a
    smoothed `step`: up while the acceptance rate is below `acceptance`, down otherwise.

    Args:
        gamma: how fast the bound falls with the entropy; above 0. The default is the paper's value.
        threshold: its value at the start, in [0, 1].
        acceptance: the acceptance rate to aim at, in [0, 1]. A higher one makes drafts shorter.
        step: how far a round moves the threshold, before smoothing.
        acceptance_memory, threshold_memory: weight of the past in the two moving averages, in [0, 1).
        maximum: the most tokens of a round, at least 1.
    """

    gamma: float = 0.2
    threshold: float = 0.5
    acceptance: float = 0.9
    step: float = 0.01
    acceptance_memory: float = 0.5
    threshold_memory: float = 0.9
    maximum: int = 16

    def __post_init__(self) -> None:
        if not self.gamma > 0:
            raise ValueError(f"gamma: {self.gamma} is not possible; give a number above 0")
        for name in ("threshold", "acceptance"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: {getattr(self, name)} is no probability; give a number in [0, 1]")
        for name in ("acceptance_memory", "threshold_memory"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is no weight; give a number in [0, 1)")
        if self.maximum < 1:
            raise ValueError(f"maximum: {self.maximum} is not possible; draft at least 1 token")

    def start(self, earlier: Length | None = None) -> Length:
        """The policy at work: see `DraftLength.start`."""
        return _AdaEDL(self, earlier)


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


class _Heuristic(Length):
    def __init__(self, policy: Heuristic, earlier: Length | None):
        self.policy = policy
        self.tokens: int = earlier.tokens if isinstance(earlier, _Heuristic) else policy.start_tokens

    def budget(self, unfinished: Sequence[int]) -> int:
        return self.tokens

    def observe(self, round: Round) -> None:
        rows = round.unfinished
        if not any(round.drafted[row] for row in rows):
            return
        full = all(round.accepted[row] == round.depths[row] for row in rows)
        self.tokens = min(self.tokens + 2, self.policy.maximum) if full else max(1, self.tokens - 1)


class _AdaEDL(Length):
    needs_q = True

    def __init__(self, policy: AdaEDL, earlier: Length | None):
        self.policy = policy
        known = isinstance(earlier, _AdaEDL)
        self.threshold: float = earlier.threshold if known else policy.threshold  # type: ignore[union-attr]
        self.acceptance: float | None = earlier.acceptance if known else None  # type: ignore[union-attr]

    def budget(self, unfinished: Sequence[int]) -> int:
        return self.policy.maximum

    def go_on(self, position: int, q: torch.Tensor, drawn: bool = False) -> torch.Tensor:
        if position == 0:  # one token is always proposed
            return super().go_on(position, q)
        entropy = torch.special.entr(q).sum(-1)
        return 1 - (self.policy.gamma * entropy).sqrt() >= self.threshold

    def observe(self, round: Round) -> None:
        drafted = round.mean(round.depths)
        if drafted == 0:
            return
        policy = self.policy
        rate = round.mean(round.accepted) / drafted
        past = rate if self.acceptance is None else self.acceptance
        self.acceptance = policy.acceptance_memory * past + (1 - policy.acceptance_memory) * rate
        step = policy.step if self.acceptance < policy.acceptance else -policy.step
        moved = self.threshold + (1 - policy.threshold_memory) * step
        self.threshold = min(1.0, max(0.0, moved))
