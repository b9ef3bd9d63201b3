"""`assisted doctor`: what is recorded, predicted and said, and the whole of it on the shipped pair."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import RECURRENT, build, half_right, random_ids
from hypothesis import given
from hypothesis import strategies as st
from pairs import BY_NAME, CALL, pair, tokenizer

from assisted import AssistedModelForCausalLM
from assisted.cli.doctor import _quick
from assisted.cli.main import main
from assisted.fast import fused, native
from assisted.lab.bench.statistics import Interval
from assisted.lab.doctor.diagnosis import Check, Diagnosis, Examination, Settings
from assisted.lab.doctor.examine import _way, examine, read_prompts
from assisted.lab.doctor.findings import advice, bottlenecks, told
from assisted.lab.doctor.forecast import (
    Drafts,
    Expected,
    Recorded,
    Spent,
    Step,
    Token,
    expect,
    half_as_wrong,
    marks,
    spend,
    tree_columns,
)
from assisted.lab.doctor.passes import (
    Bandwidth,
    Comparison,
    Memory,
    PassTimes,
    Written,
    bandwidth,
    compare,
    memory,
    pass_times,
)
from assisted.lab.doctor.trials import Trials, starts
from assisted.lengths import Costs
from assisted.lengths.policies import Never

COSTS = Costs(((1, 1.0), (2, 1.1), (16, 1.5)), 0.1)
AGREED, WRONG = Token(True), Token(False, 10**6)


def recorded(model: AssistedModelForCausalLM, prompts: list[torch.Tensor], tokens: int, **call: Any) -> Recorded:
    policy = Recorded(tokens)
    for ids in prompts:
        policy.begin()
        model.generate(ids, draft_length=policy, **(CALL | call))
    return policy


# Recording and walking through it again


def test_rounds_are_those_of_the_report() -> None:
    model = pair()[1]
    prompts = [random_ids(model.target, 1, 10, seed=seed) for seed in range(4)]
    model.reset_totals()
    policy = recorded(model, prompts, 6)
    rounds = [one for call in policy.calls for one in call]
    assert len(rounds) == model.totals.target_passes
    assert sum(one.drafted for one in rounds) == model.totals.drafted
    assert sum(one.accepted for one in rounds) == model.totals.accepted
    assert all(one.levels is None for one in rounds)
    assert all(one.asked == one.drafted for one in rounds if one.drafted)  # a chain is asked for token by token
    for call in policy.calls:
        assert sum(one.committed for one in call) == CALL["max_new_tokens"] - 1  # one comes with the prompt
        assert len(marks(call, 6)) == CALL["max_new_tokens"] - 1


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_shorter_drafts_are_foretold(length: int) -> None:
    """What a greedy draft model says at a place does not depend on where its draft began."""
    model = pair()[1]
    prompts = [random_ids(model.target, 1, 10, seed=seed) for seed in range(6)]
    long = recorded(model, prompts, 12, max_new_tokens=40)
    drafts = Drafts(tuple(marks(call, 12) for call in long.calls), COSTS, blocks=False)
    short = recorded(model, prompts, length, max_new_tokens=40)
    passes = sum(map(len, short.calls))
    assert expect(drafts, length, 1.0).tokens_per_pass == pytest.approx(6 * 39 / passes)


def test_never_drafts() -> None:
    model = pair()[1]
    ids = random_ids(model.target, 1, 10, seed=1)
    expected = model.generate(ids, assisted=False, **CALL)
    assert torch.equal(model.generate(ids, draft_length=Never(), **CALL), expected)
    assert model.report is not None and model.report.drafted == 0


def test_a_combination_is_recorded_once_a_round() -> None:
    target = pair()[0]
    model = AssistedModelForCausalLM.from_models(target, draft=["ngram", "suffix"])
    policy = recorded(model, [random_ids(target, 1, 10, seed=3)], 4)
    assert sum(one.committed for one in policy.calls[0]) == CALL["max_new_tokens"] - 1


def test_trees_are_seen_by_their_levels() -> None:
    target = pair()[0]
    model = AssistedModelForCausalLM.from_models(target, draft="recycle")
    policy = recorded(model, [random_ids(target, 1, 10, seed=seed) for seed in range(3)], 4, max_new_tokens=40)
    rounds = [one for call in policy.calls for one in call if one.drafted]
    assert any(one.levels and max(one.levels) > 1 for one in rounds)
    assert all(one.levels is None or sum(one.levels) == one.drafted for one in rounds)
    columns = tree_columns(rounds, 4)
    assert columns is not None and columns[0] == 0 and list(columns) == sorted(columns)
    assert columns[-1] == pytest.approx(sum(one.drafted for one in rounds) / len(rounds))


def test_what_comes_once_in_a_draft_is_told_from_its_tokens() -> None:
    """By the time of the first token; drafters that ask for all tokens before they draft any have no such time."""
    assert Step(4, 4, 2, 3, 5.0, 0, None, 2.0).of_draft == (1.0, 1.0)
    assert Step(4, 4, 2, 3, 4.0, 0, None, 0.1).of_draft == (0.0, 1.0)
    assert Step(1, 9, 1, 2, 4.0, 0, (3, 4, 2)).of_draft == (0.0, 4.0)
    text = (Token(True),) * 8
    plain, more = (Drafts((text,), COSTS, False, None, once) for once in (0.0, 0.25))
    for length in (0, 3):
        one, other = (spend(drafts, text, length) for drafts in (plain, more))
        assert other.draft == pytest.approx(one.draft + 0.25 * one.passes * (length > 0))


def test_marks() -> None:
    rounds = [
        Step(4, 4, 2, 3, 0, 0),  # two agree, the third does not
        Step(4, 4, 4, 5, 0, 0),  # all agree; what follows is taken to agree as well
        Step(1, 3, 1, 2, 0, 0),  # a block, shorter than it might have been: two of it left
        Step(1, 0, 0, 1, 0, 0),  # nothing proposed
        Step(1, 9, 1, 2, 0, 0, (3, 4, 2)),  # a tree, three deep
        Step(1, 2, 2, 2, 0, 0),  # the text ends in the draft
    ]
    expected = [*[AGREED] * 2, WRONG, *[AGREED] * 5, AGREED, Token(False, 2), Token(False, 0)]
    expected += [AGREED, Token(False, 2), AGREED, AGREED]
    assert list(marks(rounds, 4)) == expected


TEXTS = st.lists(st.sampled_from([AGREED, AGREED, WRONG, Token(False), Token(False, 2)]), min_size=1, max_size=40)


@given(TEXTS, st.integers(0, 15))
def test_longer_drafts_take_no_more_passes(text: list[Token], length: int) -> None:
    drafts = Drafts((tuple(text),), COSTS, blocks=False)
    found, longer = expect(drafts, length, 1.0), expect(drafts, length + 1, 1.0)
    assert 1 <= found.tokens_per_pass <= longer.tokens_per_pass <= length + 2
    if length == 0:
        assert found.speedup.ratio == pytest.approx(1.0)
    better = expect(half_as_wrong(drafts), length, 1.0)
    assert better.tokens_per_pass >= found.tokens_per_pass


@pytest.mark.parametrize(
    ("text", "length", "blocks", "columns", "seconds"),
    [
        # three columns cost 1.1 + 0.4 / 14, between those measured
        ((AGREED, AGREED, WRONG, AGREED), 2, False, None, 2 * (0.2 + 1.1 + 0.4 / 14) / 4),
        ((AGREED, AGREED, WRONG, AGREED), 2, True, None, 2 * (0.1 + 1.1 + 0.4 / 14) / 4),
        ((AGREED, AGREED, WRONG, AGREED), 2, True, (0.0, 7.0, 15.0), 2 * (0.1 + 1.5) / 4),
        ((Token(False, 1), Token(False, 0)), 5, True, None, (0.1 + 1.1 + 0.1 + 1.0) / 2),
    ],
)
def test_a_round_is_priced(text: Any, length: int, blocks: bool, columns: Any, seconds: float) -> None:
    found = expect(Drafts((text,), COSTS, blocks, columns), length, 1.0)
    assert found.milliseconds_per_token == pytest.approx(1e3 * seconds)


# The two distributions


class Bigrams:
    """A model whose distribution depends on the last token alone."""

    device = torch.device("cpu")

    def __init__(self, logits: torch.Tensor):
        self.logits = logits

    def __call__(self, ids: torch.Tensor, **kwargs: Any) -> Any:
        return SimpleNamespace(logits=self.logits[ids], hidden_states=[self.logits[ids]])


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_best_acceptance_by_position(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    target, draft = (Bigrams(torch.randn(5, 5, generator=generator)) for _ in range(2))
    p, q = ((model.logits / temperature).softmax(-1) for model in (target, draft))
    both = torch.minimum(p, q)
    beta = both.sum(-1)
    ids = [0]
    for _ in range(20000):
        ids.append(int(torch.multinomial(p[ids[-1]], 1, generator=generator)))
    starts = tuple(range(0, 19990))
    found = compare(target, draft, [Written(torch.tensor(ids), 1, starts)], temperature, 3)  # type: ignore[arg-type]
    often = torch.bincount(torch.tensor(ids[:19990]), minlength=5) / 19990
    first = often @ beta
    second = often @ both @ beta
    third = often @ both @ both @ beta
    expected = (first, second / first, third / second)
    assert found.best_by_position == pytest.approx([x.item() for x in expected], abs=0.02)
    plain = torch.minimum(target.logits.softmax(-1), draft.logits.softmax(-1)).sum(-1)
    assert found.overlap == pytest.approx((often @ plain).item(), abs=0.01)
    same = (target.logits.argmax(-1) == draft.logits.argmax(-1)).float()
    assert found.agreement == pytest.approx((often @ same).item(), abs=0.01)


def test_a_greedy_draft_reaches_the_best() -> None:
    target, model = pair()
    prompts = [random_ids(target, 1, 10, seed=seed) for seed in range(8)]
    policy = recorded(model, prompts, 4)
    texts = [
        Written(model.generate(ids, draft_length=4, **CALL)[0], 10, starts(call))
        for ids, call in zip(prompts, policy.calls, strict=True)
    ]
    comparison = compare(target, model.drafter.model, texts, 0.0, 4)
    rounds = [one for call in policy.calls for one in call if one.drafted]
    assert comparison.best_by_position[0] == pytest.approx(
        sum(one.accepted > 0 for one in rounds) / len(rounds), abs=0.01
    )
    assert comparison.cosine is not None
    assert comparison.tokens == 8 * CALL["max_new_tokens"]


def test_the_target_itself_is_the_best_draft() -> None:
    target = pair()[0]
    ids = random_ids(target, 1, 30, seed=2)[0]
    comparison = compare(target, target, [Written(ids, 10, (0, 3, 7))], 1.0, 4)
    assert comparison.overlap == pytest.approx(1.0)
    assert comparison.best_by_position == pytest.approx([1.0] * 4)
    assert comparison.cosine == pytest.approx(1.0)
    narrow = build(BY_NAME["llama"], hidden_size=16)
    assert compare(target, narrow, [Written(ids, 10, (0,))], 0.0, 2).cosine is None


# Passes and memory


@pytest.mark.parametrize("name", ["llama", "bloom", "gpt2", "lfm2"])
def test_passes_are_timed(name: str) -> None:
    """With recurrent states as well, which each pass leaves as they were."""
    target = build(next(one for one in (*BY_NAME.values(), *RECURRENT) if one.name == name))
    found = pass_times(target, random_ids(target, 1, 9, seed=1)[0], 24, (1, 2, 5), repeats=2)
    assert list(found.seconds) == [1, 2, 5]
    assert all(seconds > 0 for seconds in found.seconds.values())


def test_weights_that_a_pass_reads() -> None:
    tied, untied = (build(BY_NAME["llama"], tie_word_embeddings=tie) for tie in (True, False))
    assert memory(tied, 1.0).weight_bytes == pytest.approx(4 * tied.num_parameters(), rel=0.01)
    # the words are looked up, not read
    assert memory(untied, 1.0).weight_bytes == memory(tied, 1.0).weight_bytes
    assert memory(build(BY_NAME["qwen3_moe"]), 1.0).weight_bytes is None
    found = bandwidth(torch.device("cpu"))
    assert 0 < found.low <= found.high
    assert Memory(100, Bandwidth(50.0, 200.0), 2.0).share == (0.25, 1.0)


# Text


def test_prompts_of_a_callers_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join("abcdefgh" * 8 for _ in range(60)))
    for name, content in (("b.bin", b"\xff\xfe\x00"), ("short.txt", b"ab")):
        (tmp_path / name).write_bytes(content)
    for place in (tmp_path, tmp_path / "a.txt"):
        prompts = read_prompts(str(place), tokenizer(), Settings(prompts=3))
        assert len(prompts) == 3 and all(8 <= len(ids) <= 160 for ids in prompts)
    for name, said in (
        ("b.bin", "is not UTF-8 text"),
        ("c.txt", "does not exist"),
        ("short.txt", "is too little text"),
    ):
        with pytest.raises(ValueError, match=rf"text: .* {said}"):
            read_prompts(str(tmp_path / name), tokenizer(), Settings(prompts=3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompts": 0}, "prompts: 0 is too few"),
        ({"new_tokens": 4}, "new_tokens: 4 is too few"),
        ({"longest": 1}, "longest: 1 is too few"),
        ({"temperature": -1.0}, "temperature: -1"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"temperature": 1e-300}, "temperature: 1e-300"),
        ({"seconds": 0.0}, "seconds: 0"),
        ({"contexts": (0,)}, "contexts: 0 tokens"),
    ],
)
def test_settings_that_make_no_sense(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**fields)


# Words


def a_diagnosis(**fields: Any) -> Diagnosis:
    expected = tuple(Expected(n, 1.0 + n / 2, 5.0, Interval(1 + n / 4, 0.9 + n / 4, 1.1 + n / 4)) for n in range(5))
    checks = (
        Check("draft length 4", Interval(1.9, 1.8, 2.0), 2.0, 8, 8),
        Check("adaptive", Interval(2, 1.9, 2.1), None, 8, 8),
    )
    known: dict[str, Any] = {
        "draft": "small",
        "proposed": 1.0,
        "acceptance_by_position": (0.8, 0.7),
        "draft_seconds": 0.001,
        "pass_seconds": 0.01,
        "comparison": Comparison(0.8, 0.85, (0.82, 0.71), 0.1, 400),
        "expected": expected,
        "best": 4,
        "if_twice_as_fast": 2.1,
        "if_columns_cost_half": 2.05,
        "if_half_as_wrong": 3.0,
        "checks": checks,
    }
    return Diagnosis(**(known | fields))


def an_examination(*drafts: Diagnosis, **fields: Any) -> Examination:
    known: dict[str, Any] = {
        "target": "large",
        "way": None,
        "machine": {"processor": "a processor", "device": "cpu", "dtype": "float32", "threads": 1},
        "parameters": 7_000_000,
        "text": "held-out code",
        "prompts": 8,
        "checked": 8,
        "prompt_tokens": 150,
        "new_tokens": 64,
        "temperature": 0.0,
        "passes": (PassTimes(180, None, {1: 0.01, 5: 0.011, 16: 0.013}), PassTimes(512, None, {1: 0.012, 16: 0.02})),
        "memory": Memory(28_000_000, Bandwidth(2e10, 2.4e10), 0.01),
        "plain_way": "plain",
        "plain_seconds": 0.012,
        "undrafted": Interval(1.2, 1.1, 1.3),
        "repeated_4grams": 0.02,
        "drafts": drafts,
    }
    return Examination(**(known | fields))


def test_the_report_reads() -> None:
    said = told(an_examination(a_diagnosis()))
    for part in (
        "large: 7 million parameters, float32, on a processor, 1 thread",
        "accepted  80%  70%",
        "at best   82%  71%",
        "Best draft length: 4, 2.00 times (1.90 to 2.10) the speed of the baseline, 2.00 over no draft",
        "Measured, draft length 4: 1.90 times (1.80 to 2.00), 1.58 over no draft",
        "2.00 times the speed of the baseline, 1.67 over no draft; expected for long texts: 2.00 times (1.90 to 2.10), 2.00",
        "Predicted for these calls: 2.00; as predicted",
        "8 of 8 texts the same",
        "Diagnostic, no predictor",
        "Take draft='small'",
        "12% to 14% of the memory's speed",
    ):
        assert part in said.replace("\n    ", " ") or part in " ".join(said.split()), part
    assert max(map(len, said.splitlines())) <= 130


@pytest.mark.parametrize(
    ("fields", "what", "part"),
    [
        ({}, ["acceptance"], "distill"),
        ({"proposed": 0.4, "comparison": None}, ["acceptance"], "proposing something in only 40% of the rounds"),
        ({"if_twice_as_fast": 4.0}, ["draft"], "smaller or a quantized one"),
        ({"if_columns_cost_half": 4.0}, ["verify"], "keep drafts short"),
        ({"if_twice_as_fast": 3.1}, ["draft", "acceptance"], "Nearly as much: rejected tokens"),
    ],
)
def test_bottlenecks(fields: dict[str, Any], what: list[str], part: str) -> None:
    diagnosis = a_diagnosis(**fields)
    assert bottlenecks(diagnosis) == what
    assert part in " ".join(advice(an_examination(diagnosis)))


@pytest.mark.parametrize(
    ("speedup", "spent", "says"),
    [
        (1.5, Spent(10, 1, 8), "as predicted"),
        (
            1.1,
            Spent(10, 1, 14, 1),
            "45% less than predicted, mostly because the target's pass took 1.4e+03 ms where 800 were",
        ),
        (1.1, Spent(10, 7, 8, 1), "drafting took 700 ms where 100 were predicted"),
        (1.1, Spent(10, 1, 8, 4), "the rest of a round took 400 ms where 0 were predicted"),
        (1.1, Spent(16, 1.6, 12.8, 1), "16 rounds were needed where 10 were predicted"),
        (
            4.0,
            Spent(5, 0.5, 4, 1),
            "100% more than predicted, mostly because 5 rounds were needed where 10 were predicted",
        ),
    ],
)
def test_a_prediction_outside_the_interval_names_the_part_that_differs(speedup: float, spent: Spent, says: str) -> None:
    """The prediction is 10 rounds with 1 second of drafting and 8 of the target's passes."""
    measured = Interval(speedup, speedup - 0.5, speedup + 0.5)
    check = Check("draft length 4", measured, 2.0, 8, 8, spent, Spent(10, 1, 8))
    said = " ".join(told(an_examination(a_diagnosis(checks=(check,)))).split())
    assert "Predicted for these calls: 2.00; " in said and says in said


