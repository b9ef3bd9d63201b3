"""Slots and inputs at fixed addresses, which captured forward passes read in every pass and every call.

Deals with slots and drafts, not with models or with how a forward pass is captured.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch

from ..drafts import Draft
from ..engine.cache import Paths, SlotCache, SlotLayer
from ..engine.host import pinned
from ..engine.shapes import WIDTHS


class StaticBuffers:
    """Slots, and tensors for the inputs that change between forward passes. Captured passes refer to them by address. Layers
    are added as calls bring them.

    Args:
        rows: maximum number of rows.
        capacity: slots of a row.
        device: of all layers.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device):
        self.rows, self.capacity, self.device = rows, capacity, device
        self.slots = SlotCache(rows, capacity)
        self.slots.capacity = capacity
        self.slots.lengths = [1] * rows  # arbitrary: a captured pass that reads them fails the comparison
        with torch.inference_mode(False):

            def numbers(*shape: int) -> torch.Tensor:
                return torch.zeros(shape, dtype=torch.int64, device=device)

            self.ids, self.parents = numbers(rows, WIDTHS[-1]), numbers(rows, WIDTHS[-1]) - 1
            self.numbers = numbers(rows, 3)  # by storage index: valid slots, position of column 0, row
            self.visible = torch.ones(rows, capacity, dtype=torch.bool, device=device)
            self.path = numbers(rows, WIDTHS[-1])  # for a tree, the columns to keep, in order
        self._lent: dict[int, torch.Tensor] = {}  # by layer: the keys of the call that uses the slots
        self._lent_to: weakref.ref[SlotCache] | None = None
        self.states: dict[Hashable, torch.Tensor] = {}  # [rows, columns, D], for parts that start from hidden states
        self.shown: tuple[int, ...] | None = None  # the order of rows for which `visible` is filled

    def fits(self, cache: SlotCache, top: int) -> bool:
        """Whether a call's slots fit here."""
        both = zip(cache.layers, self.slots.layers, strict=False)
        same = all(isinstance(layer, SlotLayer) for layer in cache.layers) and all(
            not layer.is_initialized or not own.is_initialized or _shape(layer) == _shape(own) for layer, own in both
        )
        return same and cache.rows <= self.rows and top <= self.capacity

    def holds(self, cache: SlotCache, top: int) -> bool:
        """Whether a call's slots are already these."""
        return top <= self.capacity and all(
            self._lent.get(place) is (layer.keys if layer.is_initialized else None)
            for place, layer in enumerate(cache.layers)
        )

    def lend(self, layer: SlotLayer, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Give those here to a layer that has no slots yet. key_states, value_states: [any, H, any, D], of the right dtype.
        False if they are of another shape."""
        cache = layer.slots
        place = next(place for place, one in enumerate(cache.layers) if one is layer)
        own = self._layer(place, key_states, value_states)
        like = tuple((one.dtype, one.device, one.shape[1], one.shape[3]) for one in (key_states, value_states))
        if like != _shape(own):
            return False
        if self._lent_to is None or self._lent_to() is not cache:
            self._begin(cache)
        layer.dtype, layer.device, layer.is_initialized = own.dtype, own.device, True
        layer.keys, layer.values = (store[: cache.rows].zero_() for store in (own.keys, own.values))
        self._lent[place] = layer.keys
        return True

    def take(self, cache: SlotCache) -> None:
        """Move a call's slots here. Values of earlier calls are set to zero, because they may be NaN."""
        self._begin(cache)
        held = max(cache.lengths)
        for place, layer in enumerate(cache.layers):
            if not isinstance(layer, SlotLayer):
                raise TypeError(f"a {type(layer).__name__} keeps more than keys and values")
            if not layer.is_initialized:
                continue
            own = self._layer(place, layer.keys, layer.values)
            for name in ("keys", "values"):
                store = getattr(own, name)[: cache.rows]
                store[:, :, :held] = getattr(layer, name)[:, :, :held]
                store[:, :, held:] = 0
                setattr(layer, name, store)
            self._lent[place] = layer.keys

    def _begin(self, cache: SlotCache) -> None:
        """Use the slots for a call."""
        self._leave()
        self._lent_to, self._lent, self.shown = weakref.ref(cache), {}, None
        cache.capacity = self.capacity

    def _leave(self) -> None:
        """Give a copy to slots of an earlier call that are still needed: another call is going to overwrite these."""
        cache = None if self._lent_to is None else self._lent_to()
        if cache is None or not cache.outlives:
            return
        for place, lent in self._lent.items():
            layer = cache.layers[place]
            if layer.keys is lent:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()

    def feed(self, cache: SlotCache, rows: int, columns: int, ids: torch.Tensor, draft: Draft | None) -> None:
        """Fill the next pass's inputs for the first `rows` storage indices. Columns after those of `ids` are padding."""
        width = ids.shape[1]
        self._count(cache, rows)
        self.ids[:rows, :width] = self._placed(cache, rows, ids)
        if draft is not None and draft.parents is not None:
            self.parents[:rows, : width - 1] = self._placed(cache, rows, draft.parents)
            self.parents[:rows, width - 1 : columns - 1] = -1
        self._show(cache)

    @contextmanager
    def other_ids(self) -> Iterator[None]:
        """A context with other tokens, so that a capture which kept values computed from them differs at the next replay."""
        ids = self.ids.clone()
        self.ids.zero_()
        try:
            yield
        finally:
            self.ids.copy_(ids)

    def feed_states(self, kind: Hashable, cache: SlotCache, rows: int, hidden: torch.Tensor) -> None:
        """Fill the hidden states, [B, n, D], that the next pass of this kind of runner starts from. Call after `feed`."""
        if kind not in self.states:
            self.states[kind] = hidden.new_zeros(self.rows, WIDTHS[-1], hidden.shape[-1])
        self.states[kind][:rows, : hidden.shape[1]] = self._placed(cache, rows, hidden)

    def stay(self, rows: int, columns: int) -> None:
        """Make `move` leave every column in its slot."""
        self.path[:rows, :columns] = torch.arange(columns, device=self.device)

    def follow(self, cache: SlotCache, rows: int, columns: int, path: Paths) -> None:
        """Make `move` keep the columns of `path`, as in `SlotCache.commit`."""
        self._count(cache, rows)
        table = [[*path[row], *range(len(path[row]), columns)] for row in cache.order[:rows]]
        self.path[:rows, :columns].copy_(pinned(table, self.device), non_blocking=True)

    def move(self, rows: int, columns: int) -> list[torch.Tensor]:
        """Move a tree's accepted columns to the slots that a chain would use."""
        place = torch.arange(rows, device=self.device)[:, None]
        known = self.numbers[:rows, :1]
        target, source = known + torch.arange(columns, device=self.device), known + self.path[:rows, :columns]
        for store in self.slots.stores:
            store[place, :, target] = store[place, :, source]
        return []

    def _count(self, cache: SlotCache, rows: int) -> None:
        order = cache.order[:rows]
        table = [[cache.lengths[row], cache.lengths[row] - cache.padding[row], row] for row in order]
        self.numbers[:rows].copy_(pinned(table, self.device), non_blocking=True)

    def _placed(self, cache: SlotCache, rows: int, of_all: torch.Tensor) -> torch.Tensor:
        """[B, ...] -> [rows, ...], in storage order. Call after `_count`."""
        of_all = of_all.to(self.device)
        in_order = cache.order[:rows] == list(range(rows))
        return of_all[:rows] if in_order else of_all.index_select(0, self.numbers[:rows, 2])

    def _show(self, cache: SlotCache) -> None:
        order = tuple(cache.order) if cache.visible is not None else ()
        if order != self.shown:
            self.visible.fill_(True)
            if cache.visible is not None:
                hidden = min(cache.visible.shape[1], self.capacity)
                self.visible[: cache.rows, :hidden] = cache.visible[list(order), :hidden].to(self.device)
            self.shown = order

    def _layer(self, place: int, key_states: torch.Tensor, value_states: torch.Tensor) -> SlotLayer:
        """A layer here, made for such keys and values if there is none."""
        own: SlotLayer = self.slots.layer(place)
        if not own.is_initialized:
            with torch.inference_mode(False):
                own.lazy_initialization(key_states, value_states)
        return own


def _shape(layer: SlotLayer) -> tuple[tuple[torch.dtype, torch.device, int, int], ...]:
    return tuple((store.dtype, store.device, store.shape[1], store.shape[3]) for store in (layer.keys, layer.values))
