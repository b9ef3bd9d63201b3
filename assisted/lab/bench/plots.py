"""The pictures of a result, as SVG inside a page. Knows results and matplotlib, which comes with the `bench` extra.

Lines and words have the page's own colour, so they are readable on light and on dark ground.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from ...extras import install
from .results import Point, Result, Row

INK = "#0a0b0c"  # replaced by the page's own colour when the picture is written
FAMILIES = {"plain": "#8b93a1", "no draft": "#3f4a5c", "assisted": "#3b82f6"}  # transformers' own have OTHERS
OTHERS = "#e0873a"
PARTS = {"drafting": "#c2518f", "the target's forward passes": "#3b82f6", "the rest": "#8b93a1"}
LINES = ("#3b82f6", "#e0873a", "#22a06b", "#c2518f", "#8b6fd6", "#b3912b", "#2aa3b3", "#8b93a1", "#d1504a", "#6b8e23")
_BESIDE = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "frameon": False}  # legends
WIDTH, LINE, MARGIN = 8.0, 0.3, 0.9  # inches: of a picture, of a method in it, of the axis


def pictures(result: Result) -> list[tuple[str, str]]:
    """Title and SVG of every picture for which this result has data.

    Raises ImportError, naming the extra, without matplotlib.
    """
    matplotlib = require_matplotlib()
    main = result.points[0]
    ran = main.ran
    tall = LINE * len(ran) + MARGIN
    wanted: list[tuple[str, float, Callable[[Any], None]]] = [
        (f"Speedup (1.00 is {main.baseline})", tall, lambda axes: _speedups(axes, ran)),
        ("Milliseconds a token: where they go", tall, lambda axes: _times(axes, ran)),
    ]
    if any(row.acceptance_by_position for row in ran):
        wanted.insert(1, ("Accepted, by position in the draft", 3.2, lambda axes: _positions(axes, ran)))
    for name, other, words in (("context", "batch", "length of the context"), ("batch", "context", "batch size")):
        points = [point for point in result.points if getattr(point, other) == getattr(main, other)]
        if len(points) > 1:
            wanted.append((f"Speedup against the {words}", 3.6, _sweep(points, name, words)))
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "assisted",
        "font.family": "sans-serif",
        "font.size": 9,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    }
    with matplotlib.rc_context(style):
        return [(title, _drawn(height, draw, number)) for number, (title, height, draw) in enumerate(wanted)]


def require_matplotlib() -> Any:
    """The library. Raises ImportError, naming the extra, where it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(f"the page draws with matplotlib: {install('bench')}") from error
    return matplotlib


def _drawn(height: float, draw: Callable[[Any], None], number: int) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    draw(figure.subplots())
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = written.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    for size in ("height", "width"):  # the page's own
        svg = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", svg, count=1)
    # ids are unique only within a picture
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>p{number}-", svg)
    return svg.replace(INK, "currentColor")


def _colour(row: Row) -> str:
    return FAMILIES.get(row.family, OTHERS)


def _named(axes: Any, rows: Sequence[Row]) -> None:
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()


def _speedups(axes: Any, rows: Sequence[Row]) -> None:
    axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
    for line, row in enumerate(rows):
        assert row.speedup is not None
        ratio, low, high = row.speedup.ratio, row.speedup.low, row.speedup.high
        axes.plot([low, high], [line, line], color=_colour(row), linewidth=2.5, solid_capstyle="butt")
        axes.plot(ratio, line, "o", color=_colour(row), markersize=6)
        axes.annotate(f"{ratio:.2f}", (max(high, ratio), line), xytext=(6, 0), textcoords="offset points", va="center")
    _named(axes, rows)
    axes.set_xlim(left=0)
    axes.margins(x=0.12)
    axes.set_xlabel("times as fast; the bar is the 95% interval")


def _positions(axes: Any, rows: Sequence[Row]) -> None:
    drafting = [row for row in rows if row.acceptance_by_position]
    for number, row in enumerate(drafting):
        shares = row.acceptance_by_position
        axes.plot(range(1, len(shares) + 1), shares, marker="o", markersize=3, color=_line(number), label=row.name)
    axes.set(xlabel="position in the draft", ylabel="share accepted", ylim=(0, 1.02))
    axes.legend(**_BESIDE)


def _times(axes: Any, rows: Sequence[Row]) -> None:
    from matplotlib.patches import Patch

    for line, row in enumerate(rows):
        assert row.milliseconds_per_token is not None
        whole = row.milliseconds_per_token
        if not row.shares:
            axes.barh(line, whole, color=_colour(row), height=0.6)
        left = 0.0
        for share, colour in zip(row.shares, PARTS.values(), strict=False):
            axes.barh(line, share * whole, left=left, color=colour, height=0.6)
            left += share * whole
    _named(axes, rows)
    axes.set_xlabel("ms a token")
    axes.legend(handles=[Patch(color=colour, label=name) for name, colour in PARTS.items()], **_BESIDE)


def _sweep(points: Sequence[Point], name: str, words: str) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        values = [getattr(point, name) for point in points]
        rows: dict[str, list[tuple[int, Row]]] = {}
        for value, point in zip(values, points, strict=True):
            for row in point.ran:
                # transformers' fastest setting may differ between points
                title = row.name if row.family in FAMILIES else row.family
                rows.setdefault(title, []).append((value, row))
        axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
        for number, (title, found) in enumerate(rows.items()):
            intervals = [row.speedup for _, row in found if row.speedup is not None]
            at = [value for value, _ in found]
            axes.plot(at, [i.ratio for i in intervals], marker="o", markersize=3, color=_line(number), label=title)
            low, high = [i.low for i in intervals], [i.high for i in intervals]
            axes.fill_between(at, low, high, color=_line(number), alpha=0.15)
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, map(str, values))
        axes.set(xlabel=words, ylabel="speedup")
        axes.set_ylim(bottom=0)
        axes.legend(**_BESIDE)

    return draw


def _line(number: int) -> str:
    return LINES[number % len(LINES)]
