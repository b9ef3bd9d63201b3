"""This package's own weights for CPUs: "int8" and "int4", the fastest of that size there. On other devices the names stand for
the fastest weights of the same size that these have."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..packed import HEAD_BITS, METHOD, PackedConfig
from .base import Backend, Format, blocks

_FORMATS = {
    "int8": Format(
        lambda dtype: PackedConfig(8),
        lambda out, into, size: out * (16 * blocks(into, 16) + 2),
        elsewhere="int8-bitsandbytes",
        code="PackedConfig(8)",
    ),
    "int4": Format(
        lambda dtype: PackedConfig(4),
        lambda out, into, size: 16 * blocks(out, 16) * blocks(into, 32) * (16 + 4),
        elsewhere="int4-quanto",
        code="PackedConfig(4)",
    ),
}
PACKED = Backend(
    METHOD,
    _FORMATS,
    configs="assisted.loading.packed",
    format_of=lambda config: _FORMATS[f"int{config.bits}"],
    skips=None,
    modules=(nn.Linear, Conv1D),
    head=f"int{HEAD_BITS}",
)
