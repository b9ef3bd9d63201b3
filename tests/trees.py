"""Random token trees for the property tests, and the plain walk over parents that says what they mean."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

__all__ = ["any_parents", "walk"]


def any_parents(rows: int, width: int) -> Any:
    """A strategy for parents [B][n]: of each node any earlier one, or -1."""
    return st.lists(st.tuples(*(st.integers(-1, node - 1) for node in range(width))), min_size=rows, max_size=rows)


def walk(parents: Any, node: int) -> list[int]:
    """The nodes from the root to `node`."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path
