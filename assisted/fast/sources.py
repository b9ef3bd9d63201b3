"""Detects whether a model has changed since a faster copy was made from it: weights, attributes, code.

A copy (joined weights, packed products, compiled code) gives the model's own text only while the model is unchanged. So every
call compares everything that the copy was made from. Deals with modules and tensors, not with how they are run.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedConfig

from ..engine.libraries import is_wrapper_subclass
from ..engine.trust import Code, code_of
from . import native

_PART = 2**26  # words that are read at once, on devices other than a CPU
_STEADY: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of tensors that nobody changes: checksums, once they are known
_BOOKKEEPING = frozenset(vars(nn.Module())) - {"training"}  # parameters, submodules, hooks: compared separately


@dataclass(frozen=True)
class Weights:
    """The tensors that a copy was made from, and checksums of their values at that time if the values were copied.

    The checksum of a vector is the vector. The parts of a matrix on a CPU are hashed in C. Where nothing runs in C, words are
    read: each row gives its sum, each column four sums weighted by a number per row. Both change if entries are swapped or
    written, even through `.data`, which torch's version counters miss. All values are read, at about memory bandwidth.
    """

    tensors: tuple[torch.Tensor, ...]
    checksums: tuple[torch.Tensor, ...] | None
    places: tuple[Any, ...] = ()
    """Of tensors on a CPU whose values were not copied: where they lie, or the values of a vector or of a convolution of single
    channels, which may have been."""

    @staticmethod
    @torch.no_grad()
    def of(tensors: Iterable[torch.Tensor], copied: bool, read: Weights | None = None) -> Weights:
        """copied: also compare values, otherwise the identity of the tensors and where they lie. read: weights that were read
        just now, whose checksums need not be computed again."""
        held = tuple(tensors)
        if not copied:
            return Weights(
                held, None, tuple(_place(one) for one in held if not is_wrapper_subclass(one) and one.is_cpu)
            )
        known = {} if read is None else dict(zip(map(id, read.tensors), read.checksums or (), strict=False))
        return Weights(held, tuple(known[id(one)] if id(one) in known else _checksum_of(one) for one in held))

    def same(self, other: Weights) -> bool:
        """Whether a copy made from one is valid for the other."""
        if not identical(self.tensors, other.tensors) or (self.checksums is None) != (other.checksums is None):
            return False
        if len(self.places) != len(other.places) or not all(map(_same_place, self.places, other.places)):
            return False
        # `.data` may have been replaced by one of another shape
        return self.checksums is None or all(map(torch.equal, self.checksums, other.checksums or ()))


def keep_steady(modules: Iterable[nn.Module]) -> None:
    """Read the values of these modules' parameters once more and then never again, for a program that owns them: changes made
    from now on are not noticed."""
    for module in modules:
        for parameter in module.parameters():
            _STEADY.setdefault(parameter, None)


def _checksum_of(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor | None = _STEADY.get(tensor)
    if found is None:
        found = checksum(tensor.detach())
        if tensor in _STEADY:
            _STEADY[tensor] = found
    return found


def _place(tensor: torch.Tensor) -> Any:
    if tensor.dim() < 2 or (tensor.dim() == 3 and tensor.shape[1] == 1):
        return tensor.detach().clone()
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _same_place(one: Any, other: Any) -> bool:
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return torch.equal(one, other) if both else one == other


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The checksum of a tensor, see `Weights`."""
    if tensor.dim() < 2 or not tensor.numel():
        return tensor.flatten().contiguous().view(torch.uint8).clone()  # the numbers of a view may lie apart
    numbers = tensor.contiguous().view(-1).view(-1, tensor.shape[-1])  # whose last stride is 1 in a single column, too
    if not tensor.is_cpu:
        return _checksum_by_parts(numbers)
    if (found := native.hashes(numbers)) is not None:
        return found
    if numbers.shape[1] * numbers.element_size() % 4 == 0:
        words = numbers.view(torch.int32)
    else:  # narrow types with an odd number of columns
        words = numbers.view(torch.uint8).to(torch.int32)
    rows, columns = words.shape
    multipliers = _multipliers(1 << max(rows - 1, 0).bit_length())[:, :rows]
    by_row = (words.view(torch.int64) if columns % 2 == 0 else words).sum(1)
    return torch.cat([(multipliers @ words).flatten().long(), by_row])


