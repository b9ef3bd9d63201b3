"""optimum-quanto: "int4-quanto" and "int8-quanto", which quantize weights only."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, QuantoConfig

from ...engine.libraries import is_wrapper_subclass, unpack_in_torch
from .base import Backend, Format, blocks

_FORMATS = {
    "int4-quanto": Format(
        lambda dtype: QuantoConfig(weights="int4"),
        lambda out, into, size: out * into // 2 + 2 * size * blocks(out * into, 128),
    ),
    "int8-quanto": Format(
        lambda dtype: QuantoConfig(weights="int8"),
        lambda out, into, size: out * (into + size),
        multiples=(1, 16),  # other widths crash the process in bfloat16
    ),
}


def copy_shells(memo: dict[int, Any], *models: nn.Module) -> None:
    """Put copies of quanto's weights, which `copy.deepcopy` cannot copy, into the memo for it."""
    for model in models:
        for weight in model.parameters():
            if type(weight).__module__.startswith("optimum.quanto"):
                memo.setdefault(id(weight), nn.Parameter(_shell(weight, memo), requires_grad=weight.requires_grad))


def _shell(tensor: Any, memo: dict[int, Any]) -> Any:
    """A copy of a tensor, which may be a wrapper subclass around other tensors."""
    if not is_wrapper_subclass(tensor):
        return copy.deepcopy(tensor, memo)
    names, how = tensor.__tensor_flatten__()
    inner = {name: _shell(getattr(tensor, name), memo) for name in names}
    return type(tensor).__tensor_unflatten__(inner, how, tensor.size(), tensor.stride())


def _settle(model: PreTrainedModel) -> None:
    """On a CPU, quanto would compile a C++ extension to unpack 4-bit weights; torch can do it in two operations."""
    unpack_in_torch(_unpack)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """packed: [rows, ...] uint8 -> [rows * 8 // bits, ...] uint8, the lowest bits of all bytes first."""
    return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])


QUANTO = Backend(
    "quanto",
    _FORMATS,
    module="optimum.quanto",
    extra="quant",
    format_of=lambda config: _FORMATS.get(f"{config.weights}-quanto"),
    settle=_settle,
)
