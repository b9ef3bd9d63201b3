"""Sessions in a pool: prompts with the same beginning read it once, and every text is what it is without a pool."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, RECURRENT, build, half_right, random_ids
from covering import in_turns, one_in, some
from methods import HEADS
from mtp_heads import trained_mtp
from pairs import BY_NAME, CALL, said_by, tokenizer
from test_sampling import ALPHA, PROMPT, counts, exact_distribution, p_value, tiny, towards
from test_sampling import NEW_TOKENS as SAMPLED
from test_session import DRAFTS, written  # noqa: F401, a fixture
from test_sources import EDITS, PATCHES, patched
from test_threads import in_threads
from transformers import DynamicCache, LlamaForCausalLM, pipeline

from assisted import MTP, AssistedModelForCausalLM, SessionPool
from assisted.chat import Conversation
from assisted.engine import pool as engine_pool
from assisted.fast import sources
from assisted.fast.sources import Source
from assisted.methods.eagle import draft as eagle

PREFIX, NEW = 32, 6  # tokens in common, and of each question
ORDER = (0, 1, 0, 2, 1, 0)  # of the questions: later ones go on from their own text, others from what is in common

pytestmark = pytest.mark.usefixtures("invariants")


def questions(target: Any, count: int = 3, prefix: int = PREFIX) -> list[torch.Tensor]:
    """Prompts with the same beginning."""
    common = random_ids(target, 1, prefix, seed=3)
    return [torch.cat([common, random_ids(target, 1, NEW, seed=10 + number)], 1) for number in range(count)]


def pooled(target: Any, draft: Any = "suffix", **kwargs: Any) -> AssistedModelForCausalLM:
    return AssistedModelForCausalLM.from_models(
        target, draft, **{"draft_length": 4, "sessions": SessionPool()} | kwargs
    )


def report_of(model: AssistedModelForCausalLM) -> Any:
    assert model.report is not None
    return model.report


def talked(model: Any, target: Any, **kwargs: Any) -> list[int]:
    """Conversations that begin alike, each with several turns; compared with the target alone. Returns the tokens not read."""
    texts, known = questions(target), []
    for number in ORDER:
        expected = said_by(target, texts[number], **CALL | kwargs)
        found = model.generate(texts[number], **CALL | kwargs)
        assert found.tolist() == expected.tolist()
        known.append(report_of(model).cached_tokens)
        texts[number] = torch.cat([found, random_ids(target, 1, NEW, seed=50 + len(known))], 1)
    return known


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("draft", one_in(2, list(DRAFTS)))
def test_every_text_is_plain(draft: str) -> None:
    target = build(BY_NAME["llama"])
    model = pooled(target, DRAFTS[draft](target))
    known = talked(model, target)
    turn = NEW + CALL["max_new_tokens"]
    assert known == [0, PREFIX - 1, PREFIX + turn - 1, PREFIX - 1, PREFIX + turn - 1, PREFIX + 2 * turn - 1]
    assert not report_of(model).warnings


@pytest.mark.parametrize(
    "architecture",
    some(
        [*ARCHITECTURES, *RECURRENT], ("gemma3", "gpt2", "bloom", "deepseek_v3", "mamba2", "qwen3_5", "lfm2", "jamba")
    ),
)
def test_all_architectures(architecture: Any) -> None:
    target = build(architecture)
    try:
        model = pooled(target)
    except ValueError:
        pytest.skip("refused as a target")
    known = talked(model, target)
    assert any(known) or report_of(model).warnings or report_of(model).way == "plain"  # they say why


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "bamba"])
def test_a_state_is_kept_in_the_middle_of_what_is_read_on(name: str) -> None:
    """The third prompt goes on from where two texts parted, and the fourth from where it parted itself."""
    target = build(next(one for one in RECURRENT if one.name == name))
    model, known = pooled(target), []
    prompt, calls = random_ids(target, 1, 80, seed=5), CALL | {"eos_token_id": None, "max_new_tokens": 20}
    for end in (80, 30, 60, 60):
        text = torch.cat([prompt[:, :end], random_ids(target, 1, 20, seed=end + len(known))], 1)
        seen = torch.ones_like(text)
        found = model.generate(text, attention_mask=seen, **calls)
        assert found.tolist() == target.generate(text, attention_mask=seen, **calls).tolist()
        known.append(report_of(model).cached_tokens)
    assert known == [0, 0, 30, 60]


def test_sampled_texts_follow_the_targets_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "LEAST", 1)
    target = tiny(0)
    model = pooled(target, towards(target, tiny(1)), draft_length=2)
    torch.manual_seed(11)
    call = {"max_new_tokens": SAMPLED, "do_sample": True, "top_k": 0}
    found = [model.generate(PROMPT, **call) for _ in range(600)]
    assert model.totals.cached_tokens == 599 * (PROMPT.shape[1] - 1)
    assert 0 < model.totals.accepted < model.totals.drafted
    assert p_value(counts(torch.cat(found)), exact_distribution(target, top_k=0)) > ALPHA


def test_only_the_rest_is_read(written: Counter[int]) -> None:  # noqa: F811
    target = build(BY_NAME["llama"])
    model = pooled(target, half_right(target), fast="eager")
    for number, prompt in enumerate(questions(target)):
        written.clear()
        model.generate(prompt, **CALL)
        report = report_of(model)
        verified = report.drafted + report.target_passes
        unread = prompt.shape[1] if number == 0 else NEW + 1
        most = sorted(written.values())  # of target and draft
        assert len(most) == 2 and most[0] <= unread + 2 * verified + 2 and most[1] <= unread + 2 * verified + 2


@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3, chains", "mtp", "dflash", "model", "list"])
def test_drafters_go_on_as_if_they_had_read_the_whole_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two texts part and where one goes on, they draft what they draft after reading the text anew."""
    monkeypatch.setattr(eagle, "learn", lambda *args: None)  # or the second call would draft other trees
    target = build(BY_NAME["llama"])
    model = pooled(target, DRAFTS[kind](target), fast="eager", draft_length=3)
    pool, texts = model.sessions, questions(target)
    for number in ORDER:
        reports = []
        for sessions in (None, pool):
            model.sessions = sessions
            output = model.generate(texts[number], **CALL)
            reports.append((report_of(model).drafted, report_of(model).accepted))
        assert reports[0] == reports[1]
        texts[number] = torch.cat([output, random_ids(target, 1, NEW, seed=70)], 1)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("draft", ["suffix", "mtp", "eagle", "model"])
