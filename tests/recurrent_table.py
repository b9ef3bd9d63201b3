"""The table of docs/concepts/recurrent-targets.md: which drafts work with which recurrent architecture, tried out.

    python tests/recurrent_table.py

writes it anew. test_recurrent.py compares it with the page. A draft that is taken must write plain `generate`'s text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from architectures import ARCHITECTURES, RECURRENT, REFUSED, Architecture, build, random_ids
from methods import eagle_3
from mtp_heads import random_mtp
from pairs import CALL

from assisted import MTP, AssistedModelForCausalLM
from assisted.engine.trust import trust
from assisted.engine.verifiable import masks_of, require_verifiable

PAGE = Path(__file__).parent.parent / "docs" / "concepts" / "recurrent-targets.md"
BEGIN, END = "<!-- recurrent:begin -->", "<!-- recurrent:end -->"
DRAFTS: dict[str, Callable[[Any], Any]] = {
    "text, draft model": lambda target: ["suffix", build(ARCHITECTURES[0])],
    "`self:int8`": lambda target: "self:int8-torchao",
    "EAGLE": eagle_3,
    "`mtp`": lambda target: MTP(random_mtp(target)),
    "`early-exit`": lambda target: "early-exit:1",
    "`layer-skip`": lambda target: "layer-skip",
}
REASONS = {
    "over several tokens differs": "its forward pass over several tokens differs from those over one token at a time",
    "in its own modules": "its state is in its modules, not in the cache",
    "a cache of its own kind": "a cache class of its own",
    "Indexed": "keys of an indexer, which the slots do not store",
    "keeps a recurrent state, which": "a cache class of its own",
}


def row(architecture: Architecture) -> list[str]:
    """What is done about an architecture, in float32."""
    target = build(architecture)
    try:
        require_verifiable(target)
    except ValueError as error:
        reason = next(told for found, told in REASONS.items() if found in str(error))
        return [f"`{architecture.name}`", f"refused: {reason}", *[""] * (1 + len(DRAFTS))]
    way = "trees" if masks_of(target, trust(target)).trees else "chains"
    cells = [works(target, draft) for draft in DRAFTS.values()]
    cells.append(works(build(ARCHITECTURES[0]), lambda _: target))
    return [f"`{architecture.name}`", way, *("yes" if cell else "no" for cell in cells)]


def works(target: Any, draft: Callable[[Any], Any]) -> bool:
    """Whether a draft is taken; then its text must be the target's."""
    try:
        model = AssistedModelForCausalLM.from_models(target, draft=draft(target), draft_length=3)
    except ValueError:
        return False
    ids = random_ids(target, 1, 12, seed=3)
    assert model.generate(ids, **CALL).tolist() == target.generate(ids, **CALL).tolist()
    assert model.report.drafted > 0
    return True


def table() -> str:
    """Between the markers of the page."""
    head = ["model", "as a target", *DRAFTS, "as a draft"]
    rows = [head, ["---"] * len(head), *(row(a) for a in sorted(RECURRENT + REFUSED, key=lambda a: a.name))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def section(text: str) -> tuple[int, int]:
    """Where the table is on the page."""
    return text.index(BEGIN) + len(BEGIN) + 2, text.index(END) - 2


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    start, stop = section(page)
    PAGE.write_text(page[:start] + table() + page[stop:], encoding="utf-8")
