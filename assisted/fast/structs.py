"""What crosses from Python into C: addresses of tensors, and the structs of `native.c`, `heads.h` and `delta.c`.

Every address is made by `pointer`, which checks what torch would check. A library's own sizes and offsets are compared with
these structs when it is loaded. Knows nothing of what the functions in C do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int64, c_void_p
from typing import Any

import torch


class OtherLayout(RuntimeError):
    """A library whose structs are not those of this file."""


def pointer(tensor: torch.Tensor | None, dtype: torch.dtype, length: int) -> int | None:
    """The address of a tensor for C, which reads or writes its first `length` numbers; None for None.

    Raises ValueError for a tensor of another dtype or device, one whose numbers do not lie together, or a shorter one.
    """
    if tensor is None:
        return None
    if tensor.dtype != dtype or not tensor.is_cpu or not tensor.is_contiguous() or tensor.numel() < length:
        together = "contiguous" if tensor.is_contiguous() else "strided"
        raise ValueError(
            f"code in C takes {length} contiguous numbers of {dtype} on a CPU, and was given a {together} tensor of "
            f"{tensor.dtype} with shape {list(tensor.shape)} on {tensor.device}"
        )
    return tensor.data_ptr()


def offset(tensor: torch.Tensor, dtype: torch.dtype, first: int, length: int) -> int:
    """`pointer` to `length` numbers from the one at `first` on."""
    return (pointer(tensor, dtype, first + length) or 0) + first * dtype.itemsize


def pointers(tensors: Sequence[torch.Tensor], dtype: torch.dtype, lengths: Sequence[int]) -> Any:
    """The addresses of several tensors, as an array."""
    return (c_void_p * len(tensors))(*map(pointer, tensors, [dtype] * len(tensors), lengths))


def require(found: int, ids: torch.Tensor | None = None, rows: int = 0) -> None:
    """Raise IndexError if C has refused what it was to look up, and therefore computed nothing.

    found: what it returned: 0; or one more than the first column whose id has no embedding; or, below zero, whose slot is not
    there. ids: [1, n]. rows: of the table of embeddings.
    """
    if found > 0 and ids is not None:
        raise IndexError(f"token {int(ids[0, found - 1])} has no embedding; the table has {rows} rows")
    if found:
        raise IndexError(f"column {abs(found) - 1} of a pass has no slot")


def require_layout(library: Any, *structs: type[ctypes.Structure]) -> None:
    """Raise OtherLayout unless a library's structs have the sizes and offsets of these, in this order."""
    own = [number for struct in structs for number in (ctypes.sizeof(struct), *_offsets(struct))]
    count = c_int64.in_dll(library, "layout_numbers").value
    if list((c_int64 * count).in_dll(library, "layout")) != own:
        raise OtherLayout("the compiled library lays out its structs in another way than Python")


def _offsets(struct: type[ctypes.Structure]) -> list[int]:
    return [getattr(struct, name).offset for name, *_ in struct._fields_]


# ---- native.c and heads.h ----


class Product(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weights", "scales", "bias", "rows")),
        *((name, c_int64) for name in ("outputs", "inputs", "bits", "input_bits")),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, Product) for name in ("heads", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("before_attention", "before_mlp", "query_norm", "key_norm")),
        *((name, c_int64) for name in ("hidden", "inner", "query_heads", "key_heads", "head_size")),
        *((name, c_float) for name in ("attention_epsilon", "mlp_epsilon", "query_epsilon", "key_epsilon", "scaling")),
    )


class End(ctypes.Structure):
    _fields_ = (("output", Product), ("weight", c_void_p), ("epsilon", c_float))


class Pass(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("rows", "width")),
        *((name, c_void_p) for name in ("cos", "sin")),
        ("angles", c_int64),
        ("places", c_void_p),
        ("first", c_int64),
        *((name, c_void_p) for name in ("slots", "starts")),
        *((name, c_int64) for name in ("threads", "at_once")),
        *((name, c_void_p) for name in ("buffer", "scratch")),
        ("of_thread", c_int64),
    )


