"""The table of docs/methods/index.md, made of what the methods declare in the code.

    python tests/methods_table.py

writes it anew. test_methods_table.py compares it with the page, and what is declared with what the methods do.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assisted.methods import METHODS

PAGE = Path(__file__).parent.parent / "docs" / "methods" / "index.md"
BEGIN, END = "<!-- methods:begin -->", "<!-- methods:end -->"


@dataclass(frozen=True)
class Line:
    """A line of the table: what the code does not know of a method.

    Args:
        method: the name in `assisted.methods.METHODS`.
        written: what is passed as `draft=`.
        needs: what has to be there.
        example: what is passed for the shipped target, as Python; None takes what is written.
        page: of the link; None has the method's name.
        other_title: where it is not that of the spec.
    """

    method: str
    written: str
    needs: str
    example: str | None = None
    page: str | None = None
    other_title: str | None = None

    @property
    def title(self) -> str:
        return self.other_title or METHODS[self.method].title


LINES = [
    Line("suffix", '`"suffix"` or nothing', "nothing"),
    Line("ngram", '`"ngram"`', "nothing"),
    Line("recycle", '`"recycle"`', "nothing"),
    Line("early-exit", '`"early-exit"`', "a target trained for it, to pay off"),
    Line("layer-skip", '`"layer-skip"`', "a deep target, to pay off"),
    Line("self", '`"self:int8"`', "memory for the copy", page="quantized-self.md"),
    Line("draft-model", "Hub id, folder", "a small relative", '"zoo:draft"'),
    Line(
        "draft-model",
        "Hub id, folder",
        "any small model",
        '"zoo:draft-other-tokenizer"',
        "other-tokenizer.md",
        "Draft with another tokenizer",
    ),
    Line("pard", '`"pard:DIR"`', "a small relative, trained for this"),
    Line(
        "draft-tree",
        '`"draft-tree:ID"`',
        "a small relative; a target whose weights are offloaded, to pay off",
        '"draft-tree:zoo:draft"',
        "../howto/offload.md",
    ),
    Line("medusa", '`"medusa:DIR"`', "heads for this target", '"zoo:medusa"'),
    Line("eagle", '`"eagle:DIR"`', "a head for this target", '"zoo:eagle3"'),
    Line("mtp", '`"mtp"`', "a target whose checkpoint has the head"),
    Line("dflash", '`"dflash:DIR"`', "a drafter for this target"),
    Line("assistant", '`"assistant:ID"`, folder', "an assistant of this Gemma 4, or one trained for this target"),
    Line(
        "candidates",
        "a candidate generator",
        "an object of transformers' interface",
        "Candidates(lambda ids: PromptLookupCandidateGenerator(max_length=10_000))",
        "../howto/candidate-generators.md",
    ),
    Line("combined", '`["suffix", "org/draft"]`', "what its parts need", '["suffix", "zoo:draft"]'),
    Line(
        "merged",
        '`Merged(["org/draft", "suffix"])`',
        "what its parts need",
        'Merged(["zoo:draft", "suffix"])',
        "specinfer.md",
    ),
    Line("auto", '`"auto"`', "nothing", page="../howto/pick-a-draft.md#2-let-it-choose-among-what-is-there"),
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
        f"[{line.title}]({line.page or line.method + '.md'})",
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
