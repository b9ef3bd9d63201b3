"""The keys and values of one text that goes on from call to call: a conversation, or an agent's growing prompt.

For transformers it is a DynamicCache. For this package it is the target's slots as they were left, the text that they have
read, and what the drafter has read of it.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from .cache import SlotCache, SlotLayer
from .segments import Segment, cut, joined
from .states import SavedStates, StateCache, copy_row, held, nbytes_of
from .traits import Change

LEAST = 16  # tokens; fewer are read again


def _filled(layers: list[Any]) -> list[Any]:
    """Those that hold keys."""
    return [layer for layer in layers if getattr(layer, "keys", None) is not None]


class Session(DynamicCache):
    """Keys and values that stay where they are between calls of one pair: `generate(..., past_key_values=session)`.

    Pass the whole text so far as the prompt. What the session has read of it is not read again, by the target or by the
    drafter; where the text or its padding was changed, it is read again from there on. Recurrent states can't go back to any
    earlier token, so some are kept (`SavedStates`): those before each call, before the last token of a prompt, and where a text
    was changed. The text is then read again from the last of them. Other code can use a session as a DynamicCache: the first
    such use copies the keys and values out of the slots.

    A session is no more than a DynamicCache after embeddings and pictures, after calls with the new tokens alone, and after
    other code has read on with it: changes of the text before are not noticed.

    Args:
        config: the target's.
        model: the target, the only one that may use it; None if that is not known.

    Attributes:
        lock: held by the call that uses it.
        ids: the text that was read, [B, L] int64, and its last token; None if that is not known.
        mask: the attention mask of its beginning, [B, any], in which later tokens are not hidden; None if none are.
        kept: the drafter and its state after the last call; None if there is none.
        shared: tokens of the text that the prompt of the present call begins with.
        ends: of parts of the present prompt, after which states that can't go back are to be kept (`mark`); ascending.
        forks: the present call copies what it goes on from.
        segments: what was in the slots, in parts that other sessions of a pool may have, too; empty if it is still there.
    """

    ids: torch.Tensor | None
    mask: torch.Tensor | None
    kept: Any
    shared: int
    ends: Sequence[int] = ()
    forks: bool
    segments: Sequence[Segment] = ()
    saved: SavedStates
    _slots: SlotCache | None
    _length: int  # columns, which all rows have
    _is_after = False  # a change of rotary angles: they were, when the text was read
    _given: tuple[int, torch.Tensor | None] | None = (
        None  # rows and mask of the present prompt, if it is the whole text
    )

    def __init__(self, config: Any, model: Any = None):
        self._config = config
        self._models = None if model is None else weakref.WeakSet([model])
        self.lock = threading.Lock()
        self._drop()
        super().__init__(config=config)

    @property
    def layers(self) -> list[Any]:  # type: ignore[override]
        """transformers' layers. Asking for them moves the keys and values out of the slots."""
        if self._slots is not None:
            self._layers, ids = self._dynamic_layers(), self.ids
            ids = None if ids is None else ids[:, : self._length + 1]  # a call that failed may have left less
            self._drop()
            self.ids = ids
        return self._layers

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        self._layers = layers
        self._drop()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that have been read."""
        return self._length if self.in_slots else super().get_seq_length(layer_idx)

    @property
    def in_slots(self) -> bool:
        """Whether the keys and values are in the slots of the last call, or were there."""
        return self._slots is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the keys, values and states, and of what the drafter keeps; without segments, which others may have, too."""
        drafting = None if self.kept is None else self.kept[1]
        layers = [*self.saved.layers, *(self._layers if self._slots is None else ())]
        slots = () if self._slots is None else self._slots.stores
        held = sum(map(nbytes_of, layers)) + sum(store.nbytes for store in slots)
        return held + (0 if drafting is None else drafting.nbytes)

    def require(self, model: Any) -> None:
        """Raise ValueError unless it is a session of this target."""
        if self._models is not None and model not in self._models:
            raise ValueError(
                "past_key_values: this session holds keys and values of another model; make one with this model's session()"
            )

    def match(self, ids: Any, attention_mask: Any, resumes: bool = True, change: Change | None = None) -> None:
        """Keep only what a prompt begins with.

        ids, attention_mask: [B, P] or None. resumes: whether the target can read on after what it has read; if not, nothing
        is kept. change: of the target's rotary angles. A prompt that is read whole has those of its end everywhere, so nothing
        is kept that was read with others.
        """
        whole = is_whole(ids, attention_mask)
        self._given = (len(ids), attention_mask) if whole else None
        self.ends = ()
        if not whole:
            self.layers = self.layers
            return
        parted, width = 0, ids.shape[1]
        side = change is not None and width > change.position
        if change is not None and self.ids is not None and (side != self._is_after or (side and not change.once)):
            self.forget()
        self._is_after = side
        if self.ids is not None and len(ids) == len(self.ids):
            parted, known = self._shared(ids, attention_mask), self.ids.shape[1] - 1
            if self._slots is not None and (attention_mask is None or bool(attention_mask.all())):
                self.begin(parted, width)
                return
            self._go_back(ids, parted, known, resumes)
        if resumes and is_plain(ids, attention_mask, len(ids)):
            ends = [held(self)]
            for end in (min(parted, width - 1), width - 1):
                if end - ends[-1] >= LEAST:
                    ends.append(end)
            self.ends = ends[1:]

    def _go_back(self, ids: torch.Tensor, shared: int, known: int, resumes: bool) -> None:
        """`match` in transformers' layers, which have read `known` tokens, for a prompt that begins with `shared` of them."""
        self.saved.keep(min(shared, known))  # a call that failed may have left more
        read, kept = held(self), min(shared, ids.shape[1] - 1)
        if resumes and shared >= known and read < ids.shape[1]:
            self.shared = shared
            if read == known and self._slots is None:
                self.saved.save(known, self.layers)
        elif kept and all(type(layer) is DynamicLayer and layer.is_initialized for layer in self.layers):
            for layer in self.layers:
                layer.keys, layer.values = layer.keys[:, :, :kept], layer.values[:, :, :kept]
            self.ids, self.kept = ids[:, : kept + 1], None
        elif resumes and (restored := self.saved.restored(kept, self.layers)) is not None:
            length, self._layers = restored
            self.ids, self.kept = ids[:, : length + 1], None
        else:
            self.forget()

    @property
    def is_read_whole(self) -> bool:
        """Whether the present prompt is the whole text, and consists of tokens alone."""
        return self._given is not None

    def forget(self) -> None:
        """Hold nothing, as at the beginning."""
        self.layers = DynamicCache(config=self._config).layers

    def _shared(self, ids: torch.Tensor, attention_mask: torch.Tensor | None) -> int:
        """How many columns a prompt, [B, P], has in common with the text at its beginning."""
        assert self.ids is not None
        most = min(self.ids.shape[1], ids.shape[1])
        differ = self.ids[:, :most].to(ids.device) != ids[:, :most]
        if attention_mask is not None or self.mask is not None:
            masks = (mask_over(mask, most, ids) for mask in (attention_mask, self.mask))
            differ |= next(masks) != next(masks)
        columns = differ.any(0).int()
        return int(columns.argmax()) if bool(columns.any()) else most

    def begin(self, shared: int, width: int) -> None:
        """Prepare a call whose prompt of `width` tokens begins with `shared` tokens of the text."""
        self.shared = shared
        # a head's last column needs the token after it, and the prompt's last token is always read
        self._length = max(0, min(self._length, shared - 1, width - 1))

    def go_on(self, rows: int, limit: int) -> SlotCache:
        """The slots, ready to read the rest of a prompt. limit: as for `SlotCache`. Only if they are `in_slots`.

        Raises ValueError for another number of rows.
        """
        assert self._slots is not None
        self.require_rows(rows)
        slots = self._whole(limit)
        self._slots = go_on(slots, self._length, limit, self.forks and slots is self._slots)
        self.segments = ()
        return self._slots

    def cut(self, end: int, before: Sequence[Segment] = ()) -> None:
        """Move what is in the slots into segments, for slots of a single row without padding.

        Args:
            end: the column at which one segment ends; it may be the last.
            before: segments with the columns until there, which are forgotten here.
        """
        assert self._slots is not None
        parts = cut(self._slots, (end, self._length) if before else (0, end, self._length))
        self.segments = [*before, *(part for part in parts if part.width)]

    def require_rows(self, rows: int) -> None:
        """Raise ValueError if the session has another number of rows."""
        held = {self._slots.rows} if self._slots is not None else {len(layer.keys) for layer in _filled(self.layers)}
        if held - {rows}:
            raise ValueError(
                f"past_key_values: the session has {max(held)} rows, and this call has {rows} (num_return_sequences "
                "included); make a session for each text"
            )

    def keep(self, slots: SlotCache, ids: torch.Tensor, kept: Any) -> None:
        """Hold what a call leaves. slots: the target's. ids: its text, [B, L] int64. kept: the drafter with its state."""
        self._layers = []
        self._slots, self.segments = slots, ()
        self._note(ids, kept)

    def keep_copy(self, slots: SlotCache, ids: torch.Tensor, kept: Any, mask: torch.Tensor | None = None) -> None:
        """The same in transformers' layers, for slots that can't go back to an earlier token. mask: of the prompt."""
        self._slots, self._layers = None, slots.to_dynamic(self._config).layers
        self._note(ids, kept, mask)

    def mark(self, slots: SlotCache, ids: torch.Tensor) -> None:
        """Keep the states after a part of the present prompt. slots: that have read it. ids: [B, n + 1] int64, the part and the
        next token."""
        self.saved.save(ids.shape[1] - 1, slots.to_dynamic(self._config).layers)

    def read_by(self, generate: Callable[[], Any]) -> Any:
        """The output of the target's own `generate`, which reads on in transformers' layers."""
        rows, mask = self._given or (0, None)
        try:
            output = generate()
        except BaseException:
            if rows:
                self.forget()  # it may have read tokens that nobody got
            raise
        ids = output if isinstance(output, torch.Tensor) else output["sequences"]
        in_layers = {len(layer.keys) for layer in _filled(self.layers)}
        if {rows, *in_layers} == {len(ids)} and held(self) == ids.shape[1] - 1:
            self._note(ids, None, mask)
        elif rows:
            self.forget()  # it holds another text, as that of beams, or of a model that has read on in a cache of its own
        else:
            self.ids = None
        return output

    def branch(self) -> Session:
        """Another session with the same text. Its first call copies what it goes on from; until its end, this one must stay
        as it is."""
        other = Session(self._config)
        other._models = self._models
        other._layers, other._slots, other.segments = self._layers, self._slots, self.segments
        other.ids, other.kept, other._length, other.forks = self.ids, self.kept, self._length, True
        return other

    def _note(self, ids: torch.Tensor, kept: Any, mask: torch.Tensor | None = None) -> None:
        if mask is not None and not bool(mask[:, -1].all()):
            ids = torch.full_like(
                ids, -1
            )  # the positions after a hidden token are not those of a text that is read at once
        self.ids, self.mask, self.kept, self._length, self.forks = ids, mask, kept, ids.shape[1] - 1, False

    def _dynamic_layers(self) -> list[Any]:
        slots = self._whole(self._length)
        slots.rewind([self._length] * slots.rows)  # a call that failed may have left more
        return slots.to_dynamic(self._config).layers

    def _whole(self, limit: int) -> SlotCache:
        """The slots; if they are in segments, others with a copy. limit: as for `SlotCache`."""
        assert self._slots is not None
        if not self.segments:
            return self._slots
        return joined(self.segments, self._length, limit, self._slots.right_aligned)

    def _drop(self) -> None:
        self._slots, self.segments = None, ()
        self.ids = self.mask = self.kept = None
        self._length = self.shared = 0
        self.forks = False
        self.saved = SavedStates()

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """Another session with its own copy of the keys and values, for a text that branches."""
        layers = self._dynamic_layers() if self.in_slots else copy.deepcopy(self._layers, memo)
        other = _with_layers(self._config, layers, self.ids, self.mask)
        other._models = self._models
        other.saved, other._is_after = copy.copy(self.saved), self._is_after
        return other

    def __reduce__(self) -> Any:
        layers = self._dynamic_layers() if self.in_slots else self._layers
        return _with_layers, (self._config, layers, self.ids, self.mask, self._is_after)


