"""The keys and values of one text that goes on from call to call: a conversation, or an agent's growing prompt.

For transformers it is a DynamicCache. For this package it is the target's slots as they were left, the text that they have
read, and what the drafter has read of it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from .cache import SlotCache


class Session(DynamicCache):
    """Keys and values that stay where they are between calls of one pair: `generate(..., past_key_values=session)`.

    Pass the whole text so far as the prompt. What the session has read of it is not read again, by the target or by the
    drafter; where the text was changed, it is read again from there on. Other code can use a session as a DynamicCache: the
    first such use copies the keys and values out of the slots.

    A session is no more than a DynamicCache after padded prompts, embeddings and pictures, and for targets with recurrent
    layers or 2-D masks.

    Args:
        config: the target's.

    Attributes:
        lock: held by the call that uses it.
        kept: the drafter and its state after the last call; None without slots.
        shared: tokens of the text that the prompt of the present call begins with.
    """

    kept: Any
    shared: int
    _slots: SlotCache | None
    _ids: torch.Tensor | None
    _length: int  # columns, which all rows have

    def __init__(self, config: Any):
        self._config = config
        self.lock = threading.Lock()
        self._drop()
        super().__init__(config=config)

    @property
    def layers(self) -> list[Any]:  # type: ignore[override]
        """transformers' layers. Asking for them moves the keys and values out of the slots."""
        if self._slots is not None:
            self._layers = self._dynamic_layers()
            self._drop()
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
        """Whether the keys and values are in the slots of the last call."""
        return self._slots is not None

    def match(self, ids: Any, attention_mask: Any) -> None:
        """Keep only what a prompt begins with. ids, attention_mask: [B, P] or None."""
        if self._slots is None or self._ids is None:
            return
        if not _is_plain(ids, attention_mask, self._slots.rows):
            self._layers = self._dynamic_layers()
            self._drop()
            return
        most = min(self._ids.shape[1], ids.shape[1])
        differ = (self._ids[:, :most].to(ids.device) != ids[:, :most]).any(0).int()
        self.shared = int(differ.argmax()) if bool(differ.any()) else most
        # a head's last column needs the token after it, and the prompt's last token is always read
        self._length = max(0, min(self._length, self.shared - 1, ids.shape[1] - 1))

    def go_on(self, rows: int, limit: int) -> SlotCache:
        """The slots, ready to read the rest of a prompt. limit: as for `SlotCache`. Only if they are `in_slots`.

        Raises ValueError for another number of rows.
        """
        assert self._slots is not None
        if self._slots.rows != rows:
            raise ValueError(
                f"past_key_values: the session has {self._slots.rows} rows, and this call has {rows} (num_return_sequences "
                "included); make a session for each text"
            )
        self._slots.go_on(self._length, limit)
        return self._slots

    def keep(self, slots: SlotCache, ids: torch.Tensor, kept: Any) -> None:
        """Hold what a call leaves. slots: the target's. ids: its text, [B, L] int64. kept: the drafter with its state."""
        self._layers = []
        self._slots, self._ids, self.kept, self._length = slots, ids, kept, ids.shape[1] - 1

    def _dynamic_layers(self) -> list[Any]:
        assert self._slots is not None
        self._slots.rewind([self._length] * self._slots.rows)  # a call that failed may have left more
        return self._slots.to_dynamic(self._config).layers

    def _drop(self) -> None:
        self._slots = None
        self._ids = None
        self.kept = None
        self._length = self.shared = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """Another session with its own copy of the keys and values, for a text that branches."""
        return _with_layers(
            self._config, self._dynamic_layers() if self.in_slots else copy.deepcopy(self._layers, memo)
        )

    def __reduce__(self) -> Any:
        return _with_layers, (self._config, self._dynamic_layers() if self.in_slots else self._layers)


@contextmanager
def using(cache: Any, ids: Any, attention_mask: Any) -> Iterator[None]:
    """A context for one call with a cache, which matters for sessions only. ids, attention_mask: [B, P] or None, of the prompt.

    Raises ValueError while another call uses the session.
    """
    if not isinstance(cache, Session):
        yield
        return
    if not cache.lock.acquire(blocking=False):
        raise ValueError("past_key_values: another call is using this session; make a session for each text")
    try:
        cache.match(ids, attention_mask)
        yield
    finally:
        cache.lock.release()


def _with_layers(config: Any, layers: list[Any]) -> Session:
    made = Session(config)
    made.layers = layers
    return made


def _is_plain(ids: Any, attention_mask: Any, rows: int) -> bool:
    """Whether a prompt consists of tokens alone, without padding. Only then its columns are those of the slots."""
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or len(ids) != rows or ids.shape[1] == 0:
        return False
    return attention_mask is None or (attention_mask.shape == ids.shape and bool(attention_mask.all()))