def test_states_are_kept_where_texts_part(draft: str, written: Counter[int]) -> None:  # noqa: F811
    """The second prompt marks the place, the third one begins there, and a text that goes on begins at its end."""
    target = build(next(one for one in RECURRENT if one.name == "qwen3_5"))
    specs: dict[str, Callable[[], Any]] = {
        "suffix": lambda: "suffix",
        "mtp": lambda: MTP(trained_mtp(target)),
        "eagle": lambda: HEADS["eagle"](target),
        "model": lambda: half_right(target),
    }
    model = pooled(target, specs[draft](), draft_length=3)
    first, second, third = questions(target)
    turn = NEW + CALL["max_new_tokens"]
    for prompt, known in ((first, 0), (second, 0), (third, PREFIX), (first, PREFIX)):
        expected = target.generate(prompt, **CALL)
        output = model.generate(prompt, **CALL)
        assert output.tolist() == expected.tolist()
        assert report_of(model).cached_tokens == known
    prompt = torch.cat([output, random_ids(target, 1, NEW, seed=70)], 1)
    assert model.generate(prompt, **CALL).tolist() == target.generate(prompt, **CALL).tolist()
    assert report_of(model).cached_tokens == PREFIX + turn - 1
    if draft != "suffix":
        warm = report_of(model)
        anew = model.generate(prompt, sessions=SessionPool(), **CALL)
        assert anew.tolist() == target.generate(prompt, **CALL).tolist()
        assert draft != "model" or (warm.drafted, warm.accepted) == (
            report_of(model).drafted,
            report_of(model).accepted,
        )


