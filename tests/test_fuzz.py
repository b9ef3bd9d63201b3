"""The fuzzer draws the same cases every time, finds planted defects, and tells near-ties from wrong tokens."""

from __future__ import annotations

import collections
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from architectures import build, random_ids
from fuzz import changes, drafts, edits
from fuzz.cases import BY_NAME, Call, Case, Crowd, Edit, Request, draw, traits
from fuzz.command import main
from fuzz.minimise import minimised
from fuzz.running import NEAR, Outcome, _Follow, run, same_text

from assisted.core import acceptance
from assisted.engine import runner as runtime
from assisted.fast import sources
from assisted.many.distributions import OfRows

ARGUMENTS = {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
SOUND = Case(
    steps=(
        Call((12, 9, 12), arguments=ARGUMENTS),
        Call((3,), continues="cache", arguments=ARGUMENTS | {"repetition_penalty": 1.2}),
        Edit("optimizer_step", 3),
        Call((9,), arguments=ARGUMENTS | {"streamer": True}),
    )
)
REQUESTS = [
    Request(Call((12,), arguments=ARGUMENTS)),
    Request(Call((30,), 3, arguments=ARGUMENTS | {"repetition_penalty": 1.2}), shares=9, when=4),
    Request(Call((7,), 4, arguments=ARGUMENTS | {"do_sample": True, "temperature": 0.8}), when=1, draws=5),
    Request(Call((20,), 5, prompt="known", arguments=ARGUMENTS), shares=9, patience=6),
]
CROWDED = Case(steps=(Crowd(tuple(REQUESTS[:1] * 2), 2), Crowd(tuple(REQUESTS), 2, 4, True)))


def test_a_case_is_made_from_its_seed_and_number() -> None:
    cases = [draw(5, number) for number in range(50)]
    assert cases == [draw(5, number) for number in range(50)]
    assert cases != [draw(6, number) for number in range(50)]


def test_a_case_prints_as_what_makes_it_again() -> None:
    for number in range(50):
        assert eval(repr(draw(0, number, crowds=0.5))) == draw(0, number, crowds=0.5)


def test_all_architectures_and_edits_are_drawn() -> None:
    cases = [draw(0, number) for number in range(4 * len(BY_NAME))]
    assert {case.architecture for case in cases} == set(BY_NAME)
    drawn = {
        step.name for case in map(lambda n: draw(1, n), range(800)) for step in case.steps if isinstance(step, Edit)
    }
    assert drawn == {*edits.NAMES, *changes.NAMES, *changes.PREPARED.values()}


def test_crowds_are_drawn_with_every_trait() -> None:
    drawn = collections.Counter[str]()
    for case in (draw(3, number, crowds=1.0) for number in range(200)):
        for crowd in (step for step in case.steps if isinstance(step, Crowd)):
            drawn.update(name for request in crowd.requests for name in traits(case, crowd, request))
    for name in (*drafts.KINDS, "recurrent or hybrid target", "quantized target", "bfloat16", "edited between crowds"):
        assert drawn[name] >= 20, name
    for name in ("goes on after an answer", "grammar", "drawn, with a seed", "limit of 1", "prompt of pads", "pool"):
        assert drawn[name] >= 50, name


def test_a_sound_pair_passes() -> None:
    outcome = run(SOUND)
    assert (outcome.failures, outcome.near_ties, outcome.refused, outcome.warned) == ([], [], [], [])
    assert (outcome.calls, outcome.tokens) == (3, 3 * 20 + 3 * 20 + 20)
    assert outcome.drafted > outcome.accepted > 0


def test_a_sound_crowd_passes() -> None:
    outcome = run(CROWDED)
    assert (outcome.failures, outcome.near_ties, outcome.refused, outcome.warned) == ([], [], [], [])
    assert outcome.calls == 6 and 5 * 20 + 6 <= outcome.tokens <= 5 * 20 + 10
    assert outcome.traits["comes later"] == [40, 0] and outcome.traits["drawn, with a seed"] == [20, 0]
    assert outcome.traits["draft models"] == [outcome.tokens, 0] and "grammar" not in outcome.traits
    assert outcome.drafted > outcome.accepted > 0


def test_a_processor_that_writes_in_place_beside_logits() -> None:
    """Those of plain `generate` are what it has written; its scores are compared as ever."""
    more = {"processors": ["in place"], "return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    assert run(Case(steps=(Call((12, 9), arguments=ARGUMENTS | more),))).failures == []


def test_padding_at_the_end_is_refused() -> None:
    outcome = run(Case(steps=(Call((12, 9), pads="right", arguments=ARGUMENTS),)))
    assert outcome.failures == [] and "ends in padding" in outcome.refused[0]


@pytest.mark.parametrize("seed", range(6))
def test_whether_a_call_meets_nans_does_not_depend_on_chance(seed: int) -> None:
    call = Call((20,), 336, arguments=ARGUMENTS)
    sampled = replace(call, arguments=ARGUMENTS | changes.ARGUMENTS["nan_logits"](None))
    outcome = run(Case("llama4", 1, steps=(call, Edit("nan_logits", seed), sampled, Edit("undo"), call)))
    assert (outcome.failures, outcome.refused) == ([], [])


def one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = acceptance.match

    def match(drafted: Any, choice: Any) -> Any:
        walk, token = sound(drafted, choice)
        return (range(len(walk) + 1), choice[len(walk) + 1]) if len(walk) < len(drafted) else (walk, token)

    monkeypatch.setattr(acceptance, "match", match)


def stale_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.Source, "same", lambda self, other: True)


def a_position_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = runtime.CachedModel._positions
    monkeypatch.setattr(
        runtime.CachedModel, "_positions", lambda self, depths, used: sound(self, depths, used) + (depths > 1).long()
    )


def another_texts_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = OfRows.give
    monkeypatch.setattr(OfRows, "give", lambda self, row, own: self.own[row] or sound(self, row, own))


PLANTED = [(one_too_many, SOUND), (stale_weights, SOUND), (a_position_too_far, SOUND), (one_too_many, CROWDED)]
PLANTED += [(a_position_too_far, CROWDED), (another_texts_settings, CROWDED)]


@pytest.mark.parametrize(("plant", "case"), PLANTED)
def test_a_planted_defect_is_found(plant: Any, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    failures = run(case).failures
    assert failures and "by the pair" in failures[0]


def test_a_failing_crowd_is_counted_and_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    one_too_many(monkeypatch)
    assert run(CROWDED).traits["draft models"][1] == 1
    (step,) = minimised(CROWDED, "tokens").steps
    assert isinstance(step, Crowd) and len(step.requests) == step.rows == 1


def test_a_failing_case_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    one_too_many(monkeypatch)
    smaller = minimised(replace(SOUND, config={"num_key_value_heads": 4}, weights=1, packed=True), "tokens")
    (call,) = smaller.steps
    assert isinstance(call, Call)
    assert len(call.lengths) == 1 and call.arguments["max_new_tokens"] < 20
    assert (smaller.config, smaller.weights, smaller.packed) == ({}, 0, False)


@pytest.mark.parametrize(("factor", "near"), [(0.5, True), (2.0, False)])
@pytest.mark.parametrize("dtype", NEAR)
def test_a_near_tie_is_one_within_rounding(dtype: torch.dtype, factor: float, near: bool) -> None:
    step = torch.randn(1, 96, generator=torch.Generator().manual_seed(0))
    first = int(step.argmax())
    other = (first + 1) % 96
    step[0, other] = step[0, first]
    step[0, other] -= factor * NEAR[dtype] * step.std()
    plain, ours = torch.tensor([[7, 8, first]]), torch.tensor([[7, 8, other]])
    outcome = Outcome()
    assert not same_text(Call((2,)), plain, ours, 2, lambda: [step], outcome, dtype)
    assert (len(outcome.near_ties), len(outcome.failures)) == ((1, 0) if near else (0, 1))


def test_a_token_that_the_target_cannot_say_is_no_near_tie() -> None:
    step = torch.zeros(1, 96)
    step[0, 5], step[0, 6] = 1.0, -float("inf")
    outcome = Outcome()
    same_text(Call((1,)), torch.tensor([[7, 5]]), torch.tensor([[7, 6]]), 1, lambda: [step], outcome, torch.float32)
    assert outcome.failures and not outcome.near_ties


def test_the_command_says_what_it_did(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("fuzz.command.draw", lambda *of: SOUND)
    assert main(["--cases", "2", "--seed", "7"]) == 0
    assert "seed 7: 280 tokens over 1 architectures in 6 calls of 2 cases" in capsys.readouterr().out
    one_too_many(monkeypatch)
    assert main(["--cases", "1", "--seed", "7", "--json", "--no-minimise"]) == 1
    told = capsys.readouterr().out
    assert json.loads(told[told.index("{\n") :])["failures"][0]["again"] == "--seed 7 --case 0"


def test_scores_are_looked_up_along_the_text_itself() -> None:
    """Where two tokens tie, a second run of the call may go another way: its scores would be those of another text."""
    target = build(BY_NAME["llama"])
    ids, text = random_ids(target, 2, 5), random_ids(target, 2, 11, seed=9)
    text[:, :5] = ids
    follow = _Follow(text)
    call = {"max_new_tokens": 6, "do_sample": True, "top_k": 1, "logits_processor": [follow], "eos_token_id": None}
    written = target.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **call)
    assert written.tolist() == text.tolist()
    wanted = target(text).logits[:, 4:-1].unbind(1)
    assert all(torch.allclose(one, two, atol=1e-4) for one, two in zip(follow.steps, wanted, strict=True))
