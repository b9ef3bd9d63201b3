"""A result as text: columns for a terminal, Markdown for a page. Knows results alone."""

from __future__ import annotations

from collections.abc import Sequence

from .results import Point, Result, Row

__all__ = ["COLUMNS", "cells", "heading", "markdown", "notes", "table"]

COLUMNS = (
    "",
    "times plain",
    "ms/token",
    "tokens/pass",
    "accepted",
    "draft/verify/rest",
    "first token",
    "same",
    "4-grams",
    "memory",
)


def table(result: Result) -> str:
    """For a terminal."""
    parts = ["\n".join(heading(result))]
    for point in result.points:
        lines = [[*COLUMNS], *(cells(row) for row in point.rows if row.error is None)]
        parts.append("\n".join([*_titled(result, point), *_aligned(lines)]))
        categories = list(result.prompts)
        if len(categories) > 1:
            split = [["times plain, by category", *categories]]
            split += [[row.name, *_by_category(row, categories)] for row in point.rows if row.error is None]
            parts.append("\n".join(_aligned(split)))
        failed = [f"failed: {row.name}: {row.error}" for row in point.rows if row.error is not None]
        warned = [f"warned: {row.name}: {row.warned}" for row in point.rows if row.warned is not None]
        if failed or warned:
            parts.append("\n".join([*failed, *warned]))
    parts.append("\n".join(notes(result)))
    return "\n\n".join(parts)


def markdown(result: Result) -> str:
    """Tables for a page, what they were measured with below each heading."""
    lines = [" ".join(heading(result)), ""]
    for point in result.points:
        lines += [*_titled(result, point), "", "| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
        lines += ["| " + " | ".join(cells(row)) + " |" for row in point.rows if row.error is None]
        lines += ["", *(f"Failed: {row.name}: {row.error}" for row in point.rows if row.error is not None)]
    return "\n".join(lines).rstrip()


def heading(result: Result) -> list[str]:
    """What was measured, on what."""
    about, rules = result.machine, result.rules
    drawn = "temperature 0" if rules.greedy else f"temperature {rules.temperature:g}, top-p {rules.top_p:g}"
    count = sum(map(len, result.prompts.values()))
    draft = "" if result.draft is None else f" with {result.draft}"
    return [
        f"{result.target}{draft}, {about['dtype']}, {about['device']}, {about['threads']} threads; "
        f"{about['processor']}; torch {about['torch']}, transformers {about['transformers']}.",
        f"{count} prompts ({', '.join(result.prompts)}), {rules.new_tokens} new tokens each, {drawn}, {rules.repeats} repeats, "
        "all contestants in turns.",
    ]


def notes(result: Result) -> list[str]:
    """How to read the table."""
    lines = [
        "Times plain: against the fastest plain mode, median over repeats, 95% bootstrap interval over prompts and repeats.",
        "Tokens per pass of the target count its own token (the bonus) and the pass that reads the prompt.",
        "4-grams: share that repeats an earlier one of the same text; repetition flatters every drafter.",
    ]
    measured = any(row.working_bytes_over_plain is not None for point in result.points for row in point.rows)
    lines.append(
        "Memory: the draft's weights, and what a call allocates, over plain's peak."
        if measured
        else "Memory: the draft's weights alone; what a call allocates is measured on CUDA only."
    )
    if result.rules.greedy and result.machine["dtype"] != "float32":
        lines.append(f"Same: {result.machine['dtype']} texts may part from plain's at a near-tie of the target.")
    return lines


def cells(row: Row) -> list[str]:
    """One row of the table, for one that did not fail."""
    shares = "" if row.draft is None or row.verify is None else _split(row.draft, row.verify)
    return [
        row.name,
        str(row.speedup),
        f"{row.milliseconds_per_token:.2f}",
        f"{row.tokens_per_pass:.2f}",
        "" if row.acceptance_rate is None else f"{row.acceptance_rate:.0%}",
        shares,
        "" if row.first_token_milliseconds is None else f"{row.first_token_milliseconds:.1f} ms",
        "" if row.same is None else f"{row.same}/{row.rows}",
        f"{row.repeated_4grams:.0%}",
        f"{(row.draft_bytes + (row.working_bytes_over_plain or 0)) / 2**20:+.1f} MiB",
    ]


def _split(draft: float, verify: float) -> str:
    return " ".join(f"{share:.0%}" for share in (draft, verify, max(0.0, 1 - draft - verify)))


def _by_category(row: Row, categories: Sequence[str]) -> list[str]:
    by_category = row.by_category or {}
    return [f"{by_category[category].ratio:.2f}" for category in categories]


def _titled(result: Result, point: Point) -> list[str]:
    if len(result.points) == 1:
        return [f"1.00 is {point.baseline}."]
    context = "" if point.context is None else f", context {point.context}"
    return [f"Batch {point.batch}{context}; 1.00 is {point.baseline}."]


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
