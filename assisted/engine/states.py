"""Slots for attention layers beside states for recurrent ones, in transformers' own layers.

Independent of drafting and of how a forward pass is run. `ColumnCache` keeps what each layer has read of the last forward
pass, from which the state after any of its columns follows (delta.py); `recurrent.py` copies states instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from ..core.host import on_device
from . import delta
from .cache import Paths, SlotCache, SlotLayer
from .libraries import DummyLayer
from .masks import Columns
from .stepped import Steps

MOST_SAVED, MOST_SAVED_BYTES = 8, 2**28  # states of a text, beside the present ones
STATES = ("conv_states", "recurrent_states")
_FLAGS = (
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)
_WHOLE = (DynamicLayer, LinearAttentionAndFullAttentionLayer)  # their keys and values are those of all tokens


class StateAndSlotLayer(LinearAttentionLayer, SlotLayer):
    """A layer that has both attention and a recurrent state."""

    def __init__(self, slots: SlotCache, number_of_states: int):
        SlotLayer.__init__(self, slots)
        LinearAttentionLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Keys and values are positional arguments, states are keyword arguments."""
        kind: Any = SlotLayer if args else LinearAttentionLayer
        kind.lazy_initialization(self, *args, **kwargs)


class StateCache(SlotCache):
    """Slots and states of one model during one `generate`.

    Args:
        rows, limit, right_aligned: as for SlotCache.
        config: the model's; it determines the kinds of layers.
    """

    can_rewind = False

    def __init__(self, rows: int, limit: int, config: Any, right_aligned: bool = False):
        super().__init__(rows, limit, right_aligned)
        self.config = config
        self.is_saved = False  # whether the saved states equal the current ones
        self._saved: list[torch.Tensor] = []
        self._saved_lengths: list[int] = []
        self.layers = [self._own(layer) for layer in DynamicCache(config=config).layers]

    @classmethod
    def holding(cls, cache: Cache | None, rows: int, limit: int, config: Any) -> StateCache:
        """A copy of a caller's cache, which is not changed."""
        own = cls(rows, limit, config)
        if cache is None or not (length := held(cache)):
            return own
        own.reserve(length)
        for layer, given in zip(own.layers, cache.layers, strict=True):
            if isinstance(layer, SlotLayer):
                layer.hold(given, length)
            if isinstance(layer, LinearAttentionLayer):
                _copy_states(given, layer)
        return own

    @property
    def state_layers(self) -> list[Any]:
        """The layers that keep states."""
        return [layer for layer in self.layers if isinstance(layer, LinearAttentionLayer)]

    def states(self) -> list[torch.Tensor]:
        return [states[index] for layer in self.state_layers for states, index in _places(layer)]

    @property
    def state_bytes(self) -> int:  # type: ignore[override]
        """Bytes of the states and of their copies."""
        return sum(state.nbytes for state in (*self.states(), *self._saved))

    def save(self) -> None:
        """Save the current states and lengths."""
        states = self.states()
        if len(self._saved) != len(states):
            self._saved = [torch.empty_like(state) for state in states]
        for saved, state in zip(self._saved, states, strict=True):
            saved.copy_(state)
        self.is_saved, self._saved_lengths = True, list(self.lengths)

    def go_back(self) -> None:
        """Restore states and lengths to what they were at the last `save`."""
        for saved, state in zip(self._saved, self.states(), strict=True):
            state.copy_(saved)
        self.lengths, self.is_saved = list(self._saved_lengths), True

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """As SlotCache."""
        self.save()
        try:
            yield
        finally:
            self.go_back()

    def rewind(self, known: list[int]) -> None:
        """Not possible; raises ValueError unless there is nothing to discard."""
        if known != self.known:
            raise ValueError(
                "a recurrent state can't be rewound; ask Traits.of(model).is_rewindable before drafting with a target"
            )

    def to_dynamic(self, config: Any) -> DynamicCache:
        """As SlotCache, once the states have read what the slots hold. The config is always the model's own."""
        cache = super().to_dynamic(self.config)
        places = [self.order.index(row) for row in range(self.rows)]
        for layer, own in zip(cache.layers, self.layers, strict=True):
            if isinstance(own, LinearAttentionLayer):
                _copy_states(own, layer, places)
        return cache

    def swap(self, some: list[int], others: list[int]) -> None:
        super().swap(some, others)
        for state in self.states():
            state[some + others] = state[others + some]

    def _own(self, layer: Any) -> Any:
        if isinstance(layer, DummyLayer):
            return layer
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            return SlotLayer(self)
        if isinstance(layer, CacheLayerMixin):
            return StateAndSlotLayer(self, layer.number_of_states)
        return layer


