"""Linear modules with weights of 8 or 4 bits, from products in C or from those that torch itself brings; on a card, of 4 bits.

A matrix-vector product takes as long as reading the matrix, so half the bytes of bfloat16 take about half the time. Deals
with linear modules only; `loading.quantization` chooses the modules of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..engine.libraries import four_bit_product, int8_product, pack_for_tinygemm, pack_four_bits, tinygemm
from . import native

FOUR_BIT_GROUP = 32  # weights that share a scale and a zero point
LOW_BIT_DTYPE = torch.bfloat16  # the only dtype with vectorized kernels
# By bits, the multiples that the kernels need; with other numbers of inputs they read beyond the end.
_INPUTS, _OUTPUTS = {8: 16, 4: 32}, {8: 1, 4: 16}
_TILE = {8: 1, 4: 64}  # outputs that lie together in the kernels' layouts
_FEW = 32  # columns up to which a product from 8 bits is faster than converting the weight


def low_bit(module: nn.Linear | Conv1D, bits: int, input_bits: int = 16) -> LowBitLinear:
    """A module with the weight rounded to 8 or 4 bits, and the same bias.

    8 bits: symmetric, with one scale per output (2208.07339, without its outliers). 4 bits: with a scale and a zero point per
    group of `FOUR_BIT_GROUP` inputs. input_bits: 8 rounds the inputs of products, where `native` has such.
    """
    weight = module.weight.detach().float()
    weight = weight.t().contiguous() if isinstance(module, Conv1D) else weight
    outputs, inputs = weight.shape
    if native.is_available() and weight.device.type == "cpu":
        levels, scales = eight_bits(weight) if bits == 8 else _four_bits(F.pad(weight, (0, -inputs % FOUR_BIT_GROUP)))
        if bits == 8:
            packed = (native.packed if input_bits == 16 else native.packed_8)(levels)
        else:
            packed = native.packed_4(levels, *scales.unbind(-1))
        beside = scales.float() if bits == 8 else scales.new_empty(0)
        linear = NativeLinear(packed, beside, module.bias, inputs, outputs, bits)
        linear.input_bits = input_bits
        return linear
    if weight.is_cuda:
        return CardLinear.of(weight, module.bias)
    weight = F.pad(weight, (0, -inputs % _INPUTS[bits], 0, -outputs % _OUTPUTS[bits]))
    levels, scales = (eight_bits if bits == 8 else _four_bits)(weight)
    if bits == 4:
        levels, scales = pack_four_bits(levels.contiguous(), 1), scales.transpose(0, 1).contiguous()
    return LowBitLinear(levels, scales, module.bias, inputs, outputs, bits)


class LowBitLinear(nn.Module):
    """A linear module whose weight has 8 or 4 bits. It computes in bfloat16, for inputs of any dtype.

    Args:
        packed: for 8 bits [out, in] int8; for 4 bits in the layout of torch's kernel, [out, in / 2] uint8. Inputs and outputs
            are padded to multiples of what the kernel needs.
        scales: [out] bfloat16; for 4 bits scales and zero points, [groups, out, 2] bfloat16.
        bias: [out_features]; None if there is none.
        in_features, out_features: without the padding.
        bits: 8 or 4.
    """

    packed: torch.Tensor
    scales: torch.Tensor

    def __init__(
        self,
        packed: torch.Tensor,
        scales: torch.Tensor,
        bias: nn.Parameter | None,
        in_features: int,
        out_features: int,
        bits: int,
    ):
        super().__init__()
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        self.bias = bias
        self.in_features, self.out_features, self.bits = in_features, out_features, bits
        self.padded = -in_features % self._multiples[0]

    @property
    def _multiples(self) -> tuple[int, int, int]:
        """What inputs and outputs are padded to, and how many outputs lie together."""
        return _INPUTS[self.bits], _OUTPUTS[self.bits], _TILE[self.bits]

    input_bits = 16
    weight = None  # T5 looks at its dtype, if there is one, before it runs

    @property
    def kind(self) -> tuple[Any, ...]:
        """The same for modules that can be joined, if they read the same inputs."""
        return type(self), self.bits, self.input_bits, self.in_features, self.adds_bias

    @property
    def adds_bias(self) -> bool:
        """Whether the product adds the bias, before it is rounded."""
        return False

    def _apply(self, fn: Any, recurse: bool = True) -> LowBitLinear:
        """Move with the model; a cast of the model does not cast the scales, whose dtype the kernels prescribe."""
        scales = self.scales
        super()._apply(fn, recurse)
        self.scales = scales.to(self.packed.device)
        return self

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], in the inputs' dtype."""
        made = self.raw(inputs).to(inputs.dtype)
        return made if self.bias is None or self.adds_bias else made + self.bias

    def raw(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out] bfloat16, with the bias only if the product adds it."""
        given = inputs.reshape(-1, self.in_features).to(LOW_BIT_DTYPE)
        if self.padded:
            given = F.pad(given, (0, self.padded))
        made = self._product(given)
        if made.shape[-1] != self.out_features:
            made = made[:, : self.out_features]
        return made.view(*inputs.shape[:-1], self.out_features)

    @property
    def is_product(self) -> bool:
        """Whether `raw` is the result, without padding."""
        has_bias = self.bias is None or self.adds_bias
        return has_bias and not self.padded and self.out_features % self._multiples[1] == 0

    def _product(self, given: torch.Tensor) -> torch.Tensor:
        """[n, padded in] bfloat16 -> [n, padded out] bfloat16."""
        columns, inputs = given.shape
        made: torch.Tensor
        if self.bits == 8:
            # a compiler would compile a second time to ask for the number of columns
            if given.is_cpu and (torch.compiler.is_compiling() or columns <= _FEW):
                made = int8_product(given, self.packed, self.scales)
                return made
            return F.linear(given, self.packed.to(LOW_BIT_DTYPE)) * self.scales
        self._require_cpu(given)
        if columns > inputs:
            return given @ self._product(torch.eye(inputs, dtype=LOW_BIT_DTYPE))  # the weight, [padded in, padded out]
        made = four_bit_product(given, self.packed, FOUR_BIT_GROUP, self.scales)
        return made

    def _require_cpu(self, given: torch.Tensor) -> None:
        if not given.is_cpu:
            weights = f"these {self.bits}-bit weights are packed for a CPU and cannot run on {given.device}"
            raise RuntimeError(f"{weights}; load the model there instead")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"


class NativeLinear(LowBitLinear):
    """The same with weights in the layout of `native`: packed [tiles, any] uint8; scales [out] float32 of 8 bits, none of 4."""

    @property
    def _multiples(self) -> tuple[int, int, int]:
        return native.GROUP, native.OUTPUTS, native.OUTPUTS

    def _product(self, given: torch.Tensor) -> torch.Tensor:
        self._require_cpu(given)
        if torch.compiler.is_compiling():
            own = self.scales.new_empty(0) if self.bias is None or not self.adds_bias else self.bias
            return native.multiply(given, self.packed, self.scales, own, self.bits, self.input_bits)
        return self.native_product(given)  # whatever their number, a column then has the same bits

    @property
    def adds_bias(self) -> bool:
        """One of another dtype would lose more by the rounding of the sum than the product does."""
        return self.bias is not None and self.bias.dtype == LOW_BIT_DTYPE

    @property
    def native_product(self) -> native.NativeProduct:
        """The product with the current weights."""
        scales, bias = self.scales if self.bits == 8 else None, self.bias if self.adds_bias else None
        inputs = self.in_features + self.padded
        return native.NativeProduct(self.packed, inputs, self.bits, scales, bias, self.input_bits)


class CardLinear(LowBitLinear):
    """The same on a card, with 4 bits: packed int32 in the layout of torch's own kernel, scales as there."""

    @staticmethod
    def of(weight: torch.Tensor, bias: nn.Parameter | None) -> CardLinear:
        """The module for a weight, [out, in] float32 on a card."""
        outputs, inputs = weight.shape
        levels, scales = _four_bits(F.pad(weight, (0, -inputs % FOUR_BIT_GROUP, 0, -outputs % 8)))
        return CardLinear(pack_for_tinygemm(levels), scales.transpose(0, 1).contiguous(), bias, inputs, outputs, 4)

    @property
    def _multiples(self) -> tuple[int, int, int]:
        return FOUR_BIT_GROUP, 8, 8

    def _product(self, given: torch.Tensor) -> torch.Tensor:
        if len(given) > max(given.shape[1], _FEW):  # the kernel reads the weight once for every 16 columns
            return given @ self._product(torch.eye(given.shape[1], dtype=LOW_BIT_DTYPE, device=given.device))
        return tinygemm(given, self.packed, FOUR_BIT_GROUP, self.scales)


