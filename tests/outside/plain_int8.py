"""A quantization in one file of another package: 8-bit integers with a scale for each output, in plain PyTorch.

The package's entry point is `plain_int8 = "plain_int8:BACKEND"` in the group `assisted.backends`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer, get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from assisted.loading.backends import Backend, Format

NAME = "plain_int8"


@register_quantization_config(NAME)
class PlainConfig(QuantizationConfigMixin):
    def __init__(self, modules_to_not_convert: Sequence[str] | None = None, **kwargs: Any):
        self.quant_method = NAME
        self.modules_to_not_convert = modules_to_not_convert


@register_quantizer(NAME)
class PlainQuantizer(HfQuantizer):
    is_trainable = False

    def is_serializable(self) -> bool:
        return False

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        skipped = self.quantization_config.modules_to_not_convert
        skipped = get_keys_to_not_convert(model) if skipped is None else skipped
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and should_convert_module(name, skipped):
                parent, _, own = name.rpartition(".")
                setattr(model.get_submodule(parent), own, PlainLinear(module))
        return model


class PlainLinear(nn.Module):
    def __init__(self, module: nn.Linear):
        super().__init__()
        scales = module.weight.detach().abs().amax(1, keepdim=True).clamp(min=1e-9) / 127
        self.register_buffer("packed", (module.weight.detach() / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)
        self.bias = module.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.linear(inputs, self.packed * self.scales, self.bias)


BACKEND = Backend(
    NAME,
    {"int8-plain": Format(lambda dtype: PlainConfig(), lambda out, into, size: out * (into + size))},
)
