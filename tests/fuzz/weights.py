"""What the weights of a target are when a case begins: views of other tensors, packed, or products with rounded inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from assisted.loading.packed import PackedConfig
from assisted.loading.quantization import quantize_copy

__all__ = ["NAMES", "PACKED", "QUANTIZED", "weights_as"]


class _Rounded(nn.Linear):
    """Products with inputs of 8 bits. dims: those that share a scale; None for all of a forward pass."""

    dims: Any = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        most = inputs.abs().amax() if self.dims is None else inputs.abs().amax(self.dims, keepdim=True)
        scale = most.clamp(min=1e-6) / 127
        return functional.linear((inputs / scale).round() * scale, self.weight, self.bias)


class RoundedByToken(_Rounded):
    dims = -1


class RoundedByPass(_Rounded):
    pass


class RoundedBeyondTwoDimensions(_Rounded):
    """As if two dimensions were rows and tokens, which they are not where a layer flattens its input."""

    @property  # type: ignore[override]
    def dims(self) -> Any:
        return self._dims

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._dims = tuple(range(2, inputs.dim())) or None
        return super().forward(inputs)


def _in_layers(model: PreTrainedModel, kind: type) -> PreTrainedModel:
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is nn.Linear and module is not head:
            module.__class__ = kind
    return model


def _views(model: PreTrainedModel) -> PreTrainedModel:
    """Every second number of a vector, and a matrix turned twice; a vector of equal numbers is one of them, expanded."""
    for weight in model.parameters():
        if weight.dim() == 1:
            alike = bool((weight == weight[:1]).all())
            beside = torch.stack([weight.data, weight.data], -1)[:, 0]
            weight.data = weight.data[:1].clone().expand(weight.shape) if alike else beside
        elif weight.dim() == 2:
            weight.data = weight.data.t().contiguous().t()
    return model


PACKED: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = {
    f"packed {bits}/{given}": lambda model, bits=bits, given=given: quantize_copy(  # type: ignore[misc]
        model, PackedConfig(bits, input_bits=given)
    )
    for bits in (8, 4)
    for given in (16, 8)
}
QUANTIZED: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = {
    name: lambda model, name=name: quantize_copy(model, name)  # type: ignore[misc]
    for name in ("int8-torchao", "int8-quanto")
}
_MADE: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = {
    "views": _views,
    "rounded by token": lambda model: _in_layers(model, RoundedByToken),
    "rounded by pass": lambda model: _in_layers(model, RoundedByPass),
    "rounded beyond two dimensions": lambda model: _in_layers(model, RoundedBeyondTwoDimensions),
    **PACKED,
}
NAMES = tuple(_MADE)


def weights_as(name: str, model: PreTrainedModel) -> PreTrainedModel:
    """The model, which may be changed, with such weights; "" for its own."""
    return (_MADE | QUANTIZED)[name](model) if name else model