@torch.inference_mode(False)
@torch.no_grad()
def joined(modules: Sequence[nn.Module]) -> LowBitLinear | None:
    """Modules with the same inputs as a single one, with their outputs one after the other; None if they cannot be joined. In
    the layout of `native`, each module's outputs are filled up.

    No weight is held twice: the modules then keep views of the joined weights. Only scales and biases are copied; `fused` reads
    them at every call, which would wait for an accelerator.
    """
    low = [module for module in modules if isinstance(module, LowBitLinear)]
    if len(modules) == len(low) == 1:
        return low[0]
    if not len(modules) == len(low) > 1 or len({module.kind for module in low}) > 1:
        return None
    biases = [module.bias.detach() for module in low if module.bias is not None]
    if biases and not (low[0].adds_bias and len(biases) == len(low)):
        return None
    more = [-module.out_features % module._multiples[2] for module in low]
    if any(more) and not isinstance(low[0], NativeLinear):
        return None
    if not all(module.packed.is_cpu for module in low):
        return None
    bits, inputs = low[0].bits, low[0].in_features
    parts = [module.packed for module in low]
    packed = native.end_to_end(parts)
    packed = _together(parts) if packed is None else packed
    for module, own in zip(low, packed.split([len(module.packed) for module in low]), strict=True):
        module.packed = own
    own_scales = [module.scales for module in low]
    if any(more):
        biases = [F.pad(own, (0, count)) for own, count in zip(biases, more, strict=False)]
        own_scales = [F.pad(own, (0, count if len(own) else 0)) for own, count in zip(own_scales, more, strict=True)]
    scales = torch.cat(own_scales, 1 if low[0].scales.dim() == 3 else 0)
    bias: Any = torch.cat(biases) if biases else None
    outputs = sum(module.out_features for module in low) + sum(more)
    whole = type(low[0])(packed, scales, bias, inputs, outputs, bits)
    whole.input_bits = low[0].input_bits
    return whole


def _together(parts: list[torch.Tensor]) -> torch.Tensor:
    """The concatenation of matrices; themselves, without a copy, if they lie one after the other already."""
    first = parts[0]
    at = first.storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or part.storage_offset() != at:
            return torch.cat(parts)
        at += part.numel()
    return first.as_strided((sum(map(len, parts)), first.shape[1]), first.stride(), first.storage_offset())


def eight_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels of a weight of float32, [out, in] int8, and a scale per output, [out] bfloat16."""
    scales = (weight.abs().amax(1) / 127).clamp(min=1e-30).to(LOW_BIT_DTYPE)
    packed = (weight / scales.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return packed, scales


def _four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps 0 to 15, [out, in] int32; scales and zero points, [out, groups, 2] bfloat16."""
    groups = weight.view(len(weight), -1, FOUR_BIT_GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / 15).clamp(min=1e-30).to(LOW_BIT_DTYPE)
    zeros = (low + 8 * scales.float()).to(LOW_BIT_DTYPE)
    steps = ((groups - zeros.float()[..., None]) / scales.float()[..., None] + 8).round_().clamp_(0, 15)
    return steps.to(torch.int32).view(weight.shape), torch.stack([scales, zeros], -1)
