"""The shapes of captured forward passes. Rows, columns and slots are rounded up, so that few shapes occur."""

from __future__ import annotations

WIDTHS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # columns of a captured forward pass; wider ones run eagerly
CHEAP = 64  # columns over all rows that take a GPU about as long as one
_NARROW = 8  # columns and rows below which no further shapes are made, since none of them would be faster
_LEAST = 256  # slots that a captured forward pass reads, at least


def rows_for(rows: int, most: int) -> int:
    """Rows of a captured forward pass: a power of two from 8 on, or all rows."""
    return min(most, max(_NARROW, 1 << (rows - 1).bit_length()))


def columns_for(width: int, rows: int) -> int | None:
    """Columns of a captured forward pass; None if it is too wide to capture. One column, or powers of two from 8 on while
    additional columns cost almost nothing; beyond that also sizes in between.
    """
    if width == 1:
        return 1
    least = min(_NARROW, 1 << (CHEAP // rows).bit_length() >> 1)  # of many rows, fewer columns are cheap
    power = max(least, 1 << (width - 1).bit_length())
    if power * rows <= CHEAP and power in WIDTHS:
        return power
    return next((size for size in WIDTHS if size >= width), None)


def columns_among(most: int, width: int, rows: int) -> int | None:
    """`columns_for`, where `rows` of at most so many rows run."""
    return columns_for(width, rows_for(rows, most))


def slots_for(top: int, sizes_open: bool = False) -> int:
    """Slots of a captured forward pass: powers of two, and above 1024 also 3/4 of each power. With sizes_open, multiples of
    1/8 of a power.
    """
    power = max(_LEAST, 1 << (top - 1).bit_length())
    if sizes_open:
        step = power // 8
        return -(-top // step) * step
    between = power // 4 * 3
    return between if between > 1024 and top <= between else power
