"""What a drafter of somebody else's may propose by mistake costs speed, never the answer: plain decoding, one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import in_turns
from pairs import CALL, no_fallback, pair, prompt

from assisted import AssistedModelForCausalLM
from assisted.core.drafts import Draft
from assisted.core.text import Text
from assisted.methods.combined import CombinedDrafter
from assisted.methods.merged import MergedDrafter
from assisted.methods.shared.base import Call, Drafter, Drafting

SIZE = 96


def right(rows: int) -> Draft:
    tokens = torch.full((rows, 3), 7)
    return Draft(tokens, torch.full((rows,), 3), torch.nn.functional.one_hot(tokens, SIZE).float())


def changed(**fields: Callable[[Draft], Any]) -> Callable[[int], Any]:
    def make(rows: int) -> Draft:
        draft = right(rows)
        own = {"tokens": draft.tokens, "lengths": draft.lengths, "q": draft.q, "parents": draft.parents}
        return Draft(**(own | {name: field(draft) for name, field in fields.items()}))

    return make


WRONG: dict[str, Callable[[int], Any]] = {
    "None": lambda rows: None,
    "a list": lambda rows: [[1, 2]] * rows,
    "tokens that are a list": changed(tokens=lambda d: d.tokens.tolist()),
    "an id too large": changed(tokens=lambda d: torch.full_like(d.tokens, SIZE)),
    "an id below 0": changed(tokens=lambda d: d.tokens - 20),
    "float tokens": changed(tokens=lambda d: d.tokens.float()),
    "a row too many": lambda rows: right(rows + 1),
    "flat tokens": changed(tokens=lambda d: d.tokens[0]),
    "lengths beyond the width": changed(lengths=lambda d: d.lengths + 1),
    "lengths below 0": changed(lengths=lambda d: d.lengths - 4),
    "q that is no number": changed(q=lambda d: d.q * float("nan")),
    "q below 0": changed(q=lambda d: d.q * 2 - 1 / SIZE),
    "q that adds up to 2": changed(q=lambda d: d.q * 2),
    "q of other columns": changed(q=lambda d: d.q[:, 1:]),
    "q of another vocabulary": changed(q=lambda d: d.q[..., 1:]),
    "parents after their children": changed(parents=lambda d: torch.tensor([[1, 2, -1]]).repeat(len(d.tokens), 1)),
    "parents below -1": changed(parents=lambda d: torch.full_like(d.tokens, -2)),
    "another device": changed(tokens=lambda d: d.tokens.to("meta")),
}


APART = [(1, False, None), (3, True, None), (3, False, None), (1, True, None)]
TOGETHER = [(3, False, CombinedDrafter), (3, False, MergedDrafter)]


class Wrong(Drafter):
    """Its third proposal is wrong."""

    def __init__(self, make: Callable[[int], Any]):
        self.make = make

    def start(self, call: Call) -> Drafting:
        return WrongDrafting(self.make)


class WrongDrafting(Drafting):
    def __init__(self, make: Callable[[int], Any]):
        self.make, self.calls = make, 0

    def propose(self, text: Text, budget: int) -> Draft:
        self.calls += 1
        return self.make(text.rows) if self.calls == 3 else right(text.rows)


@pytest.mark.parametrize(("what", "way"), [*in_turns(list(WRONG), APART), *in_turns(list(WRONG), TOGETHER)])
def test_a_wrong_draft_costs_no_token(what: str, way: tuple[int, bool, Any]) -> None:
    """Of one row or three, judged apart or in lockstep; by itself, or among others."""
    target, (rows, lockstep, together) = pair()[0], way
    model = AssistedModelForCausalLM.from_models(target, draft="ngram", draft_length=4)
    wrong = Wrong(WRONG[what])
    model.drafter = together([model.drafter, wrong]) if together else wrong
    start = prompt(rows)
    call = CALL | {"attention_mask": start["attention_mask"]}
    call |= {"logits_processor": [lambda ids, scores: scores]} if lockstep else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = model.generate(start["ids"], **call)
    told = ["Drafting failed" in str(warning.message) for warning in caught]
    assert told == [True] or (together is MergedDrafter and what == "float tokens" and not told)  # which it writes anew
    assert ours.tolist() == target.generate(start["ids"], **call).tolist()


def test_a_right_draft_is_taken() -> None:
    _, model = pair()
    own, model.drafter = model.drafter, Wrong(right)
    try:
        with no_fallback():
            model.generate(prompt()["ids"], **CALL)
    finally:
        model.drafter = own
    assert model.report is not None
    assert model.report.drafted > 0
