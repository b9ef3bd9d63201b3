"""The steps of a head in C, in one text of a call, whichever head's they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...engine.cache import SlotCache
from ...engine.hooks import any_touched
from ...fast import delta, native
from ...fast.head_steps import EagleSteps, Shape, TreeInC
from ...fast.layers import FusedLayer

NO_TABLE = "the target's input embedding is not a plain table of the head's dtype and vocabulary"


class HeadSteps:
    """The steps of a head in C, in one text of a call.

    layer: the fused one. steps: of tensors; those of EAGLE-3 heads grow trees and fuse features, too.
    """

    def __init__(self, layer: FusedLayer, steps: EagleSteps | delta.TokenSteps):
        self.layer, self.steps, self.logits = layer, steps, steps.logits

    def __call__(self, ids: torch.Tensor, states: torch.Tensor, cache: SlotCache, first: int) -> torch.Tensor | None:
        """As `HeadRunner.__call__`; None for columns that cannot run in C. first: position of the text's first column."""
        where = self._place(states, cache, first, ids.shape[1])
        return None if where is None else self.steps(ids, states, *where)

    def chain(
        self, state: torch.Tensor, cache: SlotCache, first: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As `HeadRunner.chain`."""
        where = self._place(state[:, None], cache, first, count)
        return None if where is None else self.steps.chain(state, *where, count)

    def tree(self, state: torch.Tensor, cache: SlotCache, first: int, shape: Shape) -> TreeInC | None:
        """As `HeadRunner.tree`."""
        if not isinstance(self.steps, EagleSteps):
            return None
        where = self._place(state[:, None], cache, first, shape.limits[-1])
        return None if where is None else self.steps.tree(state, *where, shape)

    def fuse(self, features: torch.Tensor) -> torch.Tensor | None:
        """As `Head.fuse`; None if that does not run in C."""
        if isinstance(self.steps, EagleSteps) and self.steps.of_features is not None and self._fits(features, ()):
            return self.steps.fuse(features)
        return None

    def _fits(self, states: torch.Tensor, stores: Sequence[torch.Tensor]) -> bool:
        """Whether columns can run in C."""
        fit = all(store.dtype == self.steps.dtype and store.is_contiguous() for store in stores)
        few = states.shape[1] <= native.AT_ONCE and not torch.compiler.is_compiling()
        return states.dtype == self.steps.dtype and states.is_cpu and fit and few

    def _place(
        self, states: torch.Tensor, cache: SlotCache, first: int, width: int
    ) -> tuple[Sequence[torch.Tensor], int, int] | None:
        """Keys and values, and slot and position of the first of `width` columns; None for columns that cannot run in C."""
        cache.place(width, states.device)
        stores, place = self.layer.stores(cache), cache.start
        if not isinstance(place, int) or stores is None or not self._fits(states, stores):
            return None
        position = place + first
        return (stores, place, position) if 0 <= position <= self.steps.positions - width else None


def embeddings_in_c(own: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """The weight of an embedding that C can look up; None for others."""
    if type(own) is not nn.Embedding or own.max_norm is not None or any_touched([own]):
        return None
    weight = own.weight.detach()
    return weight if weight.is_cpu and weight.dtype == dtype and weight.is_contiguous() else None
