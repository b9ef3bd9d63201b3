"""A result as text: columns for a terminal, Markdown, or one HTML file that needs no other file. Knows only results and their
pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from textwrap import fill

from .plots import pictures
from .results import Point, Result, Row, point_name
from .statistics import Interval

CELLS: dict[str, Callable[[Row], str]] = {
    "": lambda row: row.name,
    "speedup": lambda row: str(row.speedup),
    "by drafting": lambda row: "" if row.by_drafting is None else str(row.by_drafting),
    "ms/token": lambda row: f"{row.milliseconds_per_token:.2f}",
    "tokens/pass": lambda row: f"{row.tokens_per_pass:.2f}",
    "accepted": lambda row: percent(row.acceptance_rate),
    "draft/verify/rest": lambda row: " ".join(map(percent, row.shares)),
    "first token": lambda row: "" if row.first_token_milliseconds is None else f"{row.first_token_milliseconds:.1f} ms",
    "same": lambda row: "" if row.same is None else f"{row.same}/{row.rows}" + _gap(row),
    "4-grams": lambda row: percent(row.repeated_4grams),
    "memory": lambda row: f"{(row.draft_bytes + (row.working_bytes_over_plain or 0)) / 2**20:+.1f} MiB",
}
"""The cells of a row that did not fail, by the title of the column."""


def table(result: Result, width: int | None = None) -> str:
    """A result for a terminal. width: of its lines, at most."""

    def filled(lines: Iterable[str]) -> str:
        return "\n".join(lines if width is None else (fill(line, width, subsequent_indent="  ") for line in lines))

    parts = [filled(heading(result))]
    for point in result.points:
        parts.append("\n".join([title(result, point), *aligned([list(CELLS), *map(cells, point.ran)], width)]))
        if len(result.prompts) > 1:
            split = [
                [row.name, *(f"{interval.ratio:.2f}" for interval in by_category(row, result.prompts))]
                for row in point.ran
            ]
            parts.append("\n".join(aligned([["speedup, by category", *result.prompts], *split], width)))
        if point.messages:
            parts.append(filled(point.messages))
    parts.append(filled(notes(result)))
    return "\n\n".join(parts)


def markdown(result: Result) -> str:
    """A result for a page: a heading, and a table for each point."""
    lines = [" ".join(heading(result)), ""]
    for point in result.points:
        lines += [title(result, point), "", *markdown_table(CELLS, map(cells, point.ran)), "", *point.messages]
    return "\n".join(lines).rstrip()


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """The lines of a table in Markdown. rows: each has as many cells as the header."""
    names = list(header)
    first, *others = ["| " + " | ".join(map(str, line)) + " |" for line in (names, *rows)]
    return [first, "|---" * len(names) + "|", *others]


def title(result: Result, point: Point) -> str:
    """The line above a point's table."""
    where = "" if len(result.points) == 1 else f"{point_name(point.batch, point.context).capitalize()}; "
    return f"{where}1.00 is {point.baseline}."


def heading(result: Result) -> list[str]:
    """What was measured, on what."""
    about, rules = result.machine, result.rules
    drawn = "temperature 0" if rules.greedy else f"temperature {rules.temperature:g}, top-p {rules.top_p:g}"
    count = sum(map(len, result.prompts.values()))
    draft = "" if result.draft is None else f" with {result.draft}"
    return [
        f"{result.target}{draft}, {about['dtype']}, {about['device']}, CPU threads: {about['threads']}; "
        f"{about['processor']}; torch {about['torch']}, transformers {about['transformers']}.",
        f"{count} prompts ({', '.join(result.prompts)}), {rules.new_tokens} new tokens each, {drawn}, {rules.repeats} repeats, "
        "all methods in turns.",
    ]


def notes(result: Result) -> list[str]:
    """How to read the table."""
    lines = [
        "Speedup: over the fastest plain mode, with a 95% bootstrap interval over prompts and repeats.",
        "By drafting: over this package without a draft, on the same forward passes and kernels; below 1, a draft costs more "
        "than it saves.",
        "Tokens per forward pass of the target: its own token (the bonus) and the pass over the prompt count.",
        "4-grams: the share that repeats an earlier one of the same text; repetition flatters every drafter.",
    ]
    measured = any(row.working_bytes_over_plain is not None for point in result.points for row in point.rows)
    lines.append(
        "Memory: the draft's weights, and what a call allocates, over plain's peak."
        if measured
        else "Memory: the draft's weights alone; what a call allocates is measured on CUDA only."
    )
    if result.rules.greedy and result.machine["dtype"] != "float32":
        lines.append(
            f"Same: {result.machine['dtype']} texts may differ from plain's after a near-tie of the target. In brackets, the "
            "largest gap between the two tokens where texts first differ, in standard deviations of the logits."
        )
    return lines


def cells(row: Row) -> list[str]:
    """A row of the table, for a method that did not fail."""
    return [cell(row) for cell in CELLS.values()]


def _gap(row: Row) -> str:
    return "" if row.largest_gap is None else f" ({row.largest_gap:.2f})"


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def by_category(row: Row, categories: Iterable[str]) -> list[Interval]:
    """The speedups of a method that did not fail."""
    assert row.by_category is not None
    return [row.by_category[category] for category in categories]


def aligned(lines: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """The lines of a table in columns: the first one on the left, the others on the right.

    width: of a line, at most. Columns that do not fit follow below an empty line, beside the first column again.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    blocks = [[0]]
    for column in range(1, len(widths)):
        block = blocks[-1]
        if width is not None and len(block) > 1 and sum(widths[c] + 2 for c in block) + widths[column] > width:
            blocks.append([0])
        blocks[-1].append(column)
    found: list[str] = []
    for block in blocks:
        found += [""] * bool(found)
        for line in lines:
            cells = (line[c].rjust(widths[c]) if c else line[c].ljust(widths[c]) for c in block)
            found.append("  ".join(cells).rstrip())
    return found


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
    tried = [row for row in result.points[0].heat if row.error is None]
    settings = [(row, [row.name, f"{row.milliseconds_per_token:.2f}"]) for row in tried]
    if settings:
        parts.append("<h2>transformers' settings, tried on some of the prompts</h2>")
        parts.append(_table(("", "ms per token"), settings))
    if result.command:
        parts.append(f"<h2>Measure it again</h2><pre>{escape(result.command)}</pre>")
    about = "".join(f"<tr><td>{escape(k)}</td><td>{escape(str(v))}</td></tr>" for k, v in result.machine.items())
    parts.append(f"<h2>Machine</h2><table>{about}</table>")
    return document(title, "\n".join(parts))


def document(title: str, body: str, style: str = "") -> str:
    """A page that needs no other file. title, body: HTML. style: CSS of its own."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}<title>{title}</title>\n<style>{_STYLE}{style}</style></head>\n'
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
