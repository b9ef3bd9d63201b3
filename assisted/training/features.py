"""The inputs of a head in training: the target's hidden states and logits over a text, computed when they are needed.

The target runs unchanged, without gradients; the taps sit in another object that shares its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..engine.parts import Tap, find_layers, with_children
from ..engine.tapped import find_final_norm

__all__ = ["Features", "Seen"]


@dataclass(frozen=True)
class Seen:
    """One forward pass of the target over a text.

    Args:
        states: by tap, [B, T, D].
        logits: [B, T, V], position t is about token t + 1.
    """

    states: dict[int, Tensor]
    logits: Tensor


class Features:
    """Runs a frozen target over texts.

    Args:
        target: put in eval mode; its parameters stop requiring gradients, their values never change.
        taps: indices into transformers' `hidden_states`: i in [1, L) is the output of layer i - 1, L that of the final norm.
        compiled: compile the layers, for this object's runs alone.

    Raises ValueError for a tap that does not exist, and for a target whose layers are not found.
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
        self._taps = {tap: Tap(own[tap - 1]) for tap in taps if tap < last}
        children: dict[tuple[str, ...], nn.Module] = {
            layers.path: nn.ModuleList([self._taps.get(number, layer) for number, layer in enumerate(own, 1)])
        }
        if last in taps:
            norm = find_final_norm(target, layers)
            self._taps[last] = children[norm] = Tap(target.get_submodule(".".join(norm)))
        self._model = with_children(target, children)

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Seen:
        """ids: [B, T] int64."""
        logits = self._model(input_ids=ids, use_cache=False, return_dict=True).logits
        return Seen({tap: module.hidden for tap, module in self._taps.items()}, logits)
