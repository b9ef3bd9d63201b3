"""The target, and the hidden states that trained heads draft from: what its last pass left in some of its layers.

Knows parts of models; nothing of heads. The target itself is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from .cache import SlotCache
from .parts import Layers, Tap, few_ids, with_children
from .runner import CachedModel, Masks, Runnable

__all__ = ["TappedModel", "find_final_norm"]


class TappedModel(CachedModel):
    """The target; and the states of its last pass, the prompt's included.

    Args:
        model, cache, masks: as for every target.
        layers: where its layers are (`find_layers`).
        taps: indices as transformers counts `hidden_states`: i in [1, L) is what leaves layer i - 1, L is what leaves the
            final norm.
        final_norm: path of that norm (`find_final_norm`); not needed where L isn't tapped.
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
        own = layers.of(runnable.module)
        self._taps: dict[int, Tap] = {tap: Tap(own[tap - 1]) for tap in taps if tap < len(own)}
        children: dict[tuple[str, ...], nn.Module] = {
            layers.path: nn.ModuleList([self._taps.get(place + 1, layer) for place, layer in enumerate(own)])
        }
        if len(own) in taps:
            self._taps[len(own)] = children[final_norm] = Tap(runnable.module.get_submodule(".".join(final_norm)))
        super().__init__(replace(runnable, module=with_children(runnable.module, children)), cache, masks)
        self.last_only = self.last_only and len(own) not in taps
        self.taps = [self._taps[tap] for tap in sorted(self._taps)]
        self.kind = tuple(sorted(self._taps))

    def states(self, tap: int) -> torch.Tensor:
        """What was tapped in the last pass, [B, n, D]."""
        return self.cache.spread(self._taps[tap].hidden)


@torch.no_grad()
def find_final_norm(model: PreTrainedModel, layers: Layers) -> tuple[str, ...]:
    """The path of the module behind the last layer, whose output is what transformers calls the last hidden state.

    Raises ValueError where there is none.
    """
    ids = few_ids(model)
    where = layers.path[:-1]
    base = model.get_submodule(".".join(where))
    last = base(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, return_dict=True).last_hidden_state
    for name, module in base.named_children():
        if isinstance(module, (nn.ModuleList, nn.Embedding)):
            continue
        tap = Tap(module)
        other = with_children(model, {(*where, name): tap})
        other(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, return_dict=True)
        found = getattr(tap, "hidden", None)
        if isinstance(found, torch.Tensor) and found.shape == last.shape and torch.equal(found, last):
            return (*where, name)
    raise ValueError(f"{type(model).__name__} has no final norm behind its layers")