@pytest.mark.parametrize(
    ("fields", "about", "parts"),
    [
        ({"comparison": Comparison(0.2, 0.1, (0.1,), None, 9), "acceptance_by_position": (0.1,)}, {}, ["hardly agree"]),
        ({"acceptance_by_position": (0.4, 0.3)}, {}, ["something else is wrong"]),
        (
            {"checks": (Check("draft length 4", Interval(1.0, 0.9, 1.1), 2.0, 7, 8),)},
            {},
            ["50% less than predicted", "Do not draft with small here"],
        ),
        ({}, {"undrafted": Interval(2.0, 1.9, 2.1)}, ["Do not draft"]),
        ({"error": "no such thing", "proposed": 0.0}, {}, ["refused: no such thing", "No draft could be loaded"]),
        ({}, {"repeated_4grams": 0.5}, ["repeats itself"]),
        ({}, {"plain_way": "plain, oneDNN off"}, ["oneDNN switched off"]),
        ({}, {"memory": Memory(28_000_000, Bandwidth(1e9, 2e9), 0.01)}, ["fit into caches"]),
        ({}, {"way": "own forward: Louder.forward"}, ["no shortcuts, own forward: Louder.forward"]),
    ],
)
def test_warnings(fields: dict[str, Any], about: dict[str, Any], parts: list[str]) -> None:
    said = " ".join(told(an_examination(a_diagnosis(**fields), **about)).split())
    assert all(part in said for part in parts)


