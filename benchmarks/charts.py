"""The charts that the docs show, drawn by matplotlib from the figures in this folder: one function each, by name in CHARTS.

Text and axes take the color of the page. A chart is 400 units wide, so that its text can be read on a phone.
"""

from __future__ import annotations

import html
import io
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

FOLDER = Path(__file__).parent
FIGURES = FOLDER / "smollm2_kernels.json"
TIMES = "Speedup over the fastest plain mode; lines: 95% intervals"
HEAD = '["suffix", "zoo:smollm2-eagle3"]'
GREY, ORANGE, BLUE, GREEN, PURPLE = "#8b93a1", "#c47f13", "#4f7fd9", "#2f9e77", "#9b6fd0"
INK = "#0a0b0c"  # replaced by the page's own color when a chart is written
WIDTH, LINE = 400, 24  # units: of a chart, of a bar
STYLE = {
    **{"svg.fonttype": "none", "svg.hashsalt": "assisted", "font.family": "sans-serif", "font.size": 13},
    **{"figure.facecolor": "none", "axes.facecolor": "none", "xtick.labelsize": 11},
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **{f"axes.spines.{side}": False for side in ("top", "right", "bottom", "left")},
}
Told = Mapping[str, Mapping[str, float]]


class Bar(NamedTuple):
    name: str
    value: float
    color: str = BLUE
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, name: str, speedup: Mapping[str, float], color: str) -> Bar:
        return cls(name, speedup["ratio"], color, speedup["low"], speedup["high"])


Rows = Mapping[str, Sequence[Bar]]


# Kinds of charts


def drawn(caption: str, height: float, draw: Callable[[Any], None], told: Told) -> str:
    """A chart as SVG. height: in units, without the caption. Those who cannot see it hear the caption and all values."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / 72, (height + 24) / 72), layout="constrained")
        figure.suptitle(caption, x=0.005, ha="left", fontsize=12, alpha=0.75)
        draw(figure.subplots())
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = re.sub(r"(?s)^.*?(?=<svg)|<metadata>.*?</metadata>|<style.*?</style>", "", written.getvalue())
    values = "; ".join(
        f"{title}: " * bool(title) + ", ".join(f"{name} {value:.4g}" for name, value in row.items())
        for title, row in told.items()
    )
    words = html.escape(f"{caption}. {values}", quote=True)
    svg = re.sub(r' (height|width)="[^"]*pt"', "", svg, count=2)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{words}" style="max-width: 26rem"', 1)
    mark = f"c{zlib.crc32(words.encode())}"  # ids are unique only within a chart
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{mark}-", svg).replace(INK, "currentColor")


def bars(panels: Rows, caption: str = TIMES, digits: int = 2, line: float | None = 1, thin: bool = False) -> str:
    """Horizontal bars with their intervals. thin: those of a panel stand close beside its name, with names in a legend."""
    size, gap = (13, 10) if thin else (LINE, 12)
    legend = {bar.name: bar.color for some in panels.values() for bar in some} if thin else {}
    at, places, titles = 0.0, {}, {}
    for title, some in panels.items():
        if title and not thin:
            titles[title] = at + 12
            at += 24
        places[title] = [at + size * (number + 0.5) for number in range(len(some))]
        at += size * len(some) + gap

    def draw(axes: Any) -> None:
        for title, some in panels.items():
            for place, bar in zip(places[title], some, strict=True):
                axes.barh(place, bar.value, height=size - (2 if thin else 6), color=bar.color)
                if bar.low is not None and bar.high is not None and bar.high > bar.low:
                    axes.plot([bar.low, bar.high], [place, place], color=INK, linewidth=1)
                end, words = max(bar.value, bar.high or 0), f"{bar.value:.{digits}f}"
                shift = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
                axes.annotate(words, (end, place), fontsize=11 if thin else 13, **shift)
        for title, place in titles.items():
            axes.text(0, place, title, fontweight="bold", va="center")
        names = {place: bar.name for t, some in panels.items() for place, bar in zip(places[t], some, strict=True)}
        if thin:
            names = {sum(each) / len(each): title for title, each in places.items() if each}
        axes.set_yticks(list(names), names.values())
        longest = max(max(bar.value, bar.high or 0) for some in panels.values() for bar in some)
        axes.set(xticks=[], xlim=(0, 1.22 * longest), ylim=(at - gap, 0))
        axes.tick_params(length=0)
        if line is not None:
            axes.axvline(line, color=INK, linewidth=1, linestyle=":")
        _explained(axes, legend)

    told = {title: {bar.name: bar.value for bar in some} for title, some in panels.items()}
    return drawn(caption, at - gap + 18 * -(-len(legend) // 2), draw, told)


def _explained(axes: Any, colors: Mapping[str, str]) -> None:
    """A legend below the bars, in two columns."""
    if colors:
        patches = [Patch(color=color, label=name) for name, color in colors.items()]
        figure = axes.figure
        figure.legend(handles=patches, loc="outside lower left", ncols=2, frameon=False, fontsize=11, handlelength=1)


# The charts


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def rows_of(race: Mapping[str, Any], shown: Mapping[str, str]) -> list[Bar]:
    """The methods of a race that are in `shown`, there by name or, of transformers' own, by family."""
    colors = {"plain": GREY, "no draft": GREEN, "assisted": BLUE}
    found = []
    for row in race["points"][0]["rows"]:
        known = shown.get(row["name"]) or shown.get(row["family"] if row["family"].startswith("transformers") else "")
        if known:
            found.append(Bar.of(known, row["speedup"], colors.get(row["family"], ORANGE)))
    return found


