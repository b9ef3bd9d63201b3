"""The table of docs/methods/index.md, made of what the methods declare in the code.

    python tests/methods_table.py

writes it anew. test_methods_table.py compares it with the page, and what is declared with what the methods do.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assisted.drafters import METHODS

PAGE = Path(__file__).parent.parent / "docs" / "methods" / "index.md"
BEGIN, END = "<!-- methods:begin -->", "<!-- methods:end -->"


@dataclass(frozen=True)
class Line:
    """A line of the table: what the code does not know of a method.

    Args:
        method: the name in `assisted.drafters.METHODS`.
        title, page: of the link.
        written: what is passed as `draft=`.
        needs: what has to be there.
        example: what is passed for the shipped target, as Python; None takes what is written.
    """

    method: str
    title: str
    page: str
    written: str
    needs: str
    example: str | None = None


LINES = [
    Line("suffix", "Suffix", "suffix.md", '`"suffix"` or nothing', "nothing"),
    Line("ngram", "n-gram", "ngram.md", '`"ngram"`', "nothing"),
    Line("recycle", "Token recycling", "recycle.md", '`"recycle"`', "nothing"),
    Line(
        "early-exit",
        "Early exit",
        "early-exit.md",
        '`"early-exit"`',
        "a target trained for it, to pay off",
    ),
    Line("layer-skip", "Layer skipping", "layer-skip.md", '`"layer-skip"`', "a deep target, to pay off"),
    Line(
        "self",
        "Quantized copy of the target",
        "quantized-self.md",
        '`"self:int8"`',
        "memory for the copy",
    ),
    Line("draft-model", "Draft model", "draft-model.md", "Hub id, folder", "a small relative", '"zoo:draft"'),
    Line(
        "draft-model",
        "Draft with another tokenizer",
        "other-tokenizer.md",
        "Hub id, folder",
        "any small model",
        '"zoo:draft-other-tokenizer"',
    ),
    Line(
        "draft-tree",
        "Draft model, large trees",
        "../howto/offload.md",
        '`"draft-tree:ID"`',
        "a small relative; a target whose weights are offloaded, to pay off",
        '"draft-tree:zoo:draft"',
    ),
    Line("medusa", "Medusa heads", "medusa.md", '`"medusa:DIR"`', "heads for this target", '"zoo:medusa"'),
    Line("eagle", "EAGLE heads", "eagle.md", '`"eagle:DIR"`', "a head for this target", '"zoo:eagle3"'),
    Line(
        "combined",
        "Several drafters in turns",
        "combined.md",
        '`["suffix", "org/draft"]`',
        "what its parts need",
        '["suffix", "zoo:draft"]',
    ),
    Line(
        "merged",
        "Several drafters in one tree",
        "specinfer.md",
        '`Merged(["org/draft", "suffix"])`',
        "what its parts need",
        'Merged(["zoo:draft", "suffix"])',
    ),
]


def tree_option(spec: type[Any]) -> Any:
    """The default of a spec's option `tree`: False drafts chains, True trees, None trees where the target is greedy. True
    for specs that have no such option and draft trees."""
    fields = {field.name: field.default for field in dataclasses.fields(spec)}
    return fields.get("tree", True)


def cells(line: Line) -> list[str]:
    spec = METHODS[line.method]
    trees = {None: "as its parts", False: "no"}.get(spec.trees)
    if trees is None:
        trees = {True: "yes", False: "optional", None: "greedy only"}[tree_option(spec)]
    return [
        f"[{line.title}]({line.page})",
        line.written,
        line.needs,
        {True: "yes", False: "no", None: "as its parts"}[spec.trained],
        "yes",
        {True: "distributions", False: "target's draws", None: "as its parts"}[spec.has_q],
        trees,
    ]


def table() -> str:
    """The table, between its markers."""
    titles = ["method", "`draft=`", "needs", "training", "exact, batches", "sampling: accepted by", "trees"]
    rows = [titles, ["---"] * len(titles), *map(cells, LINES)]
    return "\n".join([BEGIN, *("| " + " | ".join(row) + " |" for row in rows), END])


def section(text: str) -> tuple[int, int]:
    """Where the table stands in the page."""
    return text.index(BEGIN), text.index(END) + len(END)


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    start, stop = section(text)
    PAGE.write_text(text[:start] + table() + text[stop:], encoding="utf-8")
