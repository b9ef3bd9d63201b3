"""Which arguments a model's forward takes, also if its signature does not name them.

Wrappers of a forward often have the signature `*args, **kwargs`, which accepts whatever the wrapped forward accepts.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from .libraries import CACHE, CACHE_NAMES

_SEEN: weakref.WeakKeyDictionary[Callable[..., Any], tuple[frozenset[str], bool]] = weakref.WeakKeyDictionary()


def takes(model: Any, name: str) -> bool:
    """Whether a model's forward takes an argument of this name. A forward with `**kwargs` is assumed to pass it on to the
    next one: from the object's own to those of its base classes, in order."""
    for forward in _forwards(model):
        names, passes_on = _arguments(forward)
        if name in names:
            return True
        if not passes_on:
            return False
    return False


def cache_argument(model: Any) -> str:
    """The argument in which a model's forward takes its cache."""
    return next((name for name in CACHE_NAMES if takes(model, name)), CACHE)


def generate_passes(model: Any, name: str) -> bool:
    """Whether `generate` gives a model an argument of this name. It checks only the outermost signature."""
    return name in _arguments(model.forward)[0]


def _arguments(forward: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """The names of a forward's arguments, and whether it takes others, too. Read once, because every call asks."""
    forward = getattr(forward, "__func__", forward)
    found = _SEEN.get(forward)
    if found is None:
        parameters = inspect.signature(forward).parameters
        passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        found = _SEEN[forward] = frozenset(parameters), passes_on
    return found


def _forwards(model: Any) -> Iterator[Callable[..., Any]]:
    yield model.forward
    for kind in type(model).__mro__:
        if "forward" in vars(kind):
            yield vars(kind)["forward"]
