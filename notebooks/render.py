"""A written notebook as a page of the site: Markdown for mkdocs, and the HTML that stands in it.

Knows the form that build.py gives a notebook, and Material for MkDocs' Markdown. Nothing is run.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from address import BADGE, colab, repository
from nbformat import NotebookNode

HERE = Path(__file__).resolve().parent
INK = "#7d8082"  # kit.INK: on the site, text and axes have the page's own colour
FOLDED = {"folded": 'note "The code"', "check": 'note "The check"', "answer": 'success "Answer"'}
ANSWER = re.compile(r"^<details>\n<summary>Answer</summary>\n\n|\n\n</details>$")  # of an answer in Markdown
ROUND = re.compile(r"!\[[^\]]*\]\(\.\./docs/assets/round\.svg\)")  # the site draws it in the page's own colour
NOTEBOOK_LINK = re.compile(r"\[([^\]]+)\]\((?:student/)?(\d\d_\w+)\.ipynb(#[^)]*)?\)")


@dataclass
class Page:
    """Markdown with empty `<div>`s by number, and the HTML that belongs into each.

    HTML goes around the Markdown parser, which would take a blank line in a script for the end of a block.
    """

    slug: str
    title: str
    question: str
    about: str
    markdown: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def before(self) -> str:
        """The numbers of the notebooks that should be read before this one."""
        return ", ".join(dict.fromkeys(re.findall(r"\b\d\d\b(?![_\d])", self.about.partition("Before it:")[2])))

    def filled(self, page: str) -> str:
        """The page that mkdocs made of the Markdown, with the pieces in their places."""
        return re.sub(r'<div data-piece="(\d+)"></div>', lambda match: self.pieces[int(match[1])], page)


def written() -> list[Path]:
    """The notebooks there are, in order."""
    return sorted(HERE.glob("[0-9][0-9]_*.ipynb"))


def render(path: Path) -> Page:
    """The page of a notebook. The first cell is its title, its question and what it asks of the reader."""
    notebook = nbformat.read(path, as_version=4)
    title, question, about, *rest = re.split(r"\n\s*\n", notebook.cells[0].source.strip())
    page = Page(
        path.stem, title.removeprefix("# ").strip(), " ".join(question.split()).strip("*"), " ".join(about.split())
    )
    parts = [
        title,
        words(question),
        words(about),
        _downloads(path.stem),
        *(words(text) for text in rest if BADGE not in text),
    ]
    for before, cell in zip(notebook.cells, notebook.cells[1:], strict=False):
        if cell.cell_type == "code":
            part = _code(cell, page)
        elif _is_answer(cell):
            part = _folded(FOLDED["answer"], words(ANSWER.sub("", cell.source)))
        else:
            part = words(cell.source)
        if _is_answer(cell) and _is_answer(before):  # words and code of one answer unfold together
            parts[-1] += part.removeprefix(f"??? {FOLDED['answer']}")
        else:
            parts.append(part)
    page.markdown = "\n\n".join(part for part in parts if part) + "\n"
    return page


def _is_answer(cell: NotebookNode) -> bool:
    return "answer" in cell.metadata.get("tags", [])


def _folded(kind: str, *inside: str) -> str:
    return f"??? {kind}\n\n" + textwrap.indent("\n\n".join(inside), "    ")


def _downloads(slug: str) -> str:
    link = colab(f"notebooks/{slug}.ipynb", repository())
    return (
        '!!! tip "Run it yourself"\n'
        f"    [The notebook]({slug}.ipynb){{ download }}, as it ran, or [without output and answers](student/{slug}.ipynb)"
        "{ download }, to work in. [How to start it](index.md#run-them)."
    ) + (f" [Open it in Colab]({link})." if link else "")


def words(source: str) -> str:
    """The notebook's Markdown, with links to pages and with the blank lines that Python-Markdown wants before a list."""
    there = {path.stem for path in HERE.glob("[0-9][0-9]_*.ipynb")}

    def linked(match: re.Match[str]) -> str:
        words, slug, anchor = match.groups()
        return f"[{words}]({slug}.md{anchor or ''})" if slug in there else words

    lines: list[str] = []
    for line in NOTEBOOK_LINK.sub(linked, ROUND.sub("<!-- round -->", source)).split("\n"):
        item = re.match(r"\s*([-*]|\d+\.) ", line)
        if item and lines and lines[-1].strip() and not re.match(r"\s*([-*]|\d+\.) |\s{2,}", lines[-1]):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def _code(cell: NotebookNode, page: Page) -> str:
    tags = cell.metadata.get("tags", [])
    if "colab" in tags:
        return ""  # for a notebook that has been opened elsewhere
    code, outputs = _fence(cell.source, "{ .python }"), [_output(output, page) for output in cell.outputs]
    kind = next((kind for tag, kind in FOLDED.items() if tag in tags), None)
    if kind is None:
        return "\n\n".join([code, *outputs])
    inside, below = ([code], outputs) if "folded" in tags else ([code, *outputs], [])
    return "\n\n".join([_folded(kind, *inside), *below])


def _output(output: NotebookNode, page: Page) -> str:
    if output.output_type == "stream":
        return _fence(output.text.rstrip(), "{ .text .no-copy .output }")
    data = output.get("data", {})
    if "image/svg+xml" in data:
        return _piece(f'<div class="figure">{figure(data["image/svg+xml"], f"f{len(page.pieces)}")}</div>', page)
    if "text/html" in data:
        return _piece(f'<div class="shown">{data["text/html"]}</div>', page)
    if "text/markdown" in data:
        return words(data["text/markdown"])
    return _fence(data.get("text/plain", "").rstrip(), "{ .text .no-copy .output }")


def figure(svg: str, prefix: str) -> str:
    """matplotlib's SVG to stand inside a page: no ground, text in the page's colour, names of its own, any width.

    It is drawn at least as large as it was made, so that text of 10 points has 10 pixels or more. A figure of at most 4.8
    inches then fits a window of 390 pixels, and a wider one scrolls.
    """
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    opening, rest = svg.split(">", 1)
    width = re.search(r' width="([\d.]+)pt"', opening)
    size = f' style="min-width: {float(width[1]):.0f}px; max-width: {1.6 * float(width[1]):.0f}px"' if width else ""
    opening = re.sub(r' (width|height)="[^"]*"', "", opening)
    rest = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", rest)
    return f'{opening}{size} role="img">{rest}'.replace(INK, "currentColor")


def _piece(text: str, page: Page) -> str:
    page.pieces.append(text)
    return f'<div data-piece="{len(page.pieces) - 1}"></div>'


def _fence(text: str, info: str) -> str:
    longest = max((len(ticks) for ticks in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence} {info}\n{text}\n{fence}"