def test_a_head_of_a_recurrent_target_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eagle, "learn", lambda *args: None)
    target = build(next(one for one in RECURRENT if one.name == "qwen3_5"))
    model = pooled(target, MTP(trained_mtp(target), tree=False), draft_length=3, fast="eager")
    pool, (text, other, _) = model.sessions, questions(target)
    reports = []
    for sessions in (None, SessionPool()):  # in which the second prompt marks where it parts from the first one
        for prompt in (text, other):
            model.generate(prompt, sessions=SessionPool() if sessions is None else sessions, **CALL)
        reports.append((report_of(model).drafted, report_of(model).accepted))
    assert reports[0] == reports[1] and reports[0][0] > 0
    for turn in range(3):
        reports = []
        for sessions in (None, pool):
            model.sessions = sessions
            output = model.generate(text, **CALL)
            reports.append((report_of(model).drafted, report_of(model).accepted))
        assert reports[0] == reports[1] and (turn == 0) == (report_of(model).cached_tokens == 0)
        text = torch.cat([output, random_ids(target, 1, NEW, seed=70 + turn)], 1)


# ---- What is stored


def test_texts_that_are_used_stay_and_the_limit_is_kept() -> None:
    target = build(BY_NAME["llama"])
    model = pooled(target)
    apart = [random_ids(target, 1, PREFIX, seed=number) for number in range(4)]
    model.generate(apart[0], **CALL)
    one = model.sessions.nbytes  # type: ignore[union-attr]
    model.sessions = pool = SessionPool(max_bytes=3 * one)
    for number in (0, 1, 2, 0, 3):
        model.generate(apart[number], **CALL)
        assert pool.nbytes <= pool.max_bytes
    assert len(pool) == 3
    for number, known in ((0, True), (2, True), (3, True), (1, False)):
        model.generate(apart[number], **CALL)
        assert (report_of(model).cached_tokens > 0) == known
    pool.clear()
    assert len(pool) == pool.nbytes == 0
    model.sessions = small = SessionPool(max_bytes=one - 1)
    assert model.generate(apart[0], **CALL).tolist() == target.generate(apart[0], **CALL).tolist()
    assert len(small) == 0


def held_by(pool: Any) -> list[list[int]]:
    """Columns of the segments of each stored text, of which each that several texts have is counted from the second time on
    as 0."""
    seen = set[int]()
    return [
        [0 if id(one) in seen or seen.add(id(one)) else one.width for one in entry.session.segments]  # type: ignore[func-returns-value]
        for entry in pool._entries
    ]


def column_bytes(target: Any) -> int:
    """Bytes of the keys and values of a column."""
    model = pooled(target)
    model.generate(questions(target)[0], **CALL)
    slots = model.sessions._entries[0].session._slots  # type: ignore[union-attr]
    return sum(store.nbytes for store in slots.stores) // slots.capacity  # type: ignore[union-attr]


