"""What the forward of a model takes, where its signature says so and where it does not.

Whoever wraps a forward often writes `*args, **kwargs`: such a signature names nothing and takes everything that the forward
underneath takes. Knows classes and signatures; nothing of models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["generate_passes", "takes"]


def takes(model: Any, name: str) -> bool:
    """Whether the forward of a model takes an argument of this name. A signature that ends in `**kwargs` is taken to pass it on
    to the forward underneath: from one in the object itself to those of its base classes."""
    for forward in _forwards(model):
        parameters = inspect.signature(forward).parameters
        if name in parameters:
            return True
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return False
    return False


def generate_passes(model: Any, name: str) -> bool:
    """Whether `generate` gives a model an argument of this name: it looks at the outermost signature alone."""
    return name in inspect.signature(model.forward).parameters


def _forwards(model: Any) -> Iterator[Callable[..., Any]]:
    yield model.forward
    for kind in type(model).__mro__:
        if "forward" in vars(kind):
            yield vars(kind)["forward"]
