"""Shared by the notebooks: checks of exercises, the look of figures and tables. Knows nothing of decoding. Pictures with
sliders are in slider.py, token trees in tree.py. matplotlib comes with the `notebooks` extra."""

from __future__ import annotations

import html
import linecache
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assisted.extras import install

from .slider import COLOURS

INK = "#7d8082"  # text and axes: contrast 4 with white and with dark ground


def attempt(check: Callable[..., None], *candidates: Any) -> None:
    """Print whether an exercise is solved: "Correct." if `check(*candidates)` raises nothing, else what is missing.

    An unsolved exercise is no error, so a notebook runs to its end. If a candidate raised the error, its line is shown.
    """
    try:
        check(*candidates)
    except NotImplementedError:
        print("Not solved yet: the function is still to be written.")
    except Exception as error:
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        said = f"{kind}{_first_line(error)}".rstrip(": ") or "the check does not hold."
        print(f"Not solved yet: {said}{_line_of(error, candidates)}")
    else:
        print("Correct.")


def compare(prediction: Mapping[str, Any], measured: Mapping[str, Any], digits: int = 2) -> None:
    """Show what a reader predicted beside what was measured.

    prediction: by name, a value or None if nothing was written down. measured: of the same names. digits: of floats.

    Raises ValueError if the names differ.
    """
    if prediction.keys() != measured.keys():
        raise ValueError(f"prediction: has {', '.join(prediction)}; measured were {', '.join(measured)}.")
    yours = {name: "-" if value is None else value for name, value in prediction.items()}
    show(table(["", "your prediction", "measured"], [[name, yours[name], measured[name]] for name in measured], digits))


def figure_style() -> None:
    """Set up matplotlib: SVG figures, 7 inches wide, readable on white and on dark ground."""
    try:
        import matplotlib
        from matplotlib import rcsetup
    except ImportError as error:
        raise ImportError(f"the notebooks draw with matplotlib: {install('notebooks')}") from error
    inks = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    style: Any = {
        **dict.fromkeys(inks, INK),
        "legend.labelcolor": INK,
        "figure.figsize": (7.0, 3.4),
        "figure.constrained_layout.use": True,
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
        "axes.prop_cycle": rcsetup.cycler(color=[COLOURS[name] for name in COLOURS if name != "plain"]),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "grid.color": INK,
        "grid.alpha": 0.25,
        "legend.frameon": False,
        "font.size": 10,
        "lines.linewidth": 2.0,
        "image.cmap": "cividis",
        "svg.fonttype": "none",  # text stays text, with the page's font, and can be searched
        "svg.hashsalt": "assisted",
    }
    matplotlib.rcParams.update(style)
    if _in_kernel():
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))


@dataclass(frozen=True)
class Table:
    """Rows under a header, shown as HTML in a notebook and as aligned text elsewhere."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        first, *others = ["  ".join(map(_padded, line, widths)).rstrip() for line in lines]
        return "\n".join([first, "  ".join("-" * width for width in widths), *others])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        numeric = [all(_is_number(row[column]) for row in self.rows) for column in range(len(self.header))]
        style = [' style="text-align: right"' if right else ' style="text-align: left"' for right in numeric]
        lines = [
            "".join(f"<{tag}{how}>{html.escape(cell)}</{tag}>" for how, cell in zip(style, line, strict=True))
            for tag, line in [("th", self.header), *(("td", row) for row in self.rows)]
        ]
        head, *body = [f"<tr>{line}</tr>" for line in lines]
        return f"<table>\n<thead>{head}</thead>\n<tbody>\n" + "\n".join(body) + "\n</tbody>\n</table>"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], digits: int = 2) -> Table:
    """A table to show. digits: of floats, after the point.

    Raises ValueError if a row and the header have different lengths.
    """
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"rows: {tuple(row)!r} has {len(row)} cells, and the header has {len(header)}.")
    written = ((f"{cell:.{digits}f}" if isinstance(cell, float) else str(cell) for cell in row) for row in rows)
    return Table(tuple(header), tuple(tuple(row) for row in written))


def show(*things: Any) -> None:
    """Show things below the cell, each in its best form. Outside of a notebook, print them."""
    if not _in_kernel():
        print(*things, sep="\n")
        return
    from IPython.display import display

    display(*things)


def _padded(cell: str, width: int) -> str:
    return cell.rjust(width) if _is_number(cell) else cell.ljust(width)


def _is_number(cell: str) -> bool:
    try:
        float(cell.rstrip("%"))
    except ValueError:
        return False
    return True


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _line_of(error: Exception, candidates: Sequence[Any]) -> str:
    """Where a candidate raised the error: its innermost line, or nothing if the error comes from elsewhere."""
    codes = [code for one in candidates if (code := getattr(one, "__code__", None)) is not None]
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    began = next((at for at, (frame, _) in enumerate(frames) if frame.f_code in codes), len(frames))
    own = [
        (frame, line)
        for frame, line in frames[began:]
        if frame.f_code.co_filename == frames[began][0].f_code.co_filename
    ]
    if not own:
        return ""
    frame, line = own[-1]
    source = linecache.getline(frame.f_code.co_filename, line).strip()
    return f"\n  in {frame.f_code.co_name}, line {line}" + (f": {source}" if source else "")


def _in_kernel() -> bool:
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None
