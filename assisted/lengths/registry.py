"""Draft length policies by name: what a caller may pass, and what is saved with a pair.

Knows the policies of this package and of other installed packages, but not how they decide.
"""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from typing import Any

from ..extras import Registry
from .adaptive import Adaptive
from .base import DraftLength
from .policies import Confidence, Fixed


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

_REMOVED = ("heuristic", "adaedl")


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
    if isinstance(draft_length, str):
        _require_present(draft_length)
        if draft_length != "fixed" and draft_length in POLICIES:
            return POLICIES[draft_length]()
    elif hasattr(draft_length, "start"):
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
    _require_present(name)
    if name not in POLICIES:
        raise ValueError(f"draft_length: the saved policy {name!r} is not known in this version; pass draft_length=")
    try:
        return POLICIES[name](**values)
    except TypeError as error:
        raise ValueError(f"draft_length: the saved policy {name!r} cannot be made of {values}: {error}") from error


def _require_present(name: Any) -> None:
    """Raise ValueError for a policy of earlier versions."""
    if name in _REMOVED and name not in POLICIES:
        raise ValueError(
            f"draft_length: {name!r} was removed, because no measurement recommended it; use 'adaptive', the default, or a "
            "number of tokens"
        )
