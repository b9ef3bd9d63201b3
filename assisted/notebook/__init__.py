"""Shared by the notebooks: exercises, figures, tables and pictures with sliders."""

from .kit import COLOURS, INK, Picture, Table, attempt, figure_style, show, slider, table, token_tree

__all__ = ["COLOURS", "INK", "Picture", "Table", "attempt", "figure_style", "show", "slider", "table", "token_tree"]
