"""The loop that transformers' `generate` is given: what transformers doesn't pass on to it, and calls that are made again."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pairs import CALL, ENDS, Listener, assistedly, no_fallback, pair, plainly, prompt, tokenizer
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, StoppingCriteriaList, StopStringCriteria

from assisted import AssistedModelForCausalLM
from assisted.core.drafts import DraftingStopped

LONG = CALL | {"max_new_tokens": 40}


def stops(rows: int) -> list[str]:
    """A text that ends each row after some tokens, the first row after eight."""
    plain = pair()[0].generate(prompt(rows)["ids"], **LONG)
    return [tokenizer().decode(row[prompt(rows)["ids"].shape[1] + 7 + n]) for n, row in enumerate(plain)]


@pytest.fixture
def own() -> Iterator[tuple[PreTrainedModel, AssistedModelForCausalLM]]:
    """A pair whose models and settings a test may change."""
    target, model = copy.deepcopy(pair()[0]), pair()[1]
    yield target, AssistedModelForCausalLM.from_models(target, draft=model.drafter.model, draft_length=4)


def test_the_target_runs_as_it_is() -> None:
    """No class is derived from the target's, no attribute is added, and nothing is left of a call."""
    target, _ = pair()
    kinds, attributes, seen = set(type(target).__subclasses__()), dict(vars(target)), []
    hook = target.model.register_forward_hook(lambda module, *args: None)
    with target.model.register_forward_pre_hook(lambda module, args: seen.append(type(module))):
        assistedly(**prompt())
    hook.remove()
    assert set(seen) == {type(target.model)}
    assert set(type(target).__subclasses__()) == kinds
    assert {n: v for n, v in vars(target).items() if n != "_cache"} == attributes


# --- what a loop is not told ---


@pytest.mark.parametrize(
    ("where", "ends"), [("argument", None), ("argument", ENDS), ("config", None), ("target", None)], ids=str
)
@pytest.mark.parametrize("rows", [1, 3])
def test_stop_strings(
    where: str, ends: list[int] | None, rows: int, own: tuple[PreTrainedModel, AssistedModelForCausalLM]
) -> None:
    target, model = own
    texts, call = [*stops(rows), "no such text"], {**LONG, "eos_token_id": ends, "tokenizer": tokenizer()}
    if where == "argument":
        call["stop_strings"] = texts
    elif where == "config":
        call = {"tokenizer": call.pop("tokenizer"), "generation_config": GenerationConfig(**call, stop_strings=texts)}
    else:
        target.generation_config.stop_strings = texts
    ids = prompt(rows)["ids"]
    expected = target.generate(ids, **call)
    assert expected.shape[1] < ids.shape[1] + 40
    with no_fallback():
        assert model.generate(ids, **call).tolist() == expected.tolist()
    assert model.report is not None and model.report.drafted > 0
    assert call.get("generation_config", target.generation_config).stop_strings in (None, texts)


def test_a_callers_criterion_goes_before_stop_strings() -> None:
    mine = StopStringCriteria(tokenizer(), ["no such text"])
    call: dict[str, Any] = {"stop_strings": stops(1), "tokenizer": tokenizer()}
    start = prompt()
    call["stopping_criteria"] = StoppingCriteriaList([mine])
    assert plainly(**start, **call).shape[1] == start["ids"].shape[1] + CALL["max_new_tokens"]
    assert assistedly(**start, **call).tolist() == plainly(**start, **call).tolist()


def test_stop_strings_need_a_tokenizer() -> None:
    for run in (plainly, assistedly):
        with pytest.raises(ValueError, match="tokenizer"):
            run(**prompt(), stop_strings=stops(1))


