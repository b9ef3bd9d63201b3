"""What mkdocs adds to docs/ while it builds: a page for every notebook, their list, and the home page's chart.

Nothing is written into docs/. The notebooks are rendered as they were committed, not run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent
sys.path[:0] = [str(ROOT / "notebooks"), str(ROOT / "benchmarks")]

import chart  # noqa: E402
import render  # noqa: E402

CHART, LIST = "<!-- chart -->", "<!-- notebooks -->"
_pages: dict[str, render.Page] = {}


def on_config(config: Any) -> Any:
    """The notebooks under Learn, in order."""
    _pages.clear()
    for path in render.written():
        page = render.render(path)
        _pages[f"learn/{page.slug}.md"] = page
    for section in config.nav:
        if "Learn" in section:
            section["Learn"] = [section["Learn"][0], *({page.title: name} for name, page in _pages.items())]
    return config


def on_files(files: Any, config: Any) -> Any:
    for name, page in _pages.items():
        files.append(File.generated(config, name, content=page.markdown))
        for place in (f"{page.slug}.ipynb", f"student/{page.slug}.ipynb"):
            content = (ROOT / "notebooks" / place).read_bytes()
            files.append(File.generated(config, f"learn/{place}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if LIST in markdown:
        head = ["| notebook | the question | before it |", "|---|---|---|"]
        rows = [f"| [{note.title}]({note.slug}.md) | {note.question} | {note.before} |" for note in _pages.values()]
        markdown = markdown.replace(LIST, "\n".join([*head, *rows]))
    return markdown


def on_page_content(html: str, page: Any, **_: Any) -> str:
    note = _pages.get(page.file.src_uri)
    html = f'<div class="notebook">{note.filled(html)}</div>' if note else html
    return html.replace(CHART, f'<div class="figure chart">{chart.chart()}</div>')


def on_serve(server: Any, **_: Any) -> Any:
    server.watch(str(ROOT / "notebooks"))
    return server
