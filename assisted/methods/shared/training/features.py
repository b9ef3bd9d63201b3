"""The inputs of a head in training: the target's hidden states and logits over a text, computed when they are needed. The
target runs unchanged, without gradients; the taps sit in another object that shares its weights.

Where these weights are bfloat16 numbers, and a processor has matrix units for bfloat16, float32 products may round what they
read, which takes less time. Sums and results stay float32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ....engine.libraries import has_matrix_units
from ....engine.needs import find_final_norm
from ....engine.parts import find_layers, tapped


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


class Seen(NamedTuple):
    """One forward pass of the target over a text."""

    states: dict[int, Tensor]  # by tap, [B, T, D]
    logits: Tensor  # [B, T, V], position t is about token t + 1


class Features:
    """Runs a target over texts, in eval mode. Its parameters stop requiring gradients, their values never change.

    taps: indices into transformers' `hidden_states`: i in [1, L) is the output of layer i - 1, L that of the final norm.
    compiled: compile the layers, for this object's runs alone. Raises ValueError for a tap that does not exist.

    `rounded`: whether products with its weights are rounded (`fits_bfloat16`).
    """

    def __init__(self, target: PreTrainedModel, taps: Sequence[int] = (), compiled: bool = False):
        self.target = target.eval().requires_grad_(False)
        layers = find_layers(target)
        last = len(layers)
        for tap in taps:
            if not 1 <= tap <= last:
                raise ValueError(f"taps: {tap} is not among the states 1 .. {last} of this target")
        own: list[Any] = layers.of(target)
        if compiled:
            own = [torch.compile(layer) for layer in own]
        norm = find_final_norm(target, layers) if last in taps else ()
        self._model, self._taps = tapped(target, layers, taps, norm, own)
        self.rounded = not compiled and fits_bfloat16(target)

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Seen:
        """ids: [B, T] int64."""
        with RoundedLayers() if self.rounded else contextlib.nullcontext():
            logits = self._model(input_ids=ids, use_cache=False, return_dict=True).logits
        return Seen({tap: module.hidden for tap, module in self._taps.items()}, logits)
