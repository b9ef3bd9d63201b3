"""Shared by the notebooks: predictions, exercises, figures, tables and pictures with sliders."""

from .shown import INK, Table, attempt, compare, figure_style, show, table
from .slider import COLOURS, Picture, slider
from .tree import token_tree

__all__ = [
    "COLOURS",
    "INK",
    "Picture",
    "Table",
    "attempt",
    "compare",
    "figure_style",
    "show",
    "slider",
    "table",
    "token_tree",
]
