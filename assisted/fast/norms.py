"""Norms in few operations or in C, with the rounding of transformers' models. Knows tensors and the kernels in C."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from . import native


@dataclass(frozen=True)
class NormKind:
    """What the norms of an architecture compute. Numbers are float32 up to the last rounding, which all have.

    Attributes:
        name: of their class, after the family's name; None for `nn.LayerNorm`.
        rounds: normed numbers are rounded before the product with the weight.
        adds_one: they are multiplied by one plus the weight.
        rounds_weight: that sum is rounded.
        centers: the mean is subtracted first.
    """

    name: str | None = "RMSNorm"
    rounds: bool = False
    adds_one: bool = False
    rounds_weight: bool = False
    centers: bool = False

    @functools.cached_property
    def flags(self) -> int:
        """As kernels/abi.h has them."""
        return 1 + 2 * self.rounds + 4 * self.adds_one + 8 * self.rounds_weight + 16 * self.centers


RMS = NormKind(rounds=True)  # Llama's
WIDE_RMS = NormKind()  # OLMo's
RMS_PLUS_ONE = NormKind(adds_one=True)  # Gemma's
LAYER = NormKind(name=None, centers=True)


def plus_product(one: torch.Tensor, two: torch.Tensor, three: torch.Tensor) -> torch.Tensor:
    """one + two * three, with the same rounding as in the family's models."""
    return torch.addcmul(one, two, three) if one.dtype == torch.float32 else one.add_(two * three)


class Norm:
    """A module's norm.

    norm: with a weight of [D], of [heads, D], or none; and a bias, or none.
    """

    def __init__(self, norm: Any, kind: NormKind = RMS):
        self.kind, self.bias = kind, getattr(norm, "bias", None)
        self.weight: Any = getattr(norm, "weight", None)
        size = self.size = norm.normalized_shape[-1] if self.weight is None else self.weight.shape[-1]
        known = (getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name))
        self.epsilon: float = next(known, 1e-5)  # that of the first OLMo is fixed
        device = None if self.weight is None else self.weight.device
        # as tensors: an operation with a number takes twice as long as one with a tensor
        self.least = torch.tensor((self.epsilon * size) ** 0.5, device=device)
        self.share = torch.tensor(size**-0.5, device=device)
        self.natives: dict[torch.dtype, native.NativeNorm | None] = {}

    def in_c(self, dtype: torch.dtype) -> native.NativeNorm | None:
        """The norm in C, of numbers of a dtype; None if there is none."""
        if dtype not in self.natives:
            tensors = [part for part in (self.weight, self.bias) if part is not None]
            fits = all(part.is_cpu and part.dtype == dtype for part in tensors) and not self.size % native.TILE
            made = fits and native.is_available(dtype)
            self.natives[dtype] = native.NativeNorm(self, self.kind.flags, dtype) if made else None
        return self.natives[dtype]

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """[..., D] -> [..., D]. weight: instead of its own."""
        of_heads = self.weight is not None and self.weight.dim() > 1  # each head has a weight of its own
        if weight is None and hidden.is_cpu and not of_heads and not torch.compiler.is_compiling():
            made = self.in_c(hidden.dtype)
            if made is not None:
                return made(hidden)
        kind, dtype = self.kind, hidden.dtype
        weight = self.weight if weight is None else weight
        if kind.centers:
            return self._centered(hidden, weight)
        assert weight is not None
        if kind.rounds and dtype == torch.float32 and hidden.device.type != "cpu" and weight.dim() == 1:
            return F.rms_norm(hidden, weight.shape, weight, self.epsilon)
        normed = self.alone(hidden)
        if kind.rounds:
            return normed.to(dtype).mul_(weight)
        weight = weight.float()
        if kind.adds_one and dtype == torch.float32:
            return torch.addcmul(normed, normed, weight)
        return (normed * (1.0 + weight if kind.adds_one else weight)).to(dtype)

    def _centered(self, hidden: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None and self.kind.adds_one:
            weight = weight + 1.0
        if weight is None or weight.dim() == 1:
            return F.layer_norm(hidden, (self.size,), weight, self.bias, self.epsilon)
        return (weight.float() * F.layer_norm(hidden.float(), (self.size,), eps=self.epsilon)).to(hidden.dtype)

    def alone(self, hidden: torch.Tensor) -> torch.Tensor:
        """RMSNorm without a weight, in float32."""
        wide = hidden if hidden.dtype == torch.float32 else hidden.float()
        if hidden.device.type != "cpu":
            return F.rms_norm(wide, wide.shape[-1:], None, self.epsilon)
        # on a CPU, rms_norm is seven operations; these are five cheaper ones: the root of a sum of squares and of epsilon
        return wide / torch.linalg.vector_norm(wide, dim=-1, keepdim=True).hypot_(self.least).mul_(self.share)


class GatedNorm(Norm):
    """RMSNorm, then the product with a gate after SiLU."""

    def __call__(self, hidden: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (super().__call__(hidden) * F.silu(gate.float())).to(hidden.dtype)


class Called(nn.Module):
    """A function in the place of a module: a part of a fused layer, or the product of a head."""

    def __init__(self, run: Callable[..., torch.Tensor]):
        super().__init__()
        self.run = run

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.run(hidden_states, **kwargs)
