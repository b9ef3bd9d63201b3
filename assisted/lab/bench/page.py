"""A result as one HTML file that needs no other file. Knows results, their table and their pictures."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .plots import pictures
from .results import Point, Result, Row, point_name
from .table import CELLS, by_category, cells, heading, notes

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1c1e21; --faint: #6a707a; --line: #dde1e6; --mark: #eef4ff; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #15171a; --ink: #e4e6ea; --faint: #9aa1ac; --line: #30343a; --mark: #1c2739; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 80rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; } h2 { font-size: 1.1rem; margin: 2.5rem 0 .5rem; }
p { margin: .35rem 0; } .faint, caption { color: var(--faint); } .error { color: #d1504a; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9em; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { font-weight: 600; } tr.assisted td { background: var(--mark); }
svg { display: block; width: 100%; height: auto; max-width: 52rem; }
pre { overflow-x: auto; padding: .75rem; border: 1px solid var(--line); border-radius: 6px; font-size: .85em; }
"""


def page(result: Result) -> str:
    """The whole page, as text. Raises ImportError, naming the extra, without matplotlib."""
    title = escape(f"assisted bench: {result.target}")
    parts = [f"<h1>{title}</h1>", *(f'<p class="faint">{escape(line)}</p>' for line in heading(result))]
    parts += _point(result, result.points[0])
    for name, svg in pictures(result):
        parts.append(f'<h2>{escape(name)}</h2><div role="img" aria-label="{escape(name)}">{svg}</div>')
    for point in result.points[1:]:
        parts += _point(result, point)
    parts.append("<h2>How to read this</h2>" + "".join(f"<p>{escape(line)}</p>" for line in notes(result)))
    settings = [
        (row, [row.name, str(row.speedup), f"{row.tokens_per_pass:.2f}"])
        for row in result.points[0].heat
        if row.error is None and row.family != "plain"
    ]
    if settings:
        parts.append("<h2>transformers' settings, tried on some of the prompts</h2>")
        parts.append(_table(("", "speedup over plain, dynamic", "tokens/pass"), settings))
    if result.command:
        parts.append(f"<h2>Measure it again</h2><pre>{escape(result.command)}</pre>")
    about = "".join(f"<tr><td>{escape(k)}</td><td>{escape(str(v))}</td></tr>" for k, v in result.machine.items())
    parts.append(f"<h2>Machine</h2><table>{about}</table>")
    return document(title, _STYLE, "\n".join(parts))


def document(title: str, style: str, body: str) -> str:
    """A page that needs no other file. title, body: HTML. style: CSS."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}<title>{title}</title>\n<style>{style}</style></head>\n'
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _point(result: Result, point: Point) -> list[str]:
    where = escape(point_name(point.batch, point.context).capitalize())
    shown = [(row, cells(row)) for row in point.ran]
    parts = [f"<h2>{where}</h2><p>1.00 is {escape(point.baseline)}.</p>", _table(tuple(CELLS), shown)]
    if len(result.prompts) > 1:
        split = [(row, [row.name, *map(str, by_category(row, result.prompts))]) for row in point.ran]
        parts.append(f"<h2>{where}: by category</h2>" + _table(("speedup", *result.prompts), split))
    return parts + [f'<p class="error">{escape(message)}</p>' for message in point.messages]


def _table(header: Sequence[str], rows: Sequence[tuple[Row, Sequence[str]]]) -> str:
    lines = [f"<tr>{_cells(header, 'th')}</tr>"]
    for row, texts in rows:
        ours = ' class="assisted"' if row.family == "assisted" else ""
        lines.append(f"<tr{ours}>{_cells(texts, 'td')}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _cells(texts: Sequence[str], tag: str) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)