@pytest.mark.parametrize("name", some([*ARCHITECTURES], ("llama", "gemma3", "deepseek_v3", "bloom")))
def test_what_texts_have_in_common_is_held_once(name: Any) -> None:
    target = build(name)
    try:
        model = pooled(target)
    except ValueError:
        pytest.skip("refused as a target")
    texts, turn = questions(target, 4), NEW + CALL["max_new_tokens"]
    for at, text in enumerate(texts):
        assert model.generate(text, **CALL).tolist() == said_by(target, text, **CALL).tolist()
        if report_of(model).warnings or report_of(model).way == "plain":
            pytest.skip("takes nothing from a pool")
        assert report_of(model).cached_tokens == (PREFIX - 1 if at else 0)
    pool, tail = model.sessions, turn - 1
    assert held_by(pool) == [[PREFIX, tail], [0, tail], [0, tail], [0, tail]]
    assert pool.nbytes == (PREFIX + 4 * tail) * column_bytes(target)  # type: ignore[union-attr]
    half = torch.cat([texts[0][:, : PREFIX // 2], random_ids(target, 1, NEW, seed=30)], 1)
    for text in (half, *texts):
        assert model.generate(text, **CALL).tolist() == said_by(target, text, **CALL).tolist()
    assert pool.nbytes == (PREFIX + 5 * tail) * column_bytes(target)  # type: ignore[union-attr]
    assert sum(map(sum, held_by(pool))) == PREFIX + 5 * tail


def test_a_conversation_goes_on_after_a_beginning_that_others_have() -> None:
    target = build(BY_NAME["llama"])
    model = pooled(target, half_right(target))
    first, text, _ = questions(target)
    model.generate(first, **CALL)
    known = PREFIX - 1
    for turn in range(4):
        found = model.generate(text, **CALL)
        assert found.tolist() == target.generate(text, **CALL).tolist()
        assert report_of(model).cached_tokens == known
        assert [len(parts) for parts in held_by(model.sessions)] == [2, 2]  # no part for each turn
        known, text = found.shape[1] - 1, torch.cat([found, random_ids(target, 1, NEW, seed=50 + turn)], 1)


def test_a_beginning_is_held_as_long_as_some_text_has_it() -> None:
    target = build(BY_NAME["llama"])
    model, column, tail = pooled(target), column_bytes(target), NEW + CALL["max_new_tokens"] - 1
    model.sessions = pool = SessionPool(max_bytes=(PREFIX + 2 * tail) * column)
    texts = questions(target, 3)
    for number in (0, 1, 2, 1, 0):
        assert model.generate(texts[number], **CALL).tolist() == said_by(target, texts[number], **CALL).tolist()
        assert len(pool) <= 2 and pool.nbytes <= pool.max_bytes
    assert pool.nbytes == pool.max_bytes and held_by(pool) == [[PREFIX, tail], [0, tail]]
    model.generate(random_ids(target, 1, PREFIX + tail, seed=60), **CALL)  # one of them has to go
    assert len(pool) == 1 and pool.nbytes <= pool.max_bytes


def test_a_text_that_calls_read_is_divided_at_their_end() -> None:
    target = build(BY_NAME["llama"])
    model = pooled(target)
    first, second, third = questions(target)
    model.generate(first, **CALL)
    whole = model.sessions._entries[0].session._slots  # type: ignore[union-attr]
    before = [store.clone() for store in whole.stores]  # type: ignore[union-attr]
    lengths = list[list[int]]()

    def inside(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not lengths:
            lengths.append([])
            model.generate(third, **CALL)
            lengths.append([len(parts) for parts in held_by(model.sessions)])
            assert all(map(torch.equal, whole.stores, before))  # type: ignore[union-attr]
        return scores

    found = model.generate(second, logits_processor=[inside], **CALL)
    assert found.tolist() == target.generate(second, **CALL).tolist()
    assert lengths[1] == [0, 0] and [len(parts) for parts in held_by(model.sessions)] == [2, 2, 2]
    assert sum(map(sum, held_by(model.sessions))) == PREFIX + 3 * (NEW + CALL["max_new_tokens"] - 1)


def test_bytes_are_counted_with_those_of_the_draft() -> None:
    target = build(BY_NAME["llama"])
    alone, drafted = pooled(target), pooled(target, half_right(target))
    prompt = questions(target)[0]
    for model in (alone, drafted):
        model.generate(prompt, **CALL)
    (entry,) = alone.sessions._entries  # type: ignore[union-attr]
    expected = sum(store.nbytes for store in entry.session._slots.stores)
    assert alone.sessions.nbytes == expected  # type: ignore[union-attr]
    assert drafted.sessions.nbytes == 2 * expected  # type: ignore[union-attr]


def test_pools_are_separate() -> None:
    target = build(BY_NAME["llama"])
    model, prompt = pooled(target), questions(target)[0]
    model.generate(prompt, **CALL)
    model.generate(prompt, sessions=SessionPool(), **CALL)
    assert report_of(model).cached_tokens == 0
    pooled(target).generate(prompt, **CALL)
    other = pooled(build(BY_NAME["llama"], seed=1), sessions=model.sessions)
    other.generate(prompt, **CALL)
    assert report_of(other).cached_tokens == 0  # of another model
    model.generate(prompt, **CALL)
    assert report_of(model).cached_tokens == prompt.shape[1] - 1
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.sessions is None


def test_what_a_model_has_read_goes_with_it() -> None:
    pool, target = SessionPool(), build(BY_NAME["llama"])
    pooled(target, sessions=pool).generate(questions(target)[0], **CALL)
    assert len(pool) == 1
    del target
    gc.collect()
    other = build(BY_NAME["llama"], seed=1)
    pooled(other, sessions=pool).generate(questions(other)[0], **CALL)
    assert len(pool) == 1


# ---- Models that change


def cast(target: Any) -> None:
    target.double()


@pytest.mark.parametrize("edit,fast", in_turns([*EDITS, cast], ["auto", "eager"]))
@torch.no_grad()
def test_what_another_model_has_read_is_forgotten(edit: Callable[[Any], None], fast: str) -> None:
    target = build(BY_NAME["llama"])
    model = pooled(target, fast=fast)
    first, second, _ = questions(target)
    model.generate(first, **CALL)
    edit(target)
    assert model.generate(second, **CALL).tolist() == target.generate(second, **CALL).tolist()
    assert report_of(model).cached_tokens == 0
    assert len(model.sessions) <= 1  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", PATCHES)
@torch.no_grad()
def test_what_other_code_has_read_is_not_used(name: str) -> None:
    target = build(BY_NAME["llama"])
    model = pooled(target)
    first, second, third = questions(target)
    model.generate(first, **CALL)
    with patched(*PATCHES[name]):
        assert model.generate(second, **CALL).tolist() == target.generate(second, **CALL).tolist()
        assert report_of(model).cached_tokens == 0
    assert model.generate(third, **CALL).tolist() == target.generate(third, **CALL).tolist()


def test_adapters_are_part_of_the_model() -> None:
    peft = pytest.importorskip("peft")
    target = build(BY_NAME["llama"])
    wrapped = peft.get_peft_model(target, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    model = pooled(wrapped)
    for active in (True, False, True):
        with wrapped.disable_adapter() if not active else torch.no_grad():
            for prompt, known in ((questions(target)[0], False), (questions(target)[1], True)):
                assert model.generate(prompt, **CALL).tolist() == wrapped.generate(prompt, **CALL).tolist()
                assert (report_of(model).cached_tokens > 0) == known


# ---- Calls that can't go on


def hooked(target: Any, model: Any, ids: torch.Tensor) -> Any:
    target.model.layers[0].register_forward_hook(lambda module, args, output: output * 1.0)
    return model.generate(ids, **CALL)


REFUSED: dict[str, tuple[Callable[[Any, Any, torch.Tensor], Any], str]] = {
    "rows": (lambda t, m, ids: m.generate(ids.repeat(2, 1), **CALL), "2 rows are read together"),
    "sequences": (
        lambda t, m, ids: m.generate(ids, num_return_sequences=2, **CALL | {"do_sample": True}),
        "2 rows are read together",
    ),
    "padding": (
        lambda t, m, ids: m.generate(ids, attention_mask=(torch.arange(ids.shape[1]) > 2).long()[None], **CALL),
        "padding",
    ),
    "embeddings": (
        lambda t, m, ids: m.generate(inputs_embeds=t.get_input_embeddings()(ids), **CALL),
        "embeddings",
    ),
    "positions": (
        lambda t, m, ids: m.generate(ids, position_ids=5 + torch.arange(ids.shape[1])[None], **CALL),
        "position_ids",
    ),
    "hook": (hooked, "hook"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_other_calls_read_their_prompts_and_say_why(name: str) -> None:
    target = build(BY_NAME["llama"])
    model, (call, why) = pooled(target), REFUSED[name]
    prompt = questions(target)[0]
    model.generate(prompt, **CALL)
    call(target, model, prompt)
    assert report_of(model).cached_tokens == 0
    assert any(why in warning for warning in report_of(model).warnings), report_of(model).warnings
    assert len(model.sessions) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [{"assisted": False}, {"num_beams": 2}, {"use_cache": False}, {"cache_implementation": "static"}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_plain_calls_and_other_caches(call: dict[str, Any]) -> None:
    target = build(BY_NAME["llama"])
    model, prompt = pooled(target), questions(target)[0]
    model.generate(prompt, **CALL)
    own = {name: value for name, value in call.items() if name != "assisted"}
    assert model.generate(prompt, **CALL | call).tolist() == target.generate(prompt, **CALL | own).tolist()


def test_bad_input() -> None:
    target = build(BY_NAME["llama"])
    with pytest.raises(ValueError, match="max_bytes: 0"):
        SessionPool(max_bytes=0)
    with pytest.raises(ValueError, match="sessions: True is not a pool"):
        AssistedModelForCausalLM.from_models(target, "suffix", sessions=True)
    with pytest.raises(ValueError, match="sessions: 5 is not a pool"):
        AssistedModelForCausalLM.from_pretrained("zoo:target", sessions=5)
    model, prompt = pooled(target), questions(target)[0]
    model.sessions = 7
    with pytest.raises(ValueError, match="sessions: 7 is not a pool"):
        model.generate(prompt, **CALL)
    with pytest.raises(ValueError, match=r"sessions: .* pass one of the two"):
        model.generate(prompt, sessions=SessionPool(), past_key_values=model.session(), **CALL)
    other = pooled(build(BY_NAME["llama"], seed=1))
    with pytest.raises(ValueError, match=r"past_key_values: this session .* of another model"):
        other.generate(prompt, past_key_values=model.session(), **CALL)
    with pytest.raises(ValueError, match=r"past_key_values: this session .* of another model"):
        other.generate(prompt, past_key_values=copy.deepcopy(model.session()), assisted=False, **CALL)


# ---- Other ways to call


def test_a_callers_cache_and_sessions_stay_the_callers() -> None:
    target = build(BY_NAME["llama"])
    model = pooled(target, half_right(target))
    prompt = questions(target)[0]
    model.generate(prompt, **CALL)
    for past in (DynamicCache(config=target.config), model.session()):
        output = model.generate(prompt, past_key_values=past, **CALL)
        assert output.tolist() == target.generate(prompt, **CALL).tolist()
        assert past.get_seq_length() == output.shape[1] - 1
        assert report_of(model).cached_tokens == 0
    details = {"return_dict_in_generate": True}
    first = model.generate(prompt, **CALL, **details)
    assert report_of(model).cached_tokens == prompt.shape[1] - 1
    expected = target.generate(prompt, **CALL, **details).past_key_values
    before = [layer.keys.clone() for layer in first.past_key_values.layers]
    model.generate(torch.cat([first.sequences, questions(target)[1]], 1), **CALL)  # takes over what is stored
    for layer, keys, own in zip(first.past_key_values.layers, before, expected.layers, strict=True):
        assert torch.equal(layer.keys, keys) and torch.allclose(keys, own.keys, atol=1e-5)


def test_a_call_that_fails_leaves_nothing_wrong() -> None:
    target = build(BY_NAME["llama"])
    model = pooled(target, half_right(target))
    first, second, third = questions(target)

    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > first.shape[1] + 5:
            raise RuntimeError("no more")
        return scores

    for prompt in (first, second):
        model.generate(prompt, **CALL)
        text = torch.cat([prompt, third[:, -NEW:]], 1)
        with pytest.raises(RuntimeError, match="no more"):
            model.generate(text, logits_processor=[fails], **CALL)
        for again in (text, prompt, third):
            assert model.generate(again, **CALL).tolist() == target.generate(again, **CALL).tolist()


def test_calls_in_several_threads() -> None:
    target = build(BY_NAME["llama"])
    model = pooled(target, half_right(target))
    texts = questions(target, 4)
    expected = [target.generate(text, **CALL).tolist() for text in texts]
    found = in_threads(lambda number: [model.generate(texts[number], **CALL).tolist() for _ in range(4)])
    assert found == [[text] * 4 for text in expected]
    assert all(entry.readers == 0 for entry in model.sessions._entries)  # type: ignore[union-attr]
    assert len(model.sessions) <= 4  # type: ignore[arg-type]


def test_while_a_call_copies_a_text_it_stays() -> None:
    """A call from inside another one, whose text it would take over if it could."""
    target = build(BY_NAME["llama"])
    model = pooled(target, half_right(target))
    first, second, _ = questions(target)
    text = model.generate(first, **CALL)
    longer = torch.cat([text, second[:, -NEW:]], 1)
    outputs: list[Any] = []

    def inside(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not outputs:
            outputs.append(None)
            outputs[0] = model.generate(longer, **CALL).tolist()
        return scores

    found = model.generate(second, logits_processor=[inside], **CALL)
    assert found.tolist() == target.generate(second, **CALL).tolist()
    assert outputs[0] == target.generate(longer, **CALL).tolist()


@functools.cache
def words() -> Any:
    return tokenizer(first=" ")


def test_a_pipeline_needs_no_other_code() -> None:
    target = build(BY_NAME["llama"])
    model = pooled(target)
    asked = pipeline("text-generation", model=model, tokenizer=words(), device="cpu")
    begin = "To be or not to be, that is the question"
    for number, end in enumerate((": A", ". B", "? C")):
        found = asked(begin + end, max_new_tokens=8, do_sample=False)
        ids = words()(begin + end, return_tensors="pt").input_ids
        expected = target.generate(ids, max_new_tokens=8, do_sample=False)
        assert found[0]["generated_text"] == words().decode(expected[0], skip_special_tokens=True)
        assert (report_of(model).cached_tokens > 30) == (number > 0)


def test_conversations_share_what_they_have_in_common() -> None:
    model = AssistedModelForCausalLM.from_pretrained(
        "zoo:target", tokenizer=None, dtype=torch.float32, sessions=SessionPool()
    )
    model.tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    system = "You answer questions about programs, and you answer them in one word if that is possible."
    plain = AssistedModelForCausalLM.from_models(model.target, "suffix", tokenizer=model.tokenizer)
    call = {"max_new_tokens": 8, "do_sample": False}
    for number in range(2):
        ours, theirs = Conversation(model, system), Conversation(plain, system)
        for turn in range(2):
            message = f"What does line {number + turn} do?"
            reply = ours.say(message, **call)
            assert reply.text == theirs.say(message, **call).text
            assert reply.cached_tokens == report_of(model).cached_tokens
            assert (reply.cached_tokens > 16) == (number + turn > 0)


def test_a_call_reads_each_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the comparison with what the pool's sessions and the fused model were made from."""
    target = build(BY_NAME["llama"])
    model, (prompt, *_) = pooled(target), questions(target)
    own = {id(weight): 0 for weight in target.parameters()}
    checksum = sources.checksum

    def counting(tensor: torch.Tensor) -> torch.Tensor:
        for weight in target.parameters():
            own[id(weight)] += weight.data_ptr() == tensor.data_ptr()
        return checksum(tensor)

    model.generate(prompt, **CALL)
    monkeypatch.setattr(sources, "checksum", counting)
    for _ in range(2):
        model.generate(prompt, **CALL)
    assert set(own.values()) == {2}


def test_a_whole_models_state_is_compared() -> None:
    target: LlamaForCausalLM = build(BY_NAME["llama"])  # type: ignore[assignment]
    before = Source.of_model(target, ())
    assert before.same(Source.of_model(target, ()))
    target.train()
    assert not before.same(Source.of_model(target, ()))
