"""Matrix products over a few columns on a CPU, from copies of the weights in a faster layout.

Verifying multiplies three to ten columns, for which torch's own choice of kernel is two to five times slower than the
memory: here wide weights are kept in oneDNN's layout as well. Knows linear modules; nothing of layers, slots or drafts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["PackedLinear", "Product", "may_copy", "packs"]

_WIDE = 3 * 2**14  # entries of a matrix from which oneDNN's layout pays at any number of columns
_LARGE = 2**20  # entries from which a product costs more than filling up its columns
_FILLED = 4  # columns up to which such a product is filled: over fewer it takes longer
_EXACT = 16  # columns up to which every number of them is computed as it is
_STEPS = 4  # numbers of columns in each doubling above that
_MOST = 256  # columns up to which the layout is used at once; beyond, torch's own product of float32 is as fast
_SOONER = 64  # the same of a matrix that is not large
_MANY = 32  # columns from which the layout pays for every matrix
_HINT = 8  # columns that the layout is chosen for
_TALL = 1.5  # outputs for each input from which a copy for single columns pays
_ALWAYS = 2**30  # bytes of parameters that are always copied; more only where a quarter of the free memory holds them


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products of this type that are worth their copies here: float32, and bfloat16 where the processor
    multiplies it."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def may_copy(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether parameters may be copied: plain numbers on a CPU, in a type that `packs`, and there is room for them."""
    held = list(parameters)
    if any(map(is_traceable_wrapper_subclass, held)):  # quanto's and torchao's name the dtype that they compute in
        return False
    kinds = {(p.device.type, p.dtype) for p in held}
    if not all(device == "cpu" and packs(dtype) for device, dtype in kinds):
        return False
    size = sum(p.nbytes for p in held)
    return size <= _ALWAYS or size <= _free_memory() // 4


def _free_memory() -> int:
    """Bytes of memory that nobody uses; 0 where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0


def _packed(weight: torch.Tensor) -> torch.Tensor:
    """A weight, [out, in], in oneDNN's layout."""
    made: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _HINT)
    return made


def _is_tall(weight: torch.Tensor) -> bool:
    """Whether a copy of a weight pays that is there for single columns alone."""
    return weight.dtype == torch.float32 and _WIDE <= weight.numel() < _LARGE and len(weight) >= _TALL * weight.shape[1]


def _turned(weight: torch.Tensor) -> torch.Tensor:
    """The same weight, [out, in], with all that one input is multiplied by side by side: where outputs are many, one column
    takes half as long by it."""
    return weight.detach().t().contiguous().t()


def _times(
    inputs: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, filled: bool, outputs: int
) -> torch.Tensor:
    """[..., in] -> [..., outputs]. filled: compute at least `_FILLED` columns."""
    columns = inputs.shape[:-1].numel()
    if columns > _MOST:
        parts = inputs.reshape(columns, inputs.shape[-1]).split(_MOST)
        made = torch.cat([_times(part, packed, bias, filled, outputs) for part in parts])
        return made.view(*inputs.shape[:-1], outputs)
    more = _width(max(columns, _FILLED) if filled else columns) - columns
    if more == 0:
        return torch.ops.mkldnn._linear_pointwise.default(inputs, packed, bias, "none", [], "")
    filled_up = inputs.new_empty(columns + more, inputs.shape[-1])  # what else it holds, nobody reads
    filled_up[:columns] = inputs.reshape(columns, inputs.shape[-1])
    made = torch.ops.mkldnn._linear_pointwise.default(filled_up, packed, bias, "none", [], "")
    return made[:columns].view(*inputs.shape[:-1], outputs)


