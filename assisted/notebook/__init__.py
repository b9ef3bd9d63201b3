"""What the notebooks share."""

from .kit import COLOURS, INK, Picture, Table, attempt, figure_style, show, slider, table

__all__ = ["COLOURS", "INK", "Picture", "Table", "attempt", "figure_style", "show", "slider", "table"]
