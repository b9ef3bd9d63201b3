"""Rules from the literature for when to stop drafting, and all policies by name: what a caller may pass, and what is saved with
a pair. The package's own policy, which measures costs, is in adaptive.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import torch

from ..extras import Registry
from .adaptive import Adaptive
from .base import DraftLength, Length


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
    is_limit = True

    def __init__(self, tokens: int):
        self.tokens = tokens

    def budget(self, unfinished: Sequence[int]) -> int:
        return self.tokens


class _Confidence(Length):
    needs_q = reads_top = is_limit = True

    def __init__(self, policy: Confidence):
        self.policy = policy

    def budget(self, unfinished: Sequence[int]) -> int:
        return self.policy.maximum

    def go_on(self, position: int, q: torch.Tensor, drawn: bool = False) -> torch.Tensor:
        if position == 0:  # one token is always proposed
            return super().go_on(position, q)
        return q.amax(-1) >= self.policy.threshold


def _require(name: str, policy: Any) -> None:
    if not (isinstance(policy, type) and is_dataclass(policy) and hasattr(policy, "start")):
        raise TypeError(f"{policy!r} is not a dataclass with a method start")


POLICIES: Registry[type] = Registry(
    "assisted.lengths",
    _require,
    {"adaptive": Adaptive, "fixed": Fixed, "confidence": Confidence},
)
"""Policies by the names that `draft_length` accepts and config.json holds. Entry points of the group `assisted.lengths` add
others: frozen dataclasses that can be made without arguments."""


def policies() -> dict[str, type]:
    """All policies, by name."""
    return dict(POLICIES)


def resolve(draft_length: int | str | DraftLength | None) -> DraftLength:
    """The policy for a `draft_length` argument: an int, a name of `policies`, a policy object, or None for "adaptive".

    Raises ValueError for anything else.
    """
    if draft_length is None:
        draft_length = "adaptive"
    if isinstance(draft_length, int) and not isinstance(draft_length, bool):
        return Fixed(draft_length)
    if isinstance(draft_length, str) and draft_length != "fixed" and draft_length in POLICIES:
        return POLICIES[draft_length]()
    if hasattr(draft_length, "start"):
        return draft_length
    names = ", ".join(f'"{name}"' for name in POLICIES if name != "fixed")
    raise ValueError(
        f"draft_length: {draft_length!r} is not known; give a number of tokens, one of {names}, or a policy such as "
        "assisted.lengths.Confidence(threshold=0.4)"
    )


def to_dict(policy: DraftLength) -> dict[str, Any] | None:
    """A policy as plain values for config.json; None for one that has no name."""
    for name, kind in POLICIES.items():
        if type(policy) is kind:
            return {"policy": name, **asdict(policy)}  # type: ignore[call-overload]
    return None


def from_dict(fields: dict[str, Any] | None) -> DraftLength:
    """The policy that `to_dict` wrote, or the default for None. Raises ValueError for an unknown name or field."""
    if fields is None:
        return resolve(None)
    if not isinstance(fields, dict):
        raise ValueError(f"draft_length: the saved policy should be an object, but is {fields!r}")
    values = dict(fields)
    name = values.pop("policy", None)
    if name not in POLICIES:
        raise ValueError(f"draft_length: the saved policy {name!r} is not known in this version; pass draft_length=")
    try:
        return POLICIES[name](**values)
    except TypeError as error:
        raise ValueError(f"draft_length: the saved policy {name!r} cannot be made of {values}: {error}") from error