def test_the_best_of_several_is_named() -> None:
    silent = told(an_examination(a_diagnosis(proposed=0.0, warned="it failed"), a_diagnosis(draft="better")))
    assert "proposed nothing" in silent and "Take draft='better'." in silent
    better = a_diagnosis(draft="better", checks=(Check("adaptive", Interval(3, 3, 3), None, 8, 8),))
    assert "draft='better', the best of these 2" in " ".join(told(an_examination(a_diagnosis(), better)).split())


# All of it


def test_examined() -> None:
    target = build(BY_NAME["llama"])
    drafts: dict[str, Any] = {"half": half_right(target), "suffix": "suffix", "nothing": "ngram:0"}
    settings = Settings(prompts=2, new_tokens=16, longest=4, seconds=1.0, contexts=(20, 40))
    told_of: list[tuple[str, float]] = []
    found = examine(
        target, drafts, tokenizer(), __file__, settings, name="tiny", progress=lambda *told: told_of.append(told)
    )
    half, suffix, nothing = found.drafts
    assert half.comparison is not None
    assert not half.blocks
    assert suffix.comparison is None
    assert suffix.blocks
    assert nothing.error is not None
    assert "max_ngram" in nothing.error
    for one in (half, suffix):
        assert [expected.length for expected in one.expected] == [0, 1, 2, 3, 4]
        assert 1 <= one.best <= 4
        assert [check.same for check in one.checks] == [2, 2]
        first, adaptive = one.checks
        assert first.predicted is not None and adaptive.spent is None
        assert first.foretold.passes > 0 < first.spent.passes and min(first.spent.verify, first.foretold.verify) > 0
    assert [times.context for times in found.passes] == [20, 40]
    for step in ("timing passes", "recording half", "checking"):  # a step takes minutes on a busy machine
        shares = [share for what, share in told_of if what == step]
        assert shares == sorted(shares) and len(set(shares)) >= 2
    again = json.loads(json.dumps(found.to_dict()))
    assert again["drafts"][0]["draft"] == "half"
    assert "Draft half" in told(found)


