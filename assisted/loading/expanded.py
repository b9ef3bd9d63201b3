"""Expands quantized weights of a checkpoint: FP8 and integers with scales, 4 and 8 bits of compressed-tensors, AWQ and GPTQ,
NVFP4 and MXFP4. Knows the tensors that store a weight in each format; nothing of models.

Formats as in compressed-tensors 0.20, AutoAWQ 0.2 (gemm), GPTQModel 7 (gptq, gptq_v2), AutoRound (October 2026) and ModelOpt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

Group = dict[str, str]
"""The tensors that store one weight: for each of their roles ("" is the weight itself), the name in the checkpoint."""

_BLOCK = 128  # the side of the squares of an FP8 weight that share a scale
_BESIDE = re.compile(r"(packed|scale_inv|scale_2|scale|global_scale|shape|zero_point|g_idx)$")
_INSTEAD = re.compile(r"(.*\.)(qweight|qzeros|scales|g_idx|input_scale|input_global_scale|input_zero_point)$")
_UNREAD = {"input_scale", "input_global_scale", "input_zero_point", "shape"}  # of inputs, and what shapes tell anyway
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where the columns are in 32 bits
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def grouped(names: Iterable[str]) -> dict[str, Group]:
    """The tensors of a checkpoint by the weight, bias and so on that they store."""
    found, groups = set(names), dict[str, Group]()
    for name in sorted(found):
        weight, role = name, ""
        if instead := _INSTEAD.match(name):
            weight, role = f"{instead[1]}weight", instead[2]
        elif beside := _BESIDE.search(name):
            base = name[: beside.start() - 1]
            if name[beside.start() - 1] == "_" and (base.endswith(".weight") or base in found):
                weight, role = base, beside[1]
        groups.setdefault(weight, {})[role] = name
    return groups


def is_known(group: Group) -> bool:
    """Whether a weight that is stored in these tensors can be read."""
    return _reader(group) is not None


def is_as_it_is(group: Group) -> bool:
    """Whether the tensor of a weight has its shape."""
    return _reader(group) in (_as_it_is, _in_blocks, _scaled)


def expand(
    name: str, parts: Mapping[str, Tensor], shape: tuple[int, ...], method: Mapping[str, Any], dtype: torch.dtype
) -> Tensor:
    """A weight as numbers.

    name: for messages. parts: the tensors that store it, by their roles in `grouped`. shape: that it must have. method: the
    checkpoint's `quantization_config`. dtype: of the result if the weight is quantized.

    Raises ValueError, without the checkpoint's path, for a format that is not known and for tensors that do not fit it.
    """
    reader = _reader(parts)
    if reader is None:
        raise ValueError(f"{name} is stored as {', '.join(sorted(parts))}, of a quantization that cannot be read")
    if reader is _as_it_is:
        return _as_it_is(name, parts, shape, method)
    try:
        found = reader(name, parts, shape, method)
    except (RuntimeError, IndexError, ZeroDivisionError) as error:
        raise ValueError(_misfit(name, parts)) from error
    if found.shape != shape:
        raise ValueError(f"{_misfit(name, parts)}: {list(found.shape)} in place of {list(shape)}")
    return found.to(dtype)


def _misfit(name: str, parts: Mapping[str, Tensor]) -> str:
    stored = (f"{role or 'weight'} {list(part.shape)}" for role, part in parts.items() if role not in _UNREAD)
    return f"the tensors that store {name} do not fit together ({', '.join(stored)})"


def _as_it_is(name: str, parts: Mapping[str, Tensor], shape: tuple[int, ...], method: Mapping[str, Any]) -> Tensor:
    weight = parts[""]
    if not weight.is_floating_point() or weight.element_size() == 1:
        raise ValueError(f"it holds {name} in {weight.dtype} without its scales")
    return weight


def _in_blocks(name: str, parts: Mapping[str, Tensor], shape: tuple[int, ...], method: Mapping[str, Any]) -> Tensor:
    """A scale for each square, [..., ceil(n / 128), ceil(m / 128)], as DeepSeek and Qwen store FP8."""
    scale, sides = parts["scale_inv"].float(), method.get("weight_block_size") or (_BLOCK, _BLOCK)
    expected = (*shape[:-2], *(-(-size // side) for size, side in zip(shape[-2:], sides, strict=True)))
    if scale.shape != expected:
        raise ValueError(f"it holds {name}_scale_inv of shape {list(scale.shape)}; expected {list(expected)}")
    return parts[""].float() * _spread(scale, shape, sides)


def _scaled(name: str, parts: Mapping[str, Tensor], shape: tuple[int, ...], method: Mapping[str, Any]) -> Tensor:
    """8 bits with a scale for the tensor, for each row, for groups of a row, or for squares."""
    weight, scale = parts[""].float(), _factors(parts["scale"])
    if "zero_point" in parts:
        weight = weight - _each(parts["zero_point"].float(), shape, method)
    return weight * _each(scale, shape, method)


def _integers(name: str, parts: Mapping[str, Tensor], shape: tuple[int, ...], method: Mapping[str, Any]) -> Tensor:
    """compressed-tensors: rows of unsigned integers, packed into 32 bits along the row; zero points along the column."""
    packed, scale = parts["packed"], _factors(parts["scale"])
    if packed.dtype == torch.uint8:  # MXFP4
        return _four_bit_floats(packed) * _each(scale, shape, method)
    bits = _bits(name, shape[1], packed.shape[1])
    values = (_unpacked(packed, bits)[:, : shape[1]] - 2 ** (bits - 1)).float()
    zero = torch.zeros_like(scale)
    if "zero_point" in parts:
        zero = (_unpacked(parts["zero_point"].T, bits).T[: shape[0]] - 2 ** (bits - 1)).float()
    if "g_idx" in parts:
        index = parts["g_idx"].long()
        return (values - zero[:, index]) * scale[:, index]
    return (values - _each(zero, shape, method)) * _each(scale, shape, method)


def _columns(name: str, parts: Mapping[str, Tensor], shape: tuple[int, ...], method: Mapping[str, Any]) -> Tensor:
    """AWQ and GPTQ: inputs are rows. AWQ packs along outputs, GPTQ along inputs, and both pack zero points along outputs.

    In GPTQ's first format, one less than the zero point is stored. Where all are in the middle (`sym`), what is stored does not
    matter, and some writers store something else.
    """
    packed, scales, (rows, inputs) = parts["qweight"], parts["scales"].float(), shape
    if awq := packed.shape[0] == inputs:
        bits = _bits(name, rows, packed.shape[1])
        values, zeros = (_in_order(part, bits)[:, :rows] for part in (packed, parts["qzeros"]))
    else:
        bits = _bits(name, inputs, packed.shape[0])
        values, zeros = _unpacked(packed.T, bits).T[:inputs], _unpacked(parts["qzeros"], bits)[:, :rows]
        if method.get("sym"):
            zeros = torch.full_like(zeros, 2 ** (bits - 1))
        elif method.get("quant_method") in ("auto-round", "intel/auto-round"):
            raise ValueError(f"{name} has zero points of AutoRound, whose meaning depends on its version")
        elif method.get("checkpoint_format") != "gptq_v2":
            zeros = (zeros + 1) & (2**bits - 1)
    index = None if awq else parts.get("g_idx")
    if index is None:
        index = torch.arange(inputs) // _group_size(inputs, len(scales), method)
    index = index.long()
    if zeros.shape != scales.shape or len(values) != inputs:
        raise RuntimeError("zero points and scales differ")
    return ((values - zeros[index]).float() * scales[index]).T


def _nvfp4(name: str, parts: Mapping[str, Tensor], shape: tuple[int, ...], method: Mapping[str, Any]) -> Tensor:
    """4-bit floats, an FP8 scale for each 16, and one for the tensor: a divisor in compressed-tensors, a factor in ModelOpt."""
    scale = parts["scale"].float()
    scale = scale / parts["global_scale"] if "global_scale" in parts else scale * parts["scale_2"]
    return _four_bit_floats(parts["packed"] if "packed" in parts else parts[""]) * _each(scale, shape, method)


_Reader = Callable[[str, Mapping[str, Tensor], tuple[int, ...], Mapping[str, Any]], Tensor]
_READERS: tuple[tuple[set[str], set[str], _Reader], ...] = (
    ({""}, set(), _as_it_is),
    ({"", "scale_inv"}, set(), _in_blocks),
    ({"", "scale"}, {"zero_point"}, _scaled),
    ({"", "scale", "scale_2"}, set(), _nvfp4),
    ({"packed", "scale", "global_scale"}, set(), _nvfp4),
    ({"packed", "scale"}, {"zero_point", "g_idx"}, _integers),
    ({"qweight", "qzeros", "scales"}, {"g_idx"}, _columns),
)
"""The tensors that each format needs, those that it may have, and who reads it."""


def _reader(roles: Iterable[str]) -> _Reader | None:
    given = {*roles} - _UNREAD
    return next((reader for needs, may, reader in _READERS if needs <= given <= needs | may), None)


def _spread(scale: Tensor, shape: tuple[int, ...], sides: Iterable[int]) -> Tensor:
    """A scale for each number. scale: [..., n, m]. sides: how many rows and columns share one."""
    for axis, side in zip((-2, -1), sides, strict=True):
        scale = scale.repeat_interleave(side, axis).narrow(axis, 0, shape[axis])
    return scale


def _each(scale: Tensor, shape: tuple[int, ...], method: Mapping[str, Any]) -> Tensor:
    """A scale for each number, from those of a tensor, of rows, of groups of a row, or of squares."""
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.dim() < 2:
        scale = scale[..., None]
    if scale.shape[-2] == shape[-2]:
        return _spread(scale, shape, (1, _group_size(shape[-1], scale.shape[-1], method)))
    if list(scale.shape[-2:]) != [-(-size // _BLOCK) for size in shape[-2:]]:
        raise RuntimeError("neither rows nor squares")
    return _spread(scale, shape, (_BLOCK, _BLOCK))


def _group_size(numbers: int, groups: int, method: Mapping[str, Any]) -> int:
    """How many of the numbers in a row share a scale; the last ones may be fewer. Raises RuntimeError if nothing fits."""
    given, likely = method.get("group_size"), [2**k for k in range(3, 12)]
    for size in [given, *likely] if type(given) is int and given > 0 else likely:
        if groups > 1 and -(-numbers // size) == groups:
            return int(size)
    if numbers % groups:
        raise RuntimeError("groups of a row do not cover it")
    return numbers // groups


def _factors(scale: Tensor) -> Tensor:
    """Scales as float32; bytes are exponents (MXFP4, MXFP8)."""
    return torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()


def _bits(name: str, numbers: int, words: int) -> int:
    """Of each of so many numbers, in so many words of 32 bits. Raises ValueError for other than 2, 4 and 8."""
    for bits in (8, 4, 2):
        if -(-numbers * bits // 32) == words:
            return bits
    raise ValueError(f"{name} has {numbers} numbers in {words} words of 32 bits, of a quantization that cannot be read")


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """[n, m] int32 -> [n, m * 32 / bits], the lowest bits first."""
    return ((words[..., None] >> torch.arange(0, 32, bits)) & (2**bits - 1)).flatten(-2)


def _in_order(words: Tensor, bits: int) -> Tensor:
    """`_unpacked` in AWQ's order."""
    return _unpacked(words, bits).unflatten(-1, (-1, 8))[..., _AWQ_ORDER].flatten(-2)


def _four_bit_floats(packed: Tensor) -> Tensor:
    """[..., m] uint8 -> [..., 2 m] float32, the lower bits first."""
    return _FP4[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()]
