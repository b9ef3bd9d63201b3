"""Forward passes over a fixed number of columns, in which a column has the same bits whatever else the pass computes.

For `exact="bits"` where no kernels in C run, such as on a GPU. Kernels for matrix products are chosen by shape, and each choice
adds in another order. So the columns of all rows are laid one after the other and computed in parts of `WIDTH`, the last one
filled up. Attention reads the slots that a column sees in the order of its text, which no shape changes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ..engine.cache import SlotCache
from ..engine.libraries import CACHE, rotary_angles
from ..engine.prepared import PreparedModule, one_by_one

WIDTH = 16
"""Columns of every pass: the rows of a tensor core's tile, so that fewer would take a GPU as long."""


def of_fixed_width(prepared: PreparedModule) -> PreparedModule:
    """The same model, which reads every number of columns in parts of `WIDTH`. Its layers are `FusedLayer`s."""
    # whatever a drafter needs of the prompt, all of its columns are computed
    return replace(
        prepared, last_only=False, run_layers=one_by_one, keeps_bits=True, run_columns=_in_parts, runs="fixed widths"
    )


def why_not(device: torch.device) -> str | None:
    """Why passes of fixed width can't run on a device; None if they can."""
    if device.type != "cuda":
        return None
    try:
        from . import attention_triton  # noqa: F401
    except ImportError as error:
        return f"on a GPU, Triton computes its attention, which torch brings on Linux ({error})"
    return None


def _in_parts(
    prepared: PreparedModule,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor | None,
    cache: SlotCache,
) -> torch.Tensor:
    """`engine.prepared.through_all` in parts of `WIDTH` columns."""
    model, inject = prepared.module, prepared.inject
    base = model.base_model
    rows, width, _ = hidden.shape
    states = hidden if inject is None else inject.hidden.to(hidden.device)
    flat, places = states.flatten(0, 1), positions.expand(rows, width).flatten()
    seen = _Seen(cache, rows, width, mask, hidden.device)
    angles = rotary_angles(base.rotary_emb, flat[None], places[None])  # which may depend on the longest text of all
    made: list[torch.Tensor] = []
    taps: list[tuple[Any, list[torch.Tensor]]] = [(tap, []) for tap in prepared.taps.values()]
    for first in range(0, rows * width, WIDTH):
        count = min(WIDTH, rows * width - first)
        part = F.pad(flat[first : first + count], (0, 0, 0, WIDTH - count))[None]
        position_ids = F.pad(places[first : first + count], (0, WIDTH - count))[None]
        if inject is not None:
            inject.hidden = part
        given: dict[str, Any] = {CACHE: FixedColumns(cache, seen, first, count), "position_ids": position_ids}
        filled = 0, 0, 0, 0, 0, WIDTH - count
        given["position_embeddings"] = tuple(F.pad(one[:, first : first + count], filled) for one in angles)
        last = prepared.run_layers(base.layers, part, attention_mask=None, **given)
        made.append(model.lm_head(base.norm(last))[0, :count])
        for tap, found in taps:
            found.append(tap.hidden[0, :count])
    if inject is not None:
        inject.hidden = states
    for tap, found in taps:
        tap.hidden = torch.cat(found).view(rows, width, -1)
    return torch.cat(made).view(rows, width, -1)


class _Seen:
    """The row and the slot of each column of a forward pass, row by row, and the slots that it sees, in the order of its text.

    mask: [R or 1, 1, n, top] bool, None if a single column sees all slots.
    """

    def __init__(
        self, cache: SlotCache, rows: int, width: int, mask: torch.Tensor | None, device: torch.device
    ) -> None:
        start, self.top = cache.start, cache.top
        assert start is not None
        self.rows = torch.arange(rows, device=device).repeat_interleave(width)
        columns = start + torch.arange(width, device=device)[None] if isinstance(start, int) else start
        self.slots = columns.expand(rows, width).flatten()
        every = torch.arange(self.top, device=device)
        if mask is None:
            mask = torch.ones(1, 1, width, self.top, dtype=torch.bool, device=device)
        sees = mask[:, 0].expand(rows, width, self.top).flatten(0, 1)
        self.counts = sees.sum(-1, dtype=torch.int32)
        order = (sees.cumsum(-1) - 1).where(sees, self.top)  # those that it does not see all go to one place at the end
        lists = torch.zeros(rows * width, self.top + 1, dtype=torch.int64, device=device)
        self.lists = lists.scatter_(1, order, every.expand(rows * width, -1))[:, : self.top].int()


class FixedColumns:
    """A part of a forward pass, which layers take in the place of a cache.

    cache: the slots of all rows. first, count: its columns, of those of `seen`; the other ones of `WIDTH` are filled up.
    """

    def __init__(self, cache: SlotCache, seen: _Seen, first: int, count: int):
        self.cache, self.count, self.top = cache, count, seen.top
        part = slice(first, first + count)
        self.rows, self.slots, self.lists, self.counts = (
            of_all[part] for of_all in (seen.rows, seen.slots, seen.lists, seen.counts)
        )

    def attend(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Write the keys and values of a layer, and read those that each column sees.

        index: of the layer. query: [1, H, n, D]. key, value: [1, G, n, D]. Returns [1, H, n, D], zeros where it is filled up.
        """
        layer, count = self.cache.layer(index), self.count
        layer.make_room(self.top, key, value)
        for store, states in ((layer.keys, key), (layer.values, value)):
            store[self.rows, :, self.slots] = states[0, :, :count].transpose(0, 1)
        made = torch.zeros_like(query)
        if query.is_cuda:
            from .attention_triton import attend

            attend(made[0], query[0], layer.keys, layer.values, self.rows, self.lists, self.counts, scaling)
            return made
        for column, (row, sees) in enumerate(zip(self.rows.tolist(), self.counts.tolist(), strict=True)):
            slots = self.lists[column, :sees]
            keys, values = (store[row, :, slots][None] for store in (layer.keys, layer.values))
            one = query[:, :, column : column + 1].contiguous()
            found = F.scaled_dot_product_attention(one, keys, values, scale=scaling, enable_gqa=True)
            made[:, :, column] = found[:, :, 0]
        return made
