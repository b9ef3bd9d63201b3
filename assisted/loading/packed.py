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
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..engine.libraries import lacks_tinygemm
from ..fast import native
from ..fast.low_bit import low_bit

_logger = logging.get_logger(__name__)
HEAD_BITS = 8  # of the output head, whatever the other modules have
METHOD = "assisted_packed"


@register_quantization_config(METHOD)
class PackedConfig(QuantizationConfigMixin):
    """Weights of 8 or 4 bits for a CPU, with products in C or of torch, and of 4 bits for an NVIDIA card; also for a target's
    `quantization_config`.

    Every linear module is quantized. The output head has 8 bits on a CPU, since its errors go into the logits without a layer
    that could make up for them; if it is tied to the embedding, the embedding stays as it is. On a card, the head stays, too.

    Args:
        bits: of the other modules: 8 (a scale per output) or 4 (a scale and a zero point per 32 inputs).
        modules_to_not_convert: names of modules that stay as they are.
        input_bits: of the inputs of products: 16 (bfloat16) or 8. 8 rounds each 32 inputs with a scale of their own, as
            llama.cpp does, and multiplies integers, which is faster; it needs the products in C, and elsewhere inputs keep 16
            bits and a warning says so.

    Raises ValueError for other numbers of bits; while a model is loaded, for a card that has no product with these.
    """

    def __init__(
        self,
        bits: int = 8,
        modules_to_not_convert: Sequence[str] | None = None,
        input_bits: int = 16,
        **kwargs: Any,
    ):
        if bits not in (8, 4):
            raise ValueError(f"bits: {bits!r} is not possible; use 8 or 4")
        if input_bits not in (16, 8):
            raise ValueError(f"input_bits: {input_bits!r} is not possible; use 16 or 8")
        self.quant_method = METHOD  # type: ignore[assignment]
        self.bits, self.input_bits = bits, input_bits
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
        config = self.quantization_config
        skipped, head = config.modules_to_not_convert or [], model.get_output_embeddings()
        on_card = model.device.type == "cuda"
        if on_card and (why := lacks_tinygemm() if config.bits == 4 else "products with 8 bits are for a CPU"):
            raise ValueError(
                f"quantization_config: PackedConfig({config.bits}) does not run on this GPU, as {why}; use BitsAndBytesConfig"
            )
        if config.input_bits == 8 and not (on_card or native.is_available()):
            why = native.loaded()[1]
            _logger.warning_once(f"input_bits: inputs keep 16 bits, because the products in C do not run here: {why}")
        for name, module in list(model.named_modules()):
            if on_card and module is head:
                continue
            if isinstance(module, (nn.Linear, Conv1D)) and should_convert_module(name, skipped):
                parent, _, own = name.rpartition(".")
                bits = HEAD_BITS if module is head else config.bits
                setattr(model.get_submodule(parent), own, low_bit(module, bits, config.input_bits))
        return model