@contextmanager
def using(
    cache: Any, model: Any, ids: Any, attention_mask: Any, resumes: bool = True, change: Change | None = None
) -> Iterator[None]:
    """A context for one call with a cache, which matters for sessions only. model: the target. ids, attention_mask: [B, P] or
    None, of the prompt. resumes, change: as for `Session.match`.

    Raises ValueError while another call uses the session, and for one of another model.
    """
    if not isinstance(cache, Session):
        yield
        return
    cache.require(model)
    if not cache.lock.acquire(blocking=False):
        raise ValueError("past_key_values: another call is using this session; make a session for each text")
    try:
        cache.match(ids, attention_mask, resumes, change)
        yield
    finally:
        cache.lock.release()


def can_go_on(slots: SlotCache) -> bool:
    """Whether `go_on` is possible: slots are columns of the text, in all rows, or the same ones are missing."""
    aligned = slots.right_aligned and slots.rows > 1  # a single row is never shifted
    is_text = slots.visible is None and not any(slots.prompt_padding) and len({*slots.padding}) == 1
    return type(slots) is SlotCache and not aligned and is_text


def go_on(slots: SlotCache, length: int, limit: int, forks: bool = False) -> SlotCache:
    """Slots prepared to read a further prompt after the first `length` columns of every row.

    limit: as for `SlotCache`. forks: in a copy, so that the others stay as they are.
    """
    length += slots.padding[0]  # which is below 0 where a window has dropped slots
    if forks:
        slots = _copy(slots, length, limit)
    for place in range(slots.rows):
        if slots.order[place] != place:
            slots.swap([place], [slots.order.index(place)])
    slots.running = list(slots.order)
    slots.limit = max(slots.limit, limit, 2 * slots.capacity)  # over all prompts, memory grows by doubling
    slots.lengths, slots.start = [length] * slots.rows, None
    for layer in slots.slot_layers:
        layer.filled = length
    return slots