class Head(ctypes.Structure):
    _fields_ = (
        ("layer", Layer),
        ("output", Product),
        *((name, c_void_p) for name in ("embeddings", "token_norm", "state_norm", "end_norm", "tokens")),
        *((name, c_int64) for name in ("rows", "vocabulary", "normed_residual", "normed_output")),
        *((name, c_float) for name in ("token_epsilon", "state_epsilon", "end_epsilon", "tap_epsilon")),
        ("fuse", Product),
        ("tap_norms", c_void_p),
        ("taps", c_int64),
    )


TREE_LIMITS = "depth", "beam", "candidates", "nodes", "room"
TREE_NODES = "tokens", "parents", "depths", "columns", "children"


class Tree(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in TREE_LIMITS),
        *((name, ctypes.POINTER(c_double)) for name in ("base", "slope", "edges")),
        *((name, c_int64) for name in ("ranks", "bins")),
        *((name, c_void_p) for name in (*TREE_NODES, "scores", "sure", "best", "reading")),
        *((name, c_int64) for name in ("found", "kept", "width", "read", "last", "known")),
        *((name, c_void_p) for name in ("states", "before", "space", "logits", "angles")),
        *((name, c_void_p) for name in ("ids", "places", "slots", "starts", "scratch")),
    )


# ---- delta.c ----


class Shape(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("key_heads", "heads", "dk", "dv", "size")),
        *((name, c_float) for name in ("strongest", "epsilon")),
        *((name, c_int64) for name in ("rounds", "rounds_norm")),
    )


class Columns(ctypes.Structure):
    """Of a tensor, [R, n, any]; see `columns_of`."""

    _fields_ = (("data", c_void_p), ("stride", c_int64))


class Floats(ctypes.Structure):
    """A product of float32, `Product` in C."""

    _fields_ = (
        *((name, c_void_p) for name in ("weights", "bias")),
        *((name, c_int64) for name in ("outputs", "inputs")),
    )


class HybridLayer(ctypes.Structure):
    _fields_ = (
        *((name, Floats) for name in ("into", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("before_mixer", "before_mlp")),
        *((name, c_float) for name in ("mixer_epsilon", "mlp_epsilon")),
        *((name, c_int64) for name in ("hidden", "inner", "is_attention")),
        *((name, c_int64) for name in ("query_heads", "key_heads", "head_size", "turned", "is_gated")),
        *((name, c_void_p) for name in ("query_norm", "key_norm")),
        *((name, c_float) for name in ("query_epsilon", "key_epsilon", "scaling")),
        ("shape", Shape),
        *((name, c_void_p) for name in ("conv", "conv_bias", "a_log", "shift", "norm")),
    )


class HybridPass(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("rows", "width")),
        *((name, c_void_p) for name in ("parents", "cos", "sin")),
        ("angles", c_int64),
        ("places", c_void_p),
        ("first", c_int64),
        *((name, c_void_p) for name in ("slots", "starts")),
        *((name, c_int64) for name in ("capacity", "threads")),
        ("buffer", c_void_p),
        ("top", c_int64),
        ("scratch", c_void_p),
    )


class MtpHead(ctypes.Structure):
    _fields_ = (
        ("fuse", Floats),
        *((name, c_void_p) for name in ("embed_norm", "hidden_norm", "end_norm")),
        *((name, c_float) for name in ("embed_epsilon", "hidden_epsilon", "end_epsilon")),
    )


OF_NATIVE = Product, Layer, End, Pass, Head, Tree
OF_DELTA = Shape, Columns, Floats, HybridLayer, HybridPass, MtpHead


def columns_of(tensor: torch.Tensor) -> Columns:
    """A tensor of float32, [R, n, any], whose columns lie equally far apart through all rows."""
    apart = tensor.stride(1)
    if (
        tensor.dtype != torch.float32
        or not tensor.is_cpu
        or tensor.stride(2) != 1
        or tensor.stride(0) != tensor.shape[1] * apart
    ):
        raise ValueError(
            "code in C takes columns of float32 on a CPU that lie equally far apart, and was given a tensor of "
            f"{tensor.dtype} with shape {list(tensor.shape)} and strides {list(tensor.stride())} on {tensor.device}"
        )
    return Columns(tensor.data_ptr(), apart)
