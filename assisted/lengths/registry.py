"""Draft length policies by name: what a caller may pass, and what is saved with a pair.

Knows every policy of the package, but not how they decide.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .adaptive import Adaptive
from .base import DraftLength
from .policies import AdaEDL, Confidence, Fixed, Heuristic

__all__ = ["from_dict", "policies", "resolve", "to_dict"]


def policies() -> dict[str, type]:
    """The package's policies by the names that `draft_length` accepts and config.json holds."""
    return {"adaptive": Adaptive, "fixed": Fixed, "confidence": Confidence, "heuristic": Heuristic, "adaedl": AdaEDL}


def resolve(draft_length: int | str | DraftLength | None) -> DraftLength:
    """The policy for a `draft_length` argument: an int, a name of `policies`, a policy object, or None for "adaptive".

    Raises ValueError for anything else.
    """
    if draft_length is None:
        draft_length = "adaptive"
    if isinstance(draft_length, int) and not isinstance(draft_length, bool):
        return Fixed(draft_length)
    if isinstance(draft_length, str):
        if draft_length in policies() and draft_length != "fixed":
            return policies()[draft_length]()
    elif hasattr(draft_length, "start"):
        return draft_length
    names = ", ".join(f'"{name}"' for name in policies() if name != "fixed")
    raise ValueError(
        f"draft_length: {draft_length!r} is not known; give a number of tokens, one of {names}, or a policy such as "
        "assisted.lengths.Confidence(threshold=0.4)"
    )


def to_dict(policy: DraftLength) -> dict[str, Any] | None:
    """A policy as plain values for config.json; None for a policy from outside this package."""
    for name, kind in policies().items():
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
    if name not in policies():
        raise ValueError(f"draft_length: the saved policy {name!r} is not known in this version; pass draft_length=")
    try:
        return policies()[name](**values)
    except TypeError as error:
        raise ValueError(f"draft_length: the saved policy {name!r} cannot be made of {values}: {error}") from error
