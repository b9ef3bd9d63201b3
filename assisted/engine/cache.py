"""The KV cache of one model during one `generate`: preallocated slots, one length per row, rewind without copying.

Implements transformers' Cache interface and is independent of drafting. A forward pass writes its n columns after each
row's length. `commit` keeps some of them; the next forward pass overwrites the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from ..core.host import on_device, zeros
from .libraries import UnboundedLayer

Paths = Sequence[Sequence[int]]
"""For each row, the columns of a forward pass that lie on the accepted path of its tree, in order."""

_GROWTH = 512  # slots; the first allocation for a text of unknown length, which then doubles
_LEAST_GROWTH = 32  # where memory is short


class SlotLayer(UnboundedLayer):
    """Keys and values of one attention layer, [B, H, S, D] each, with S slots that are written in place."""

    is_sliding = False  # every slot is kept; the mask applies the window

    def __init__(self, slots: SlotCache):
        super().__init__()
        self.slots = slots
        self.filled = 0  # columns of the prompt written so far

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        rows, size, both = self.slots.rows, self.slots.capacity, (key_states, value_states)
        new = torch.Tensor.new_zeros if rows == 1 else zeros
        self.keys, self.values = (new(one, (rows, one.shape[1], size, one.shape[-1])) for one in both)
        self.is_initialized = True

    def hold(self, layer: Any, length: int) -> None:
        """Copy `length` tokens from a layer of a caller's cache; nothing if it shares another layer's keys."""
        if getattr(layer, "keys", None) is None:
            return
        self.lazy_initialization(layer.keys, layer.values)
        held = layer.keys.shape[2]  # fewer than `length` with a sliding window
        self.keys[:, :, length - held : length] = layer.keys
        self.values[:, :, length - held : length] = layer.values
        self.filled = length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write n columns [B, H, n, D] after each row's length; return all slots that attention may read, [B, H, top, D]."""
        slots, start = self.slots, self.slots.start
        if start is None:
            return self._read(key_states, value_states)
        self.make_room(slots.top, key_states, value_states)
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            if isinstance(start, int):
                store[: len(states), :, start : start + states.shape[2]] = states
            else:
                rows, columns = slots.row_index.to(store.device), start.to(store.device)
                store[rows, :, columns] = states.transpose(1, 2)
        running = len(key_states)
        return self.keys[:running, :, : slots.top], self.values[:running, :, : slots.top]

    def _read(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`update` for a prompt: all rows start at the same column, and only the rows being read take part."""
        places, first = self.slots.places, self.slots.first
        start, top = self.count(key_states.shape[2], key_states, value_states)
        self.keys[places, :, start:top] = key_states
        self.values[places, :, start:top] = value_states
        if start == first:
            return key_states, value_states
        return self.keys[places, :, first:top], self.values[places, :, first:top]

    def count(self, width: int, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[int, int]:
        """Count further columns of a prompt. Returns the first slot for them, to which the caller writes, and the one after the
        last. key_states, value_states: [any, H, any, D], of the right dtype."""
        start, self.filled = self.slots.first + self.filled, self.filled + width
        top = self.slots.first + self.filled
        self.make_room(top, key_states, value_states)
        return start, top

    def make_room(self, top: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if not self.is_initialized and self.slots.lender and self.slots.lender(self, top, key_states, value_states):
            return
        self.slots.reserve(top)
        capacity = self.slots.capacity
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.keys.shape[2] < capacity:
            self.keys, self.values = _grown(self.keys, capacity), _grown(self.values, capacity)

    def get_seq_length(self) -> int:
        slots = self.slots  # after the prompt, only running rows count: others may be longer
        return self.filled if slots.start is None else max(slots.lengths[row] for row in slots.running)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class SlotCache(Cache):
    """The slots of all layers, and how many of them are valid in each row.

    Invariant between forward passes: `lengths[b]` slots of row b hold the KV of all its committed tokens except the last.
    In the layers' tensors, row b is at index `order.index(b)`; forward passes run over the first `len(running)` indices.

    Args:
        rows: batch size B.
        limit: the largest number of slots ever needed (prompt, new tokens and one draft); memory grows towards it.
        right_aligned: all rows end at the same slot; rows that accepted fewer tokens are shifted. For models whose masks
            must be 2-D (ALiBi, flash attention, chunked attention). Costs one gather whenever rows differ.
    """

    can_rewind = True  # to any earlier prefix
    state_bytes = 0  # of recurrent states

    def __init__(self, rows: int, limit: int, right_aligned: bool = False):
        super().__init__(layers=[])
        self.rows, self.limit, self.right_aligned = rows, limit, right_aligned
        self.capacity = 0
        self._is_short = False  # of memory
        self.outlives = False  # the call: a session goes on from these slots
        # while the prompt is read: gives a layer slots for so many columns of such keys and values; False if it has none
        self.lender: Callable[[SlotLayer, int, torch.Tensor, torch.Tensor], bool] | None = None
        self.lengths = [0] * rows
        self.order = list(range(rows))
        self.running = list(self.order)  # the rows that forward passes run over, in storage order
        self.padding = [0] * rows  # slots of each row that get no position, usually hidden ones
        self.prompt_padding = [0] * rows  # those of the prompt itself; shifting adds others
        self.visible: torch.Tensor | None = None  # [B, prompt] bool, None when nothing is hidden
        # where the next forward pass writes: one slot for all rows, or [B, n]; None while the prompt is read
        self.start: int | torch.Tensor | None = None
        self.places: slice | list[int] = slice(None)  # the rows whose prompt is being read,
        self.first = 0  # starting at this column
        self.alike = False  # columns are computed in the same way however many come along, for `exact="bits"`
        self.move: Callable[[Sequence[torch.Tensor], torch.Tensor], bool] | None = None  # see `PreparedModule`
        self.top = 0
        self.row_index = torch.arange(rows)[:, None]  # of the last forward pass

    @classmethod
    def of(cls, cache: Cache | None, rows: int, limit: int, right_aligned: bool = False) -> SlotCache:
        """Slots with a copy of a caller's DynamicCache, which is not changed."""
        slots = cls(rows, limit, right_aligned)
        length = 0 if cache is None else cache.get_seq_length()
        if cache is None or length == 0:
            return slots
        slots.reserve(length)
        for layer in cache.layers:
            own = SlotLayer(slots)
            slots.layers.append(own)
            own.hold(layer, length)
        return slots

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by attention layers; a layer's slots are created at its first call."""
        return self.layer(layer_idx).update(key_states, value_states)

    def layer(self, index: int) -> Any:
        """A layer's slots."""
        while len(self.layers) <= index:
            self.layers.append(SlotLayer(self))
        return self.layers[index]

    def hide(self, attention_mask: torch.Tensor | None) -> None:
        """Hide the slots of a prompt's padding. attention_mask: [B, prompt], 0 at padding."""
        if attention_mask is None or bool(attention_mask.all()):
            return
        self.visible = attention_mask.bool()
        self.padding = (~self.visible).sum(1).tolist()
        self.prompt_padding = list(self.padding)

    def hide_padding(self, seen: torch.Tensor) -> torch.Tensor:
        """Hide the slots of padding in the mask of the running rows, [rows, .., S] bool, and return it."""
        if self.visible is not None:
            hidden = min(self.visible.shape[1], seen.shape[-1])
            visible = self.of_running(self.visible)[:, :hidden].to(seen.device)
            seen[..., :hidden] &= visible.view(len(seen), *[1] * (seen.dim() - 2), hidden)
        return seen

    @contextmanager
    def reading(self, rows: Sequence[int], first: int) -> Iterator[None]:
        """A context in which only the prompts of these rows are read, from column `first` on; earlier ones are padding."""
        places = [self.order.index(row) for row in rows]
        side_by_side = places == list(range(places[0], places[-1] + 1))
        self.places = slice(places[0], places[-1] + 1) if side_by_side else places
        self.first = first
        for layer in self.slot_layers:
            layer.filled = 0
        yield
        for layer in self.slot_layers:
            layer.filled += first
        self.places, self.first = slice(None), 0

    def empty(self) -> SlotCache:
        """Others of this kind, without contents."""
        return SlotCache(self.rows, self.limit)

    def drop(self) -> None:
        """Hold nothing any more, and be given nothing: others have copies. A drafting keeps its call, and this the slots."""
        self.layers, self.outlives = list[Any](), False

    def states(self) -> list[torch.Tensor]:
        """The recurrent states of all layers, [B, ...] each, as far as they have any."""
        return []

    def reserve(self, top: int) -> None:
        """Make room for `top` slots in every layer. Capacity at least doubles when it grows, up to `limit`."""
        if top > self.capacity and self._is_short:
            self.capacity = max(top, min(self.limit, top + _LEAST_GROWTH))
        elif top > self.capacity:
            self.capacity = max(top, min(self.limit, max(2 * self.capacity, top + _GROWTH)))

    def save_memory(self) -> None:
        """Grow by few slots at a time from now on, even if the last growth failed halfway."""
        self._is_short = True
        self.capacity = min((layer.keys.shape[2] for layer in self.slot_layers if layer.is_initialized), default=0)

    def begin_rounds(self, read: int = 0, positions: Sequence[int] | None = None) -> None:
        """End the prompt; from now on each row has its own length.

        read: columns of the prompt, for models without attention layers, which fill no slots. positions: position of the
        last column in each row, unless `hide` determines it (a hidden column has position 0).
        """
        self.lender = None
        filled = max((layer.filled for layer in self.slot_layers), default=read)
        self.lengths = [filled] * self.rows
        self.start = filled
        if positions is not None:
            self.padding = [filled - 1 - position for position in positions]
            self.prompt_padding = list(self.padding)

    def place(self, width: int, device: torch.device) -> None:
        """Prepare a forward pass that writes `width` columns after each row's length."""
        lengths = [self.lengths[row] for row in self.running]
        self.top = max(lengths) + width
        if min(lengths) == max(lengths):
            self.start = lengths[0]
            return
        self.row_index = torch.arange(len(lengths), device=device)[:, None]
        self.start = self.ends(device) + torch.arange(width, device=device)

    def place_at(self, known: torch.Tensor, width: int, top: int) -> None:
        """`place` from a tensor, for captured forward passes. known: [R, 1] int64, valid slots of each row. top: slots that
        attention reads."""
        self.row_index = torch.arange(len(known), device=known.device)[:, None]
        self.start, self.top = known + torch.arange(width, device=known.device), top

    def ends(self, device: torch.device) -> torch.Tensor:
        """Valid slots of each running row, [rows, 1] int64."""
        return on_device([self.lengths[row] for row in self.running], device)[:, None]

    def run_only(self, rows: Sequence[int]) -> None:
        """Run the next forward passes over these rows only; the other rows keep their contents. Right-aligned rows all run.

        Rows are swapped where necessary, so that the running ones are adjacent.
        """
        if self.right_aligned or sorted(rows) == sorted(self.running):
            return
        wanted = set(rows)
        leaving = [place for place in range(len(rows)) if self.order[place] not in wanted]
        if leaving:
            self.swap(leaving, [place for place in range(len(rows), self.rows) if self.order[place] in wanted])
        self.running = self.order[: len(rows)]

    def of_running(self, of_all: torch.Tensor) -> torch.Tensor:
        """[B, ...] -> [rows, ...]: the running rows, in storage order."""
        return of_all if self.running == list(range(self.rows)) else of_all[self.running]

    def spread(self, of_running: torch.Tensor) -> torch.Tensor:
        """The inverse of `of_running`: [rows, ...] -> [B, ...], zeros for rows that don't run."""
        if self.running == list(range(self.rows)):
            return of_running
        spread = of_running.new_zeros(self.rows, *of_running.shape[1:])
        spread[self.running] = of_running
        return spread

    def commit(self, counts: list[int], path: Paths | None = None) -> None:
        """Keep `counts[b]` of the columns just written and discard the rest.

        path: for a tree, the columns to keep, at least `counts[b]`; None keeps the first ones (a chain).
        """
        if path is not None:
            self._gather(path, counts)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._realign()

    def rewind(self, known: list[int]) -> None:
        """Discard all but the first `known[b]` columns of each row's text. Nothing is copied unless rows must be aligned."""
        each = zip(self.lengths, self.known, known, strict=True)
        self.lengths = [length - have + keep for length, have, keep in each]
        self._realign()

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """A context for drafting over these slots. At its end, what was committed within it is discarded."""
        known = self.known
        try:
            yield
        finally:
            self.rewind(known)

    @property
    def slot_layers(self) -> list[SlotLayer]:
        """The layers that keep keys and values."""
        return [layer for layer in self.layers if isinstance(layer, SlotLayer)]

    @property
    def stores(self) -> list[torch.Tensor]:
        """Keys and values of all these layers, as far as they have any."""
        layers = (layer for layer in self.slot_layers if layer.is_initialized)
        return [store for layer in layers for store in (layer.keys, layer.values)]

    @property
    def known(self) -> list[int]:
        """Columns stored of each row's text, prompt padding included."""
        return [n - p + q for n, p, q in zip(self.lengths, self.padding, self.prompt_padding, strict=True)]

    @property
    def unpadded(self) -> list[int]:
        """Columns stored of each row's text, without padding."""
        return [length - hidden for length, hidden in zip(self.lengths, self.padding, strict=True)]

    def mask(self, width: int, device: torch.device) -> torch.Tensor | None:
        """The 2-D mask of a right-aligned forward pass over `width` columns, [B, top] int64; None when nothing is hidden."""
        if self.visible is None:
            return None
        hidden = min(self.visible.shape[1], max(self.lengths))
        seen = torch.ones(self.rows, max(self.lengths) + width, dtype=torch.int64, device=device)
        seen[:, :hidden] = self.visible[:, :hidden].to(device)
        return seen

    def to_dynamic(self, config: Any) -> DynamicCache:
        """The same KV in transformers' own cache, for a caller who continues from it.

        Columns are in text order, even where alignment has moved them. Shorter rows are filled with zeros up to the length
        of the longest.
        """
        cache = DynamicCache(config=config)
        longest = max(self.known)
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, SlotLayer) or not layer.is_initialized:
                continue
            stores = []
            for store in (layer.keys, layer.values):
                stores.append(store.new_zeros(*store.shape[:2], longest, store.shape[3]))
                for place, row in enumerate(self.order):
                    top, held = self.lengths[row], self.known[row]
                    stores[-1][row, :, :held] = store[place, :, top - held : top]
            cache.update(*stores, index)
        return cache

    def _realign(self) -> None:
        if self.right_aligned:
            end = max(self.known)  # not beyond the longest text: a model may have no slots after its context
            if any(length != end for length in self.lengths):
                self._shift([end - length for length in self.lengths], end)
                self.lengths = [end] * self.rows
        self.start = max(self.lengths)

    def _gather(self, path: Paths, counts: list[int]) -> None:
        """Move the columns of `path` to the slots that a chain would use. Most are already there."""
        moves = [
            (place, self.lengths[row] + to, self.lengths[row] + column)
            for place, row in enumerate(self.running)
            for to, column in enumerate(path[row][: counts[row]])
            if to != column
        ]
        if moves and (stores := self.stores):
            moved = on_device(list(zip(*moves, strict=True)), stores[0].device)
            if self.move is not None and self.move(stores, moved):
                return
            for store in stores:
                place, target, source = moved.to(store.device)
                store[place, :, target] = store[place, :, source]

    def swap(self, some: list[int], others: list[int]) -> None:
        """Swap the rows at indices of the layers' tensors, each with the one at the same place of the other list."""
        for one, other in zip(some, others, strict=True):
            self.order[one], self.order[other] = self.order[other], self.order[one]
        both, crossed, top = some + others, others + some, max(self.lengths)
        for store in self.stores:
            store[both, :, :top] = store[crossed, :, :top]

    def _shift(self, by: list[int], end: int) -> None:
        """Move each row `by[b]` slots to the right (left if negative), to the same end. The slots it vacates become padding."""
        moved_from = torch.arange(end) - torch.tensor(by)[:, None]  # [B, end], negative in vacated slots
        source = moved_from.clamp(min=0)
        for store in self.stores:
            slot = source.to(store.device)[:, None, :, None]
            store[:, :, :end] = store.gather(2, slot.expand(-1, store.shape[1], -1, store.shape[3]))
        visible = torch.ones(self.rows, max(end, *self.lengths), dtype=torch.bool)
        if self.visible is not None:
            hidden = min(visible.shape[1], self.visible.shape[1])
            visible[:, :hidden] = self.visible[:, :hidden].cpu()
        self.visible = visible.gather(1, source) & (moved_from >= 0)
        self.padding = [hidden + extra for hidden, extra in zip(self.padding, by, strict=True)]


def _grown(store: torch.Tensor, capacity: int) -> torch.Tensor:
    larger = zeros(store, (*store.shape[:2], capacity, store.shape[3]))
    larger[:, :, : store.shape[2]] = store
    return larger
