"""What a faster copy of a model was made from, and whether that is still what it was: weights, attributes, code.

A copy (joined weights, packed products, compiled code) gives the model's own text only as long as the model does not change.
Everything that a copy has read is therefore compared at every call. Knows modules and tensors; nothing of how they are run.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["Modules", "Source", "Weights"]

_BOOKKEEPING = frozenset(vars(nn.Module())) - {"training"}  # parameters, submodules, hooks: looked at on their own


@dataclass(frozen=True)
class Weights:
    """The tensors that something was made from, and checksums of what they held then, where they were copied.

    A vector's checksum is the vector. A matrix is read as integers: of each row the sum, of each column four sums of its
    entries times a number of their row. These change when entries trade places as well as when one is written to, through
    `.data` too, which torch's own version counters do not see. All numbers are read, at about the speed of the memory.
    """

    tensors: tuple[torch.Tensor, ...]
    checksums: tuple[torch.Tensor, ...] | None

    @staticmethod
    @torch.no_grad()
    def of(tensors: Iterable[torch.Tensor], copied: bool) -> Weights:
        """copied: look at the numbers, too; otherwise only at which tensors these are. Numbers are read on a CPU only."""
        held = tuple(tensors)
        return Weights(held, tuple(_checksum(tensor.detach()) for tensor in held) if copied else None)

    def same(self, other: Weights) -> bool:
        """Whether what was made of one serves for the other."""
        if not _identical(self.tensors, other.tensors) or (self.checksums is None) != (other.checksums is None):
            return False
        # a tensor may have got other data of another shape
        return self.checksums is None or all(map(torch.equal, self.checksums, other.checksums or ()))


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor on a CPU."""
    if tensor.dim() < 2:
        return tensor.reshape(-1).view(torch.uint8).clone()
    words = tensor.flatten(0, -2).contiguous()
    if words.shape[1] * words.element_size() % 4 == 0:
        words = words.view(torch.int32)
    else:  # narrow types with an odd number of columns
        words = words.view(torch.uint8).to(torch.int32)
    rows, columns = words.shape
    multipliers = _multipliers(1 << max(rows - 1, 0).bit_length())[:, :rows]
    by_row = (words.view(torch.int64) if columns % 2 == 0 else words).sum(1)
    return torch.cat([(multipliers @ words).flatten().long(), by_row])


@functools.cache
def _multipliers(count: int) -> torch.Tensor:
    """Four numbers for each row, [4, count] int32. The first is odd: every change of a single entry changes the sum."""
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(count)
        numbers = torch.randint(-(2**30), 2**30, (4, count), generator=generator, dtype=torch.int32)
    numbers[0] = 2 * numbers[0] + 1
    return numbers


@dataclass(frozen=True)
class Modules:
    """Everything but their tensors that modules compute with: which modules they are, their attributes, the code of their
    classes, and the functions that this code calls. Keeps no module alive.
    """

    modules: tuple[weakref.ref[nn.Module], ...]
    kinds: tuple[type, ...]
    attributes: tuple[dict[str, Any], ...]
    code: tuple[Any, ...]

    @staticmethod
    def of(modules: Iterable[nn.Module], around: Iterable[type] = (), attention: str | None = None) -> Modules:
        """around: classes of the modules that call these, of which the code alone counts. attention: name of the attention
        function that is called, as transformers knows it."""
        held = tuple(modules)
        kinds = tuple(map(type, held))
        code = [value for kind in dict.fromkeys((*kinds, *around)) for value in _called_by(kind)]
        called = ALL_ATTENTION_FUNCTIONS.get(attention) if attention in ALL_ATTENTION_FUNCTIONS else None
        return Modules(
            tuple(map(weakref.ref, held)),
            kinds,
            tuple({name: value for name, value in vars(m).items() if name not in _BOOKKEEPING} for m in held),
            (*code, called, nn.Module.__call__, F.linear),
        )

    def same(self, other: Modules) -> bool:
        """Whether what was made of one serves for the other."""
        return (
            _identical(self.modules, other.modules)  # a module has one plain weak reference
            and _identical(self.kinds, other.kinds)
            and _identical(self.code, other.code)
            and all(map(_equal, self.attributes, other.attributes))
        )


@dataclass(frozen=True)
class Source:
    """All that a faster copy of a model was made from.

    Args:
        modules: that were read.
        weights: their parameters.
        buffers: their buffers.
    """

    modules: Modules
    weights: Weights
    buffers: Weights

    def same(self, other: Source) -> bool:
        """Whether what was made of one serves for the other."""
        return (
            self.modules.same(other.modules) and self.buffers.same(other.buffers) and self.weights.same(other.weights)
        )


def _called_by(kind: type) -> Iterator[Any]:
    """The forward of a class, and what the names in it stand for now."""
    forward = getattr(kind, "forward", None)
    yield forward
    for names, name in _names_in(forward):
        yield names.get(name)


@functools.cache
def _names_in(function: Any) -> tuple[tuple[dict[str, Any], str], ...]:
    """Where a function looks up what it calls: namespaces and names, those of functions beside it included."""
    found: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
    left: list[Callable[..., Any]] = [function]
    while left:
        one = left.pop()
        code, names = getattr(one, "__code__", None), getattr(one, "__globals__", {})
        left += [inner] if (inner := getattr(one, "__wrapped__", None)) is not None else []
        for name in () if code is None else code.co_names:
            if name in names and (id(names), name) not in found:
                found[id(names), name] = names, name
                value = names[name]
                if getattr(value, "__module__", None) == names.get("__name__") and hasattr(value, "__code__"):
                    left.append(value)
    return tuple(found.values())


def _identical(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    try:
        return one == other  # values that are the same object are equal without being asked
    except (RuntimeError, TypeError, ValueError):  # another tensor or array, which is neither true nor false
        return False