def take_over(cache: SlotCache, row: int, one: SlotCache) -> None:
    """Give a row what slots of a single row hold, all `lengths[0]` columns, while other rows keep theirs."""
    copy_columns(one, 0, cache, row, 0)
    cache.padding[row], cache.prompt_padding[row] = one.padding[0], one.prompt_padding[0]


def copy_columns(source: SlotCache, row: int, target: SlotCache, to: int, first: int, end: int | None = None) -> None:
    """Copy columns of a row, from `first` to `end` or its last one, and its states, to a row of other slots that holds those
    before."""
    at, place, end = source.order.index(row), target.order.index(to), source.lengths[row] if end is None else end
    target.limit = max(target.limit, end)
    for index, layer in enumerate(source.layers):
        # others share another layer's keys, or have states alone
        if isinstance(layer, SlotLayer) and layer.is_initialized:
            target.layer(index).make_room(end, layer.keys, layer.values)
            for held, store in zip(_stores(target.layer(index)), _stores(layer), strict=True):
                held[place, :, first:end] = store[at, :, first:end]
    if isinstance(source, StateCache) and isinstance(target, StateCache):
        copy_row(source, at, target, place)
    target.lengths[to] = end
    target.start = max(target.lengths)


def _stores(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.keys, layer.values


def _copy(slots: SlotCache, length: int, limit: int) -> SlotCache:
    other = SlotCache(slots.rows, limit, slots.right_aligned)
    other.reserve(length)
    other.padding = list(slots.padding)
    places = [slots.order.index(row) for row in range(slots.rows)]
    for layer in slots.slot_layers:
        own = SlotLayer(other)
        other.layers.append(own)
        if layer.is_initialized:
            stores = (store[places, :, :length] for store in (layer.keys, layer.values))
            own.hold(SimpleNamespace(**dict(zip(("keys", "values"), stores, strict=True))), length)
    return other


def _with_layers(
    config: Any, layers: list[Any], ids: torch.Tensor | None, mask: torch.Tensor | None, is_after: bool = False
) -> Session:
    made = Session(config)
    made.layers = layers
    made.ids, made.mask, made._is_after = ids, mask, is_after
    return made


def is_whole(ids: Any, attention_mask: Any) -> bool:
    """Whether a prompt consists of tokens alone, [B, P], and is the whole text: with the new tokens alone, a mask is longer."""
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.shape[1] == 0:
        return False
    return attention_mask is None or attention_mask.shape == ids.shape


def mask_over(mask: torch.Tensor | None, width: int, ids: torch.Tensor) -> torch.Tensor:
    """What a mask [B, any] shows of the first columns, [B, width] bool; None, and columns after its end, hide nothing.

    ids: [B, any], on the device of the result.
    """
    seen = torch.ones(len(ids), width, dtype=torch.bool, device=ids.device)
    if mask is not None:
        seen[:, : mask.shape[1]] = mask[:, :width].to(ids.device) != 0
    return seen


def is_plain(ids: Any, attention_mask: Any, rows: int) -> bool:
    """Whether a prompt consists of tokens alone, without padding. Only then its columns are those of the slots."""
    return is_whole(ids, attention_mask) and len(ids) == rows and (attention_mask is None or bool(attention_mask.all()))
