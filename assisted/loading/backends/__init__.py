"""The quantization backends, one file each: those of this package, and those that other installed packages add."""

from __future__ import annotations

from typing import Any

from ...extras import Registry
from .base import Backend, Format
from .bitsandbytes import BITSANDBYTES
from .packed import PACKED
from .quanto import QUANTO
from .torchao import TORCHAO

__all__ = ["BACKENDS", "NAMES", "Backend", "Format", "find", "names", "placed"]


def _require(name: str, backend: Any) -> None:
    if not isinstance(backend, Backend) or backend.name != name:
        raise TypeError(f"{backend!r} is not an assisted.loading.backends.Backend of this name")


_OWN = {backend.name: backend for backend in (PACKED, BITSANDBYTES, QUANTO, TORCHAO)}
BACKENDS: Registry[Backend] = Registry("assisted.backends", _require, _OWN)
"""By the `quant_method` of their configs. Entry points of the group `assisted.backends` add others."""
NAMES: tuple[str, ...] = tuple(name for backend in _OWN.values() for name in backend.formats)
"""The formats of this package, by name."""


def names() -> list[str]:
    """The formats of all installed backends, by name."""
    return [name for backend in BACKENDS.values() for name in backend.formats]


def find(name: str) -> tuple[Backend, Format]:
    """The format of a name, and its backend. Raises ValueError for an unknown name."""
    for backend in _OWN.values() if name in NAMES else BACKENDS.values():
        if name in backend.formats:
            return backend, backend.formats[name]
    raise ValueError(
        f"quantization: {name!r} is not known; use one of {', '.join(names())}, or a transformers quantization config"
    )


def placed(name: str, device: str) -> str:
    """The name of the format that a name stands for on a type of device. Raises ValueError for an unknown name."""
    elsewhere = find(name)[1].elsewhere
    return name if device == "cpu" or elsewhere is None else elsewhere
