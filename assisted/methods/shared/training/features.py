"""The inputs of a head in training: the target's hidden states and logits over a text, computed when they are needed. The
target runs unchanged, without gradients; the taps sit in another object that shares its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ....engine.needs import find_final_norm
from ....engine.parts import find_layers, tapped
from .frozen import RoundedLayers, fits_bfloat16


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
