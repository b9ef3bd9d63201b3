"""Matrix products over a few columns on a CPU, from copies of the weights in a faster layout.

Verification multiplies three to ten columns. For these, torch's own kernels are two to five times slower than memory
bandwidth allows, so wide weights are also kept in oneDNN's layout. On a processor without instructions for bfloat16, torch
converts bfloat16 weights again for every column; there, the copies are of float32. Deals with linear modules only.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..core.host import free_memory
from ..engine.libraries import (
    is_wrapper_subclass,
    multiplies_bfloat16,
    pack_for_onednn,
    packed_product,
    packs_for_onednn,
)
from . import native
from .low_bit import LowBitLinear, NativeLinear, eight_bits, joined

_WIDE = 3 * 2**14  # entries of a matrix from which oneDNN's layout is faster at any number of columns
_LARGE = 2**20  # entries from which a product costs more than padding its columns
_FILLED = 4  # columns to which such a product is padded; fewer take longer
_EXACT = 16  # columns up to which no number of columns is rounded up
_STEPS = 4  # numbers of columns per doubling above that
_MOST = 256  # the most columns per product in this layout; above, torch's float32 product is as fast
_SOONER = 64  # the same for a matrix that is not large
_MANY = 32  # columns from which the layout is faster for every matrix
_HINT = 8  # columns that the layout is optimized for
_TALL = 1.5  # outputs per input from which a copy for single columns is worthwhile
_GIANT = 2**23  # entries from which float32 is faster than converting bfloat16, even for one column
_ALWAYS = 2**30  # bytes of parameters that may always be copied; more only if they fit in a quarter of the free memory


def packs(dtype: torch.dtype) -> bool:
    """Whether products in C, or oneDNN's, are worth a copy of weights of this dtype here: of float32 and bfloat16."""
    return copied_in(dtype) is not None or native.is_available(dtype)


@functools.cache
def copied_in(dtype: torch.dtype) -> torch.dtype | None:
    """The dtype of a copy of such weights: their own, but float32 for bfloat16 if the processor has no instructions for it.
    None if no copy is faster."""
    if not packs_for_onednn():
        return None
    if dtype == torch.bfloat16:
        return (
            torch.bfloat16 if multiplies_bfloat16(platform.machine().lower() in ("x86_64", "amd64")) else torch.float32
        )
    return dtype if dtype == torch.float32 else None


