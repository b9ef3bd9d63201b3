"""RMSNorm in few operations, with the rounding of the family's models. Knows tensors and the kernels in C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from . import native


def plus_product(one: torch.Tensor, two: torch.Tensor, three: torch.Tensor) -> torch.Tensor:
    """one + two * three, with the same rounding as in the family's models."""
    return torch.addcmul(one, two, three) if one.dtype == torch.float32 else one.add_(two * three)


class Norm:
    """RMSNorm, with the same rounding as in the family's models."""

    def __init__(self, norm: Any):
        self.weight = norm.weight
        self.epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        size = self.weight.shape[0]
        # as tensors: an operation with a number takes twice as long as one with a tensor
        self.least = torch.tensor((self.epsilon * size) ** 0.5, device=self.weight.device)
        self.share = torch.tensor(size**-0.5, device=self.weight.device)
        weight = self.weight
        self.in_c = weight.is_cpu and not size % 16 and native.is_available(weight.dtype)

    def factor(self) -> tuple[torch.Tensor, float]:
        """A copy of what it multiplies by, [D] float32, and its epsilon."""
        return self.weight.detach().float().clone(), self.epsilon

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """[..., D] -> [..., D]. weight: instead of its own."""
        if weight is None and self.in_c and hidden.dtype == self.weight.dtype and not torch.compiler.is_compiling():
            return native.norm(hidden, self.weight, self.epsilon)
        weight = self.weight if weight is None else weight
        if hidden.dtype == torch.float32 and hidden.device.type != "cpu" and weight.dim() == 1:
            return F.rms_norm(hidden, weight.shape, weight, self.epsilon)
        return self.alone(hidden).to(hidden.dtype).mul_(weight)

    def alone(self, hidden: torch.Tensor) -> torch.Tensor:
        """The norm without a weight, in float32."""
        wide = hidden if hidden.dtype == torch.float32 else hidden.float()
        if hidden.device.type != "cpu":
            return F.rms_norm(wide, wide.shape[-1:], None, self.epsilon)
        # on a CPU, rms_norm is seven operations; these are five cheaper ones: the root of a sum of squares and of epsilon
        return wide / torch.linalg.vector_norm(wide, dim=-1, keepdim=True).hypot_(self.least).mul_(self.share)


class WideNorm(Norm):
    """The norm of families that round after the weight; Qwen's add 1 to it."""

    def __init__(self, norm: Any):
        super().__init__(norm)
        self.adds_one = not hasattr(norm, "variance_epsilon")

    def factor(self) -> tuple[torch.Tensor, float]:
        factor, epsilon = super().factor()
        return factor.add_(1.0) if self.adds_one else factor, epsilon

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        weight, normed = (self.weight if weight is None else weight).float(), self.alone(hidden)
        if self.adds_one and hidden.dtype == torch.float32:
            return torch.addcmul(normed, normed, weight)
        return (normed * (1.0 + weight if self.adds_one else weight)).to(hidden.dtype)


class GatedNorm(Norm):
    """RMSNorm, then the product with a gate after SiLU."""

    def __call__(self, hidden: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (super().__call__(hidden) * F.silu(gate.float())).to(hidden.dtype)


def norm_of(norm: Any) -> Norm:
    """The faster form of a family's RMSNorm."""
    wide = not hasattr(norm, "variance_epsilon") or type(norm).__name__.startswith("Olmo")
    return WideNorm(norm) if wide else Norm(norm)


class Called(nn.Module):
    """A function in the place of a module: a part of a fused layer, or the product of a head."""

    def __init__(self, run: Callable[..., torch.Tensor]):
        super().__init__()
        self.run = run

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.run(hidden_states, **kwargs)
