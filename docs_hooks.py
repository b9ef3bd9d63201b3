"""What mkdocs adds to docs/ while it builds: a page for every notebook, their list, pictures and tables.

Nothing is written into docs/. The notebooks are rendered as they were committed, not run.
"""

from __future__ import annotations

import ast
import html as markup
import itertools
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).parent
sys.path[:0] = [str(ROOT), str(ROOT / "notebooks"), str(ROOT / "benchmarks")]

import address  # noqa: E402
import charts  # noqa: E402
import render  # noqa: E402

import docs_drawings  # noqa: E402

CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.DOTALL)
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)  # from Markdown: other tables have attributes
ROW, FIELD = re.compile(r"<tr>.*?</tr>", re.DOTALL), re.compile(r"<t([dh])( [^>]*)?>(.*?)</t[dh]>", re.DOTALL)
NUMBER = re.compile(r"[+-]?\.?\d(?:[\d.,%\s/+()\[\]-]|of|to|ms|µs|[KMG]i?B|[Msx]|head)*")
VERSION = re.compile(r"\d+\.\d+\.\d+")
APART = re.compile(r"(<pre\b.*?</pre>|<script\b.*?</script>)", re.DOTALL)
FORMULA = re.compile(r"\\[()]")  # around a formula in text
OPTION = re.compile(r"(?<![^\s>])--?\w[\w-]*(?=[^<>]*</code>)")
INTERVAL = re.compile(r"(?:\d[\d.,]*%?\s)?\[-?[\d.]+%?,\s-?[\d.]+%?\]")
PHONE, PAGE = 350, 640  # pixels for a table
DASHES = ("-", "–", "—")  # cells that say nothing
INLINE = re.compile(r"<code>([^<]* [^<]*)</code>")
DRAWING = re.compile(r"<!-- drawing: ([\w-]+) -->")
CHART, LIST, MAP = "<!-- chart -->", "<!-- notebooks -->", "<!-- map -->"
ROUND_COLORS = {render.INK: "currentColor", "#c47f13": "var(--draft)", "#4f7fd9": "var(--target)"}
ROUND_COLORS |= {"#32a360": "var(--kept)", "#e23b4e": "var(--gone)"}
ROUND, VALUES = "<!-- round -->", "<!-- values -->"
_pages: dict[str, render.Page] = {}
_order: list[Any] = []  # all pages, as the navigation lists them


def on_config(config: Any) -> Any:
    """The notebooks under Learn, in order."""
    _pages.clear()
    for path in render.written():
        page = render.render(path)
        _pages[f"learn/{page.slug}.md"] = page
    for section in config.nav:
        if "Learn" in section:
            section["Learn"] = [*section["Learn"], *({page.title: name} for name, page in _pages.items())]
    return config


