"""A picture with sliders for a notebook: one SVG, its states computed in advance, and a few lines of script.

Knows SVG and HTML. The notebook defines what is drawn and what a slider means.
"""

from __future__ import annotations

import hashlib
import html
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any

__all__ = ["COLOURS", "Picture", "slider"]

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
    kind: str = "lines",
    ticks: Sequence[str] = (),
    xlabel: str = "",
    ylabel: str = "",
    xlim: tuple[float, float] | None = None,
    ylim: tuple[float, float] | None = None,
    text: Callable[..., str] | None = None,
    colours: Mapping[str, str] | None = None,
) -> Picture:
    """A picture that the reader changes with sliders: one SVG, all its states computed here, ten lines of script.

    Where scripts do not run, as in a preview of the file, it shows the state `start`.

        slider({"acceptance": [0.5, 0.7, 0.9], "draft length": [1, 2, 4, 8]}, lambda a, g: {"tokens": ...})

    Args:
        controls: the name of each slider and its values, left to right.
        series: is called with one value of every control and returns the curves: name to (xs, ys), or for bars name to
            heights. Every call returns the same names, and for bars as many heights as there are ticks.
        start: the initial values; by default the middle of each control.
        kind: "lines" or "bars".
        ticks: for bars, the name of each group of bars.
        xlabel, ylabel: the labels of the axes.
        xlim, ylim: the ends of the axes; by default, all states fit. Bars always begin at zero.
        text: is called like `series` and returns the sentence above the picture.
        colours: name of a curve to its colour. The default is that of its name in `COLOURS`, else one of these in turn.
    """
    if kind not in ("lines", "bars"):
        raise ValueError(f'kind: {kind!r} is neither "lines" nor "bars".')
    states = list(itertools.product(*controls.values()))
    if not states:
        raise ValueError("controls: every slider needs at least one value.")
    drawn = [{name: _points(curve, kind) for name, curve in series(*state).items()} for state in states]
    names = list(drawn[0])
    if any(list(state) != names for state in drawn):
        raise ValueError(f"series: not every state has the curves {names}.")
    chosen = tuple(values[len(values) // 2] for values in controls.values()) if start is None else tuple(start)
    if chosen not in states:
        raise ValueError(f"start: {chosen} is no state; the values are {dict(controls)}.")
    xs = [x for state in drawn for curve in state.values() for x, _ in curve]
    ys = [y for state in drawn for curve in state.values() for _, y in curve]
    across = (-0.5, len(ticks) - 0.5) if kind == "bars" else _limits(xs, xlim)
    plot = _Plot(across, _limits([*ys, 0.0] if kind == "bars" else ys, ylim))
    palette = [colour for name, colour in COLOURS.items() if name != "plain"]
    paint = {name: COLOURS.get(name, palette[number % len(palette)]) for number, name in enumerate(names)}
    paint |= dict(colours or {})
    if kind == "lines":
        paths = [[plot.line(state[name]) for name in names] for state in drawn]
    else:
        paths = [[plot.bars(state[name], number, len(names)) for number, name in enumerate(names)] for state in drawn]
    sentences = [text(*state) if text else "" for state in states]
    first = states.index(chosen)
    strokes = "fill='none' stroke='{0}' stroke-width='2'" if kind == "lines" else "fill='{0}'"
    curves = "\n".join(
        f'<path class="curve" d="{path}" {strokes.format(paint[name])}/>'
        for name, path in zip(names, paths[first], strict=True)
    )
    legend = " ".join(f'<span style="color:{paint[name]}">&#9632;</span> {html.escape(name)}&ensp;' for name in names)
    inputs = "\n".join(
        f"<label>{html.escape(name)} <output>{html.escape(str(at))}</output> "
        f'<input type="range" min="0" max="{len(values) - 1}" value="{list(values).index(at)}"></label>'
        for (name, values), at in zip(controls.items(), chosen, strict=True)
    )
    data = json.dumps(
        {"values": [[str(value) for value in values] for values in controls.values()], "d": paths, "text": sentences},
        separators=(",", ":"),
    ).replace("</", "<\\/")
    key = "s" + hashlib.sha256((data + curves + xlabel + ylabel).encode()).hexdigest()[:10]
    page = Template(_SLIDER).substitute(
        key=key,
        inputs=inputs,
        sentence=html.escape(sentences[first]),
        legend=legend,
        width=plot.width,
        height=plot.height,
        label=html.escape(f"{ylabel} against {xlabel}" if xlabel and ylabel else ", ".join(names), quote=True),
        axes=plot.axes(ticks, xlabel, ylabel),
        curves=curves,
        data=data,
    )
    return Picture(page, ", ".join(controls))


@dataclass(frozen=True)
class _Plot:
    """From data to positions in the picture, in SVG's units."""

    xlim: tuple[float, float]
    ylim: tuple[float, float]
    width: int = 660
    height: int = 320
    left: int = 56
    bottom: int = 46
    top: int = 12
    right: int = 14

    def x(self, value: float) -> float:
        low, high = self.xlim
        return round(self.left + (value - low) / (high - low) * (self.width - self.left - self.right), 1)

    def y(self, value: float) -> float:
        low, high = self.ylim
        inside = min(max(value, low), high)
        return round(self.height - self.bottom - (inside - low) / (high - low) * self._tall(), 1)

    def line(self, points: Sequence[tuple[float, float]]) -> str:
        kept = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
        return "M" + "L".join(f"{self.x(x)} {self.y(y)}" for x, y in kept) if kept else ""

    def bars(self, points: Sequence[tuple[float, float]], number: int, of: int) -> str:
        wide = 0.8 / of
        parts = []
        for group, height in points:
            left, right = (self.x(group - 0.4 + wide * (number + side)) for side in (0.04, 0.96))
            parts.append(f"M{left} {self.y(0)}V{self.y(height)}H{right}V{self.y(0)}Z")
        return "".join(parts)

    def axes(self, ticks: Sequence[str], xlabel: str, ylabel: str) -> str:
        floor, middle = self.height - self.bottom, (self.left + self.width - self.right) / 2
        lines = [
            f'<path d="M{self.left} {self.top}V{floor}H{self.width - self.right}" fill="none" stroke="currentColor"/>'
        ]
        for value in _steps(*self.ylim):
            y = self.y(value)
            lines.append(f'<path d="M{self.left} {y}H{self.width - self.right}" stroke="currentColor" opacity=".15"/>')
            lines.append(_word(self.left - 8, y + 4, f"{value:g}", "end"))
        marks = list(enumerate(ticks)) if ticks else [(value, f"{value:g}") for value in _steps(*self.xlim)]
        lines += [_word(self.x(value), floor + 18, word, "middle") for value, word in marks]
        lines.append(_word(middle, self.height - 6, xlabel, "middle"))
        lines.append(_word(14, self.top + self._tall() / 2, ylabel, "middle", turned=True))
        return "\n".join(lines)

    def _tall(self) -> int:
        return self.height - self.bottom - self.top


_SLIDER = """<div class="assisted-slider" data-key="$key" style="max-width:${width}px">
<style>
.assisted-slider label { display: inline-block; margin: 0 1.5em .4em 0; }
.assisted-slider output { display: inline-block; min-width: 3em; font-weight: bold; }
.assisted-slider input { vertical-align: middle; width: 12em; max-width: 100%; }
.assisted-slider svg { width: 100%; height: auto; display: block; }
.assisted-slider text { fill: currentColor; font: 13px sans-serif; stroke: none; }
</style>
$inputs
<div class="sentence" aria-live="polite">$sentence</div>
<div class="legend">$legend</div>
<svg viewBox="0 0 $width $height" role="img" aria-label="$label">
$axes
$curves
</svg>
<script>
(function () {
  const data = $data;
  for (const root of document.querySelectorAll('[data-key="$key"]')) {
    const inputs = [...root.querySelectorAll("input")], outputs = root.querySelectorAll("output");
    const curves = root.querySelectorAll(".curve"), sentence = root.querySelector(".sentence");
    const draw = () => {
      let state = 0;
      inputs.forEach((input, n) => {
        state = state * data.values[n].length + Number(input.value);
        outputs[n].textContent = data.values[n][input.value];
      });
      curves.forEach((curve, n) => curve.setAttribute("d", data.d[state][n]));
      sentence.textContent = data.text[state];
    };
    inputs.forEach(input => input.addEventListener("input", draw));
  }
})();
</script>
</div>"""


def _word(x: float, y: float, word: str, anchor: str, turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:g} {y:g})"' if turned else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{turn}>{html.escape(word)}</text>'


def _points(curve: Any, kind: str) -> list[tuple[float, float]]:
    if kind == "bars":
        return [(float(group), float(height)) for group, height in enumerate(curve)]
    xs, ys = curve
    return [(float(x), float(y)) for x, y in zip(xs, ys, strict=True)]


def _limits(values: Sequence[float], wanted: tuple[float, float] | None) -> tuple[float, float]:
    """The wanted limits, or round numbers around the values."""
    if wanted is not None:
        return wanted
    known = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(known), max(known)
    if low == high:
        low, high = low - 0.5, high + 0.5
    step = _step(low, high)
    return math.floor(low / step) * step, math.ceil(high / step) * step


def _step(low: float, high: float) -> float:
    """1, 2 or 5 times a power of ten, with at most eight steps between the two."""
    rough = (high - low) / 8
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)


def _steps(low: float, high: float) -> list[float]:
    step = _step(low, high)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]
