"""Slots and inputs at fixed addresses, which captured functions read in every pass and every call.

Deals with slots and drafts, not with models or with how a function is captured.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..core.drafts import Draft
from ..core.host import pinned
from ..engine.cache import Paths, SlotCache, SlotLayer
from ..engine.passes import WIDTHS
from ..engine.states import STATES, ColumnCache


class StaticBuffers:
    """Slots, and tensors for the inputs that change between passes. Captured functions refer to them by address. Layers and
    inputs are added as calls bring them.

    Args:
        slots: empty ones, for the maximum number of rows; recurrent states are kept in them, too.
        capacity: slots of a row.
        device: of all layers.
    """

    def __init__(self, slots: SlotCache, capacity: int, device: torch.device):
        self.rows, self.capacity, self.device = slots.rows, capacity, device
        rows, self.slots = slots.rows, slots
        self.slots.capacity = capacity
        self.slots.lengths = [1] * rows  # arbitrary: a captured pass that reads them fails the comparison
        with torch.inference_mode(False):
            # by storage index: valid slots, position of column 0, row, columns that are kept of a chain's first ones
            self.numbers = torch.zeros(rows, 4, dtype=torch.int64, device=device)
            self.visible = torch.ones(rows, capacity, dtype=torch.bool, device=device)
        self._inputs: dict[Hashable, torch.Tensor] = {}  # [rows, columns, ...]
        self._lent: dict[int, torch.Tensor] = {}  # by layer: the keys of the call that uses the slots
        self._states: list[torch.Tensor] = []  # the same of its states
        self._lent_to: weakref.ref[SlotCache] | None = None
        self._shown: tuple[torch.Tensor | None, list[int]] | None = (
            None  # what `visible` is filled with, in which order
        )

    def fits(self, cache: SlotCache, top: int) -> bool:
        """Whether a call's slots and states fit here."""
        both = zip(cache.layers, self.slots.layers, strict=False)
        pairs = ((_kinds(layer), _kinds(own)) for layer, own in both)
        same = all(given[name] == kind for given, own in pairs for name, kind in own.items() if name in given)
        return same and type(cache) is type(self.slots) and cache.rows <= self.rows and top <= self.capacity

    def holds(self, cache: SlotCache, top: int) -> bool:
        """Whether a call's slots and states are already these."""
        return top <= self.capacity and self._has_slots(cache) and self._has_states(cache)

    def _has_slots(self, cache: SlotCache) -> bool:
        return all(
            self._lent.get(place) is (layer.keys if layer.is_initialized else None)
            for place, layer in enumerate(cache.layers)
            if isinstance(layer, SlotLayer)
        )

    def _has_states(self, cache: SlotCache) -> bool:
        states = cache.states()
        return len(states) == len(self._states) and all(map(operator.is_, states, self._states))

    def lend(self, layer: SlotLayer, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Give those here to a layer that has no slots yet. key_states, value_states: [any, H, any, D], of the right dtype.
        False if they are of another shape."""
        cache = layer.slots
        place = next(place for place, one in enumerate(cache.layers) if one is layer)
        own = self._layer(place, key_states, value_states)
        if {"keys": _kind(key_states), "values": _kind(value_states)}.items() - _kinds(own).items():
            return False
        if not self._is_lent_to(cache):
            self._begin(cache)
        layer.dtype, layer.device, layer.is_initialized = own.dtype, own.device, True
        layer.keys, layer.values = (store[: cache.rows].zero_() for store in (own.keys, own.values))
        self._lent[place] = layer.keys
        return True

    def take(self, cache: SlotCache) -> None:
        """Move a call's slots and states here. Values of earlier calls are set to zero, because they may be NaN."""
        if not (self._is_lent_to(cache) and self._has_slots(cache)):
            self._begin(cache)
            self._take_slots(cache)
        if isinstance(cache, ColumnCache) and isinstance(self.slots, ColumnCache):
            self.slots.lend_states(cache)
            self._states = cache.states()

    def _take_slots(self, cache: SlotCache) -> None:
        held = max(cache.lengths)
        for place, layer in enumerate(cache.layers):
            if not isinstance(layer, SlotLayer) or not layer.is_initialized:
                continue
            own = self._layer(place, layer.keys, layer.values)
            for name in ("keys", "values"):
                store = getattr(own, name)[: cache.rows]
                store[:, :, :held] = getattr(layer, name)[:, :, :held]
                store[:, :, held:] = 0
                setattr(layer, name, store)
            self._lent[place] = layer.keys

    def _is_lent_to(self, cache: SlotCache) -> bool:
        return self._lent_to is not None and self._lent_to() is cache

    def _begin(self, cache: SlotCache) -> None:
        """Use the slots for a call."""
        self._leave()
        self._lent_to, self._lent, self._states, self._shown = weakref.ref(cache), {}, [], None
        cache.capacity = self.capacity

    def _leave(self) -> None:
        """Give copies to an earlier call whose slots and states are still needed: another one is going to overwrite these."""
        cache = None if self._lent_to is None else self._lent_to()
        if cache is None or not cache.outlives:
            return
        if isinstance(cache, ColumnCache) and self._has_states(cache):
            cache.own_states()
        for place, lent in self._lent.items():
            layer = cache.layers[place]
            if layer.keys is lent:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()

    def feed(
        self,
        cache: SlotCache,
        rows: int,
        columns: int,
        ids: torch.Tensor,
        draft: Draft | None = None,
        counts: list[int] | None = None,
    ) -> None:
        """Fill the next pass's inputs for the first `rows` storage indices. Columns after those of `ids` are padding.

        counts: by row, the columns that are no padding, for `Graphs.chain`.
        """
        self.count(cache, rows, counts)
        self.put("ids", cache, rows, ids)
        if draft is not None and draft.parents is not None:
            parents = self.put("parents", cache, rows, draft.parents)
            if ids.shape[1] < columns:
                parents[:rows, ids.shape[1] - 1 : columns - 1] = -1
        self._show(cache)

    def put(self, name: Hashable, cache: SlotCache, rows: int, of_all: torch.Tensor) -> torch.Tensor:
        """Fill an input with [B, n, ...] and return it whole. Call after `feed`, which knows the order of the rows."""
        held, of_all = self._input(name, of_all), of_all.to(self.device)
        in_order = cache.order[:rows] == list(range(rows))
        placed = of_all[:rows] if in_order else of_all.index_select(0, self.numbers[:rows, 2])
        held[:rows, : of_all.shape[1]] = placed
        return held

    def input(self, name: Hashable, rows: int, columns: int) -> torch.Tensor:
        """An input as captured functions read it, [rows, columns, ...]."""
        return self._inputs[name][:rows, :columns]

    def _input(self, name: Hashable, like: torch.Tensor) -> torch.Tensor:
        if name not in self._inputs:
            with torch.inference_mode(False):
                sizes = self.rows, WIDTHS[-1], *like.shape[2:]
                self._inputs[name] = torch.zeros(sizes, dtype=like.dtype, device=self.device)
        return self._inputs[name]

    @contextmanager
    def other_ids(self) -> Iterator[None]:
        """A context with other tokens, so that a capture which kept values computed from them differs at the next replay."""
        held = self._inputs["ids"]
        ids = held.clone()
        held.zero_()
        try:
            yield
        finally:
            held.copy_(ids)

    def follow(self, cache: SlotCache, rows: int, columns: int, path: Paths | None) -> None:
        """Make `move` keep the columns of `path`, as in `SlotCache.commit`; None leaves every column in its slot."""
        self.count(cache, rows)
        each = [range(0)] * rows if path is None else [path[row] for row in cache.order[:rows]]
        table = [[*kept, *range(len(kept), columns)] for kept in each]
        own = self._input("path", self.numbers[:, :1])
        own[:rows, :columns].copy_(pinned(table, self.device), non_blocking=True)

    def move(self, path: torch.Tensor) -> list[torch.Tensor]:
        """Move a tree's accepted columns to the slots that a chain would use. path: [R, n] int64, the columns in order."""
        rows, columns = path.shape
        place = torch.arange(rows, device=self.device)[:, None]
        known = self.numbers[:rows, :1]
        target, source = known + torch.arange(columns, device=self.device), known + path
        for store in self.slots.stores:
            store[place, :, target] = store[place, :, source]
        return []

    def count(self, cache: SlotCache, rows: int, counts: list[int] | None = None) -> None:
        """Feed how many tokens each row holds. counts: columns of each row, 1 by default."""
        table = [
            [cache.lengths[row], cache.lengths[row] - cache.padding[row], row, 1 if counts is None else counts[row]]
            for row in cache.order[:rows]
        ]
        self.numbers[:rows].copy_(pinned(table, self.device), non_blocking=True)

    def _show(self, cache: SlotCache) -> None:
        known = self._shown
        if known is not None and known[0] is cache.visible and (known[0] is None or known[1] == cache.order):
            return
        self.visible.fill_(True)
        if cache.visible is not None:
            hidden = min(cache.visible.shape[1], self.capacity)
            self.visible[: cache.rows, :hidden] = cache.visible[cache.order, :hidden].to(self.device)
        self._shown = cache.visible, list(cache.order)

    def _layer(self, place: int, key_states: torch.Tensor, value_states: torch.Tensor) -> SlotLayer:
        """A layer here, made for such keys and values if there is none."""
        own: SlotLayer = self.slots.layer(place)
        if not own.is_initialized:
            with torch.inference_mode(False):
                own.lazy_initialization(key_states, value_states)
        return own


def _kind(store: torch.Tensor) -> tuple[Any, ...]:
    return store.dtype, store.device, store.shape[1], store.shape[3]


def _kinds(layer: Any) -> dict[Any, tuple[Any, ...]]:
    """Of what a layer keeps so far: what it has to have in common with what is here."""
    found: dict[Any, tuple[Any, ...]] = {}
    if isinstance(layer, SlotLayer) and layer.is_initialized:
        found = {"keys": _kind(layer.keys), "values": _kind(layer.values)}
    for name in STATES:
        kept = getattr(layer, name, {}).items()
        found |= {(name, index): (state.dtype, state.shape[1:]) for index, state in kept if state is not None}
    return found
