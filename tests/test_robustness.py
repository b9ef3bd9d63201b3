"""Failures in mid-call and bad input: the right answer, the plain result or a clear error; nobody's model is changed."""

from __future__ import annotations

import copy
import hashlib
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import REFUSED, VOCABULARY, build, half_right, random_ids
from assistant_heads import trained_assistant
from pairs import BY_NAME, CALL, assistedly, no_fallback, pair, plainly, prompt, tokenizer
from transformers import DynamicCache, GenerationConfig, LlamaModel, PreTrainedModel, TextStreamer

from assisted import Assistant, AssistedConfig, AssistedModelForCausalLM, DraftModel, NGram
from assisted.core import text
from assisted.core.drafts import DraftingStopped
from assisted.engine import cache as slots
from assisted.lengths import Adaptive, Confidence, Fixed
from assisted.methods.other_tokenizer.draft import TranslatedDrafter

ROWS = [1, 4]
CONTEXT = 32


pytestmark = pytest.mark.usefixtures("invariants")


# --- failures in mid-call


class Broken(RuntimeError):
    """What a test makes a forward raise."""


def raises(error: BaseException) -> Callable[[Any], None]:
    def fail(output: Any) -> None:
        raise error

    return fail


def nan(output: Any) -> None:
    output.logits.fill_(float("nan"))


def one_nan(output: Any) -> None:
    output.logits[..., 7] = float("nan")


@contextmanager
def failing(model: PreTrainedModel, how: Callable[[Any], None], first: int, times: int = 10**6) -> Iterator[None]:
    """From its forward number `first` on (0-based), something happens to the model's output, so many times."""
    calls = 0

    def hook(module: Any, args: Any, output: Any) -> None:
        nonlocal calls
        calls += 1
        if first < calls <= first + times:
            how(output)

    handle = model.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def one_warning(match: str) -> Iterator[list[str]]:
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(warning.message) for warning in caught]
    assert [match in line for line in said] == [True]