def _width(columns: int) -> int:
    """How many columns are computed of a product over so many.

    For every shape of weight and every number of columns oneDNN keeps half a megabyte, and a thousand of those: over all the
    lengths of prompts that a server sees, they would take more memory than the model. So numbers of columns are few.
    """
    if columns <= _EXACT:
        return columns
    step = (1 << (columns - 1).bit_length()) // (2 * _STEPS)
    return -(-columns // step) * step


class Product:
    """What several linear modules make of one input, side by side: in one product, where their weights may be copied."""

    def __init__(self, modules: Sequence[nn.Module], copied: bool):
        self.modules = modules
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.packed: torch.Tensor | None = None
        linear = [module for module in modules if type(module) is nn.Linear]
        biases = [module.bias for module in linear if module.bias is not None]
        if not copied or len(linear) < len(modules) or len(biases) not in (0, len(linear)):
            return
        # a single weight is the model's own, not a copy, unless it is repacked
        weight = linear[0].weight if len(linear) == 1 else torch.cat([module.weight.detach() for module in linear])
        if biases:
            self.bias = biases[0] if len(biases) == 1 else torch.cat([bias.detach() for bias in biases])
        self.wide, self.large, self.outputs = weight.numel() >= _WIDE, weight.numel() >= _LARGE, len(weight)
        if packs(weight.dtype):
            self.packed = _packed(weight)
        # of a large product the joined weight would be a copy too many: over one column its modules run one by one
        read = not self.wide or (weight.dtype == torch.float32 and not self.large)
        if read or self.packed is None:
            self.weight = _turned(weight) if len(linear) > 1 or _is_tall(weight) else weight

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., sum of the modules' outputs]."""
        if self.packed is not None and torch.compiler.is_compiling():
            return self._for_compiler(inputs)
        if self.packed is not None and _pays(inputs, self.wide, self.large):
            return _times(inputs, self.packed, self.bias, self.large, self.outputs)
        if self.weight is not None:
            return F.linear(inputs, self.weight, self.bias)
        if len(self.modules) == 1:
            return self.modules[0](inputs)
        return torch.cat([module(inputs) for module in self.modules], -1)

    def _for_compiler(self, inputs: torch.Tensor) -> torch.Tensor:
        """The same of the model's own weights, which a compiler that takes them for constants joins and lays out by itself."""
        weights: list[Any] = [module.weight for module in self.modules]
        return F.linear(inputs, torch.cat(weights) if len(weights) > 1 else weights[0], self.bias)


def _pays(inputs: torch.Tensor, wide: bool, large: bool) -> bool:
    """Whether oneDNN's layout is the faster one over these columns. wide, large: a weight of `_WIDE`, `_LARGE` entries or more.

    Over one column of float32, or over very many, any layout of torch's own is.
    """
    columns = inputs.shape[:-1].numel()
    if columns < _MANY and not wide:
        return False
    return inputs.dtype != torch.float32 or 1 < columns <= (_MOST if large else _SOONER)


class PackedLinear(nn.Linear):
    """A wide linear module run from a packed copy of its weight, which is the module's own in everything else."""

    packed: torch.Tensor
    turned: torch.Tensor | None
    large: bool

    @staticmethod
    def of(module: nn.Linear) -> PackedLinear:
        other: Any = object.__new__(PackedLinear)
        weight = module.weight
        own = {
            "packed": _packed(weight),
            "turned": _turned(weight) if _is_tall(weight) else None,
            "large": weight.numel() >= _LARGE,
        }
        other.__dict__ = {**module.__dict__, **own}
        return other

    @staticmethod
    def pays(module: nn.Module) -> bool:
        """Whether a module is one that gains by it."""
        return type(module) is nn.Linear and module.weight.numel() >= _WIDE

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        # of another type torch says what is wrong; a compiler lays out weights by itself
        if inputs.dtype != self.weight.dtype or torch.compiler.is_compiling():
            return super().forward(inputs)
        if not _pays(inputs, True, self.large):
            return super().forward(inputs) if self.turned is None else F.linear(inputs, self.turned, self.bias)
        return _times(inputs, self.packed, self.bias, self.large, self.out_features)
