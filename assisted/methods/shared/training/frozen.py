"""Products with weights that no training changes, in less time: where such weights are bfloat16 numbers, and a processor has
matrix units for bfloat16, float32 products may round what they read. Sums and results stay float32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ....engine.libraries import has_matrix_units


@torch.no_grad()
def fits_bfloat16(module: nn.Module) -> bool:
    """Whether products with a module's weights lose nothing of them if both factors are rounded to bfloat16, and take less
    time: the weights are float32 copies of a bfloat16 checkpoint, on a processor with matrix units for bfloat16."""
    if not has_matrix_units():
        return False
    weights = [weight for weight in module.parameters() if weight.ndim > 1]
    return all(
        weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.equal(weight, weight.bfloat16().float())
        for weight in weights
    )


def plain_output(output: nn.Module | None) -> bool:
    """Whether an output layer is a frozen product on a CPU and nothing else: no subclass, no hook and no wrapper."""
    if type(output) is not nn.Linear or "forward" in vars(output) or output._forward_hooks or output._forward_pre_hooks:
        return False
    return output.weight.device.type == "cpu" and not any(weight.requires_grad for weight in output.parameters())


@contextlib.contextmanager
def rounded_products(rounded: bool = True) -> Iterator[None]:
    """Within it, float32 products on a CPU with matrix units round both factors to bfloat16, and sum in float32.

    rounded: False changes nothing.
    """
    setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    if rounded:
        setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        if rounded:
            setting.fp32_precision = before


class RoundedLayers(TorchFunctionMode):
    """Within it, products of layers are `rounded_products`. Those of attention are not: they are small, and take longer."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with rounded_products(func is F.linear):
            return func(*args, **(kwargs or {}))