def call_of(start: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The greedy call on a batch of `prompt`, by the names that `generate` has."""
    return CALL | {"inputs": start["ids"], "attention_mask": start["attention_mask"]} | more


def state(model: PreTrainedModel) -> dict[str, Any]:
    """Everything of a caller's model that a call could have changed."""
    weights = hashlib.sha256()
    for name, weight in model.state_dict().items():
        weights.update(name.encode() + weight.numpy().tobytes())
    return {
        "class": type(model),
        "attributes": sorted(model.__dict__),
        "config": model.config.to_dict(),
        "generation_config": model.generation_config.to_dict(),
        "weights": weights.hexdigest(),
        "training": [module.training for module in model.modules()],
        "hooks": [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()],
        "attention": model.config._attn_implementation,
    }


def contents(cache: DynamicCache) -> list[Any]:
    return [(type(layer), layer.keys.tolist(), layer.values.tolist()) for layer in cache.layers]


FAILURES = {
    **{"exception": raises(Broken("no luck")), "out of memory": raises(torch.OutOfMemoryError("no room"))},
    **{"nan": nan, "one nan": one_nan},
}


SAMPLED = {"do_sample": True, "top_k": 1}  # of one token to choose from, the distribution is greedy
LOCKSTEP = {"logits_processor": [lambda ids, scores: scores - scores[:, :1]]}


@pytest.mark.parametrize(
    ("how", "first", "rows", "more"),
    [
        *((how, first, rows, {}) for how, first, rows in zip(FAILURES, (0, 1, 7, 1), (1, 4, 1, 4), strict=True)),
        ("nan", 0, 4, {}),
        ("exception", 5, 1, SAMPLED),
        ("one nan", 5, 1, SAMPLED),
        ("exception", 5, 4, LOCKSTEP),
    ],
)
def test_a_draft_that_fails_costs_no_token(how: str, first: int, rows: int, more: dict[str, Any]) -> None:
    _, model = pair()
    call = call_of(prompt(rows), draft_length="confidence" if rows == 1 else 4, **more)
    with failing(model.drafter.model, FAILURES[how], first), one_warning("Drafting failed"):
        ours = model.generate(**call)
    assert ours.tolist() == plainly(**prompt(rows)).tolist()
    assert [warning.startswith("Drafting failed") for warning in model.report.warnings] == [True]
    assert model.report.assisted_share < 1
    assert assistedly(**prompt(rows)).tolist() == ours.tolist()  # and the next call drafts again


NO_ROOM = [torch.OutOfMemoryError("no room"), RuntimeError("[enforce] DefaultCPUAllocator: no room")]


@pytest.mark.parametrize(("first", "rows", "error"), [(1, 1, NO_ROOM[0]), (2, 4, NO_ROOM[1]), (4, 4, NO_ROOM[0])])
def test_a_target_without_room_for_a_draft_goes_on_without_drafts(first: int, rows: int, error: Exception) -> None:
    """first: the forward pass that fails, after the prompt's."""
    target, model = pair()
    expected = plainly(**prompt(rows)).tolist()
    with failing(target, raises(error), first, 1), one_warning("The target ran out of memory"):
        ours = model.generate(**call_of(prompt(rows), draft_length=4))
    assert ours.tolist() == expected
    assert [warning.startswith("The target ran out of memory") for warning in model.report.warnings] == [True]
    assert assistedly(**prompt(rows)).tolist() == expected  # and the next call drafts again


def test_slots_that_cannot_double_grow_by_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer's growth fails once, so that the layers differ in size."""
    model = AssistedModelForCausalLM.from_models(pair()[0], draft="ngram")
    expected = plainly(**prompt()).tolist()
    assert model.generate(prompt()["ids"], **CALL).tolist() == expected  # the fused layers are made and compared
    grown, calls = slots._grown, []

    def fails_once(store: torch.Tensor, capacity: int) -> torch.Tensor:
        calls.append(capacity)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no room")
        return grown(store, capacity)

    monkeypatch.setattr(slots, "_grown", fails_once)
    monkeypatch.setattr(slots, "_GROWTH", 1)
    monkeypatch.setattr(slots, "_LEAST_GROWTH", 1)
    with one_warning("The target ran out of memory"):
        assert model.generate(prompt()["ids"], **(CALL | {"draft_length": 4})).tolist() == expected
    assert max(calls[3:]) > max(calls[:3])  # it grew again afterwards


def test_a_target_that_has_no_room_for_a_token_says_so() -> None:
    target, model = pair()
    with failing(target, raises(NO_ROOM[0]), 2), pytest.raises(torch.OutOfMemoryError, match="no room"):
        model.generate(prompt()["ids"], **CALL)


@pytest.mark.parametrize(("first", "rows"), [(0, 1), (1, 4), (3, 1)])
@pytest.mark.parametrize(
    ("which", "error"),
    [("draft", KeyboardInterrupt()), ("target", KeyboardInterrupt()), ("target", Broken("out of luck"))],
    ids=["draft-interrupted", "target-interrupted", "target-broken"],
)
def test_what_propagates_leaves_everything_as_it_was(which: str, error: BaseException, first: int, rows: int) -> None:
    target, model = pair()
    draft, start = model.drafter.model, prompt(rows)
    cache, config = DynamicCache(config=target.config), GenerationConfig(**CALL, repetition_penalty=1.1)
    plainly(**start, past_key_values=cache, max_new_tokens=1)
    longer = torch.cat([start["ids"], start["ids"][:, -3:]], 1)
    call = {"attention_mask": torch.cat([start["attention_mask"], torch.ones(rows, 3, dtype=torch.long)], 1)}
    before = state(target), state(draft), contents(cache), config.to_dict(), longer.tolist(), model.totals
    with failing(draft if which == "draft" else target, raises(error), first), pytest.raises(type(error)):
        model.generate(longer, generation_config=config, past_key_values=cache, draft_length=4, **call)
    assert (state(target), state(draft), contents(cache), config.to_dict(), longer.tolist(), model.totals) == before
    plain = plainly(longer, **call)
    assert assistedly(longer, past_key_values=cache, **call).tolist() == plain.tolist()


@pytest.mark.parametrize("more", [4, -2])
@pytest.mark.parametrize("draft", [half_right, lambda target: "recycle"], ids=["draft-model", "recycle"])
def test_a_target_that_is_resized_between_two_calls(draft: Any, more: int) -> None:
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, draft=draft(target), draft_length=4)
    target.resize_token_embeddings(VOCABULARY + more)
    for sampled in ({}, {"do_sample": True, "top_k": 1}):
        with no_fallback():
            ours = model.generate(prompt()["ids"].clamp(max=VOCABULARY + more - 1), **(CALL | sampled))
        assert ours.tolist() == target.generate(prompt()["ids"].clamp(max=VOCABULARY + more - 1), **CALL).tolist()
        assert model.report is not None and model.report.drafted > 0


@pytest.mark.parametrize("call", [{"sequence_bias": [[[7], 4.0]]}, {"do_sample": True, "top_k": 1}], ids=str)
def test_a_head_of_a_target_that_is_resized_costs_no_text(call: dict[str, Any]) -> None:
    """It goes on with the tokens that it knows, or stops. In rows, it comes before the target has any logits."""
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, draft=Assistant(trained_assistant(target)), draft_length=4)
    target.resize_token_embeddings(VOCABULARY + 4)
    ids, call = random_ids(target, 1, 12), CALL | call
    expected = target.generate(ids, **call).tolist()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert model.generate(ids, **call).tolist() == expected
        assert [answer.ids.tolist() for answer in model.generate_many([ids[0]] * 2, rows=2, **call)] == expected * 2
    told = [str(one.message) for one in caught if issubclass(one.category, DraftingStopped)]
    assert all("of 96 tokens, the target's of 100" in one for one in told) and bool(told) == call["do_sample"]