def test_kernels_that_are_not_here_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "loaded", lambda *dtype: (None, "no C compiler was found; install one"))
    target = build(BY_NAME["llama"])
    settings = Settings(prompts=1, new_tokens=8, longest=2, seconds=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = examine(target, {"half": half_right(target), "suffix": "suffix"}, tokenizer(), __file__, settings)
    assert found.lacking == (f"kernels in C ({native.COST}, because no C compiler was found; install one)",)
    assert not any(one.warned for one in found.drafts)
    assert " ".join(told(found).split()).count("no C compiler was found") == 1


def test_sampled() -> None:
    target, model = pair()
    settings = Settings(prompts=2, new_tokens=12, longest=3, seconds=1.0, temperature=0.8)
    found = examine(target, {"half": model.drafter.model}, tokenizer(), __file__, settings)
    assert found.drafts[0].checks[0].same is None
    assert "temperature 0.8" in told(found)


def test_what_fails_in_silence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_near", lambda *given: False)
    target = build(BY_NAME["llama"])
    settings = Settings(prompts=1, new_tokens=8, longest=2, seconds=0.5, contexts=(20,))
    found = examine(target, {"suffix": "suffix"}, tokenizer(), __file__, settings)
    assert "warning: LlamaForCausalLM runs as it is" in told(found)


def test_drafts_are_loaded_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trials, "passes", None)
    drafts = {"nothing": "ngram:0", "nowhere": "./nowhere"}
    with pytest.raises(ValueError, match=r"none could be loaded: nothing \(.*max_ngram.*; nowhere \(.*nowhere"):
        examine(pair()[0], drafts, tokenizer(), __file__)


