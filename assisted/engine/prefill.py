"""Reads a batch of prompts of different lengths in groups of similar length, so that little padding is computed.

Depends only on which columns are padding, not on models or caches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Group = tuple[list[int], int]
"""Rows, ascending, and the first column that is not padding in any of them."""

_PRICE = 512  # columns that take as long as one more forward pass
_PRICE_CPU = 32


def groups(visible: torch.Tensor | None, rows: Sequence[int], device: torch.device) -> list[Group]:
    """The forward passes that read these rows of a batch with the least work, each from its own first column to the end.

    visible: [B, n] bool, False at padding; None without padding. Padding after a row's first token is read.
    """
    if visible is None or len(rows) == 1:
        return [(list(rows), 0 if visible is None else _first(visible, rows)[0])]
    price = _PRICE_CPU if device.type == "cpu" else _PRICE
    width = visible.shape[1]
    ordered = sorted(zip(_first(visible, rows), rows, strict=True), reverse=True)  # the shortest row first
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