def test_a_criterion_that_raises_is_heard() -> None:
    def criterion(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        if input_ids.shape[1] > 16:
            raise Broken("enough")
        return torch.tensor([False])

    with pytest.raises(Broken, match="enough"):
        assistedly(stopping_criteria=[criterion], **prompt())
    assert assistedly(**prompt()).tolist() == plainly(**prompt()).tolist()


# --- lengths and contexts


def test_no_prompt_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"input_ids.*empty"):
        pair()[1].generate(torch.zeros(1, 0, dtype=torch.long), **CALL)


@pytest.mark.parametrize("length", [{"max_new_tokens": 0}, {"max_new_tokens": None, "max_length": 12}], ids=str)
def test_no_room_for_a_token_is_refused_as_by_plain(length: dict[str, Any]) -> None:
    for call in (plainly, assistedly):
        with pytest.raises(ValueError, match=r"max_new_tokens|max_length"):
            call(**prompt(), **length)


@pytest.mark.parametrize("length", [{"max_new_tokens": 1}, {"max_new_tokens": None, "max_length": 13}], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_one_token_needs_no_draft(rows: int, length: dict[str, Any]) -> None:
    _, model = pair()
    with no_fallback():
        ours = model.generate(**call_of(prompt(rows), **length))
    assert ours.tolist() == plainly(**prompt(rows), **length).tolist()
    assert (model.report.new_tokens, model.report.drafted, model.report.target_passes) == (rows, 0, 0)


HUGE = [
    {"max_new_tokens": 10**12},
    {"max_new_tokens": None, "max_length": 1e30},  # a tokenizer's `model_max_length`
    {"max_new_tokens": None, "max_length": 10**30},
    {"max_new_tokens": float("inf")},
]


WAYS: dict[str, dict[str, Any]] = {
    "streamed": {"streamer": TextStreamer(tokenizer(VOCABULARY))},
    "in lockstep": {"logits_processor": [lambda ids, scores: scores + 1]},
    "static": {"cache_implementation": "static"},
}


@pytest.mark.parametrize(
    ("how", "length", "rows"),
    [
        *(("model", length, ROWS[number % 2]) for number, length in enumerate(HUGE)),
        *zip(("suffix", "recycle", "early-exit:1"), HUGE, (4, 1, 4), strict=False),
        *((how, HUGE[number % 2], 1 if how == "streamed" else 4) for number, how in enumerate(WAYS)),
    ],
    ids=str,
)
def test_limits_that_no_memory_holds(how: str, rows: int, length: dict[str, Any]) -> None:
    """how: a draft, or a way to call."""
    target, model = pair()
    if how != "model" and how not in WAYS:
        model = AssistedModelForCausalLM.from_models(target, draft=how)
    start = prompt(rows)
    end = {"eos_token_id": sorted(plainly(**start)[:, 20:].flatten().tolist())[::3]}
    with no_fallback():
        ours = model.generate(**call_of(start, draft_length=4, **end, **WAYS.get(how, {}), **length))
    assert ours.tolist() == plainly(**start, **end, **length).tolist()


@pytest.mark.parametrize("length", [{"max_new_tokens": 7.5}, {"max_new_tokens": None, "max_length": 19.0}], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_limits_that_are_no_whole_numbers(rows: int, length: dict[str, Any]) -> None:
    assert assistedly(**prompt(rows), **length).tolist() == plainly(**prompt(rows), **length).tolist()


@pytest.mark.parametrize(
    ("rows", "more"), [(1, {}), (4, {}), (4, WAYS["in lockstep"])], ids=["one", "many", "lockstep"]
)
def test_a_text_that_outgrows_its_memory(rows: int, more: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_GROWTH", 1)
    call = {**prompt(rows, 3), **more, "max_new_tokens": 60}
    assert assistedly(**call).tolist() == plainly(**call).tolist()


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def short(request: pytest.FixtureRequest) -> tuple[str, AssistedModelForCausalLM]:
    """Pairs whose context ends early: learned positions, and rotary ones, which go on beyond it."""
    target = build(BY_NAME[request.param], max_position_embeddings=CONTEXT)
    return request.param, AssistedModelForCausalLM.from_models(target, draft=half_right(target), draft_length=4)


@pytest.mark.parametrize("rows", ROWS)
def test_a_prompt_longer_than_the_context(short: tuple[str, AssistedModelForCausalLM], rows: int) -> None:
    name, model = short
    ids = random_ids(model.target, rows, CONTEXT + 3)
    if name == "gpt2":
        with pytest.raises(ValueError, match=f"input_ids.*{CONTEXT + 3} tokens.*{CONTEXT}"):
            model.generate(ids, **CALL)
    else:
        with one_warning(f"without drafts: the prompt is longer than the target's context of {CONTEXT} tokens"):
            ours = model.generate(ids, **CALL)
        assert ours.tolist() == model.target.generate(ids, **CALL).tolist()
        with no_fallback():
            model.generate(ids[:, -CONTEXT:], **CALL)


@pytest.mark.parametrize(("new_tokens", "rows"), [(12, 1), (13, 4), (30, 4)])
def test_text_that_reaches_the_end_of_the_context(
    short: tuple[str, AssistedModelForCausalLM], new_tokens: int, rows: int
) -> None:
    """The last tokens that fit are drafted, too, and no draft reaches beyond."""
    name, model = short
    call = call_of(prompt(rows, CONTEXT - 12), max_new_tokens=new_tokens)
    if name == "gpt2" and new_tokens == 30:  # it keeps rows in lockstep
        call["stopping_criteria"] = [lambda ids, scores: torch.full((len(ids),), ids.shape[1] > CONTEXT)]
    with no_fallback():
        ours = model.generate(draft_length=6, **call)
    assert ours.tolist() == model.target.generate(**call).tolist()
    assert model.report.accepted > 0


ENDS_FIRST = pytest.mark.xfail(
    strict=True, raises=RuntimeError, reason="a row in the last slot leaves none to those behind it"
)


@pytest.mark.parametrize("new_tokens", [20, pytest.param(21, marks=ENDS_FIRST)])
@pytest.mark.parametrize(("name", "field"), [("gpt_neo", "max_position_embeddings"), ("mpt", "max_seq_len")])
def test_slots_that_end_where_the_context_ends(name: str, field: str, new_tokens: int) -> None:
    """These models align their rows, and a row that has ended lies in the last slot while the others go on."""
    target = build(BY_NAME[name], **{field: CONTEXT})
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target), draft_length=4)
    call = call_of(prompt(4), max_new_tokens=new_tokens, use_cache=True)
    plain = target.generate(**call)
    with no_fallback():
        ours = model.generate(draft_length=6, **call)
    assert ours.tolist() == plain.tolist()
    assert model.report.accepted > 0


def test_the_context_counts_a_past_that_is_not_repeated(short: tuple[str, AssistedModelForCausalLM]) -> None:
    _, model = short
    ids = random_ids(model.target, 1, CONTEXT - 3)
    cache = DynamicCache()
    with torch.no_grad():
        model.target(ids[:, :-4], past_key_values=cache)
    call = CALL | {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20}
    stop = {"stopping_criteria": [lambda new, scores: torch.tensor([new.shape[1] >= 7])]}
    ours = model.generate(ids[:, -4:], past_key_values=cache, draft_length=6, **call, **stop)
    plain = model.target.generate(ids, **(call | {"max_new_tokens": 3}))
    assert ours[:, 4:].tolist() == plain[:, ids.shape[1] :].tolist()


# --- arguments of generate


@pytest.mark.parametrize("length", [0, -1, "bogus", True, 2.5, []], ids=repr)
def test_impossible_draft_lengths_are_refused(length: Any) -> None:
    target, model = pair()
    for call in (
        lambda: model.generate(prompt()["ids"], draft_length=length, **CALL),
        lambda: AssistedModelForCausalLM.from_models(target, draft=model.drafter.model, draft_length=length),
    ):
        with pytest.raises(ValueError, match="draft_length"):
            call()


@pytest.mark.parametrize(
    "mode",
    [
        {"assistant_tokenizer": "a tokenizer"},
        {"assistant_model": "no/such-model"},
        {"assistant_early_exit": 1},
        {"num_assistant_tokens": 0},
        {"num_assistant_tokens": True},
        {"num_assistant_tokens_schedule": "sometimes"},
        {"assistant_confidence_threshold": 1.4},
        {"prompt_lookup_num_tokens": 2.5},
        {"prompt_lookup_num_tokens": 3, "num_assistant_tokens": 3},
        {"prompt_lookup_num_tokens": 3, "assistant_model": "the draft"},
        {"draft_length": 3, "num_assistant_tokens": 3},
        {"custom_generate": lambda *args, **kwargs: None},
        {"synced_gpus": True},
        {"draft_lenght": 3},
        {"pixel_values": torch.zeros(1, 3, 8, 8)},
    ],
    ids=lambda mode: "-".join(map(str, mode)),
)
def test_what_cannot_be_honoured_is_refused_by_name(mode: dict[str, Any]) -> None:
    _, model = pair()
    name = next(iter(mode))
    with no_fallback(), pytest.raises(OSError if "no/such-model" in mode.values() else ValueError, match=name):
        model.generate(prompt()["ids"], **CALL, **mode)
    assert assistedly(**prompt()).tolist() == plainly(**prompt()).tolist()


OTHER_WAYS = [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}, {"use_mtp": True}]


