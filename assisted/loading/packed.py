"""The quantization of `fast.low_bit` as transformers knows one: a config and a quantizer, found by `from_pretrained`. Knows
transformers' interface for quantizers; nothing of drafting or of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..fast.low_bit import low_bit

HEAD_BITS = 8  # of the output head, whatever the other modules have
METHOD = "assisted_packed"


@register_quantization_config(METHOD)
class PackedConfig(QuantizationConfigMixin):
    """Weights of 8 or 4 bits for a CPU, with products in C or of torch; also for a target's `quantization_config`.

    Every linear module is quantized. The output head always has 8 bits, since its errors go into the logits without a layer
    that could make up for them; if it is tied to the embedding, the embedding stays as it is. Activations are not quantized,
    but rounded to bfloat16 for the products.

    Args:
        bits: of the other modules: 8 (a scale per output) or 4 (a scale and a zero point per 32 inputs).
        modules_to_not_convert: names of modules that stay as they are.

    Raises ValueError for other numbers of bits.
    """

    def __init__(self, bits: int = 8, modules_to_not_convert: Sequence[str] | None = None, **kwargs: Any):
        if bits not in (8, 4):
            raise ValueError(f"bits: {bits!r} is not possible; use 8 or 4")
        self.quant_method = METHOD  # type: ignore[assignment]
        self.bits = bits
        self.modules_to_not_convert = None if modules_to_not_convert is None else list(modules_to_not_convert)


@register_quantizer(METHOD)
class _Quantizer(HfQuantizer):
    quantization_config: PackedConfig

    @property
    def is_trainable(self) -> bool:
        return False

    def is_serializable(self) -> bool:
        return False

    @torch.no_grad()
    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        skipped, head = self.quantization_config.modules_to_not_convert or [], model.get_output_embeddings()
        for name, module in list(model.named_modules()):
            if isinstance(module, (nn.Linear, Conv1D)) and should_convert_module(name, skipped):
                parent, _, own = name.rpartition(".")
                bits = HEAD_BITS if module is head else self.quantization_config.bits
                setattr(model.get_submodule(parent), own, low_bit(module, bits))
        return model
