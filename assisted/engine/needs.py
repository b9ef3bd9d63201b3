"""What a drafter needs of the target besides its logits, and how the hidden states reach it.

Uses parts of models; independent of drafters. The target itself is not changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from .cache import SlotCache
from .parts import Layers, Tap, few_ids, find_layers, try_out, with_children

__all__ = ["NOTHING", "Needs", "States", "find_final_norm"]

_NO_LAYERS = Layers((), ())


@dataclass(frozen=True)
class Needs:
    """What a drafter needs of the target besides its logits; nothing by default. `one | other` is what both need.

    Args:
        layers: the target's layers (`find_layers`), for drafters that read their states or run parts of the target.
        states: the hidden states to read, as indices of transformers' `hidden_states`: i in [1, L) is the output of layer
            i - 1, L that of the final norm. L + 1, which transformers does not have, is the output of the last layer. They
            arrive in `Call.states` and `Round.states`.
        final_norm: path of that norm (`find_final_norm`); needed only if L is among the states.
        split: the first layers run while drafting, and verification runs the others (`Split`). All rows of a batch then run
            in every forward pass.
        lockstep: all rows of a batch keep the same number of columns, because the draft's own state can't do otherwise.
    """

    layers: Layers = _NO_LAYERS
    states: frozenset[int] = frozenset()
    final_norm: tuple[str, ...] = ()
    split: bool = False
    lockstep: bool = False

    @classmethod
    def of_states(cls, model: PreTrainedModel, *states: int) -> Needs:
        """The need for hidden states of a model; a negative index counts from the normed last one.

        Raises ValueError if the model's layers or its final norm are not found, or if it has no such state.
        """
        layers = find_layers(model)
        last = len(layers)
        wanted = frozenset(state if state >= 0 else last + 1 + state for state in states)
        if not all(1 <= state <= last + 1 for state in wanted):
            raise ValueError(f"it reads the hidden states {list(states)} of a target with {last} layers")
        return cls(layers, wanted, find_final_norm(model, layers) if last in wanted else ())

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            self.layers if len(self.layers) else other.layers,
            self.states | other.states,
            self.final_norm or other.final_norm,
            self.split or other.split,
            self.lockstep or other.lockstep,
        )


NOTHING = Needs()


class States(Mapping[int, torch.Tensor]):
    """Hidden states of one forward pass of the target, by their index in transformers' `hidden_states`: [B, n, D] each.

    They are on the devices of their layers, and zeros for rows that didn't run. Valid until the target's next forward pass,
    which may overwrite them; then this mapping is empty, so that nobody reads others by mistake and no memory is held. A
    drafter reads them in `start` and `observe`, and keeps copies of the few that it needs for longer. Only the prompt's are
    never overwritten: a tensor read in `start` may be kept without copying.

    Args:
        taps: modules that hold the states of the running rows, by index.
        cache: the slots of this forward pass.
    """

    def __init__(self, taps: Mapping[int, Tap], cache: SlotCache):
        self._taps, self._cache = taps, cache

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._cache.spread(self.of_running(index))

    def of_running(self, index: int) -> torch.Tensor:
        """The same of the rows that ran alone, [R, n, D] in the model's dtype. Raises KeyError for an index that it lacks."""
        if index not in self._taps:
            raise KeyError(f"hidden state {index} is not among the drafter's needs, or of an earlier forward pass")
        return self._taps[index].hidden

    def __iter__(self) -> Iterator[int]:
        return iter(self._taps)

    def __len__(self) -> int:
        return len(self._taps)

    def end(self) -> None:
        """Become empty, because the next forward pass begins."""
        self._taps = {}


@torch.no_grad()
def find_final_norm(model: PreTrainedModel, layers: Layers) -> tuple[str, ...]:
    """The path of the module after the last layer whose output is transformers' last hidden state.

    model: any causal LM. layers: its layers (`find_layers`). Raises ValueError if there is none.
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