def on_files(files: Any, config: Any) -> Any:
    for name, page in _pages.items():
        files.append(File.generated(config, name, content=page.markdown))
        for place in (f"{page.slug}.ipynb", f"student/{page.slug}.ipynb"):
            content = (ROOT / "notebooks" / place).read_bytes()
            files.append(File.generated(config, f"learn/{place}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    markdown = address.addressed(markdown, address.repository())
    if LIST in markdown:
        head = ["| notebook | the question | before it |", "|---|---|---|"]
        rows = [f"| [{note.title}]({note.slug}.md) | {note.question} | {note.before} |" for note in _pages.values()]
        markdown = markdown.replace(LIST, "\n".join([*head, *rows]))
    return re.sub(
        r"<!-- chart: (\w+) -->", lambda found: f'<div class="figure chart">{charts.chart(found[1])}</div>', markdown
    )


def on_page_content(html: str, page: Any, **_: Any) -> str:
    note = _pages.get(page.file.src_uri)
    html = CELL.sub(lambda cell: INLINE.sub(_whole_words, cell[0]), TABLE.sub(_table, html))
    html = "".join(part if APART.fullmatch(part) else _unbroken(part) for part in APART.split(html))
    html = f'<div class="notebook">{note.filled(html)}</div>' if note else html
    for mark, drawn in ((CHART, _chart), (MAP, _map), (ROUND, _round), (VALUES, _values)):
        if mark in html:
            html = html.replace(mark, drawn())
    return DRAWING.sub(lambda found: docs_drawings.DRAWINGS[found[1]](), html)


def _chart() -> str:
    return f'<div class="figure chart">{charts.chart()}</div>'


def _round() -> str:
    """The moving picture of one round, in the colors of the drawings. `site.js` lets it begin once it is seen."""
    svg = (ROOT / "docs" / "assets" / "round.svg").read_text(encoding="utf-8")
    for color, name in ROUND_COLORS.items():
        svg = svg.replace(color, name)
    return f'<div class="figure chart moving">{svg}</div>'


def _values() -> str:
    """What the package computes at some points, for the page of sliders to be compared with: `.ci/site_check.py`."""
    model = runpy.run_path(str(ROOT / "assisted" / "lengths" / "cost_model.py"))
    lines = []
    for a, c, g, rows, w in itertools.product(
        (0, 0.3, 0.8, 0.95, 1), (0, 0.1, 1), (0, 1, 4, 12), (1, 8, 256), (0, 0.02, 0.3)
    ):
        verify = model["verify_cost"](g, rows, w)
        lines.append((a, c, g, rows, w, model["expected_tokens"](a, g), verify, model["speedup"](a, c, g, verify)))
    return f'<script type="application/json" data-values>{json.dumps(lines)}</script>'


def _whole_words(code: re.Match[str]) -> str:
    """Code in a cell of a table: a line may end at its blanks only, not at a hyphen or a slash."""
    return f"<code>{' '.join(f'<span>{word}</span>' for word in code[1].split(' '))}</code>"


def _unbroken(html: str) -> str:
    """Options of commands, and intervals after their numbers, stay on one line."""
    html = OPTION.sub(lambda option: f'<span class="whole">{option[0]}</span>', html)
    return INTERVAL.sub(lambda interval: re.sub(r"\s", "\xa0", interval[0]), html)


def _table(table: re.Match[str]) -> str:
    """Columns of numbers to the right. A table that a phone cannot show whole is told there row by row, each a card."""
    rows = [FIELD.findall(row) for row in ROW.findall(table[0])]
    plain = [[markup.unescape(re.sub("<[^>]+>", "", inner)).strip() for _, _, inner in row] for row in rows]
    columns = list(zip(*plain, strict=True)) if len({len(row) for row in rows}) == 1 else []
    is_number = [any(below) and all(map(_is_number, filter(None, below))) for _, *below in columns]
    width = sum(
        24 + max((7.5 * len(word) for cell in column for word in ([cell] if numbers else cell.split())), default=0)
        for column, numbers in zip((column[1:] for column in columns), is_number, strict=True)
    )

    def field(found: re.Match[str]) -> str:
        kind, style, inner = found.groups()
        at = next(counted) % len(columns)
        label = FORMULA.sub("", markup.escape(plain[0][at])) if kind == "d" else ""
        label = f' data-name="{label}"' if label else ""
        number = ' class="amount"' if is_number[at] else ""
        more = number + (style or "") + label
        return f"<t{kind}{more}>{'' if inner in DASHES else inner}</t{kind}>"

    counted = itertools.count()
    html = FIELD.sub(field, table[0]) if columns else table[0]
    return html.replace("<table>", f"<table data-cards{'=dense' * (width > PAGE)}>") if width > PHONE else html


def _is_number(cell: str) -> bool:
    return bool(NUMBER.fullmatch(cell) and not VERSION.fullmatch(cell)) and len(cell) < 30


def _map() -> str:
    """The rooms of the package by the layers that `make lint` holds them to, each with the first line of its docstring."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = next(contract["layers"] for contract in settings["contracts"] if contract["id"] == "layers")
    rows = []
    for layer in layers:
        rooms = []
        for name in layer.replace("|", ":").split(":"):
            path = ROOT / "assisted" / name.strip()
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            says = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
            label = f"{path.name}/" if path.is_dir() else file.name
            says = re.sub("`([^`]+)`", r"<code>\1</code>", markup.escape(says))
            rooms.append(f'<div class="room"><strong><code>{label}</code></strong> {says}</div>')
        rows.append(f'<div class="level">{"".join(rooms)}</div>')
    return f'<div class="map">{"".join(rows)}</div>'


def on_nav(nav: Any, **_: Any) -> Any:
    _order[:] = nav.pages
    return nav


def on_post_build(config: Any) -> None:
    """llms.txt: all pages with their titles, for programs that read documentation (llmstxt.org)."""
    links = [f"- [{page.title}]({page.url or 'index.html'})" for page in _order]
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Pages", "", *links, ""]
    (Path(config.site_dir) / "llms.txt").write_text("\n".join(lines), encoding="utf-8")


def on_serve(server: Any, **_: Any) -> Any:
    server.watch(str(ROOT / "notebooks"))
    return server
