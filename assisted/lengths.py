"""When to stop drafting. A policy is what the caller writes down; a `Length` is its memory during one `generate`.

Knows numbers and confidences, nothing of models. To stay exact under sampling a policy decides from the draft's law
before a token is drawn from it, never from the token (non-anticipation): `Length.go_on` is called in that place.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

__all__ = ["Confidence", "DraftLength", "Fixed", "Length", "resolve"]


class Length:
    """A policy at work during one `generate`. What it does not override, it does not care about."""

    needs_law = False
    """Whether `go_on` looks at the law; a policy that does not spares the draft a softmax and a synchronisation."""

    predicted_speedup: float | None = None
    """Against plain decoding, for the draft lengths it chooses; None where nothing is predicted."""

    def budget(self) -> int:
        """The most tokens to draft this round; 0 decodes one token plainly. Called once, at the start of every round."""
        raise NotImplementedError

    def another(self, position: int) -> bool:
        """Whether to run the draft for one more token, at `position` (0-based, at least 1). Asked before its forward."""
        return True

    def go_on(self, position: int, q: torch.Tensor) -> torch.Tensor:
        """Which rows propose a token at `position` (0-based). Asked before it is drawn from q, and only if `needs_law`.

        q: [B, V] float32, the draft's law there. Returns [B] bool. Rows that said no once are not asked again.
        """
        return q.new_ones(len(q), dtype=torch.bool)

    def observe(self, rows: list[tuple[int, int, int]], draft_seconds: float, verify_seconds: float) -> None:
        """What became of the round: tokens drafted, accepted and committed in each unfinished row, and what the two steps
        took. Called after every round, those without a draft included."""


class DraftLength(Protocol):
    """What a caller passes as `draft_length`: immutable, shared between calls."""

    def start(self, earlier: Length | None = None) -> Length:
        """The policy's memory for one `generate`. earlier: the one of the model's last call with this policy, if any."""
        ...


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
        return _Fixed(self)


@dataclass(frozen=True)
class Confidence:
    """Draft until the draft model is unsure: the rule of transformers' `assistant_confidence_threshold`.

    Args:
        threshold: stop before a token whose law has no probability above this; in [0, 1]. Higher pays where the draft is
            slow against the target.
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
        return _Confidence(self)


class _Fixed(Length):
    def __init__(self, policy: Fixed):
        self.policy = policy

    def budget(self) -> int:
        return self.policy.tokens


class _Confidence(Length):
    needs_law = True

    def __init__(self, policy: Confidence):
        self.policy = policy

    def budget(self) -> int:
        return self.policy.maximum

    def go_on(self, position: int, q: torch.Tensor) -> torch.Tensor:
        if position == 0:  # one token is always proposed
            return super().go_on(position, q)
        return q.amax(-1) >= self.policy.threshold


def resolve(draft_length: int | str | DraftLength | None) -> DraftLength:
    """The policy behind what a caller may write: an int, "confidence", a policy object; None is the default, `Confidence()`.

    Raises ValueError for anything else.
    """
    if draft_length is None or draft_length == "confidence":
        return Confidence()
    if isinstance(draft_length, int) and not isinstance(draft_length, bool):
        return Fixed(draft_length)
    if hasattr(draft_length, "start") and not isinstance(draft_length, str):
        return draft_length
    if draft_length == "adaptive":
        raise ValueError(
            'draft_length: "adaptive" is not available in this version; give a number of tokens or "confidence"'
        )
    raise ValueError(
        f'draft_length: {draft_length!r} is not known; give a number of tokens, "confidence", or a policy such as '
        "assisted.lengths.Confidence(threshold=0.4)"
    )


_POLICIES: dict[str, type] = {"fixed": Fixed, "confidence": Confidence}


def to_dict(policy: DraftLength) -> dict[str, Any] | None:
    """A policy as plain values for config.json; None for one that this package does not know."""
    for name, kind in _POLICIES.items():
        if type(policy) is kind:
            return {"policy": name, **asdict(policy)}  # type: ignore[call-overload]
    return None


def from_dict(fields: dict[str, Any] | None) -> DraftLength:
    """The policy that `to_dict` wrote; the default for None. Raises ValueError for an unknown name."""
    if fields is None:
        return resolve(None)
    values = dict(fields)
    name = values.pop("policy", None)
    if name not in _POLICIES:
        raise ValueError(f"draft_length: this version does not know the saved policy {name!r}; pass draft_length=")
    return _POLICIES[name](**values)