@pytest.mark.parametrize(
    "mode",
    [
        *OTHER_WAYS[1:],
        *({"prompt_lookup_num_tokens": 0}, {"num_assistant_tokens": -1}, {"assistant_lookbehind": 5}),
        *({"assistant_ensemble_weight": 0.5}, {"max_matching_ngram_size": 2}),
    ],
    ids=str,
)
def test_a_config_that_sets_drafting_of_transformers_is_refused_by_name(mode: dict[str, Any]) -> None:
    _, model = pair()
    (name,) = mode
    for given in (mode, {"generation_config": GenerationConfig(**mode)}):
        with no_fallback(), pytest.raises(ValueError, match=rf"^{name}: "):
            model.generate(prompt()["ids"], **given)


IN_OUR_WORDS: list[tuple[dict[str, Any], Any, Any]] = [
    ({"num_assistant_tokens": 3}, Fixed(3), None),
    ({"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}, Fixed(3), None),
    ({"num_assistant_tokens_schedule": "constant"}, Fixed(20), None),
    ({"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "heuristic"}, Adaptive(), None),
    ({"num_assistant_tokens_schedule": "heuristic_transient"}, Adaptive(), None),
    ({"assistant_confidence_threshold": 0.3}, Confidence(0.3, 20), None),
    ({"assistant_confidence_threshold": 0.3, "num_assistant_tokens": 3}, Confidence(0.3, 3), None),
    ({"assistant_confidence_threshold": 0, "num_assistant_tokens": 3}, Fixed(3), None),
    ({"prompt_lookup_num_tokens": 3}, Fixed(3), NGram(2, 1)),
    ({"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 4}, Fixed(3), NGram(4, 1)),
]


@pytest.mark.parametrize(("settings", "length", "drafted_by"), IN_OUR_WORDS, ids=str)
def test_settings_of_transformers_choose_the_nearest_of_ours(settings: Any, length: Any, drafted_by: Any) -> None:
    _, model = pair()
    config = GenerationConfig(**CALL, **settings)
    before = config.to_dict()
    with one_warning("the nearest that this package has") as said:
        for given in ({**CALL, **settings}, {"generation_config": config}):
            assert model.generate(prompt()["ids"], **given).tolist() == plainly(**prompt()).tolist()
            assert model.report.draft == (drafted_by and repr(drafted_by))
    assert all(f"{name} = {value!r}" in said[0] for name, value in settings.items())
    assert f"draft_length={length!r}" in said[0] and (drafted_by is None or f"draft={drafted_by!r}" in said[0])
    assert config.to_dict() == before
    model.generate(prompt()["ids"], **CALL)
    assert model.report.draft is None
    if type(length) is Fixed and length.tokens == 3 and drafted_by is None:
        model.generate(prompt()["ids"], **CALL, **settings)
        assert len(model.report.acceptance_by_position) == 3


def test_an_assistant_of_one_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Drafts in place of the pair's draft, is prepared once, and counts in the totals; the pair's own one is recognized."""
    target, made = build(BY_NAME["llama"]), []
    model = AssistedModelForCausalLM.from_models(target, draft=pair()[1].drafter.model, draft_length=4)
    assistant, folder = half_right(target), str(tmp_path / "assistant")
    load = DraftModel.load
    monkeypatch.setattr(DraftModel, "load", lambda *args, **kw: (made.append(1), load(*args, **kw))[1])
    assistant.save_pretrained(folder)
    rounds: list[Any] = []
    for given, times in ((assistant, 1), (folder, 2), (model.drafter.model, 2)):
        model.reset_totals()
        model.watch = lambda round: rounds.append(round) if model.running.drafted else None
        for _ in range(2):
            rounds.clear()
            with no_fallback():
                ours = model.generate(prompt()["ids"], **CALL, assistant_model=given)
            assert ours.tolist() == plainly(**prompt()).tolist()
            assert len(made) == times
            assert sum(map(sum, (round.drafted for round in rounds))) == model.report.drafted > 0
        assert model.totals.drafted == 2 * model.report.drafted
        name = {1: "LlamaForCausalLM", 2: folder}[times]
        assert model.report.draft == (None if given is model.drafter.model else name)
        assert ("drafted by" in str(model.report)) == (model.report.draft is not None)
    assert len(model.other_pairs) == 2
    model.generate(prompt()["ids"], **CALL, prompt_lookup_num_tokens=3)
    assert len(model.other_pairs) == 2  # the oldest was given up
    assert copy.deepcopy(model).other_pairs == {}
    with pytest.raises(ValueError, match=r"^assistant_model: draft"):
        model.generate(prompt()["ids"], **CALL, assistant_model=build(REFUSED[0]))
    call = CALL | {"do_sample": True, "max_new_tokens": 5, "num_assistant_tokens": 2}
    sampled = model.generate(prompt()["ids"], assistant_model=assistant, **call)
    assert sampled.shape[1] == prompt()["ids"].shape[1] + 5


def test_an_assistant_in_a_session_and_with_bits() -> None:
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, draft=pair()[1].drafter.model, draft_length=4)
    assistant, ids = half_right(target), prompt()["ids"]
    session = model.session()
    first = model.generate(ids, **CALL, past_key_values=session)
    for given in ({"assistant_model": assistant}, {}):
        again = model.generate(first, **CALL, past_key_values=session, **given)
        assert again.tolist() == target.generate(first, **CALL).tolist()
    model.exact = "bits"
    assert model.generate(ids, **CALL, assistant_model=assistant).tolist() == model.generate(ids, **CALL).tolist()


def test_an_assistant_when_loading() -> None:
    pair = AssistedModelForCausalLM.from_pretrained("zoo:target", assistant_model="zoo:draft")
    assert isinstance(pair.spec, DraftModel) and pair.spec.model == "zoo:draft"
    draft, tokenizer = pair.drafter.model, pair.tokenizer
    pair = AssistedModelForCausalLM.from_pretrained("zoo:target", assistant_model=draft, assistant_tokenizer=tokenizer)
    assert pair.drafter.model is draft and pair.spec.tokenizer is tokenizer
    for both in (
        {"draft": "suffix", "assistant_model": draft},
        {"draft_tokenizer": tokenizer, "assistant_tokenizer": tokenizer},
    ):
        with pytest.raises(ValueError, match=r"^assistant_(model|tokenizer): .*another name of draft"):
            AssistedModelForCausalLM.from_pretrained("zoo:target", **both)


@pytest.mark.parametrize("mode", OTHER_WAYS, ids=str)
@pytest.mark.parametrize("passed_on", [False, True], ids=["not passed", "passed on"])
def test_drafting_that_the_models_own_config_chooses_gives_way_and_that_is_said_once(
    mode: dict[str, Any], passed_on: bool
) -> None:
    (name,) = mode
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target), draft_length=4)
    expected = target.generate(prompt()["ids"], **CALL)
    target.generation_config.update(**mode)
    before = target.generation_config.to_dict()
    call = {"generation_config": GenerationConfig(**{**before, **CALL})} if passed_on else CALL
    with one_warning(f"generation_config.{name}"):
        for copies, more in ((1, {}), (2, {"num_return_sequences": 2, **SAMPLED})):
            assert model.generate(prompt()["ids"], **(call | more)).tolist() == expected.tolist() * copies
    assert model.report.accepted > 0
    assert target.generation_config.to_dict() == before


def test_plain_decoding_on_request() -> None:
    _, model = pair()
    config = GenerationConfig(**CALL, prompt_lookup_num_tokens=3)
    for call in ({"generation_config": config}, {**CALL, "prompt_lookup_num_tokens": 3}):
        with no_fallback():
            ours = model.generate(prompt()["ids"], assisted=False, **call)
        assert ours.tolist() == plainly(**prompt()).tolist()
        assert (model.report.drafted, model.report.new_tokens) == (0, CALL["max_new_tokens"])


@pytest.mark.parametrize(
    "mode",
    [
        *({"num_beams": 2}, {"num_beams": 3, "num_return_sequences": 2}, {"use_cache": False}),
        *({name: True, "return_dict_in_generate": True} for name in ("output_hidden_states", "output_attentions")),
        {"num_beams": 2, "return_dict_in_generate": True, "output_scores": True},
    ],
    ids=lambda mode: "-".join(map(str, mode)),
)
def test_other_modes_run_plainly_and_say_so_once(mode: dict[str, Any]) -> None:
    target, model = pair("gptj")  # attention that gives its weights
    plain = target.generate(prompt()["ids"], **CALL, **mode)
    with one_warning("without drafts"):
        ours = model.generate(prompt()["ids"], **CALL, **mode)
    if isinstance(plain, torch.Tensor):
        plain, ours = {"sequences": plain}, {"sequences": ours}
    assert ours.keys() == plain.keys()
    assert ours["sequences"].tolist() == plain["sequences"].tolist()
    for name in ("attentions", "hidden_states"):
        for mine, theirs in zip(ours.get(name) or (), plain.get(name) or (), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_hidden_states_without_a_place_for_them_are_no_reason_to_decode_plainly() -> None:
    assert assistedly(output_hidden_states=True, **prompt()).tolist() == plainly(**prompt()).tolist()


# --- models that do not fit


@pytest.mark.parametrize("unfit", [*REFUSED, LlamaModel], ids=lambda one: getattr(one, "name", "without a head"))
def test_models_that_do_not_fit_are_refused(unfit: Any) -> None:
    """Their states cannot take tokens back, or they have no head."""
    target, _ = pair()
    other, why = (LlamaModel(target.config), "head") if unfit is LlamaModel else (build(unfit), "cannot take back")
    with pytest.raises(ValueError, match=rf"target: .*{why}"):
        AssistedModelForCausalLM.from_models(other, draft=target)
    with pytest.raises(ValueError, match=rf"draft: .*{why}"):
        AssistedModelForCausalLM.from_models(target, draft=other)


def resized(entries: int) -> PreTrainedModel:
    return build(BY_NAME["llama"], vocab_size=entries)


@pytest.mark.parametrize("entries", [VOCABULARY, VOCABULARY - 8, VOCABULARY + 8])
def test_tokens_of_other_characters_are_refused(entries: int) -> None:
    words = {"tokenizer": tokenizer(), "draft_tokenizer": tokenizer(first="À", special=("[PAD]", "[BOS]", "[EOS]"))}
    with pytest.raises(ValueError, match=r"draft: .*shares no token"):
        AssistedModelForCausalLM.from_models(pair()[0], draft=resized(entries), **words)


@pytest.mark.parametrize("given", [{}, {"tokenizer": tokenizer()}, {"draft_tokenizer": tokenizer()}], ids=str)
def test_a_tokenizer_that_is_needed_is_named(given: dict[str, Any]) -> None:
    missing = "draft_tokenizer" if "tokenizer" in given else "tokenizer"
    with pytest.raises(ValueError, match=rf"Pass {missing}="):
        AssistedModelForCausalLM.from_models(pair()[0], draft=resized(VOCABULARY + 8), **given)


@pytest.mark.parametrize(
    ("draft", "error"),
    [
        *((one, ValueError) for one in ("early-exit:99", "self:bogus", "zoo:nobody", "", " ")),
        *((one, ValueError) for one in ([], ["suffix"], ["suffix", ""])),
        *((one, TypeError) for one in (42, True)),
        *((f"{method}/no/such/folder", OSError) for method in ("", "eagle:", "medusa:.")),
        (DraftModel(Path("no/where")), OSError),
    ],
    ids=str,
)
def test_drafts_that_are_none(draft: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^(draft|quantization|zoo):"):
        AssistedModelForCausalLM.from_models(pair()[0], draft=draft)


@pytest.mark.parametrize("draft", ["sufix", "nothing", DraftModel("gpt2"), ["suffix", "ngrm"]], ids=str)
def test_a_word_is_no_hub_id(draft: Any) -> None:
    with pytest.raises(ValueError, match=r"^draft: .* is neither a method .* a Hub id has a slash") as error:
        AssistedModelForCausalLM.from_models(pair()[0], draft=draft)
    meant = {"sufix": "suffix", "['suffix', 'ngrm']": "ngram"}.get(str(draft))
    assert (f"did you mean {meant!r}?" in str(error.value)) == (meant is not None)


def test_a_misspelled_argument_is_named(folders: dict[str, Path]) -> None:
    model = pair()[1]
    for given, message in {
        "draft_lenght": "did you mean draft_length?",
        "load_in_4bit": r"BitsAndBytesConfig\(load_in_4bit=True\).*draft_quantization=\"nf4\"",
    }.items():
        with pytest.raises(ValueError, match=f"^{given}: .*{message}"):
            AssistedModelForCausalLM.from_pretrained(folders["target"], **{given: 4})
        with pytest.raises(ValueError, match=f"^{given}: .*{message}"):
            model.generate(prompt()["ids"], **{given: 4})


@pytest.mark.parametrize("text", ["def f(", ["def f("], {"input_ids": torch.tensor([[5]])}], ids=str)
def test_text_is_no_prompt(text: Any) -> None:
    with pytest.raises(ValueError, match=r"^inputs: a tensor .*\*\*tokenizer\(text"):
        pair()[1].generate(text)


def test_short_names_of_dtypes(folders: dict[str, Path]) -> None:
    for name, dtype in {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}.items():
        assert AssistedModelForCausalLM.from_pretrained(folders["target"], dtype=name).dtype == dtype


def test_other_arguments_that_are_none(folders: dict[str, Path]) -> None:
    target, model = pair()
    draft = model.drafter.model
    for name, given in {
        "tokenizer": {"tokenizer": "words"},
        "draft_tokenizer": {"draft_tokenizer": "words", "draft": draft},
        "draft_length": {"draft_length": 0},
        "fast": {"fast": "x"},
        "quantization": {"draft": str(folders["draft"]), "draft_quantization": {}},
    }.items():
        for make in (
            lambda given=given: AssistedModelForCausalLM.from_models(target, **given),
            lambda given=given: AssistedModelForCausalLM.from_pretrained(folders["target"], **given),
        ):
            with pytest.raises(ValueError, match=f"^{name}: "):
                make()
    for draft in ("suffix", ["suffix", model.drafter.model]):  # which of the two would read it?
        with pytest.raises(ValueError, match=r"^draft_tokenizer: "):
            AssistedModelForCausalLM.from_models(target, draft=draft, draft_tokenizer=tokenizer())
    for path in (None, "", 5):
        with pytest.raises(ValueError, match=r"^pretrained_model_name_or_path: "):
            AssistedModelForCausalLM.from_pretrained(path)
        with pytest.raises(ValueError, match=r"^target: .*from_pretrained"):
            AssistedModelForCausalLM.from_models(path)


def test_a_quantization_is_said_in_one_place() -> None:
    target, model = pair()
    for draft in (model.drafter.model, DraftModel("folder"), "self:nf4"):
        with pytest.raises(ValueError, match="draft_quantization"):
            AssistedModelForCausalLM.from_models(target, draft=draft, draft_quantization="nf4")


# --- folders


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, a draft, a draft with another tokenizer of the same size; an empty folder and one without a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    target, model = pair()
    saved = {
        "target": (target, tokenizer()),
        "draft": (model.drafter.model, tokenizer()),
        "other-tokenizer": (model.drafter.model, tokenizer(first="$")),
        "larger": (resized(VOCABULARY + 8),),
        "empty": (),
    }
    for name, parts in saved.items():
        (root / name).mkdir()
        for part in parts:
            part.save_pretrained(root / name)
    return {name: root / name for name in (*saved, "missing")}


@pytest.mark.parametrize("wrong", ["missing", "empty"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_wrong_folder_is_named(folders: dict[str, Path], role: str, wrong: str) -> None:
    names = {"target": "target", "draft": "draft"} | {role: wrong}
    with pytest.raises((OSError, ValueError), match=f"^{role}: .*{wrong}"):
        AssistedModelForCausalLM.from_pretrained(str(folders[names["target"]]), draft=str(folders[names["draft"]]))


def test_a_folder_with_another_tokenizer_of_the_same_size_is_translated(folders: dict[str, Path]) -> None:
    names = [str(folders[name]) for name in ("target", "other-tokenizer")]
    model = AssistedModelForCausalLM.from_pretrained(names[0], draft=names[1])
    assert isinstance(model.drafter, TranslatedDrafter)
    with no_fallback():
        assert model.generate(prompt()["ids"], **CALL).tolist() == plainly(**prompt()).tolist()


def test_a_folder_whose_tokenizer_is_needed_and_missing(folders: dict[str, Path]) -> None:
    target, draft = str(folders["target"]), str(folders["larger"])
    with pytest.raises(ValueError, match="draft_tokenizer"):
        AssistedModelForCausalLM.from_pretrained(target, draft=draft)
    model = AssistedModelForCausalLM.from_pretrained(target, draft=draft, draft_tokenizer=tokenizer())
    assert model.generate(prompt()["ids"], **CALL).tolist() == plainly(**prompt()).tolist()


class Payload:
    """Unpickled, it makes a folder: code that must not run."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.mark,)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_checkpoint_that_runs_code_is_not_loaded(folders: dict[str, Path], role: str, tmp_path: Path) -> None:
    unsafe, mark = tmp_path / "unsafe", tmp_path / "mark"
    unsafe.mkdir()
    pair()[0].config.save_pretrained(unsafe)
    torch.save({"lm_head.weight": Payload(mark)}, unsafe / "pytorch_model.bin")
    names = {"target": folders["target"], "draft": folders["draft"]} | {role: unsafe}
    with pytest.raises((OSError, ValueError, RuntimeError, pickle.UnpicklingError)):
        AssistedModelForCausalLM.from_pretrained(str(names["target"]), draft=str(names["draft"]))
    assert not mark.exists()


@pytest.mark.parametrize("field", [{"draft": {"method": "warp"}}, {"draft_length": {"policy": "warp"}}], ids=str)
def test_a_saved_pair_of_a_later_version(folders: dict[str, Path], field: dict[str, Any], tmp_path: Path) -> None:
    pair()[1].save_pretrained(tmp_path)
    config = AssistedConfig.from_pretrained(tmp_path)
    for name, value in field.items():
        setattr(config, name, value)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"warp.*pass draft"):
        AssistedModelForCausalLM.from_pretrained(tmp_path)
