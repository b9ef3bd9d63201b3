"""The gated delta rule over few columns in C, for float32 on a CPU. By operations of torch it takes some forty of them between
the two products of a layer, longer than the arithmetic. Deals with one layer's tensors; `fused` decides where it is used.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

import torch

from ..engine.columns import Columns
from ..engine.delta import DeltaMixer, Projected, Read
from . import native

_MOST = 2**14  # numbers of a head's values over all columns, which lie on the stack
_FLAGS = (
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-fopenmp",
    "-shared",
    "-fPIC",
)
_SHARED = 2**18  # products of a number and a state's entry from which several threads are faster


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("key_heads", "heads", "dk", "dv", "size")),
        *((name, c_float) for name in ("strongest", "epsilon")),
    )


class _Columns(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("stride", c_int64))


@functools.cache
def loaded() -> tuple[Any, str]:
    """The compiled library and an empty string, or None and why there is none."""
    vectors = ("-mavx2", "-mfma") if {"avx2", "fma"} <= native.processor_flags() else ()
    library, reason = native.compiled("delta.c", (*_FLAGS, *vectors))
    if library is not None:
        library.mix.argtypes = [c_void_p, c_int64, c_int64, c_void_p, *[_Columns] * 4, *[c_void_p] * 13, c_int]
        library.mix.restype = None
    return library, reason


class NativeMixer(DeltaMixer):
    """A `DeltaMixer` that runs in C where it can. It uses the model's own weights, at the address that they have now."""

    def over_columns(
        self, projected: Projected, before: torch.Tensor, state: torch.Tensor, columns: Columns
    ) -> tuple[torch.Tensor, Read]:
        own: Any = self.own
        rows, heads, dk, dv = state.shape
        n, (_, channels, size) = columns.width, before.shape
        norm: Any = self.gated_norm
        conv, gate = own.conv1d, projected[1]
        given = (conv.weight, conv.bias, own.A_log, own.dt_bias, norm.weight)
        if (
            n * dv > _MOST
            or conv.weight.shape[-1] != size
            or not all(part is None or _is_plain(part) for part in (*given, before, state))
            or not all(part.stride(-1) == 1 and part.stride(0) == n * part.stride(1) for part in projected)
            or gate.dtype != torch.float32
            or torch.compiler.is_compiling()
        ):
            return super().over_columns(projected, before, state, columns)
        inputs, read = before.new_empty(rows, channels, size + n), before.new_empty(rows, n, channels)
        decay, keys = before.new_empty(rows, heads, n), before.new_empty(rows, heads, n, dk)
        written, made = before.new_empty(rows, heads, n, dv), before.new_empty(rows, n, heads * dv)
        parents = columns.parents.contiguous() if columns.parents is not None and n > 1 else None
        shape = _Shape(own.num_k_heads, heads, dk, dv, size, self.strongest, norm.variance_epsilon)
        tensors = (*given, before, state, inputs, decay, keys, written, made, read)
        loaded()[0].mix(
            ctypes.addressof(shape),
            *(rows, n, None if parents is None else parents.data_ptr()),
            *(_Columns(part.data_ptr(), part.stride(1)) for part in projected),
            *(None if part is None else part.data_ptr() for part in tensors),
            torch.get_num_threads() if rows * n * heads * dk * dv >= _SHARED else 1,
        )
        return made, Read(columns, inputs, decay, keys, written)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_cpu and tensor.is_contiguous()
