"""Logits that no token can be drawn from (NaN, infinity, everything forbidden) end a call as they end plain `generate`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from covering import in_turns
from pairs import CALL, assistedly, pair, plainly, prompt
from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria

from assisted import AssistedModelForCausalLM
from assisted.core.drafts import Draft
from assisted.core.text import Text
from assisted.distribution import Distribution
from assisted.lockstep import judge_in_lockstep
from assisted.verification import judge

SAMPLED = {"do_sample": True, "top_k": 0}
MESSAGE = "probability tensor contains either `inf`, `nan` or element < 0"
INVALID = {
    "nan": lambda logits: logits * math.nan,
    "one nan": lambda logits: logits.index_fill(-1, torch.tensor(7), math.nan),
    "one infinite": lambda logits: logits.index_fill(-1, torch.tensor(7), math.inf),
    "everything forbidden": lambda logits: torch.full_like(logits, -math.inf),
}


pytestmark = pytest.mark.usefixtures("invariants")


@contextmanager
def invalid(target: Any, how: str, first: int) -> Iterator[None]:
    """From position `first` of each row on, the target's logits are invalid."""
    positions = torch.empty(0)

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal positions
        positions = kwargs["position_ids"]

    def spoil(module: Any, args: Any, output: Any) -> None:
        rows, columns = output.logits.shape[:2]
        spoiled = positions[:, -columns:].expand(rows, -1) >= first
        output.logits[spoiled] = INVALID[how](output.logits[spoiled])

    handles = [target.register_forward_pre_hook(keep, with_kwargs=True), target.register_forward_hook(spoil)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def with_draft(draft: str) -> AssistedModelForCausalLM:
    return pair()[1] if draft == "model" else AssistedModelForCausalLM.from_models(pair()[0], draft=draft)


SPOILED = [
    (how, first, rows)
    for how, row in zip(INVALID, (1, 4, 1, 4), strict=True)
    for first, rows in ((0, row), (16, 5 - row))
]
"""How, from which position, in how many rows."""


@pytest.mark.parametrize(("spoiled", "draft"), in_turns(SPOILED, ["model", "suffix", "recycle"]))
def test_sampling_raises_what_plain_raises(spoiled: tuple[str, int, int], draft: str) -> None:
    target, model = pair()[0], with_draft(draft)
    how, first, rows = spoiled
    start = prompt(rows)
    with invalid(target, how, first):
        with pytest.raises(RuntimeError, match=MESSAGE):
            plainly(**start, **SAMPLED)
        with pytest.raises(RuntimeError, match=MESSAGE):
            model.generate(start["ids"], attention_mask=start["attention_mask"], draft_length=4, **(CALL | SAMPLED))
    assert assistedly(**start).tolist() == plainly(**start).tolist()


@pytest.mark.parametrize("how", INVALID)
def test_sampling_in_lockstep_raises_what_plain_raises(how: str) -> None:
    start, calls = prompt(4), CALL | SAMPLED | {"logits_processor": [lambda ids, scores: scores + 1]}
    with invalid(pair()[0], how, 16):
        for generate in (pair()[0].generate, pair()[1].generate):
            with pytest.raises(RuntimeError, match=MESSAGE):
                generate(start["ids"], attention_mask=start["attention_mask"], **calls)


@pytest.mark.parametrize(("spoiled", "penalty"), in_turns(SPOILED, [1.0, 1.3, 1.0]))
def test_greedy_takes_what_plain_takes(spoiled: tuple[str, int, int], penalty: float) -> None:
    (how, first, rows), processors = spoiled, {"repetition_penalty": penalty}
    start = prompt(rows)
    with invalid(pair()[0], how, first):
        plain = plainly(**start, **processors)
        ours = pair()[1].generate(
            start["ids"], attention_mask=start["attention_mask"], draft_length=4, **(CALL | processors)
        )
    assert ours.tolist() == plain.tolist()


def text_of(*rows: list[int], room: int = 9, end: int = 3) -> Text:
    criteria = [MaxLengthCriteria(len(rows[0]) + room), EosTokenCriteria(end)]
    return Text(torch.tensor(rows), StoppingCriteriaList(criteria), 0, None)


SAMPLING = Distribution(LogitsProcessorList(), True)


@pytest.mark.parametrize("rule", [judge, judge_in_lockstep])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("drawn", [False, True])
def test_invalid_logits_after_a_rejected_token_are_no_matter(drawn: bool, tree: bool, rule: Any) -> None:
    tokens = torch.tensor([[2, 1]])
    q = torch.nn.functional.one_hot(tokens, 4).float() if drawn else None
    draft = Draft(tokens, torch.tensor([2]), q, torch.tensor([[-1, 0]]) if tree else None)
    logits = torch.full((1, 3, 4), math.nan)
    logits[:, 0] = torch.tensor([-math.inf, 0.0, -math.inf, -math.inf])
    text = text_of([0, 0])
    rule(draft, logits, SAMPLING, text)
    assert text.output().tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("drawn", [False, True])
def test_invalid_logits_after_the_end_are_no_matter(drawn: bool, tree: bool) -> None:
    tokens = torch.tensor([[2, 3]])
    q = torch.nn.functional.one_hot(tokens, 4).float() if drawn else None
    draft = Draft(tokens, torch.tensor([2]), q, torch.tensor([[-1, 0]]) if tree else None)
    logits = torch.full((1, 3, 4), math.nan)
    logits[:, :2] = torch.nn.functional.one_hot(tokens, 4).float().log()
    text = text_of([0, 0])
    outcome = judge(draft, logits, SAMPLING, text)
    assert text.output().tolist() == [[0, 0, 2, 3]] and text.done
    assert (outcome.accepted, outcome.kept) == ([2], [2])


@pytest.mark.parametrize("tree", [False, True])
def test_a_call_ends_as_often_as_plain_draws_a_token_with_invalid_logits_after_it(tree: bool) -> None:
    """A draft that proposes the token more often than the target does not change that."""
    torch.manual_seed(0)
    p, q = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    failed = 0
    for _ in range(1000):
        first, second = q.multinomial(1), q.multinomial(1)
        logits = p.log().expand(1, 3, 4).clone()
        if first == 3:
            logits[:, 1:] = math.nan
        draft = Draft(
            torch.cat([first, second])[None],
            torch.tensor([2]),
            q.expand(1, 2, 4),
            torch.tensor([[-1, 0]]) if tree else None,
        )
        text = text_of([0, 0], end=9)
        try:
            judge(draft, logits, SAMPLING, text)
        except RuntimeError:
            failed += 1
    # the token is drawn with probability 0.1 as draft or as correction; it is kept as a draft with the same probability
    assert abs(failed - 100) < 42  # more than four standard deviations
