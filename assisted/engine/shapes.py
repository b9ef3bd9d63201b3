"""Which shapes captured passes have: rows, columns and slots are rounded up, so that few of them occur.

Knows numbers alone.
"""

from __future__ import annotations

__all__ = ["WIDTHS", "columns_for", "rows_for", "slots_for"]

WIDTHS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # columns of a captured pass; wider ones run eagerly
_CHEAP = 64  # columns of all rows that a device with graphs reads in about the time of one
_LEAST = 256  # slots that a captured pass looks at


def rows_for(rows: int, most: int) -> int:
    """Rows of a captured pass: a power of two, or all."""
    return min(most, 1 << (rows - 1).bit_length())


def columns_for(width: int, rows: int) -> int | None:
    """Columns of a captured pass; None for more than are captured. Powers of two, as long as more of them cost next to
    nothing; otherwise some between them, too.
    """
    power = 1 << (width - 1).bit_length()
    if power * rows <= _CHEAP and power in WIDTHS:
        return power
    return next((size for size in WIDTHS if size >= width), None)


def slots_for(top: int, sizes_open: bool = False) -> int:
    """Slots of a captured pass: powers of two, from 1024 on with one step between them; of sizes that are left open eighths of
    a power.
    """
    power = max(_LEAST, 1 << (top - 1).bit_length())
    if sizes_open:
        step = power // 8
        return -(-top // step) * step
    between = power // 4 * 3
    return between if between > 1024 and top <= between else power