def test_a_window_is_that_of_the_drafts_that_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    target, model = pair()
    seen: dict[str, Any] = {}
    load = AssistedModelForCausalLM.from_models

    def loaded(*args: Any, **kwargs: Any) -> Any:
        seen[type(args[1]).__name__] = kwargs["draft_window"]
        return load(*args, **kwargs)

    monkeypatch.setattr(AssistedModelForCausalLM, "from_models", loaded)
    monkeypatch.setattr(Trials, "passes", lambda *given: 1 / 0)
    drafts = {"text": "suffix", "half": model.drafter.model}
    with pytest.raises(ZeroDivisionError):
        examine(target, drafts, tokenizer(), __file__, draft_window=8)
    assert seen == {"str": None, type(model.drafter.model).__name__: 8}


def test_no_room() -> None:
    target = build(BY_NAME["llama"], max_position_embeddings=64)
    with pytest.raises(ValueError, match="do not fit into a context of 64"):
        examine(target, {"suffix": None}, tokenizer(), __file__)


QUICK = ["--count", "1", "--max-new-tokens", "8", "--longest", "2", "--seconds", "1", "--contexts", "64"]
QUICK += ["--text", __file__, "--device", "cpu"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    argv = ["doctor", "zoo:target", "--draft", "zoo:draft", "--draft", "suffix", *QUICK]
    assert main([*argv, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "What to do" in printed
    found = json.loads(out.read_text())
    assert [one["draft"] for one in found["drafts"]] == ["zoo:draft", "suffix"]
    assert found["told"].strip() == printed.strip()
    argv = ["doctor", "zoo:target", "--draft", "suffix", *QUICK]
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == "zoo:target"
    assert main([*argv, "--draft", "ngram:0"]) == 2
    said = capsys.readouterr()
    assert "refused: ValueError: max_ngram" in said.out and "could not be loaded: ngram:0" in said.err
    assert main(["doctor", "zoo:nope"]) == 2
    assert "zoo:nope is not in the zoo" in capsys.readouterr().err


def test_a_quick_run_measures_little_and_keeps_what_is_asked_for() -> None:
    assert _quick(Settings()) == Settings(prompts=2, new_tokens=24, longest=8, seconds=20.0, contexts=(128,))
    asked = Settings(prompts=1, new_tokens=8, longest=4, seconds=5.0, contexts=(64,), temperature=0.8)
    assert _quick(asked) == asked


def test_a_saved_pair_brings_its_own_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    AssistedModelForCausalLM.from_pretrained("zoo:target", draft="zoo:draft").save_pretrained(tmp_path)
    assert main(["doctor", str(tmp_path), *QUICK]) == 0
    assert "Draft its own draft" in capsys.readouterr().out


def test_it_says_why_a_target_takes_no_shortcuts() -> None:
    class Louder(type(build(BY_NAME["llama"]))):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 2
            return output

    target = build(BY_NAME["llama"])
    assert _way(target) is None
    target.__class__ = Louder
    way = _way(target)
    assert way is not None
    assert way.startswith("own forward: Louder.forward is")
    with torch.overrides.TorchFunctionMode():  # around the class that is not own
        assert _way(target) == "plain: TorchFunctionMode is active"
