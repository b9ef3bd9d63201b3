"""This package's own weights: for CPUs "int8" and "int4", the fastest of that size there, and "int4-int8", whose inputs always
have 8 bits; for NVIDIA cards "int4-tinygemm", for torch's kernel of that name. On other devices the first three stand for the
fastest weights of the same size that these have."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

from ...engine.libraries import lacks_tinygemm
from ...fast import native
from ..packed import HEAD_BITS, METHOD, PackedConfig
from .base import Backend, Format, blocks


def _bytes_8(out: int, into: int, size: int) -> int:
    if native.is_available():
        return native.OUTPUTS * blocks(out, native.OUTPUTS) * native.GROUP * blocks(into, native.GROUP) + 4 * out
    return out * (16 * blocks(into, 16) + 2)


def _bytes_4(out: int, into: int, size: int) -> int:
    together = native.OUTPUTS if native.is_available() else 16
    return together * blocks(out, together) * blocks(into, 32) * (16 + 4)


def _packed(bits: int, always: bool = False) -> Format:
    """always: inputs have 8 bits also where there are no kernels for them."""
    return Format(
        lambda dtype: PackedConfig(bits, input_bits=8 if always or native.is_available() else 16),
        _bytes_8 if bits == 8 else _bytes_4,
        elsewhere=("int8-bitsandbytes",) if bits == 8 else ("int4-tinygemm", "int4-quanto"),
        code=f"PackedConfig({bits}, input_bits=8)",
        head=f"int{HEAD_BITS}",
    )


_TINYGEMM = Format(
    lambda dtype: PackedConfig(4),
    lambda out, into, size: 8 * blocks(out, 8) * blocks(into, 32) * (16 + 4),
    code="PackedConfig(4)",
    lacks=lacks_tinygemm,
    cards=True,
)
_FORMATS = {
    "int8": _packed(8),
    "int4": _packed(4),
    "int4-int8": _packed(4, always=True),
    "int4-tinygemm": _TINYGEMM,
}
PACKED = Backend(
    METHOD,
    _FORMATS,
    configs="assisted.loading.packed",
    format_of=lambda config: _FORMATS[f"int{config.bits}"],
    skips=None,
    modules=(nn.Linear, Conv1D),
)
