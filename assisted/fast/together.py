"""All layers of a model in one call in C, or the whole model: embeddings go in, logits come out."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..engine.libraries import CACHE, rotary_angles
from ..engine.parts import Tap
from ..engine.prepared import PreparedModule, one_by_one, through_all
from . import delta, native
from .layers import DeltaLayer, FusedLayer
from .norms import Called, Norm
from .products import Product
from .shared import slots_of

# by the model or the list of layers
_TOGETHER: weakref.WeakKeyDictionary[nn.Module, _Together] = weakref.WeakKeyDictionary()


def layers_at_once(
    layers: Iterable[nn.Module],
    hidden_states: torch.Tensor,
    attention_mask: Any,
    position_embeddings: Any,
    **given: Any,
) -> torch.Tensor:
    """`one_by_one` of layers in C in one call, where they can run this pass. Taps keep their layer's output."""
    known: _Together = _together(layers)
    cache: Any = given[CACHE]
    stores = known.stores(cache, hidden_states)
    if stores is None:
        given |= {"attention_mask": attention_mask, "position_embeddings": position_embeddings}
        return one_by_one(layers, hidden_states, **given)
    around = known.around(hidden_states, attention_mask, position_embeddings, cache)
    return known.run(hidden_states, stores, around, cache)


def model_at_once(
    prepared: PreparedModule, hidden: torch.Tensor, positions: torch.Tensor, mask: Any, cache: Any
) -> torch.Tensor:
    """`through_all` of a whole model in C in one call, where it can run this pass."""
    module = prepared.module
    base = module.base_model
    known: _Together = _together(base.layers, module)
    whole = known.natives
    stores = known.stores(cache, hidden)
    if whole is None or whole.output is None or stores is None:
        return through_all(prepared, hidden, positions, mask, cache)
    around = known.around(hidden, mask, rotary_angles(base.rotary_emb, hidden, positions), cache)
    logits = hidden.new_empty(*hidden.shape[:-1], whole.output.outputs)
    known.run(hidden, stores, around, cache, logits)
    return prepared.finished(logits[..., : known.vocabulary])


@dataclass(frozen=True)
class _Together:
    """Layers, as they can run together."""

    each: Sequence[Any]  # without taps; none if they cannot
    attend: Sequence[bool]  # which of them have attention
    taps: Sequence[tuple[int, Tap]]  # by index
    natives: native.NativeLayers | None = None  # the layers in C
    vocabulary: int = 0  # of a whole model in C

    @staticmethod
    def of(layers: Iterable[nn.Module], model: Any) -> _Together:
        """Layers, some of them inside taps. model: a fused one that ends with them, a norm and a product; None for others."""
        taps = [(index, layer) for index, layer in enumerate(layers) if type(layer) is Tap]
        each: list[Any] = [layer.layer if type(layer) is Tap else layer for layer in layers]
        attend = [type(own) is FusedLayer for own in each]
        kinds = FusedLayer, DeltaLayer
        natives = [own.native for own in each if type(own) in kinds and own.native and own.native.is_whole]
        if len(natives) < len(each) or len({own.dtype for own in natives}) > 1 or not any(attend):
            return _Together((), (), taps)
        made = functools.partial(_Together, each, attend, taps)
        # a norm that is tapped has to keep what it returns
        parts = () if model is None else (model.base_model.norm, model.lm_head)
        norm, head = (part.run for part in parts) if {*map(type, parts)} == {Called} else (None, None)
        if type(norm) is Norm and isinstance(head, Product) and (output := head.native) is not None:
            end = norm.in_c(natives[0].dtype)
            if end is not None and output.dtype == end.dtype and output.inputs == norm.size:
                return made(native.NativeLayers(natives, end, output), head.outputs)
        return made(native.NativeLayers(natives))

    def stores(self, cache: Any, hidden: torch.Tensor) -> list[torch.Tensor] | None:
        """Keys and values, or states, of all layers for a pass over columns [R, n, D]; None if they cannot run it."""
        if self.natives is None or self.natives.dtype != hidden.dtype:
            return None
        slots = slots_of(cache, [own.index for own, attends in zip(self.each, self.attend, strict=True) if attends])
        return slots if slots is None or all(self.attend) else self._with_states(slots, cache, hidden)

    def _with_states(self, slots: list[torch.Tensor], cache: Any, hidden: torch.Tensor) -> list[torch.Tensor] | None:
        of_attention, found = iter(slots), list[torch.Tensor]()
        for own, attends in zip(self.each, self.attend, strict=True):
            part = (next(of_attention), next(of_attention)) if attends else own.stores(cache)
            if part is None or not (attends or delta.fits(hidden, part)):
                return None
            found += part
        return found

    def run(
        self,
        hidden: torch.Tensor,
        stores: list[torch.Tensor],
        around: Any,
        cache: Any,
        logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run all layers, and give taps their layers' outputs. Returns the last one. logits: as `NativeLayers.run`."""
        assert self.natives is not None
        if all(self.attend):
            made = hidden.new_empty(len(self.each), *hidden.shape)
            self.natives.run(hidden.contiguous(), stores, around, made=made, logits=logits)
        else:
            made, read = delta.run(self.natives, hidden, stores, around, cache.columns, logits)
            cache.note_together(read)
        for index, tap in self.taps:
            tap.hidden = made[index]
        return made[-1]

    def around(self, hidden: torch.Tensor, mask: Any, angles: Any, cache: Any) -> dict[str | None, native.NativePass]:
        """What the layers of each kind with attention share in a pass."""
        columns, found = getattr(cache, "columns", None), {}
        if columns is not None and columns.parents is None and cache.visible is None:
            mask = None  # each column sees all slots up to its own
        for own, attends in zip(self.each, self.attend, strict=True):
            if attends and own.kind not in found:
                given = [
                    part[own.kind or "full_attention"] if isinstance(part, dict) else part for part in (mask, angles)
                ]
                found[own.kind] = own.shared.around(hidden, *given, cache, own.index, own.kind)
        return found


def _together(layers: Any, model: Any = None) -> _Together:
    """`_Together.of` the layers, computed once."""
    key = layers if model is None else model  # which may share its layers with one that also taps the norm
    known = _TOGETHER.get(key)
    if known is None:
        known = _TOGETHER[key] = _Together.of(layers, model)
    return known
