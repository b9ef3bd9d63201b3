"""Charts of the docs as SVG, without a library: one function for each kind.

Text and axes take the color of the page. A chart is 400 units wide, so that its text can be read on a phone.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

GREY, ORANGE, BLUE, GREEN, PURPLE, RED = "#8b93a1", "#c47f13", "#4f7fd9", "#2f9e77", "#9b6fd0", "#d0605e"
WIDTH, LINE, THIN = 400, 24, 13
LETTER, VALUE = 6.6, 42  # room for a letter, and for the number after a bar


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    color: str = BLUE
    low: float | None = None
    high: float | None = None

    @property
    def end(self) -> float:
        return max(self.value, self.high or 0)


def bars(panels: Mapping[str, Sequence[Bar]], caption: str, digits: int = 2, line: float | None = 1) -> str:
    """Horizontal bars with their intervals, in titled panels of one scale. line: a dashed one at this value."""
    left = _left(bar.name for rows in panels.values() for bar in rows)
    scale = (WIDTH - left - VALUE) / max(bar.end for rows in panels.values() for bar in rows)
    parts, top = _caption(caption)
    for title, rows in panels.items():
        if title:
            parts.append(_text(left, top + 16, title, 'font-weight="bold"'))
            top += 24
        if line is not None:
            parts.append(_dashes(left + line * scale, top, top + LINE * len(rows)))
        for bar in rows:
            parts += [
                _text(left - 8, top + LINE / 2 + 4, bar.name, 'text-anchor="end"'),
                *_bar(bar, left, top + 3, 18, scale, digits),
            ]
            top += LINE
        top += 12
    return _svg(parts, top, caption, {title: {bar.name: bar.value for bar in rows} for title, rows in panels.items()})


def groups(rows: Mapping[str, Sequence[Bar]], caption: str, digits: int = 2, line: float | None = 1) -> str:
    """Several thin bars behind each label. A bar's name and color are explained in a legend."""
    left = _left(rows)
    scale = (WIDTH - left - VALUE) / max(bar.end for some in rows.values() for bar in some)
    parts, top = _caption(caption)
    drawn, top = _legend({bar.name: bar.color for some in rows.values() for bar in some}.items(), top)
    parts += drawn
    first = top
    for label, some in rows.items():
        middle = top + THIN * len(some) / 2 + 4
        parts.append(_text(left - 8, middle, label, 'text-anchor="end"'))
        for bar in some:
            parts += _bar(bar, left, top + 1, THIN - 2, scale, digits, 11)
            top += THIN
        top += 10
    if line is not None:
        parts.insert(0, _dashes(left + line * scale, first, top - 10))
    return _svg(parts, top, caption, {label: {bar.name: bar.value for bar in some} for label, some in rows.items()})


def shares(rows: Mapping[str, Mapping[str, float]], caption: str) -> str:
    """A bar for each row, divided into its parts, with the sum behind it."""
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    colors = dict(zip(names, (BLUE, ORANGE, GREEN, PURPLE, RED, GREY), strict=False))
    left = _left(rows)
    scale = (WIDTH - left - VALUE - 8) / max(sum(row.values()) for row in rows.values())
    parts, top = _caption(caption)
    drawn, top = _legend(colors.items(), top)
    parts += drawn
    for label, row in rows.items():
        parts.append(_text(left - 8, top + LINE / 2 + 4, label, 'text-anchor="end"'))
        at = left
        for name, share in row.items():
            parts.append(_rect(at, top + 3, share * scale, 18, colors[name]))
            at += share * scale
        parts.append(_text(at + 6, top + LINE / 2 + 4, f"{sum(row.values()):.1%}"))
        top += LINE
    described = {label: {name: round(100 * share, 1) for name, share in row.items()} for label, row in rows.items()}
    return _svg(parts, top + 6, caption, described)