def may_copy(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether parameters may be copied: plain tensors on a CPU, of a dtype that `packs`, with enough free memory."""
    held = list(parameters)
    kinds = {(p.device.type, p.dtype) for p in held}
    # the dtype of quanto's and torchao's tensors is the one they compute in
    if any(map(is_wrapper_subclass, held)) or not all(device == "cpu" and packs(dtype) for device, dtype in kinds):
        return False
    return may_take(sum(p.numel() * (copied_in(p.dtype) or p.dtype).itemsize for p in held))


def may_take(size: int, free: int | None = None) -> bool:
    """Whether copies of this size may be kept. free: bytes of free memory; None for those of this machine."""
    return size <= _ALWAYS or size <= (free_memory() if free is None else free) // 4


def size_of_copies(shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> int:
    """Bytes of what a `Product` of linear modules with these weights, [out, in] each, keeps beside the weights."""
    numbers = sum(out * into for out, into in shapes)
    outputs, into = sum(out for out, _ in shapes), shapes[0][1]
    if _runs_in_c(into, dtype):
        return into * (outputs + -outputs % native.OUTPUTS) * dtype.itemsize
    kind = copied_in(dtype)
    if kind is None:
        return 0
    found = numbers * kind.itemsize
    if _keeps(numbers, dtype) and (len(shapes) > 1 or _is_tall(outputs, into, dtype)):
        found += numbers * dtype.itemsize
    return found


def _runs_in_c(inputs: int, dtype: torch.dtype) -> bool:
    """Whether products of a dtype with so many inputs run in C."""
    return inputs % native.GROUP == 0 and native.is_available(dtype)


def reads_in_place(modules: Iterable[nn.Module]) -> bool:
    """Whether a product of linear modules runs in C from their weights, where these are."""
    weights: list[Any] = [getattr(module, "weight", None) for module in modules if type(module) is nn.Linear]
    if not weights or any(map(is_wrapper_subclass, weights)):
        return False
    alike = {(weight.device.type, weight.dtype, weight.stride(1)) for weight in weights} == {
        ("cpu", weights[0].dtype, 1)
    }
    return alike and all(_runs_in_c(weight.shape[1], weight.dtype) for weight in weights)


def suffice_in_place(modules: Iterable[nn.Module]) -> bool:
    """Whether copies of weights would make no product of these modules faster: linear ones read all of them where they are, at
    the same speed."""
    linear = [module for module in modules if type(module) is nn.Linear]
    return reads_in_place(linear) and native.suffices_in_place(linear[0].weight.dtype)


def _packed(weight: torch.Tensor) -> torch.Tensor:
    """A weight, [out, in], in oneDNN's layout and in the dtype of copies."""
    made: torch.Tensor = pack_for_onednn(weight.detach().to(copied_in(weight.dtype)), _HINT)
    return made


def _is_tall(outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    """Whether a separate copy of a weight for single columns is worthwhile."""
    return dtype == torch.float32 and _WIDE <= outputs * inputs < _LARGE and outputs >= _TALL * inputs


def _keeps(entries: int, dtype: torch.dtype) -> bool:
    """Whether a product also keeps its weight as it is; large ones run their modules one by one over a single column."""
    return entries < _WIDE or (dtype == torch.float32 and entries < _LARGE)


def _turned(weight: torch.Tensor) -> torch.Tensor:
    """The same weight, [out, in], stored with the factors of each input contiguous. With many outputs, this halves the time
    of one column."""
    return weight.detach().t().contiguous().t()


def _times(
    inputs: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, filled: bool, outputs: int
) -> torch.Tensor:
    """[..., in] -> [..., outputs]. filled: compute at least `_FILLED` columns."""
    if inputs.dtype != packed.dtype:
        wide = None if bias is None else bias.to(packed.dtype)
        return _times(inputs.to(packed.dtype), packed, wide, filled, outputs).to(inputs.dtype)
    columns = inputs.shape[:-1].numel()
    if columns > _MOST:
        parts = inputs.reshape(columns, inputs.shape[-1]).split(_MOST)
        made = torch.cat([_times(part, packed, bias, filled, outputs) for part in parts])
        return made.view(*inputs.shape[:-1], outputs)
    more = _width(max(columns, _FILLED) if filled else columns) - columns
    if more == 0:
        return packed_product(inputs, packed, bias)
    filled_up = inputs.new_empty(columns + more, inputs.shape[-1])  # the padding is never read
    filled_up[:columns] = inputs.reshape(columns, inputs.shape[-1])
    made = packed_product(filled_up, packed, bias)
    return made[:columns].view(*inputs.shape[:-1], outputs)


def _width(columns: int) -> int:
    """The number of columns that a product is padded to.

    oneDNN caches half a megabyte per weight shape and number of columns, up to a thousand entries. With all the prompt lengths
    of a server, these would take more memory than the model, so few numbers of columns are used.
    """
    if columns <= _EXACT:
        return columns
    step = (1 << (columns - 1).bit_length()) // (2 * _STEPS)
    return -(-columns // step) * step


class Product:
    """The concatenated outputs of several linear modules for one input; one product if their weights may be copied, or where C
    reads them in place.

    in_8_bits: in C, round weights and inputs of bfloat16 to 8 bits, as a draft may.

    Attributes:
        order: [outputs] int64, where they are among the outputs of `native`; None if they are the first ones.
    """

    order: torch.Tensor | None = None

    def __init__(self, modules: Sequence[nn.Module], copied: bool, in_8_bits: bool = False):
        self.modules = modules
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.packed: torch.Tensor | None = None
        self.low: LowBitLinear | None = None
        self.native: native.NativeProduct | None = None
        self.most = native.MOST
        whole = joined(modules)
        if whole is not None:
            self.modules, sizes = [whole], [int(module.out_features) for module in modules]  # type: ignore[arg-type]
            self.low, self.outputs = whole if whole.is_product else None, sum(sizes)
            if any(size % native.OUTPUTS for size in sizes[:-1]) and whole.out_features > self.outputs:
                begin = accumulate((size + -size % native.OUTPUTS for size in sizes), initial=0)
                self.order = torch.cat([at + torch.arange(size) for at, size in zip(begin, sizes, strict=False)])
            if isinstance(self.low, NativeLinear):
                self.native = self.low.native_product
            return
        linear = [module for module in modules if type(module) is nn.Linear]
        biases = [module.bias for module in linear if module.bias is not None]
        if len(linear) < len(modules) or len(biases) not in (0, len(linear)):
            return
        if not copied and not reads_in_place(linear):
            return
        if biases:
            self.bias = biases[0] if len(biases) == 1 else torch.cat([bias.detach() for bias in biases])
        if not copied:
            weights, self.outputs = [module.weight for module in linear], sum(module.out_features for module in linear)
            given = weights, linear[0].in_features, 8 * weights[0].dtype.itemsize
            self.native = native.NativeProduct(*given, bias=None if self.bias is None else self.bias.float())
            self.most = self.native.most
            return
        # a single weight is not copied unless it is repacked
        weight = linear[0].weight if len(linear) == 1 else torch.cat([module.weight.detach() for module in linear])
        self.entries, self.large, self.outputs = weight.numel(), weight.numel() >= _LARGE, len(weight)
        if _runs_in_c(weight.shape[1], weight.dtype):
            bias, bits = None if self.bias is None else self.bias.float(), 8 * weight.dtype.itemsize
            if in_8_bits and weight.dtype == torch.bfloat16:
                levels, scales = eight_bits(weight.detach().float())
                self.native = native.NativeProduct(
                    native.packed_8(levels), weight.shape[1], 8, scales.float(), bias, input_bits=8
                )
            else:
                self.native = native.NativeProduct(native.packed(weight), weight.shape[1], bits, bias=bias)
            self.most = self.native.most
            return
        if copied_in(weight.dtype) is not None:
            self.packed = _packed(weight)
        if _keeps(self.entries, weight.dtype) or self.packed is None:
            tall = _is_tall(len(weight), weight.shape[1], weight.dtype)
            self.weight = _turned(weight) if len(linear) > 1 or tall else weight

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., sum of the modules' outputs]."""
        made = self.raw(inputs)
        return made if made.dtype == inputs.dtype else made.to(inputs.dtype)

    def raw(self, inputs: torch.Tensor) -> torch.Tensor:
        """The same, in the dtype that the product was computed in if that is another one."""
        columns = inputs.shape[:-1].numel()
        if self.native is not None and not torch.compiler.is_compiling() and columns <= self.most:
            made = self._real(self.native(inputs.reshape(columns, -1).to(self.native.dtype)))
            return made[:, : self.outputs].view(*inputs.shape[:-1], self.outputs)
        if self.low is not None:
            return self._real(self.low.raw(inputs))
        if (self.packed is not None or self.native is not None) and torch.compiler.is_compiling():
            # from the model's own weights: a compiler that treats them as constants joins and packs them itself
            weights: list[Any] = [module.weight for module in self.modules]
            return F.linear(inputs, torch.cat(weights) if len(weights) > 1 else weights[0], self.bias)
        if self.packed is not None and _is_faster(inputs, self.entries):
            return _times(inputs, self.packed, self.bias, self.large, self.outputs)
        if self.weight is not None:
            return F.linear(inputs, self.weight, self.bias)
        if len(self.modules) == 1:
            return self._real(self.modules[0](inputs))
        return torch.cat([module(inputs) for module in self.modules], -1)

    def _real(self, made: torch.Tensor) -> torch.Tensor:
        """Outputs without what lies between them."""
        return made if self.order is None else made.index_select(-1, self.order)


def _is_faster(inputs: torch.Tensor, entries: int) -> bool:
    """Whether oneDNN's layout is faster for these columns. entries: of the weight.

    By size alone: the layouts round differently, so equal processors must choose alike. For a few columns of float32, or very
    many, torch's own layouts are faster; for one column, bfloat16 is read in half the
    time of a copy in float32.
    """
    columns = inputs.shape[:-1].numel()
    if columns < _MANY and entries < _WIDE:
        return False
    if inputs.dtype == torch.float32:
        return _FILLED <= columns <= (_MOST if entries >= _LARGE else _SOONER)
    return columns > 1 or entries >= _GIANT or copied_in(inputs.dtype) == inputs.dtype


class PackedLinear(nn.Linear):
    """A wide linear module that runs as a `Product`; everything else is shared with the module."""

    product: Product

    @staticmethod
    def of(module: nn.Linear, copied: bool = True, in_8_bits: bool = False) -> PackedLinear:
        """The same module. copied: its weight may be copied. in_8_bits: see `Product`."""
        other: Any = object.__new__(PackedLinear)
        other.__dict__ = {**module.__dict__, "product": Product([module], copied, in_8_bits)}
        return other

    @staticmethod
    def gains(module: nn.Module) -> bool:
        """Whether a module is wide enough to be faster."""
        return type(module) is nn.Linear and module.weight.numel() >= _WIDE

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        # for another dtype, torch raises its error; a compiler packs weights itself
        if inputs.dtype != self.weight.dtype or torch.compiler.is_compiling():
            return super().forward(inputs)
        return self.product(inputs)
