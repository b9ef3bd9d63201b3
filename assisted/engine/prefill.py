"""Reads a batch of prompts of different lengths in groups of similar length, so that little padding is computed.

Depends on slots and on which columns are padding, not on models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from .cache import SlotCache
from .parts import Tap

Group = tuple[list[int], int]
"""Rows, ascending, and the first column that is not padding in any of them."""

_PRICE = 512  # columns that take as long as one more forward pass
_PRICE_CPU = 32


def by_groups(
    cache: SlotCache,
    taps: Iterable[Tap],
    width: int,
    device: torch.device,
    read: Callable[[list[int], int], torch.Tensor],
    apart: bool,
    alike: bool = False,
) -> torch.Tensor:
    """Read a prompt of `width` columns, in the groups of rows that take the least work. Taps then hold all rows' states.

    read: a forward pass over given rows, starting at a given column, that returns the output at the last column,
    [rows, 1, ...]. apart: whether rows may be read apart; otherwise all are read at once. alike: read each
    row as if it were alone. Returns the output of all rows, [B, 1, ...].
    """
    taps, rows = list(taps), sorted(cache.running)
    cache.alike = alike
    hidden = 0 if cache.visible is None else cache.visible.shape[1]
    apart = apart and not cache.layers and hidden <= width
    parts: list[Group] = groups(cache.visible, rows, device, alike) if apart else [(rows, 0)]
    if parts == [(cache.order, 0)]:
        return read(rows, 0)
    last: torch.Tensor | None = None
    states: list[torch.Tensor] = []
    for rows, first in parts:
        with cache.reading(rows, first):
            part = read(rows, first)
        if last is None:
            last = part.new_zeros(cache.rows, *part.shape[1:])
            states = [tap.hidden.new_zeros(cache.rows, width, tap.hidden.shape[-1]) for tap in taps]
        last[rows] = part
        for of_all, tap in zip(states, taps, strict=True):
            of_all[rows, first:] = tap.hidden
    for of_all, tap in zip(states, taps, strict=True):
        tap.hidden = of_all
    assert last is not None
    return last


def groups(visible: torch.Tensor | None, rows: Sequence[int], device: torch.device, alike: bool = False) -> list[Group]:
    """The forward passes that read these rows of a batch with the least work, each from its own first column to the end.

    visible: [B, n] bool, False at padding; None without padding. alike: each row by itself, without any padding before its
    first token. Padding after it is read.
    """
    starts = [0] * len(rows) if visible is None else _first(visible, rows)
    if alike or len(rows) == 1:
        return [([row], first) for row, first in zip(rows, starts, strict=True)]
    if visible is None:
        return [(list(rows), 0)]
    price = _PRICE_CPU if device.type == "cpu" else _PRICE
    width = visible.shape[1]
    ordered = sorted(zip(starts, rows, strict=True), reverse=True)  # the shortest row first
    # for the first i rows: the least work, and the start of their last group
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, len(ordered) + 1):
        longest = width - ordered[end - 1][0]
        best.append(min((best[i][0] + price + (end - i) * longest, i) for i in range(end)))
    found: list[Group] = []
    end = len(ordered)
    while end:
        start = best[end][1]
        found.append((sorted(row for _, row in ordered[start:end]), ordered[end - 1][0]))
        end = start
    return found


def _first(visible: torch.Tensor, rows: Sequence[int]) -> list[int]:
    """The first column of each row that is not padding; the last column in rows that are all padding."""
    counts = visible[list(rows)]
    first = counts.int().argmax(1).where(counts.any(1), visible.shape[1] - 1)
    found: list[int] = first.tolist()
    return found