Read = delta.Read | Steps
"""What a layer has read in a forward pass."""


class PassRead(Protocol):
    """What several layers have read in a forward pass; it changes their states itself."""

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        ...

    def advance(self, last: list[int]) -> None:
        """Let the states become those after one column of each running row. last: -1 for rows whose states stay."""
        ...


class ColumnCache(StateCache):
    """States that change only when columns are committed. Rows may differ in length, and columns may form trees.

    Attributes:
        columns: how those of the next forward pass follow one another; None while the prompt is read.
        kept: what captured forward passes have read, if these are the slots that they refer to.
    """

    def __init__(self, rows: int, limit: int, config: Any):
        super().__init__(rows, limit, config)
        self.columns: Columns | None = None
        self._read: dict[int, Read] = {}
        self._together: list[PassRead] = []
        self.kept: dict[Hashable, StaticRead] = {}
        self._most = 0, 0  # columns of the widest forward pass, and bytes of what layers have read in it

    def states_of(self, layer: int) -> list[torch.Tensor]:
        """The states of a layer, [B, ...] each, in storage order: those of convolutions, then those of recurrences."""
        return [states[index] for states, index in _places(self.layers[layer])]

    @contextmanager
    def lent(self, layer: int, states: list[torch.Tensor]) -> Iterator[Callable[[], list[torch.Tensor]]]:
        """A context in which a layer has copies of these states, and may change them. Yields a function that returns them."""
        places = _places(self.layers[layer])
        own = [held[index] for held, index in places]
        for (held, index), state in zip(places, states, strict=True):
            held[index] = state.clone()
        try:
            yield lambda: [held[index] for held, index in places]
        finally:
            for (held, index), state in zip(places, own, strict=True):
                held[index] = state

    def note(self, layer: int, read: Read) -> None:
        """Keep what a layer has read, until `commit`."""
        self._read[layer] = read

    def note_together(self, read: PassRead) -> None:
        """The same for several layers."""
        self._together.append(read)

    def commit(self, counts: list[int], path: Paths | None = None) -> None:
        """As SlotCache. The states become those after each row's last kept column."""
        self.advance(counts, path)
        super().commit(counts, path)

    def advance(self, counts: list[int], path: Paths | None = None) -> None:
        """`commit` for the states alone."""
        if not (self._read or self._together):
            return
        assert self.columns is not None
        if self.columns.width > self._most[0]:
            held: list[torch.Tensor | PassRead] = [*self._together]
            held += [tensor for read in self._read.values() for tensor in read.tensors]
            self._most = self.columns.width, sum(one.nbytes for one in held)
        kept = [(row, counts[row]) for row in self.running]
        last = [(count if path is None or not count else path[row][count - 1] + 1) - 1 for row, count in kept]
        for together in self._together:
            together.advance(last)
        self._together.clear()
        is_same = self.columns.ancestors is None and len({*last}) == 1 and last[0] >= 0
        if self._read:
            device = self.states_of(next(iter(self._read)))[0].device
            self.move_states(self._read, last[0] if is_same else on_device(last, device), self.columns)
        self._read.clear()

    def move_states(self, read: Mapping[int, Read], last: torch.Tensor | int, columns: Columns) -> None:
        """Let the states become those after one column of each of the first rows.

        read: by layer. last: [R] int64, -1 for rows whose states stay; or a column of every running row of a chain.
        """
        rows = len(self.running) if isinstance(last, int) else len(last)
        for layer, of_layer in read.items():
            before = [state[:rows] for state in self.states_of(layer)]
            kept = last if isinstance(last, int) else last.clamp(min=0)
            after = of_layer.states_after(kept, before, columns)
            for state, new in zip(before, after, strict=True):
                if not isinstance(last, int):
                    new = new.where((last >= 0).view(-1, *[1] * (new.dim() - 1)), state)
                state.copy_(new)

    @property
    def state_bytes(self) -> int:  # type: ignore[override]
        """As StateCache, with what layers have read in the widest forward pass."""
        return super().state_bytes + self._most[1]

    def go_back(self) -> None:
        """As StateCache; what was read since is forgotten."""
        self.forget_read()
        super().go_back()

    def forget_read(self) -> None:
        """Forget what was read in the last forward pass."""
        self._read.clear()
        self._together.clear()

    def empty(self) -> ColumnCache:
        """As SlotCache."""
        return ColumnCache(self.rows, self.limit, self.config)

    def lend_states(self, cache: ColumnCache) -> None:
        """Let a call's states be the first rows of those here, which get their values. Made like them if there are none."""
        for own, layer in zip(self.state_layers, cache.state_layers, strict=True):
            for name in STATES:
                held, given = getattr(own, name), getattr(layer, name)
                for index, state in given.items():
                    if state is not None and held[index] is None:
                        with torch.inference_mode(False):
                            held[index] = state.new_empty(self.rows, *state.shape[1:])
                    if state is not None:
                        given[index] = held[index][: cache.rows].copy_(state)
            _copy_flags(layer, own)

    def own_states(self) -> None:
        """Replace the states by copies."""
        for layer in self.state_layers:
            for states, index in _places(layer):
                states[index] = states[index].clone()

    def keep(self, key: Hashable, rows: int) -> None:
        """Copy what was read in a captured forward pass of so many rows to where `kept` has it, by this key."""
        assert self.columns is not None
        if key not in self.kept:
            with torch.inference_mode(False):
                self.kept[key] = StaticRead(self, rows, self.columns, self._read)
        else:
            self.kept[key].fill(self.columns, self._read)
        self.forget_read()