def short(title: str) -> str:
    """The title of a race without what its table says."""
    return re.sub(r", (float32|bfloat16|top-p [\d.]+|\d+ tokens)", "", title)


def races(file: str) -> dict[str, Any]:
    return {title: race for title, race in read(file).items() if title != "about"}


SHOWN = {  # method -> its name in the chart
    "plain": "plain generate",
    "plain, static cache, compiled": "plain, compiled",
    "transformers lookup": "transformers prompt lookup",
    "no draft": "assisted, no draft",
    '"self:int8"': "assisted, 8-bit copy",
    '"suffix"': "assisted, suffix draft",
    HEAD: "assisted, suffix and EAGLE-3",
    '"self:int4"': "assisted, 4-bit copy",
}
DRAFTS = {
    **{"transformers assisted": "transformers, draft model", "transformers lookup": "transformers, lookup"},
    **{
        "plain": "plain",
        "no draft": "no draft",
        '"zoo:draft", 4 tokens': "draft model, 4 tokens",
        '"suffix"': "suffix",
    },
    **{'"zoo:eagle3", a chain of 4': "EAGLE-3, 4 tokens", "EAGLE-3, a chain": "EAGLE-3", '"zoo:draft"': "draft model"},
    **{'"self:int4"': "4-bit copy", "suffix and EAGLE-3": "suffix and EAGLE-3"},
}
SHIPPED, GROWN = races("shipped_pair"), races("grown")
(CHAT,) = races(FIGURES.stem).values()
PANELS: dict[str, tuple[Mapping[str, str], Mapping[str, Any]]] = {  # chart: the methods, and the race of each panel
    "home": (SHOWN, races(FIGURES.stem)),
    "drafts": (DRAFTS, {short(title): race for title, race in SHIPPED.items() if "Free" in title}),
    "larger": (DRAFTS, {short(title): race for title, race in GROWN.items()}),
    "batches": (
        DRAFTS,
        {
            **{f"7 M, {short(title)}": race for title, race in SHIPPED.items() if "rows" in title},
            **{short(f"135 M chat, {title}"): race for title, race in races("smollm2_batches").items()},
        },
    ),
    "contexts": (DRAFTS, races("contexts")),
}


def panels(name: str) -> str:
    shown, each = PANELS[name]
    titles = {title: rows_of(race, shown) for title, race in each.items()}
    return bars(titles, TIMES)


def kinds() -> str:
    """The chat model by kind of request."""
    shown = {
        "transformers lookup": ("transformers prompt lookup", ORANGE),
        '"suffix"': ("suffix", BLUE),
        '"self:int8"': ("8-bit copy", GREEN),
        HEAD: ("suffix and EAGLE-3", PURPLE),
    }
    known = [(row, shown.get(row["name"]) or shown.get(row["family"])) for row in CHAT["points"][0]["rows"]]
    labels = {"chat": "questions", "edit": "edits of code", "quote": "quotes", "JSON": "JSON"}
    rows = {
        label: [Bar(one[0], row["by_category"][kind]["ratio"], one[1]) for row, one in known if one]
        for kind, label in labels.items()
    }
    return bars(rows, "Speedup over the fastest plain mode", thin=True)


def summary() -> str:
    """transformers' fastest, no draft, the default draft and the fastest draft, in several races."""
    kinds: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "transformers' fastest draft": (ORANGE, lambda row: row["family"].startswith("transformers")),
        "assisted, no draft": (GREY, lambda row: row["name"] == "no draft"),
        '"suffix", the default draft': (GREEN, lambda row: row["name"] == '"suffix"'),
        "assisted's fastest draft": (BLUE, lambda row: row["family"] == "assisted"),
    }
    each = {"135 M chat, bfloat16": CHAT}
    each |= {short(title): race for races_of in (SHIPPED, GROWN) for title, race in races_of.items()}
    rows: dict[str, list[Bar]] = {}
    for label, race in each.items():
        for name, (color, chosen) in kinds.items():
            if some := [row["speedup"] for row in race["points"][0]["rows"] if row["error"] is None and chosen(row)]:
                best = max(some, key=lambda speedup: speedup["ratio"])
                rows.setdefault(label, []).append(Bar.of(name, best, color))
    return bars(rows, thin=True)


def engines() -> str:
    rows = []
    for name, runs in read("engines_tiles")["engines"].items():
        if "bits" in name and "no draft" in name:
            continue
        color = BLUE if name.startswith("assisted") else GREY if name.startswith("plain") else ORANGE
        short = name.replace('"suffix+zoo:smollm2-eagle3"', "suffix and EAGLE-3").replace(" GenAI", "").replace('"', "")
        rows.append(Bar(short, median(1e3 * sum(run["seconds"]) / sum(run["tokens"]) for run in runs), color))
    return bars({"": rows}, "Milliseconds per token, prompt included; less is better", digits=1, line=None)


def gpu() -> str:
    modes = {"eager": ("eager", GREY), "graphs": ("CUDA graphs", BLUE)}
    rows = {
        row["way"].removeprefix("zoo:"): [Bar(label, row[m], color) for m, (label, color) in modes.items() if m in row]
        for row in read("gpu_first_run")["tokens_per_second"]
        if row["rows"] == 1
    }
    return bars(rows, "Tokens per second, one row", digits=0, line=None, thin=True)


CHARTS: dict[str, Callable[[], str]] = {name: lambda name=name: panels(name) for name in PANELS}  # type: ignore[misc]
CHARTS |= {one.__name__: one for one in (kinds, summary, engines, gpu)}


def chart(name: str = "home") -> str:
    """One of CHARTS as SVG."""
    return CHARTS[name]()
