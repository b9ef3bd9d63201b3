"""A target that also keeps the hidden states of some layers, from which trained heads draft.

Uses parts of models; independent of heads. The target itself is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from .cache import SlotCache
from .parts import Layers, Tap, few_ids, tapped, try_out, with_children
from .runner import CachedModel, Masks, Runnable

__all__ = ["TappedModel", "find_final_norm"]


class TappedModel(CachedModel):
    """The target with hidden states of its last forward pass, which may be the prompt's.

    Args:
        model, cache, masks: as for every target.
        layers: its layers (`find_layers`).
        taps: indices of transformers' `hidden_states`: i in [1, L) is the output of layer i - 1, L that of the final norm.
        final_norm: path of that norm (`find_final_norm`); needed only if L is tapped.
    """

    def __init__(
        self,
        model: PreTrainedModel | Runnable,
        cache: SlotCache,
        masks: Masks,
        layers: Layers,
        taps: Sequence[int],
        final_norm: tuple[str, ...] = (),
    ):
        runnable = model if isinstance(model, Runnable) else Runnable(model)
        module, self._taps = tapped(runnable.module, layers, taps, final_norm)
        super().__init__(replace(runnable, module=module), cache, masks)
        self.untapped = runnable.module
        self.last_only = self.last_only and len(layers) not in taps
        self.taps = [self._taps[tap] for tap in sorted(self._taps)]
        self.kind = tuple(sorted(self._taps))

    def states(self, tap: int) -> torch.Tensor:
        """The states tapped in the last forward pass, [B, n, D]."""
        return self.cache.spread(self._taps[tap].hidden)


@torch.no_grad()
def find_final_norm(model: PreTrainedModel, layers: Layers) -> tuple[str, ...]:
    """The path of the module after the last layer whose output is transformers' last hidden state.

    Raises ValueError if there is none.
    """
    ids = few_ids(model)
    where = layers.path[:-1]
    base = model.get_submodule(".".join(where))
    last = try_out(base, ids).last_hidden_state
    for name, module in base.named_children():
        if isinstance(module, (nn.ModuleList, nn.Embedding)):
            continue
        tap = Tap(module)
        try_out(with_children(model, {(*where, name): tap}), ids)
        found = getattr(tap, "hidden", None)
        if isinstance(found, torch.Tensor) and found.shape == last.shape and torch.equal(found, last):
            return (*where, name)
    raise ValueError(f"{type(model).__name__} has no final norm after its layers")