class StaticRead:
    """What layers have read in a captured forward pass, copied to fixed addresses.

    Args:
        cache: the slots and states that captured functions refer to.
        rows: R, of the forward pass.
        columns, read: of it.
    """

    def __init__(self, cache: ColumnCache, rows: int, columns: Columns, read: Mapping[int, Read]):
        self.cache, self.rows, self.width = cache, rows, columns.width
        self.path = [tensor.clone() for tensor in columns.tensors]
        self.read = {layer: _copied(of_layer) for layer, of_layer in read.items()}
        self.compute: Callable[[Any, torch.Tensor], Any] = lambda function, last: None  # as `Runner.compute`

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return sum(tensor.nbytes for tensor in self._tensors(self.path, self.read))

    def fill(self, columns: Columns, read: Mapping[int, Read]) -> None:
        """Replace the contents by those of another forward pass of this shape."""
        given = self._tensors(columns.tensors, read)
        for own, new in zip(self._tensors(self.path, self.read), given, strict=True):
            own.copy_(new)

    def advance(self, last: list[int]) -> None:
        """As `PassRead`."""
        kept = [*(column + 1 for column in last), *[0] * (self.rows - len(last))]
        given = on_device(kept, self.cache.states()[0].device)
        if self.compute(self.move, given) is None:
            self.move(given)

    def move(self, kept: torch.Tensor) -> list[torch.Tensor]:
        """`advance` as a function of tensors. kept: [R] int64, the column after the last kept one; 0 leaves the states."""
        self.cache.move_states(self.read, kept - 1, Columns(self.width, *self.path))
        return []

    @staticmethod
    def _tensors(path: list[torch.Tensor], read: Mapping[int, Read]) -> list[torch.Tensor]:
        return [*path, *(tensor for of_layer in read.values() for tensor in of_layer.tensors)]


def _copied(read: Any) -> Any:
    """The same with copies of its tensors."""
    parts = ((field.name, getattr(read, field.name)) for field in fields(read))
    return replace(
        read, **{name: [t.clone() for t in part] if isinstance(part, list) else part.clone() for name, part in parts}
    )


