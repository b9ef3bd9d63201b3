"""torchao: "int8-torchao", which quantizes weights only."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, TorchAoConfig

from .base import Backend, Format


def _int8(dtype: torch.dtype) -> TorchAoConfig:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def _format_of(config: TorchAoConfig) -> None:
    if type(config.quant_type).__name__.startswith("Int4") and not torch.accelerator.is_available():
        raise ValueError('quantization: torchao has no int4 for CPUs; use "nf4" or "int4"')


def _settle(model: PreTrainedModel) -> None:
    for module in model.modules():
        module.__dict__.pop("extra_repr", None)  # used by print() only, and prevents pickling


TORCHAO = Backend(
    "torchao",
    {"int8-torchao": Format(_int8, lambda out, into, size: out * (into + size))},
    module="torchao",
    extra="torchao",
    format_of=_format_of,
    settle=_settle,
)
