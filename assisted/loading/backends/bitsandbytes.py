"""bitsandbytes: "nf4" and "fp4" in 4 bits, and LLM.int8(), which also quantizes activations and casts them to float16."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .base import Backend, Format, blocks


def _four_bit(kind: str) -> Format:
    return Format(
        # Compute in the model's own dtype: another one would cost casts in every layer.
        lambda dtype: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=dtype),
        lambda out, into, size: out * into // 2 + 4 * blocks(out * into, 64) + 64,
        # It packs 32 rows together and scales blocks of 64 along a row. CPU kernels raise or are wrong for other shapes; the
        # rule holds on all devices, so that drafts are the same.
        multiples=(32, 64),
        code=f'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="{kind}", bnb_4bit_compute_dtype={{dtype}})',
    )


_EIGHT_BIT = Format(
    # Outliers of a draft's inputs would be found on the host, in every layer: slow, and no pass could be captured. The code is
    # for targets, whose quality they may decide.
    lambda dtype: BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    lambda out, into, size: out * (into + 4),
    code="BitsAndBytesConfig(load_in_8bit=True)",
)
_FORMATS = {"nf4": _four_bit("nf4"), "fp4": _four_bit("fp4"), "int8-bitsandbytes": _EIGHT_BIT}


def _settle(model: PreTrainedModel) -> None:
    if model.config.quantization_config.load_in_8bit:
        model.register_forward_pre_hook(_silence)
        model.register_forward_hook(_unsilence, always_call=True)


def _is_news(record: logging.LogRecord) -> bool:
    return "inputs will be cast" not in str(record.msg)


def _silence(*_: Any) -> None:
    """bitsandbytes logs in every call of an int8 layer that it casts to float16."""
    if not torch.compiler.is_compiling():
        logging.getLogger("bitsandbytes.autograd._functions").addFilter(_is_news)


def _unsilence(*_: Any) -> None:
    if not torch.compiler.is_compiling():
        logging.getLogger("bitsandbytes.autograd._functions").removeFilter(_is_news)


BITSANDBYTES = Backend(
    "bitsandbytes",
    _FORMATS,
    module="bitsandbytes",
    extra="quant",
    format_of=lambda config: _FORMATS["nf4"] if config.load_in_4bit else _EIGHT_BIT,
    skips="llm_int8_skip_modules",
    modules=(nn.Linear, Conv1D),  # GPT-2's [in, out] weights are quantized too
    settle=_settle,
)
