"""What crosses from Python into C: addresses of tensors, and the structs of `kernels/abi.h`.

Every address is made by `pointer`, which checks what torch would check. The structs are read from the sources in C; a library's
own sizes and offsets are compared with them when it is loaded. Knows nothing of what the functions in C do.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int64, c_void_p
from typing import Any

import torch

from .variants import KERNELS


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


def pointers(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], lengths: Sequence[int]) -> Any:
    """The addresses of several tensors, as an array."""
    return (c_void_p * len(tensors))(*map(pointer, tensors, dtypes, lengths))


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


def _declared() -> tuple[type[ctypes.Structure], ...]:
    """The structs of `abi.h`. A pointer is an address, or takes an array of ctypes if it is one to constant doubles."""
    text = re.sub(r"/\*.*?\*/", "", (KERNELS / "abi.h").read_text(), flags=re.DOTALL)
    found: dict[str, Any] = {"int64_t": c_int64, "float": c_float}
    known = len(found)
    for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", text, re.DOTALL):
        fields: list[tuple[str, Any]] = []
        for kind, declared in re.findall(r"((?:const )?\w+) ([^;]+);", body):
            address = ctypes.POINTER(c_double) if kind == "const double" else c_void_p
            for one in map(str.strip, declared.split(",")):
                fields.append((one.lstrip("*"), address if one.startswith("*") else found[kind]))
        found[name] = type(name, (ctypes.Structure,), dict(_fields_=fields))
    return tuple([*found.values()][known:])


STRUCTS = _declared()
Product, Norm, Delta, Layer, Pass, End, Head, Tree = STRUCTS
TREE_NODES = "tokens", "parents", "depths", "columns", "children"
