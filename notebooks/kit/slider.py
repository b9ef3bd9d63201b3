"""A picture with sliders for a notebook: one SVG, its states computed in advance, and a few lines of script (slider.html).
Knows SVG and HTML. The notebook defines what is drawn and what a slider means."""

from __future__ import annotations

import hashlib
import html
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

# Contrast of at least 3 with white and with #1e1e1e; distinguishable with any kind of colour blindness.
COLOURS = {
    "target": "#6d89da",
    "draft": "#c47f13",
    "accepted": "#32a360",
    "rejected": "#e23b4e",
    "bonus": "#b455f5",
    "plain": "#808080",
    "accent": "#df33bd",
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = (
    660,
    320,
    56,
    646,
    12,
    274,
)  # SVG units: of the picture and the ends of its axes


@dataclass(frozen=True)
class Picture:
    """HTML for a notebook or any page. It needs no other file and makes no request."""

    text: str
    title: str

    def __repr__(self) -> str:
        return f"<picture: {self.title}>"

    def _repr_html_(self) -> str:
        return self.text


def slider(
    controls: Mapping[str, Sequence[Any]],
    series: Callable[..., Mapping[str, Any]],
    *,
    start: Sequence[Any] | None = None,
    xlabel: str = "",
    ylabel: str = "",
    ylim: tuple[float, float] | None = None,
    text: Callable[..., str] | None = None,
    colours: Mapping[str, str] = COLOURS,
) -> Picture:
    """Curves that the reader changes with sliders. Where scripts do not run, the picture shows the state `start`.

        slider({"acceptance": [0.5, 0.7, 0.9], "draft length": [1, 2, 4, 8]}, lambda a, g: {"target": (xs, ys)})

    Args:
        controls: the name of each slider and its values, left to right.
        series: is called with one value of every control and returns the curves: name to (xs, ys). Every call returns the same
            names.
        start: the initial values; by default the middle of each control.
        xlabel, ylabel: the labels of the axes.
        ylim: the ends of the vertical axis; by default, all states fit.
        text: is called like `series` and returns the sentence above the picture.
        colours: of each curve, by name; by default the notebooks' own.
    """
    states = list(itertools.product(*controls.values()))
    if not states:
        raise ValueError("controls: every slider needs at least one value.")
    drawn = [series(*state) for state in states]
    names = list(drawn[0])
    paint = {name: colours.get(name, COLOURS["accent"]) for name in names}
    if any(list(state) != names for state in drawn):
        raise ValueError(f"series: not every state has the curves {names}.")
    chosen = tuple(values[len(values) // 2] for values in controls.values()) if start is None else tuple(start)
    if chosen not in states:
        raise ValueError(f"start: {chosen} is no state; the values are {dict(controls)}.")
    xs = [x for state in drawn for curve in state.values() for x in curve[0]]
    ys = [y for state in drawn for curve in state.values() for y in curve[1]]
    across, up = (min(xs), max(xs)), ylim or (min(ys), max(ys))
    paths = [[_line(state[name], across, up) for name in names] for state in drawn]
    sentences = [text(*state) if text else "" for state in states]
    first = states.index(chosen)
    curves = "\n".join(
        f"<path class=\"curve\" d=\"{path}\" fill='none' stroke='{paint[name]}' stroke-width='2'/>"
        for name, path in zip(names, paths[first], strict=True)
    )
    data = json.dumps(
        {"values": [[str(value) for value in values] for values in controls.values()], "d": paths, "text": sentences},
        separators=(",", ":"),
    ).replace("</", "<\\/")
    page = template("slider").substitute(
        key="s" + hashlib.sha256((data + curves + xlabel + ylabel).encode()).hexdigest()[:10],
        inputs="\n".join(
            f"<label>{html.escape(name)} <output>{html.escape(str(at))}</output> "
            f'<input type="range" min="0" max="{len(values) - 1}" value="{list(values).index(at)}"></label>'
            for (name, values), at in zip(controls.items(), chosen, strict=True)
        ),
        sentence=html.escape(sentences[first]),
        legend=" ".join(
            f'<span style="color:{paint[name]}">&#9632;</span> {html.escape(name)}&ensp;' for name in names
        ),
        width=WIDTH,
        height=HEIGHT,
        label=html.escape(f"{ylabel} against {xlabel}" if xlabel and ylabel else ", ".join(names), quote=True),
        axes=_axes(across, up, xlabel, ylabel),
        curves=curves,
        data=data,
    )
    return Picture(page, ", ".join(controls))


def template(name: str) -> Template:
    """A page of this folder, with the places that Python fills in."""
    return Template(Path(__file__).with_name(f"{name}.html").read_text(encoding="utf-8").rstrip("\n"))


def _placed(value: float, limits: tuple[float, float], ends: tuple[int, int]) -> float:
    """From a number to a position in the picture; what is outside of the limits stands at the end."""
    low, high = limits
    inside = min(max(value, low), high)
    return round(ends[0] + (inside - low) / ((high - low) or 1) * (ends[1] - ends[0]), 1)


def _line(curve: tuple[Any, Any], across: tuple[float, float], up: tuple[float, float]) -> str:
    points = zip(*curve, strict=True)
    return "M" + "L".join(f"{_placed(x, across, (LEFT, RIGHT))} {_placed(y, up, (BOTTOM, TOP))}" for x, y in points)


def _axes(across: tuple[float, float], up: tuple[float, float], xlabel: str, ylabel: str) -> str:
    lines = [f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="currentColor"/>']
    for value in _ticks(*up):
        y = _placed(value, up, (BOTTOM, TOP))
        lines.append(f'<path d="M{LEFT} {y}H{RIGHT}" stroke="currentColor" opacity=".15"/>')
        lines.append(_word(LEFT - 8, y + 4, f"{value:g}", "end"))
    for value in _ticks(*across):
        lines.append(_word(_placed(value, across, (LEFT, RIGHT)), BOTTOM + 18, f"{value:g}", "middle"))
    lines.append(_word((LEFT + RIGHT) / 2, HEIGHT - 6, xlabel, "middle"))
    x, y = 14, (TOP + BOTTOM) / 2
    lines.append(_word(x, y, ylabel, "middle", f' transform="rotate(-90 {x:g} {y:g})"'))
    return "\n".join(lines)


def _word(x: float, y: float, word: str, anchor: str, turn: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{turn}>{html.escape(word)}</text>'


def _ticks(low: float, high: float) -> list[float]:
    """The multiples of 1, 2 or 5 times a power of ten between two numbers, nine at most."""
    rough = (high - low) / 8 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]
