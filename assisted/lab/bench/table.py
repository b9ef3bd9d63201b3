"""A result as text: columns for a terminal, Markdown for a page. Knows only results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from textwrap import fill

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
