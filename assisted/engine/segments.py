"""Keys and values of consecutive columns of a text, which a pool holds once for all texts that have them in common.

Knows the slots of a single row; nothing of tokens, or of which texts have what in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from .cache import SlotCache


@dataclass(frozen=True, eq=False)
class Segment:
    """Some columns of a row, which never change.

    layers: keys and values of each layer, [1, H, width, D] both; None for a layer that has none of its own.
    """

    layers: tuple[tuple[torch.Tensor, torch.Tensor] | None, ...]
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(store.nbytes for stores in self.layers if stores is not None for store in stores)

    def split(self, at: int) -> tuple[Segment, Segment]:
        """Its first `at` columns and the others, in copies: each can be forgotten without the other."""
        ends = (0, at, self.width)
        one, other = (
            Segment(tuple(None if held is None else _copied(held, first, end) for held in self.layers), end - first)
            for first, end in pairwise(ends)
        )
        return one, other


def cut(slots: SlotCache, ends: Sequence[int]) -> list[Segment]:
    """Move columns out of slots of a single row, which then hold nothing: from each of the ends to the next one.

    Layer by layer, so that no more than one layer is in memory twice.
    """
    layers, found = list(reversed(slots.layers)), [list[tuple[torch.Tensor, torch.Tensor] | None]() for _ in ends[1:]]
    slots.drop()
    while layers:
        layer = layers.pop()
        for part, (first, end) in zip(found, pairwise(ends), strict=True):
            part.append(_copied((layer.keys, layer.values), first, end) if layer.is_initialized else None)
    return [Segment(tuple(part), end - first) for part, (first, end) in zip(found, pairwise(ends), strict=True)]


def joined(segments: Sequence[Segment], length: int, limit: int, right_aligned: bool) -> SlotCache:
    """Slots of a single row with a copy of the first `length` columns. limit, right_aligned: as for `SlotCache`."""
    slots = SlotCache(1, limit, right_aligned)
    slots.reserve(length)
    first = 0
    for segment in segments:
        end = min(first + segment.width, length)
        for index, stores in enumerate(segment.layers):
            layer = slots.layer(index)
            if stores is not None and first < end:
                layer.make_room(end, *stores)
                layer.keys[:, :, first:end] = stores[0][:, :, : end - first]
                layer.values[:, :, first:end] = stores[1][:, :, : end - first]
        first = end
    slots.lengths, slots.start = [length], length
    return slots


def _copied(stores: tuple[torch.Tensor, torch.Tensor], first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (store[:, :, first:end].clone() for store in stores)
    return keys, values
