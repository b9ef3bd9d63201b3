"""Shared by the notebooks: exercises, figures, tables and pictures with sliders."""

from .kit import COLOURS, INK, Picture, Table, attempt, figure_style, show, slider, table

__all__ = ["COLOURS", "INK", "Picture", "Table", "attempt", "figure_style", "show", "slider", "table"]