def _checksum_by_parts(numbers: torch.Tensor) -> torch.Tensor:
    """A sum of each row of a matrix, weighted by an odd number per word or byte. Torch has no product of integers on other
    devices, and the factors of a large matrix would take too much memory at once."""
    words = numbers.view(torch.uint8)
    words = words.view(torch.int32) if words.shape[1] % 4 == 0 else words.to(torch.int32)
    multipliers = _multipliers(words.shape[1])[0].to(words.device)
    return torch.cat([(part * multipliers).sum(1) for part in words.split(max(1, _PART // words.shape[1]))])


@functools.cache
def _multipliers(count: int) -> torch.Tensor:
    """Four numbers per word, [4, count] int32. The first is odd, so every change of a word changes the sum."""
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(count)
        numbers = torch.randint(-(2**30), 2**30, (4, count), generator=generator, dtype=torch.int32)
    numbers[0] = 2 * numbers[0] + 1
    return numbers


@dataclass(frozen=True)
class Modules:
    """Everything that modules compute with, except the values of tensors: their identity, their attributes, the fields of their
    configs, and the code of their classes. Keeps no module alive.
    """

    modules: tuple[weakref.ref[nn.Module], ...]
    kinds: tuple[type, ...]
    attributes: tuple[dict[str, Any], ...]
    configs: tuple[dict[str, Any], ...]
    code: tuple[Code, ...]

    @staticmethod
    def of(modules: Iterable[nn.Module], code: tuple[Code, ...] | None = None) -> Modules:
        """code: what these modules run, from `trust`; None for that of their classes."""
        held = tuple(modules)
        kinds = tuple(map(type, held))
        attributes = tuple({name: value for name, value in vars(m).items() if name not in _BOOKKEEPING} for m in held)
        values = (value for found in attributes for value in found.values() if isinstance(value, PreTrainedConfig))
        configs = {id(config): config for config in values}  # a forward may read any field
        return Modules(
            tuple(map(weakref.ref, held)),
            kinds,
            attributes,
            tuple(copy.deepcopy(vars(config)) for config in configs.values()),
            code_of(kinds) if code is None else code,
        )

    def same(self, other: Modules) -> bool:
        """Whether a copy made from one is valid for the other."""
        return (
            identical(self.modules, other.modules)  # a module has one plain weak reference
            and identical(self.kinds, other.kinds)
            and identical(self.code, other.code)
            and all(map(_equal, self.attributes, other.attributes))
            and len(self.configs) == len(other.configs)
            and all(map(_equal, self.configs, other.configs))
        )


@dataclass(frozen=True)
class Source:
    """Everything that a faster copy of a model was made from."""

    modules: Modules  # the modules that were read
    weights: Weights  # their parameters
    buffers: Weights  # their buffers
    kept: Weights = Weights((), None)  # tensors that it does not copy but uses themselves

    @staticmethod
    def of_model(model: nn.Module, code: tuple[Code, ...]) -> Source:
        """Everything that a model computes with, values on any device included. code: what it runs, from `trust`.

        Raises RuntimeError, TypeError or NotImplementedError if its weights can't be read as numbers.
        """
        modules = Modules.of(model.modules(), code)
        tensors = (value for own in modules.attributes for value in own.values() if isinstance(value, torch.Tensor))
        return Source(modules, Weights.of(model.parameters(), True), Weights.of((*model.buffers(), *tensors), True))

    def same(self, other: Source) -> bool:
        """Whether a copy made from one is valid for the other."""
        return (
            self.modules.same(other.modules)
            and self.kept.same(other.kept)
            and self.buffers.same(other.buffers)
            and self.weights.same(other.weights)
        )


def identical(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two tuples hold the same objects."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    try:
        return one == other  # identical objects are equal without calling __eq__
    except (RuntimeError, TypeError, ValueError):  # another tensor or array: its comparison has no single truth value
        return False