def test_a_healed_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers heals the last token of the prompt before the loop, with a tokenizer that a loop is not given."""
    healed: list[Any] = []

    def heal_tokens(self: Any, input_ids: torch.Tensor, tokenizer: Any = None) -> torch.Tensor:
        healed.append(tokenizer)
        changed = input_ids.clone()
        changed[:, -1] = 9
        return changed

    monkeypatch.setattr(GenerationMixin, "heal_tokens", heal_tokens)
    call = {**prompt(2), "token_healing": True, "tokenizer": tokenizer()}
    expected = plainly(**call)
    assert assistedly(**call).tolist() == expected.tolist()
    assert expected[0, prompt(2)["ids"].shape[1] - 1] == 9
    assert len(healed) == 2 and None not in healed


@pytest.mark.parametrize("healed", [8, 11])  # a longer one fails in transformers
@pytest.mark.parametrize(
    "more", [{}, {"min_new_tokens": 3, "eos_token_id": ENDS}, {"max_length": 20, "max_new_tokens": None}], ids=str
)
def test_a_healed_prompt_of_another_length(healed: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """All limits count from the healed prompt, which a streamer gets as well."""

    def heal_tokens(self: Any, input_ids: torch.Tensor, tokenizer: Any = None) -> torch.Tensor:
        return torch.cat([input_ids, input_ids], 1)[:, :healed]

    monkeypatch.setattr(GenerationMixin, "heal_tokens", heal_tokens)
    call = {"token_healing": True, "tokenizer": tokenizer(), **more, "ids": prompt()["ids"]}
    mine, theirs = Listener(), Listener()
    expected = plainly(**call, streamer=theirs)
    assert assistedly(**call, streamer=mine).tolist() == expected.tolist()
    assert mine.heard[0] == theirs.heard[0] and len(mine.heard[0][0]) == healed


# --- calls that are made again ---


@pytest.mark.parametrize(
    "more", [{"output_hidden_states": True, "return_dict_in_generate": True}, {"use_cache": False}], ids=str
)
def test_a_stream_has_the_prompt_once(more: dict[str, Any]) -> None:
    streams = Listener(), Listener()
    start = prompt()
    pair()[0].generate(start["ids"], streamer=streams[0], **CALL, **more)
    with pytest.warns(DraftingStopped):
        pair()[1].generate(start["ids"], streamer=streams[1], **CALL, **more)
    assert streams[0].heard == streams[1].heard
    assert streams[1].heard[0] == start["ids"].tolist() and streams[1].heard[-1] == "end"


def test_beam_search_with_a_stream_is_refused_as_by_plain() -> None:
    for model in pair():
        with pytest.raises(ValueError, match="streamer"):
            model.generate(prompt()["ids"], streamer=Listener(), num_beams=2, **CALL)


def test_a_criterion_that_counts_starts_once(own: tuple[PreTrainedModel, AssistedModelForCausalLM]) -> None:
    """Of a call that is made again, nothing but the prompt's preparation was done before."""
    target, model = own
    ids, calls = prompt()["ids"], []

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(ids.shape[1])
        return scores

    target.generate(ids, use_cache=False, logits_processor=[processor], **CALL)
    expected, calls[:] = list(calls), []
    with pytest.warns(DraftingStopped, match="use_cache"):
        model.generate(ids, use_cache=False, logits_processor=[processor], **CALL)
    assert calls == expected


def test_sampling_that_is_made_again_draws_the_same(own: tuple[PreTrainedModel, AssistedModelForCausalLM]) -> None:
    target, model = own
    ids, sampled = prompt()["ids"], CALL | {"do_sample": True, "use_cache": False}
    torch.manual_seed(4)
    expected = target.generate(ids, **sampled)
    torch.manual_seed(4)
    with pytest.warns(DraftingStopped, match="use_cache"):
        assert model.generate(ids, **sampled).tolist() == expected.tolist()


# --- a `generate` of somebody's ---


def overridden(target: Any, named: bool) -> list[int]:
    """Put a `generate` of its own into a target, which passes everything on, or only what it names."""
    calls: list[int] = []

    def all_passed(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return type(self).generate(self, *args, **kwargs | {"max_new_tokens": 7})

    def some_passed(self: Any, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
        calls.append(1)
        left = {name: kwargs[name] for name in CALL} | {"max_new_tokens": 7}
        return type(self).generate(self, inputs, generation_config, streamer=kwargs.get("streamer"), **left)

    target.generate = types.MethodType(some_passed if named else all_passed, target)
    return calls


@pytest.mark.parametrize("named", [False, True])
def test_a_targets_own_generate_is_called(named: bool, own: tuple[PreTrainedModel, AssistedModelForCausalLM]) -> None:
    target, model = own
    calls, streams = overridden(target, named), (Listener(), Listener())
    ids = prompt()["ids"]
    expected = target.generate(ids, streamer=streams[0], **CALL)
    with warnings.catch_warnings(record=True):
        assert model.generate(ids, streamer=streams[1], **CALL).tolist() == expected.tolist()
    assert expected.shape[1] == ids.shape[1] + 7
    assert len(calls) == 2
    assert streams[1].heard[-1] == "end" and streams[1].heard[0] == streams[0].heard[0]
    assert model.report is not None and (model.report.drafted > 0) is not named