def curves(
    series: Mapping[str, Sequence[tuple[float, float]]], caption: str, below: str, ticks: Sequence[float]
) -> str:
    """Lines over a common axis, each with its name and last value at its end. below: the title of the axis; ticks: of y."""
    parts, top = _caption(caption)
    left, right, bottom = 40, WIDTH - 118, top + 200
    longest = max(x for points in series.values() for x, _ in points)
    low, high = ticks[0], ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        return left + x / longest * (right - left), bottom - (y - low) / (high - low) * (bottom - top - 10)

    for tick in ticks:
        _, y = place(0, tick)
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="currentColor" stroke-opacity=".2"/>')
        parts.append(_text(left - 6, y + 4, f"{tick:g}", 'text-anchor="end" font-size="11"'))
    for part in range(5):
        x, _ = place(longest * part / 4, low)
        parts.append(_text(x, bottom + 16, f"{longest * part / 4:g}", 'text-anchor="middle" font-size="11"'))
    parts.append(_text((left + right) / 2, bottom + 34, below, 'text-anchor="middle"'))
    for (name, points), color in zip(series.items(), (GREY, GREEN, BLUE, ORANGE), strict=False):
        path = "L".join("{:.1f} {:.1f}".format(*place(*point)) for point in points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        x, y = place(*points[-1])
        parts.append(_text(x + 6, y + 4, f"{name}: {points[-1][1]:.0f}"))
    return _svg(parts, bottom + 44, caption, {name: {"at the end": points[-1][1]} for name, points in series.items()})


# Pieces of charts


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{" " * bool(more)}{more}>{html.escape(words)}</text>'


def _rect(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'


def _dashes(x: float, top: float, bottom: float) -> str:
    return f'<path d="M{x:.1f} {top:.1f}V{bottom:.1f}" stroke="currentColor" stroke-dasharray="2 3"/>'


def _bar(bar: Bar, left: float, top: float, height: float, scale: float, digits: int, size: int = 13) -> list[str]:
    """A bar, its interval, and its value behind both."""
    middle = top + height / 2
    parts = [_rect(left, top, bar.value * scale, height, bar.color)]
    if bar.low is not None and bar.high is not None and bar.high > bar.low:
        ends = f"M{left + bar.low * scale:.1f} {middle:.1f}H{left + bar.high * scale:.1f}"
        parts.append(f'<path d="{ends}" stroke="currentColor"/>')
    words = f"{bar.value:.{digits}f}"
    return [*parts, _text(left + bar.end * scale + 5, middle + 0.34 * size, words, f'font-size="{size}"')]


def _left(labels: Iterable[str]) -> float:
    """Where bars begin: after the longest label."""
    return 12 + LETTER * max(map(len, labels))


def _caption(words: str) -> tuple[list[str], float]:
    """A line above the chart, and where the chart begins."""
    return [_text(0, 13, words, 'font-size="12" fill-opacity=".75"')], 26


def _legend(entries: Iterable[tuple[str, str]], top: float) -> tuple[list[str], float]:
    """Names and colors in as many lines as they need, and where these end."""
    parts, x = [], 0.0
    for name, color in entries:
        width = 20 + 0.92 * LETTER * len(name)
        if x and x + width > WIDTH:
            x, top = 0, top + 18
        parts += [_rect(x, top + 2, 11, 11, color), _text(x + 16, top + 12, name, 'font-size="12"')]
        x += width + 8
    return parts, top + 26


def _svg(parts: Iterable[str], height: float, caption: str, values: Mapping[str, Mapping[str, float]]) -> str:
    """The drawing. Those who cannot see it hear the caption and all values."""
    told = "; ".join(
        f"{title}: " * bool(title) + ", ".join(f"{name} {value:.4g}" for name, value in row.items())
        for title, row in values.items()
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{html.escape(f"{caption}. {told}", quote=True)}" '
        'font-size="13" fill="currentColor" style="max-width: 26rem">\n' + "\n".join(parts) + "\n</svg>"
    )
