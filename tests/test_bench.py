"""The protocol: prompts, counting, methods, races and their sums. On tiny random models."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import half_right
from hypothesis import given
from hypothesis import strategies as st
from pairs import pair as built
from pairs import tokenizer as letters
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from assisted import AssistedModelForCausalLM
from assisted.engine.hooks import obstacle
from assisted.lab import bench
from assisted.lab.bench import held_out, methods, protocol
from assisted.lab.bench.measure import default_drafts
from assisted.lab.bench.methods import Method, of_model
from assisted.lab.bench.prompts import SETS, UNNAMED, of_dataset
from assisted.lab.bench.protocol import Rules, race, stream
from assisted.lab.bench.results import largest_gap
from assisted.lab.bench.table import aligned

RULES = Rules(new_tokens=24, repeats=2)


@pytest.fixture(scope="module")
def pair() -> AssistedModelForCausalLM:
    """Targets and drafts that would write end tokens, which the protocol ignores."""
    target = built("llama")[0]
    return AssistedModelForCausalLM.from_models(target, draft=half_right(target), draft_length=3, tokenizer=letters())


@pytest.fixture
def batches(pair: AssistedModelForCausalLM) -> list[bench.Batch]:
    return bench.batches(some_prompts(pair.tokenizer, ["add", "subtract", "mul"]))


@pytest.fixture
def held_out_text() -> None:
    pytest.importorskip("sympy")
    pytest.importorskip("networkx")


def some_prompts(tokenizer: Any, texts: list[str], category: str = "code") -> list[bench.Prompt]:
    return [bench.Prompt(text, category, text, tokenizer(text, return_tensors="pt").input_ids) for text in texts]


def named(measured: list[bench.Measured]) -> dict[str, bench.Measured]:
    return {one.method.name: one for one in measured}


# Statistics


@pytest.mark.parametrize(
    ("plain", "other", "ratio"),
    [
        ([[1.0, 2.0, 4.0], [2.0, 4.0, 8.0]], [[0.5, 1.0, 2.0], [1.0, 2.0, 4.0]], 2.0),
        # ratios are formed within a repeat, so a slow repeat does not change the result
        ([[1, 1], [9, 9], [1, 1]], [[2, 2], [18, 18], [2, 2]], 0.5),
    ],
)
def test_a_constant_ratio_is_certain(plain: list[list[float]], other: list[list[float]], ratio: float) -> None:
    assert bench.speedup(plain, other) == bench.Interval(ratio, ratio, ratio)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=6), st.floats(0.1, 10))
def test_intervals_scale_with_the_ratio(prompts: list[tuple[float, float]], factor: float) -> None:
    plain = [[a for a, _ in prompts]] * 3
    found = bench.speedup(plain, [[b for _, b in prompts]] * 3)
    slower = bench.speedup(plain, [[factor * b for _, b in prompts]] * 3)
    assert found.low <= found.high
    for name in ("ratio", "low", "high"):
        assert getattr(slower, name) == pytest.approx(getattr(found, name) / factor)
    assert min(a / b for a, b in prompts) - 1e-9 <= found.low and found.high <= max(a / b for a, b in prompts) + 1e-9


def test_tables_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(1, 2\) cannot be compared with \(1, 3\)"):
        bench.speedup([[1, 2, 3]], [[1, 2]])


def test_repeated_share() -> None:
    assert bench.repeated_share([[1, 2, 3, 4, 5, 6, 7]]) == 0
    assert bench.repeated_share([[1] * 7]) == pytest.approx(3 / 4)
    assert bench.repeated_share([[1] * 7, [1, 2, 3, 4]]) == pytest.approx(3 / 5)
    assert bench.repeated_share([[1, 2]]) == 0


# Prompts


@pytest.mark.usefixtures("held_out_text")
@pytest.mark.slow
def test_the_sets_are_always_the_same() -> None:
    tokenizer = letters()
    found = bench.read(list(SETS), tokenizer, 2, (400, 900))
    again = bench.read(list(SETS), tokenizer, 2, (400, 900))
    assert [prompt.text for prompt in found] == [prompt.text for prompt in again]
    assert [prompt.category for prompt in found] == ["code"] * 2 + ["edits"] * 2 + ["json"] * 2 + ["prose"] * 2
    for prompt in found:
        assert prompt.source.split("/")[0] in ("sympy", "networkx")
        assert prompt.ids.shape[1] <= 900
    code, edit, records, prose = found[::2]
    assert code.text.startswith("def ") and code.ids.shape[1] >= 400
    assert "\ndef " in edit.text and "_given" in edit.text.rpartition("\n")[2]
    closed = json.loads(records.text.removesuffix(',\n  {\n    "name":') + "]")
    assert len(closed) >= 2 and all(record["name"] for record in closed)
    assert ">>>" not in prose.text


def test_held_out_sets_leave_something_to_write() -> None:
    source = 'def f(a, b):\n    """It does."""\n' + "".join(f"    a = a + {n}\n" for n in range(12))
    beginnings = list(held_out.functions(source))
    assert beginnings and all(source.startswith(text) and len(text) < len(source) for _, text in beginnings)
    ((name, text),) = held_out.edits(source)
    assert name == "f" and text.startswith(source.rstrip()) and text.endswith("def f(a_given, b):")


def test_questions_of_a_file_by_category(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    rows = [{"question_id": n, "category": "ab"[n % 2], "turns": [f"ask {n}", "and then?"]} for n in range(6)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    tokenizer = letters()
    tokenizer.chat_template = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}:"
    found = bench.read([str(path)], tokenizer, 2)
    assert [(prompt.category, prompt.text) for prompt in found] == [
        ("a", "<ask 0>:"),
        ("b", "<ask 1>:"),
        ("a", "<ask 2>:"),
        ("b", "<ask 3>:"),
    ]
    tokenizer.chat_template = None
    assert bench.read([str(path)], tokenizer, 1)[0].text == "ask 0"


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 1 of .* is no JSON"), ("[1]", "no JSON object"), ('{"id": 1}', "none of the fields turns, question")],
)
def test_lines_that_are_no_questions(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=message):
        bench.read([str(path)], letters(), 1)


def test_a_wide_table_goes_on_below() -> None:
    lines = [["", "one", "two", "three"], ["plain", "1", "2", "3"]]
    assert aligned(lines, 13) == [
        *("       one", "plain    1", ""),
        *("       two", "plain    2", ""),
        *("       three", "plain      3"),
    ]
    assert aligned(lines, 15) == ["       one  two", "plain    1    2", "", "       three", "plain      3"]
    assert aligned(lines) == aligned(lines, 80) == ["       one  two  three", "plain    1    2      3"]


def test_questions_of_a_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, name: str | None, split: str | None, streaming: bool) -> Any:
        asked.append((path, name, split))
        rows = [{"prompt": "one"}, {"prompt": [{"role": "user", "content": "two"}], "category": "chat"}]
        return rows if split else {"train": rows}

    monkeypatch.setitem(__import__("sys").modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    expected = [("1", UNNAMED, "one"), ("2", "chat", "two")]
    for name in ("org/set", "org/set:test", "org/set:main:test"):
        assert list(of_dataset(name)) == expected
    assert asked == [("org/set", None, None), ("org/set", None, "test"), ("org/set", "main", "test")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["nowhere.jsonl"], 1), "'nowhere.jsonl' is no file here"),
        ((["4"], 1), "is a number; give some of code, edits, json, prose"),
        ((["pros"], 1), r"^prompts: 'pros' is no set of prompts; did you mean 'prose'\?"),
        (([], 1), "prompts: none chosen"),
        ((["code"], 0), "count: 0 prompts"),
    ],
)
def test_prompts_that_cannot_be_had(arguments: tuple[list[str], int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench.read(arguments[0], letters(), arguments[1])


def test_batches_are_of_one_category_and_full() -> None:
    tokenizer = letters()
    prompts = some_prompts(tokenizer, ["aa", "bbbb", "c"]) + some_prompts(tokenizer, ["dd"], "prose")
    found = bench.batches(prompts, rows=2, pad=0)
    assert [batch.category for batch in found] == ["code", "code", "prose"]
    assert all(batch.ids.shape[0] == 2 for batch in found)
    first = found[0]
    assert first.ids[0].tolist() == [0, 0, *prompts[0].ids[0].tolist()]
    assert first.attention_mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    with pytest.raises(ValueError, match="batch: 0 rows"):
        bench.batches(prompts, rows=0)


@pytest.mark.usefixtures("held_out_text")
def test_prompts_of_one_length() -> None:
    tokenizer = letters()
    prompts = some_prompts(tokenizer, ["short", "x" * 80])
    found = bench.at_length(prompts, tokenizer, 50)
    assert [prompt.ids.shape[1] for prompt in found] == [50, 50]
    assert found[0].ids[0, -5:].equal(prompts[0].ids[0])
    assert found[1].ids.equal(prompts[1].ids[:, -50:])


# The race


@pytest.fixture
def drafted_by_transformers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many tokens transformers' own candidate generator proposed, call by call."""
    proposed: list[int] = []
    original = AssistedCandidateGenerator.get_candidates

    def noted(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        found = original(self, input_ids, **kwargs)
        proposed.append(found[0].shape[1] - input_ids.shape[1])
        return found

    monkeypatch.setattr(AssistedCandidateGenerator, "get_candidates", noted)
    yield proposed


def test_what_counts_passes_keeps_them_from_being_captured():
    """A counter would make compiled code compile again in every forward pass."""
    target = built()[0]
    assert obstacle(target, target.device) is None
    hook = target.register_forward_pre_hook(protocol._Counter(), with_kwargs=True)
    try:
        assert "has hooks" in str(obstacle(target, target.device))
    finally:
        hook.remove()


def test_passes_and_drafts_are_counted_alike(
    pair: AssistedModelForCausalLM, batches: list[bench.Batch], drafted_by_transformers: list[int]
) -> None:
    """The hook's counts agree with plain decoding, with transformers' own generator, and with this package's report."""
    for peer in methods.peers(pair.target, pair.drafter.models[0]):
        drafted_by_transformers.clear()
        (one,) = race(pair.target, [peer], batches, replace(RULES, repeats=1))
        assert one.error is None
        calls = len(drafted_by_transformers) // 2  # warmed up once, timed once
        assert (one.passes, one.drafted) == (calls, sum(drafted_by_transformers[:calls]))
        assert max(drafted_by_transformers) <= peer.setting["num_assistant_tokens"]
    field = [*methods.plain(pair.target, compiled=False), of_model("ours", pair, counted=True)]
    plain, ours = race(pair.target, field, batches, RULES)
    assert (plain.passes, plain.drafted) == (None, 0)  # one pass for every token
    assert ours.tokens == plain.tokens
    report = ours.report
    assert report is not None and report.new_tokens == 2 * 24 * 3
    assert 2 * ours.passes == report.target_passes + len(
        report.row_tokens
    )  # two repeats, and the forward passes over prompts
    assert 2 * ours.drafted == report.drafted
    _, (base, row) = bench.summed_up([plain, ours], batches, greedy=True)
    assert (base.tokens_per_pass, base.drafted_per_pass, base.acceptance_rate) == (1, 0, None)
    assert row.tokens_per_pass == pytest.approx(24 * 3 / ours.passes)
    assert row.acceptance_rate == pytest.approx((24 * 3 - ours.passes) / ours.drafted)


def test_the_loop_without_a_draft_keeps_bits(pair: AssistedModelForCausalLM, batches: list[bench.Batch]) -> None:
    """exact="bits" refuses a target with hooks, and such a method is counted without one."""
    loop = methods.undrafted(pair.target)
    assert loop.model is not None
    loop.model.exact = "bits"
    plain, ours = race(pair.target, [*methods.plain(pair.target, compiled=False), loop], batches[:1], RULES)
    assert ours.error is None and ours.tokens == plain.tokens
    _, (_, row) = bench.summed_up([plain, ours], batches[:1], greedy=True)
    assert (row.tokens_per_pass, row.drafted_per_pass) == (1, 0)


def test_how_close_the_tokens_are_where_texts_first_differ(pair: AssistedModelForCausalLM) -> None:
    prompts = some_prompts(pair.tokenizer, ["add", "multiply", "sub"])
    batches = bench.batches(prompts, rows=3)  # padded on the left
    text = [prompt.ids[0] for prompt in prompts]
    with torch.no_grad():
        scores = [pair.target(ids[None]).logits[0, -1].sort(descending=True) for ids in text]
    best = [[int(row.indices[0]), 1, 2] for row in scores]
    second = [[int(scores[0].indices[1]), 3, 4], best[1], [int(scores[2].indices[2]), 1, 2]]
    gaps = [
        (scores[row].values[0] - scores[row].values[rank]) / scores[row].values.std() for row, rank in ((0, 1), (2, 2))
    ]
    assert largest_gap(pair.target, batches, best, second) == pytest.approx(float(max(gaps)), rel=1e-3)
    assert largest_gap(pair.target, batches, best, best) is None
    behind = [torch.cat([ids, torch.tensor(row[:2])]) for ids, row in zip(text, best, strict=True)]
    with torch.no_grad():
        logits = [pair.target(ids[None]).logits[0, -1] for ids in behind]
    gaps = [(row.max() - row[[2, 3]].min()) / row.std() for row in logits]
    one, two = ([[*row[:2], token] for row in best] for token in (2, 3))  # they differ at their third token
    assert largest_gap(pair.target, batches, one, two) == pytest.approx(float(max(gaps)), rel=1e-3)


def test_batches_are_counted_by_row(pair: AssistedModelForCausalLM) -> None:
    batches = bench.batches(some_prompts(pair.tokenizer, ["add", "sub", "multiply"]), rows=3)
    field = [*methods.plain(pair.target, compiled=False), of_model("ours", pair, counted=True)]
    plain, ours = race(pair.target, field, batches, RULES)
    assert len(plain.tokens) == 3
    assert ours.error is None and ours.tokens == plain.tokens
    assert 2 * ours.passes == ours.report.target_passes + len(ours.report.row_tokens)


def test_end_tokens_are_ignored_by_everybody(pair: AssistedModelForCausalLM, batches: list[bench.Batch]) -> None:
    target, draft = pair.target, pair.drafter.models[0]
    before = [model.generation_config.to_dict() for model in (target, draft)]
    everything = list(range(target.config.vocab_size))
    for model in (target, draft):
        model.generation_config.eos_token_id = everything  # every token ends a text
    try:
        field = [
            *methods.plain(target, compiled=False),
            *methods.peers(target, draft),
            *methods.lookups(target),
            of_model("ours", pair),
        ]
        measured = race(target, field, batches, replace(RULES, repeats=1))
        assert {one.error for one in measured} == {None}
        assert {len(tokens) for one in measured for tokens in one.tokens} == {24}
        assert all(one.tokens == measured[0].tokens for one in measured)
        assert [model.generation_config.eos_token_id for model in (target, draft)] == [everything] * 2
        peer = named(measured)["transformers assisted 3, 0"]
        assert peer.drafted > peer.passes  # an end token did not end the drafts
    finally:
        for model in (target, draft):
            model.generation_config.eos_token_id = built("llama")[0].config.eos_token_id
    assert [model.generation_config.to_dict() for model in (target, draft)] == before


def test_the_draft_keeps_its_own_settings(pair: AssistedModelForCausalLM) -> None:
    draft = pair.drafter.models[0]
    before = draft.generation_config.to_dict()

    def failing(*args: Any, **kwargs: Any) -> torch.Tensor:
        assert draft.generation_config.num_assistant_tokens == 20
        raise RuntimeError

    target = SimpleNamespace(generate=failing)
    with pytest.raises(RuntimeError):
        methods._with_assistant(target, draft, {"num_assistant_tokens": 20})  # type: ignore[arg-type]
    assert draft.generation_config.to_dict() == before


def test_one_that_raises_is_out_and_the_others_go_on(
    pair: AssistedModelForCausalLM, batches: list[bench.Batch]
) -> None:
    calls = []

    def late(ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        calls.append(ids)
        if len(calls) > 4:  # in the first timed round
            raise MemoryError("no more\nof it")
        return pair.target.generate(ids, **kwargs)

    def short(ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return pair.target.generate(ids, **{**kwargs, "max_new_tokens": 5})

    field = [
        Method("late", "assisted", late),
        *methods.plain(pair.target, compiled=False),
        Method("short", "assisted", short),
        *methods.assisted(pair.target, {"refused": "early-exit:99"}),
    ]
    measured = race(pair.target, field, batches, RULES)
    found = named(measured)
    assert found["late"].error == "MemoryError: no more"
    assert found["short"].error == "ValueError: wrote 5 tokens where 24 were asked for"
    assert found["assisted refused"].error.startswith("ValueError: ")
    assert [len(row) for row in found["plain"].seconds] == [3, 3]
    baseline, rows = bench.summed_up(measured, batches, greedy=True)
    assert baseline == "plain" and [row.speedup is None for row in rows] == [True, False, True, True]


def test_without_plain_decoding_there_is_nothing_to_compare_with(
    pair: AssistedModelForCausalLM, batches: list[bench.Batch]
) -> None:
    def broken(ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("broken")

    field = [Method("plain", "plain", broken), of_model("ours", pair)]
    measured = race(pair.target, field, batches, replace(RULES, repeats=1))
    with pytest.raises(ValueError, match=r"target: plain decoding failed.*plain: RuntimeError: broken"):
        bench.summed_up(measured, batches, greedy=True)


def test_a_drafter_that_gives_up_is_told_of(pair: AssistedModelForCausalLM, batches: list[bench.Batch]) -> None:
    class Failing:
        """Of no use."""

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("out of ideas")

    model = AssistedModelForCausalLM.from_models(pair.target, draft="ngram")
    model.drafter.start = lambda call: Failing()  # type: ignore[method-assign]
    (one,) = race(pair.target, [of_model("failing", model)], batches, replace(RULES, repeats=1))
    assert one.error is None and "out of ideas" in one.warned


def test_turns_change_and_seeds_are_shared(pair: AssistedModelForCausalLM, batches: list[bench.Batch]) -> None:
    seen: list[tuple[str, int, float]] = []

    def noting(name: str) -> Method:
        def run(ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            assert kwargs["do_sample"] and kwargs["temperature"] == 0.7 and kwargs["top_p"] == 0.9
            seen.append((name, ids.shape[1], torch.rand(()).item()))
            return torch.nn.functional.pad(ids, (0, kwargs["max_new_tokens"]))

        return Method(name, "plain", run)

    rules = Rules(new_tokens=4, repeats=2, temperature=0.7, top_p=0.9)
    race(pair.target, [noting("a"), noting("b")], batches, rules)
    timed = seen[2 * len(batches) :]
    assert [name for name, _, _ in timed] == ["a", "b", "b", "a", "a", "b", "b", "a", "a", "b", "b", "a"]
    drawn = [draw for _, _, draw in timed]
    assert drawn[::2] == drawn[1::2]  # the same for both at a prompt
    assert len(set(drawn)) == len(drawn) // 2  # another at every prompt and repeat


def test_no_repeat_begins_after_the_deadline(pair: AssistedModelForCausalLM, batches: list[bench.Batch]) -> None:
    rules = Rules(new_tokens=2, repeats=9, seconds=0.0)
    (one,) = race(pair.target, methods.plain(pair.target, compiled=False), batches, rules)
    assert len(one.seconds) == 1


def test_first_tokens_are_streamed(pair: AssistedModelForCausalLM, batches: list[bench.Batch]) -> None:
    field = [
        *methods.plain(pair.target, compiled=False),
        *methods.peers(pair.target, pair.drafter.models[0])[:1],
        of_model("ours", pair),
    ]
    rules = replace(RULES, repeats=1)
    measured = race(pair.target, field, batches, rules)
    stream(pair.target, measured, batches, rules)
    for one in measured:
        assert one.error is None and len(one.first_token) == 3
        assert all(0 < first < both for first, both in zip(one.first_token, one.all_tokens, strict=True))


@pytest.mark.gpu
def test_memory_is_measured_on_cuda(pair: AssistedModelForCausalLM) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA")
    target = copy.deepcopy(pair.target)
    draft = half_right(target).to("cuda")
    model = AssistedModelForCausalLM.from_models(target.to("cuda"), draft=draft, draft_length=3)
    batches = [one.to("cuda") for one in bench.batches(some_prompts(letters(), ["add", "subtract"]))]
    field = [*methods.plain(target), of_model("ours", model)]
    measured = race(target, field, batches, RULES)
    stream(target, measured, batches, RULES)
    assert {one.error for one in measured} == {None}
    assert all(one.working_bytes > 0 for one in measured)
    _, rows = bench.summed_up(measured, batches, greedy=True)
    assert rows[0].working_bytes_over_plain is not None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"new_tokens": 0}, "new_tokens: 0"),
        ({"repeats": 0}, "repeats: 0"),
        ({"temperature": -1.0}, "temperature: -1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p: 0.0"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"seed": 2**32}, "seed: 4294967296"),
        ({"top_p": 0.9}, "top_p: has no effect at temperature 0"),
    ],
)
def test_rules_that_make_no_sense(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rules(**wrong)


def test_what_the_context_has_no_room_for(pair: AssistedModelForCausalLM, batches: list[bench.Batch]) -> None:
    with pytest.raises(ValueError, match=r"context: prompts of up to 8 tokens and 10000 new ones"):
        race(pair.target, methods.plain(pair.target, False), batches, Rules(new_tokens=10_000))


# Who takes part


def test_half_precision_on_a_cpu_is_tried_without_onednn() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("no oneDNN")
    seen = []

    class Target(torch.nn.Linear):
        device = torch.device("cpu")
        dtype = torch.bfloat16

        def generate(self) -> Any:
            seen.append(torch.backends.mkldnn.enabled)

    target: Any = Target(2, 2)
    with torch.backends.mkldnn.flags(enabled=True, allow_tf32=torch.backends.mkldnn.allow_tf32):
        for one in [*methods.plain(target, compiled=False), *methods.lookups(target)]:
            if one.family == "plain":
                one.generate()
            assert one.setting.get("onednn", True) is ("oneDNN off" not in one.name)
        assert torch.backends.mkldnn.enabled
    assert seen == [True, False]


def test_drafts_that_a_pair_allows(pair: AssistedModelForCausalLM) -> None:
    found = default_drafts(pair, "mine")
    assert list(found)[:2] == ["mine", "suffix+mine"] and {"suffix", "ngram", "recycle", "early-exit"} <= set(found)
    assert found["mine"].model is pair.drafter.models[0]  # not loaded again
    assert found["suffix+mine"] == ["suffix", found["mine"]]
    alone = AssistedModelForCausalLM.from_models(pair.target, draft="suffix")
    assert not any("mine" in name for name in default_drafts(alone, None))
    method = next(methods.assisted(pair.target, {"mine": found["mine"]}, pair.tokenizer))
    narrow = methods.assisted(pair.target, found, pair.tokenizer, draft_window=8)
    assert {
        one.name: getattr(one.model.drafter, "window", None)
        for one in narrow
        if one.name in ("assisted mine", "assisted suffix")
    } == {
        "assisted mine": 8,
        "assisted suffix": None,
    }
    weights = sum(p.numel() * p.element_size() for p in pair.drafter.models[0].parameters())
    assert method.draft_bytes >= weights  # buffers, too
    assert of_model("text", alone).draft_bytes == 0


def test_the_baseline_decodes_no_more_than_it_must(pair: AssistedModelForCausalLM) -> None:
    """It takes the most time of all: one prompt to warm up, then the timed ones, and none to choose transformers' setting."""
    prompts, calls = some_prompts(pair.tokenizer, ["add", "subtract", "mul"]), []
    (plain,) = methods.plain(pair.target, compiled=False)
    noted = replace(plain, generate=lambda *args, **kwargs: calls.append(args) or plain.generate(*args, **kwargs))
    tried = methods.lookups(pair.target)
    found = bench.point(pair, [noted], tried, [of_model("ours", pair)], prompts, replace(RULES, seconds=1e6))
    assert len(calls) == 1 + RULES.repeats * len(prompts)
    assert [row.name for row in found.heat] == [one.name for one in tried]
    assert all(row.milliseconds_per_token > 0 and row.speedup is row.tokens_per_pass is None for row in found.heat)
    plain_row, peer, _ = found.rows
    assert plain_row.tokens_per_pass == 1 and peer.name in {one.name for one in tried} and peer.drafted_per_pass > 0


def test_the_fastest_of_each_family() -> None:
    def one(name: str, family: str, seconds: float | None) -> bench.Measured:
        entry = bench.Measured(Method(name, family, lambda: torch.empty(0)))
        entry.seconds = [] if seconds is None else [[seconds], [seconds], [9 * seconds]]
        entry.error = "ValueError: no" if seconds is None else None
        return entry

    tried = [one("a", "x", 2.0), one("b", "x", 1.0), one("c", "x", None), one("d", "y", None), one("e", "y", None)]
    assert [method.name for method in bench.fastest(tried)] == ["b", "d"]