class SavedStates:
    """What the layers of transformers' cache held after some beginnings of its text, to go back to them: recurrent states, and
    keys and values in a window. All other keys and values can be cut off.

    At most `MOST_SAVED` beginnings are kept, of at most `MOST_SAVED_BYTES`. The first to go are those without which the fewest
    tokens would be read again.
    """

    def __init__(self) -> None:
        self.by_length: dict[int, list[Any]] = {}  # by the number of tokens read, ascending

    @property
    def layers(self) -> list[Any]:
        """All that is kept."""
        return [layer for layers in self.by_length.values() for layer in layers]

    def save(self, length: int, layers: list[Any]) -> None:
        """Copy what layers hold after `length` tokens; nothing if their keys and values can be cut off."""
        if length in self.by_length or all(type(layer) is DynamicLayer for layer in layers):
            return
        self.by_length = dict(sorted({**self.by_length, length: [_without_whole(layer) for layer in layers]}.items()))
        while len(self.by_length) > MOST_SAVED or sum(map(nbytes_of, self.layers)) > MOST_SAVED_BYTES:
            del self.by_length[min(pairwise([0, *self.by_length]), key=lambda gap: gap[1] - gap[0])[1]]

    def keep(self, length: int) -> None:
        """Drop what more than `length` tokens are part of."""
        self.by_length = {read: layers for read, layers in self.by_length.items() if read <= length}

    def restored(self, length: int, layers: list[Any]) -> tuple[int, list[Any]] | None:
        """The longest kept beginning of at most `length` tokens: how many, and its layers. None if there is none.

        layers: of the present text, which begins with it.
        """
        read = max((read for read in self.by_length if read <= length), default=None)
        if read is None:
            return None
        found = [copy.deepcopy(layer) for layer in self.by_length[read]]
        for layer, present in zip(found, layers, strict=True):
            if type(layer) in _WHOLE and present.keys is not None:
                layer.keys, layer.values = present.keys[:, :, :read], present.values[:, :, :read]
        return read, found


def nbytes_of(layer: Any) -> int:
    """Bytes of a cache layer's tensors."""
    parts = [
        part for value in vars(layer).values() for part in (value.values() if isinstance(value, dict) else [value])
    ]
    return sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))


def _without_whole(layer: Any) -> Any:
    """A copy of a layer that shares no tensor, without keys and values that later tokens leave as they are."""
    other = copy.copy(layer)
    if type(layer) in _WHOLE:
        other.keys = other.values = None
    return copy.deepcopy(other)


def held(cache: Cache) -> int:
    """How many tokens a caller's cache holds, counted by its keys; states have no length."""
    return cache.get_seq_length() if any(isinstance(layer, CacheLayerMixin) for layer in cache.layers) else 0


def has_uncounted_states(cache: Cache) -> bool:
    """Whether a caller's cache holds states, but no keys from which to count their tokens."""
    return held(cache) == 0 and any(any(getattr(layer, "has_previous_state", {}).values()) for layer in cache.layers)


def _places(layer: Any) -> list[tuple[dict[int, torch.Tensor], int]]:
    """Where a layer keeps its states."""
    kept = (layer.conv_states, layer.recurrent_states)
    return [(states, index) for states in kept for index, state in states.items() if state is not None]


def _copy_states(source: Any, layer: Any, places: list[int] | None = None) -> None:
    """Copy the states of one layer of a cache into another. places: of the rows in the source, by default in order."""
    for name in STATES:
        given = getattr(source, name).items()
        copies = {index: None if one is None else one[places] if places else one.clone() for index, one in given}
        setattr(layer, name, copies)
    _copy_flags(source, layer)


def copy_row(source: StateCache, at: int, target: StateCache, to: int) -> None:
    """Copy the states of a row into another cache, which gets them if it has none. at, to: indices in the layers' tensors."""
    for layer, own in zip(source.state_layers, target.state_layers, strict=True):
        for name in STATES:
            held = getattr(own, name)
            for index, state in getattr(layer, name).items():
                if state is not None and held[index] is None:
                    held[index] = state.new_zeros(target.rows, *state.shape[1:])
                    _copy_flags(layer, own)
                if state is not None:
                    held[index][to] = state[at]


def _copy_flags(source: Any, layer: Any) -> None:
    for name in _FLAGS:
        setattr(layer, name, dict(getattr(source, name)))
    layer.dtype, layer.device = source.dtype, source.device
