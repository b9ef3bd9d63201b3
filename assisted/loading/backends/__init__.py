"""The quantization backends, one file each: those of this package, and those that other installed packages add."""

from __future__ import annotations

from typing import Any

from transformers.utils import logging

from ...extras import Registry
from .base import Backend, Format
from .bitsandbytes import BITSANDBYTES
from .packed import PACKED
from .quanto import QUANTO
from .torchao import TORCHAO

logger = logging.get_logger(__name__)
__all__ = ["BACKENDS", "NAMES", "Backend", "Format", "find", "names", "placed", "replacement"]


def _require(name: str, backend: Any) -> None:
    if not isinstance(backend, Backend) or backend.name != name:
        raise TypeError(f"{backend!r} is not an assisted.loading.backends.Backend of this name")


_OWN = {backend.name: backend for backend in (PACKED, BITSANDBYTES, QUANTO, TORCHAO)}
BACKENDS: Registry[Backend] = Registry("assisted.backends", _require, _OWN)
"""By the `quant_method` of their configs. Entry points of the group `assisted.backends` add others."""
NAMES: tuple[str, ...] = tuple(
    name for backend in _OWN.values() for name, chosen in backend.formats.items() if not chosen.cards
)
"""The formats of this package, by name; "int4" stands for the one that is for cards only."""


def names() -> list[str]:
    """The formats of all installed backends, by name, but for those that are for cards only."""
    return [name for backend in BACKENDS.values() for name, chosen in backend.formats.items() if not chosen.cards]


def find(name: str) -> tuple[Backend, Format]:
    """The format of a name, and its backend. Raises ValueError for an unknown name."""
    for backend in _OWN.values() if name in NAMES else BACKENDS.values():
        if name in backend.formats:
            return backend, backend.formats[name]
    raise ValueError(
        f"quantization: {name!r} is not known; use one of {', '.join(names())}, or a transformers quantization config"
    )


def placed(name: str, device: str) -> str:
    """The name of the format that a name stands for on a type of device. Raises ValueError for an unknown name, and for one
    that is for cards only on a CPU."""
    chosen = find(name)[1]
    if device == "cpu" and chosen.cards:
        raise ValueError(f"quantization: {name!r} is for NVIDIA cards; on a CPU, use 'int4'")
    return name if device == "cpu" or not chosen.elsewhere else replacement(chosen, device)


def replacement(chosen: Format, device: str) -> str:
    """The name of the format that replaces one which is for a CPU (`chosen`) on another type of device."""
    for name in chosen.elsewhere[:-1]:
        other = find(name)[1]
        if other.cards and device != "cuda":
            continue
        if (reason := other.lacks()) is None:
            return name
        logger.warning_once(f"quantization: {chosen.elsewhere[-1]!r} is used instead of {name!r}: {reason}")
    return chosen.elsewhere[-1]
