"""Rows that come and go: whatever joins and leaves, each text is what its request gives alone."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from architectures import build, half_right, random_ids
from automata import END, Automaton, Brackets, Fragile, any_grammar, brackets
from crowd import Requests
from pairs import BY_NAME, CALL, ENDS, tokenizer
from test_many import DRAFTS, STATES, parts_read
from test_many import Never as NeverEnds
from test_sampling import ALPHA, PROMPT, SEQUENCES, counts, exact_distribution, p_value, tiny, towards
from test_sampling import NEW_TOKENS as SAMPLED

from assisted import AssistedModelForCausalLM, GrammarProcessor, SessionPool
from assisted.core.drafts import DraftingStopped
from assisted.engine.runner import CachedModel
from assisted.fast.sources import Source
from assisted.lengths.policies import Never
from assisted.many.reading import shares
from assisted.many.texts import Answer
from assisted.methods.shared.runner import HeadRunner

pytestmark = pytest.mark.usefixtures("invariants")

WORDS = tokenizer()
SETTINGS: list[dict[str, Any]] = [
    {},
    {"eos_token_id": None, "max_new_tokens": 9},
    {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
    {"do_sample": True, "top_k": 1},
    {"do_sample": True, "top_k": 1, "min_new_tokens": 4, "temperature": 0.7},
    {"stop_strings": ["a", "bc", "!"], "tokenizer": WORDS},
]
"""Of requests, each with one text. What depends on a prompt belongs to it alone."""


def mixed(requests: Requests, target: Any, seed: int, count: int = 10) -> dict[int, tuple[list[int], int]]:
    """Ask for texts at random. Returns what each is alone, and after how many tokens its client leaves."""
    draw, expected = random.Random(seed), {}
    for number in range(count):
        prompt = random_ids(target, 1, draw.choice([1, 2, 7, 23]), seed=100 * seed + number)[0]
        call = CALL | {"eos_token_id": ENDS} | draw.choice(SETTINGS)
        grammar = draw.choice([None, None, draw.randrange(99)])
        call, own = (call | ({} if grammar is None else {"logits_processor": [any_grammar(grammar)]}) for _ in range(2))
        patience = draw.choice([999, 999, draw.randint(1, 8)])
        at = requests.ask(prompt, call, draw.randint(0, 25), patience)
        expected[at] = target.generate(prompt[None], **own)[0].tolist(), patience
    return expected


FAMILIES = ["llama", "gemma2", "gpt2", "gpt_neox", "qwen3_moe", "mistral"]
DRAFTED = ["suffix", "ngram", "model", "draft tree", "list", "merged", "none"]


@pytest.mark.parametrize(
    "draft,family,rows",
    [(draft, FAMILIES[at % len(FAMILIES)], 3 - 2 * (at % 3 == 2)) for at, draft in enumerate(DRAFTED * 2)],
)
def test_rows_that_come_and_go_have_the_texts_of_their_requests(draft: str, family: str, rows: int) -> None:
    target = build(BY_NAME[family])
    made, length = (DRAFTS[draft](target), 4) if draft != "none" else ("suffix", Never())
    model = AssistedModelForCausalLM.from_models(target, made, draft_length=length)
    requests = Requests(model, rows)
    expected = mixed(requests, target, seed=len(draft) + rows)
    for number, answer in requests.answers().items():
        whole, patience = expected[number]
        written = answer.ids.tolist()
        assert written == whole[: len(written)], number
        new, all_new = len(answer.new_tokens), len(whole) - answer.prompt_tokens
        assert new == all_new <= patience + 4 or patience <= new <= patience + 4, number  # rounds have at most 5 tokens
    recorders = [asked.recorder for _, asked in requests.coming]
    assert [one.tokens for one in recorders] == [sum(one.row_tokens) for one in recorders]
    assert sum(one.tokens for one in recorders) == requests.batch.recorder.tokens
    assert sum(one.accepted for one in recorders) == requests.batch.recorder.accepted


def sampled(requests: Requests, count: int, settings: list[dict[str, Any]], seeds: bool) -> dict[int, Answer]:
    for number in range(count):
        call = CALL | {"max_new_tokens": SAMPLED} | settings[number % len(settings)]
        requests.ask(PROMPT[0], call, number // 3, seed=number if seeds and call["do_sample"] else None)
    return requests.answers()


@pytest.mark.parametrize("draft,seeds", [("model", False), ("model", True), ("suffix", False)])
def test_drawn_rows_beside_others_follow_their_own_distribution(draft: str, seeds: bool) -> None:
    """Rows with two temperatures and greedy rows in one batch."""
    target = tiny(0)
    made = towards(target, tiny(1)) if draft == "model" else "suffix"
    model = AssistedModelForCausalLM.from_models(target, made, draft_length=2)
    torch.manual_seed(12)
    settings = [
        {"do_sample": True, "top_k": 0},
        {"do_sample": False},
        {"do_sample": True, "top_k": 3, "temperature": 0.6},
    ]
    requests = Requests(model, 48)
    found = sampled(requests, SEQUENCES // 5, settings, seeds)
    assert requests.batch.recorder.accepted > 0
    greedy = target.generate(PROMPT, max_new_tokens=SAMPLED, do_sample=False)[0].tolist()
    assert all(found[number].ids.tolist() == greedy for number in found if number % 3 == 1)
    for kind in (0, 2):
        ids = torch.stack([found[number].ids for number in sorted(found) if number % 3 == kind])
        own = {name: value for name, value in settings[kind].items() if name != "do_sample"}
        assert p_value(counts(ids), exact_distribution(target, **own)) > ALPHA


@pytest.mark.parametrize("draft", ["model", "suffix", "draft tree"])
def test_a_seed_gives_the_same_text_alone_and_beside_others(draft: str) -> None:
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, DRAFTS[draft](target), draft_length=3)
    call = CALL | {"do_sample": True, "temperature": 0.8, "top_k": 9}
    prompt = random_ids(target, 1, 11)[0]
    texts = []
    for seed in (5, 6):
        alone = Requests(model, 1)
        alone.ask(prompt, call, seed=seed)
        texts.append(alone.answers()[0].ids.tolist())
    undrafted = Requests(AssistedModelForCausalLM.from_models(target, "suffix", Never()), 1)
    undrafted.ask(prompt, call, seed=5)
    assert undrafted.answers()[0].ids.tolist() == texts[0]
    among = Requests(model, 4)
    mixed(among, target, seed=4)
    numbers = [among.ask(prompt, call, when, seed=5 + when % 2) for when in (2, 5, 8)]
    found = among.answers()
    assert [found[number].ids.tolist() for number in numbers] == [texts[0], texts[1], texts[0]]
    assert texts[0] != texts[1]


def test_a_row_that_joins_has_its_own_drafts_and_its_own_limit() -> None:
    """All drafts of a copy of the target are right, so a round has as many tokens as its limit allows."""
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, copy.deepcopy(target), draft_length=4)
    requests = Requests(model, 2)
    for at, new in enumerate((30, 7, 12, 3)):
        requests.ask(random_ids(target, 1, 9 + at, seed=at)[0], CALL | {"max_new_tokens": new}, at)
    found = requests.answers()
    for number, new in enumerate((30, 7, 12, 3)):
        recorder = requests.coming[number][1].recorder
        assert len(found[number].new_tokens) == new and recorder is not None
        assert recorder.target_passes == -(-new // 5)


def test_what_a_rows_grammar_forces_is_drafted_and_a_dead_end_is_that_rows_error() -> None:
    target, forced = build(BY_NAME["llama"]), [7, 30, 31, 50, 9, 44, 12, 13, 14, 15]
    model = AssistedModelForCausalLM.from_models(target, "ngram")
    edges: dict[int, Any] = {at: {token: at + 1} for at, token in enumerate(forced)}
    requests, prompt = Requests(model, 3), random_ids(target, 1, 9)[0]
    for after in ({END: None}, {}):  # nothing is allowed after the second one's tokens
        grammar = GrammarProcessor(lambda after=after: Automaton({**edges, len(forced): after}))
        requests.ask(prompt, CALL | {"eos_token_id": END, "logits_processor": [grammar]})
    requests.ask(prompt, CALL)
    found = requests.answers()
    assert found[0].new_tokens.tolist() == [*forced, END] and requests.pieces[1][:10] == forced
    recorder = requests.coming[0][1].recorder
    assert recorder is not None and recorder.target_passes == 1 and recorder.accepted == 11
    assert "allows no token of this vocabulary after 10 new tokens" in str(requests.coming[1][1].error)
    assert found[2].ids.tolist() == target.generate(prompt[None], **CALL)[0].tolist()


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("forced", [[], [30, 31, 50]])
def test_a_row_that_can_draw_no_token_ends_with_an_error(forced: list[int], seed: int | None) -> None:
    """What its grammar allows after some forced tokens, or after its end, is suppressed. The others go on."""
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, "ngram")
    requests, prompt = Requests(model, 4), random_ids(target, 1, 9)[0]
    edges: dict[int, Any] = {at: {token: at + 1} for at, token in enumerate(forced)} | {9: {}}
    for after in ({60: 0}, {END: None}, {44: 9}):
        grammar = GrammarProcessor(lambda after=after: Automaton({**edges, len(forced): after}))
        call = CALL | {"do_sample": True, "suppress_tokens": [60], "eos_token_id": 5}
        call |= {"bad_words_ids": [[END, END]]} if END in after else {}
        requests.ask(prompt, call | {"logits_processor": [grammar]}, seed=seed)
    requests.ask(prompt, CALL)
    found = requests.answers()
    errors = [asked.error for _, asked in requests.coming]
    assert [type(error) for error in errors] == [RuntimeError, RuntimeError, ValueError, type(None)]
    assert "probability tensor" in str(errors[0]) and "allows no token of this vocabulary" in str(errors[2])
    assert [requests.pieces[number] for number in range(3)] == [forced, [*forced, END], [*forced, 44]]
    assert found[3].ids.tolist() == target.generate(prompt[None], **CALL)[0].tolist()


@pytest.mark.parametrize("draft", ["model", "draft tree", "suffix"])
def test_a_row_whose_matcher_fails_at_a_draft_goes_on_without(draft: str) -> None:
    """The others keep their drafts, and another text in its row has some."""
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, DRAFTS[draft](target), draft_length=3)
    requests, prompt = Requests(model, 2), random_ids(target, 1, 9)[0]
    call, when = CALL | {"max_new_tokens": 24}, (0, 0, 1)
    makers = [lambda: GrammarProcessor(Fragile), brackets, brackets]
    for make, at in zip(makers, when, strict=True):
        requests.ask(prompt, call | {"logits_processor": [make()]}, at)
    with pytest.warns(DraftingStopped, match="RuntimeError: no such state") as warned:
        found = requests.answers()
    assert len(warned) == 1
    expected = target.generate(prompt[None], **call, logits_processor=[brackets()])[0].tolist()
    assert [found[number].ids.tolist() for number in range(3)] == [expected] * 3
    recorders = [asked.recorder for _, asked in requests.coming]
    assert recorders[0].accepted == 0 and recorders[0].target_passes == 24  # type: ignore[union-attr]
    assert "no such state" in recorders[0].report().warnings[0]  # type: ignore[union-attr]
    for recorder in recorders[1:]:
        assert recorder is not None and recorder.accepted > 0 and not recorder.report().warnings


def test_a_matcher_that_fails_in_its_text_ends_that_alone() -> None:
    class Broken(Brackets):
        def allowed(self, size: int) -> torch.Tensor:
            if len(self.states) > 4:
                raise RuntimeError("no such state")
            return super().allowed(size)

    target = build(BY_NAME["llama"])
    requests, prompt = (
        Requests(AssistedModelForCausalLM.from_models(target, half_right(target)), 2),
        random_ids(target, 1, 9)[0],
    )
    requests.ask(prompt, CALL | {"logits_processor": [GrammarProcessor(Broken)]})
    requests.ask(prompt, CALL)
    with pytest.warns(DraftingStopped, match="no such state"):
        found = requests.answers()
    assert "no such state" in str(requests.coming[0][1].error)
    assert found[1].ids.tolist() == target.generate(prompt[None], **CALL)[0].tolist()


def test_a_row_that_joins_with_a_criterion_of_its_own_is_refused() -> None:
    target = build(BY_NAME["llama"])
    requests = Requests(AssistedModelForCausalLM.from_models(target, "suffix"), 2)
    prompt = random_ids(target, 1, 9)[0]
    requests.ask(prompt, CALL)
    with pytest.raises(ValueError, match="stopping_criteria: Never may depend on the batch"):
        requests.ask(prompt, CALL | {"stopping_criteria": [NeverEnds()]})
    assert requests.answers()[0].ids.tolist() == target.generate(prompt[None], **CALL)[0].tolist()


@pytest.mark.parametrize(
    "widths,when,rows,chunk,parts,begin",
    [
        ([43, 4], [1, 2], 3, 5, [[5], [3], [5]], [11, 3]),
        ([8, 10, 9], [1, 1, 1], 4, 30, [[7], [8], [9]], [2, 4, 3]),
        ([50, *[7] * 9], [1] * 10, 3, 8, [[6], [6, 2]] * 4 + [[6]], [16, *range(2, 11)]),
    ],
    ids=["a short one", "several", "a long one"],
)
def test_prompts_are_read_in_parts_between_rounds(
    widths: list[int],
    when: list[int],
    rows: int,
    chunk: int,
    parts: list[list[int]],
    begin: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside a text that is being written, no more than a chunk is read before each round. A short prompt does not wait for the
    end of a long one, nor a long one for short ones that keep coming. Of those that fit into a chunk, one begins in each round.

    widths, when: of the prompts, and in which rounds they come. parts: what is read before each round. begin: in which round
    each text begins.
    """
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, "suffix", draft_length=Never())
    requests, before, first = Requests(model, rows, chunk), list[list[int]](), dict[int, int]()
    texts = [random_ids(target, 1, width, seed=width)[0] for width in (3, *widths)]
    expected = {}
    for number, text in enumerate(texts):
        call = CALL | {"max_new_tokens": 1 if number else 30}
        requests.ask(text, call, when[number - 1] if number else 0)
        expected[number] = target.generate(text[None], **call)[0].tolist()
    read = parts_read(monkeypatch)

    def seen(round: Any) -> None:
        before.append(read[sum(map(len, before)) :])
        requests.seen(round)
        for number, pieces in requests.pieces.items():
            if pieces:
                first.setdefault(number, requests.round)

    requests.batch.watch = seen
    assert {number: answer.ids.tolist() for number, answer in requests.answers().items()} == expected
    assert before[: 1 + len(parts)] == [[2], *parts] and max(map(sum, before)) <= chunk
    assert [first[number] for number in range(1, len(texts))] == begin


@pytest.mark.parametrize(
    "rests,most,rows,waited,expected",
    [
        ([40], 16, 4, False, [16]),
        ([40, 3, 5], 16, 4, False, [0, 3, 0]),
        ([40, 3, 5], 16, 4, True, [4, 3, 0]),
        ([40, 30, 9, 10], 16, 4, True, [4, 0, 9, 0]),
        ([3, 30, 0, 5], 16, 4, False, [3, 0, 0, 0]),
        ([9, 5], 3, 4, False, [1, 2]),
        ([40, 40, 40], 16, 4, False, [16, 0, 0]),
    ],
)
def test_what_is_read_between_two_rounds(
    rests: list[int], most: int, rows: int, waited: bool, expected: list[int]
) -> None:
    assert shares(rests, most, rows, waited) == expected


def test_what_others_have_read_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows take from a pool and leave there what they have read: for other rows, and for calls alone."""
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, half_right(target), draft_length=4, sessions=SessionPool())
    text = random_ids(target, 1, 40)[0]
    expected = target.generate(text[None], **CALL)[0]
    assert model.generate(text[None], **CALL)[0].tolist() == expected.tolist()
    turns = [torch.cat([expected, random_ids(target, 1, 20, seed=seed)[0]]) for seed in (1, 2)]
    requests, checked, own = Requests(model, 3), list[Any](), Source.of_model
    monkeypatch.setattr(Source, "of_model", staticmethod(lambda *model: checked.append(model) or own(*model)))
    for at, turn in enumerate([*turns, turns[0]]):
        requests.ask(turn, CALL, 30 * at)
    found = requests.answers()
    assert len(checked) == 1  # all weights are read for it, which takes as long as several rounds
    cached = [asked.recorder.cached_tokens for _, asked in requests.coming]
    assert cached[:2] == [len(expected) - 1] * 2 and cached[2] == len(turns[0]) - 1
    for at, turn in enumerate([*turns, turns[0]]):
        assert found[at].ids.tolist() == target.generate(turn[None], **CALL)[0].tolist()
    third = torch.cat([found[1].ids, random_ids(target, 1, 9)[0]])[None]
    assert model.generate(third, **CALL).tolist() == target.generate(third, **CALL).tolist()
    assert model.report is not None and model.report.cached_tokens == len(found[1].ids) - 1


def test_a_prompt_waits_for_another_that_reads_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read once. If its client leaves, the next one reads it. Without a pool, nothing is shared."""
    target = build(BY_NAME["llama"])
    document = random_ids(target, 1, 30)[0]
    texts = [torch.cat([document, random_ids(target, 1, 4 + seed, seed=seed)[0]]) for seed in range(3)]
    expected = [target.generate(text[None], **CALL)[0].tolist() for text in texts]
    read = parts_read(monkeypatch)
    for pool, leaves, most in (
        (SessionPool(), False, 30 + 12),
        (SessionPool(), True, 30 + 9 + 5),
        (None, False, 30 * 3 + 12),
    ):
        read.clear()
        model = AssistedModelForCausalLM.from_models(target, half_right(target), draft_length=4, sessions=pool)
        requests = Requests(model, 4)
        for at, text in enumerate(texts):
            requests.ask(text, CALL, patience=0 if leaves and not at else 999)
        found = requests.answers()
        assert [found[at].ids.tolist() for at in (1, 2)] == expected[1:] and sum(read) <= most
        shared = [asked.recorder.shared_tokens for _, asked in requests.coming]
        assert shared == [0, 0 if leaves or pool is None else 30, 0 if pool is None else 30]


@pytest.mark.parametrize("draft", ["eagle-1", "model", "suffix"])
def test_a_document_that_a_call_has_read_is_read_in_no_row(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call goes on in a row, and others ask about the same document: neither the target nor a head reads it again."""
    target = build(BY_NAME["llama"])
    document, widths = random_ids(target, 1, 40)[0], list[int]()
    texts = [torch.cat([document, random_ids(target, 1, 4, seed=seed)[0]]) for seed in range(3)]
    for owner, name in ((CachedModel, "prefill"), (HeadRunner, "read")):
        own = getattr(owner, name)
        read = lambda self, ids, *more, own=own: (widths.append(ids.shape[1]), own(self, ids, *more))[1]  # noqa: E731
        monkeypatch.setattr(owner, name, read)
    model = AssistedModelForCausalLM.from_models(target, DRAFTS[draft](target), 3, sessions=SessionPool())
    texts[0] = model.generate(texts[0][None], **CALL | {"max_new_tokens": 8})[0]
    widths.clear()
    requests = Requests(model, 4, 64)
    for text in texts:
        requests.ask(text, CALL)
    found = requests.answers()
    for at, text in enumerate(texts):
        assert found[at].ids.tolist() == target.generate(text[None], **CALL)[0].tolist()
    assert max(widths) <= 8, widths
    cached = [asked.recorder.cached_tokens for _, asked in requests.coming]  # type: ignore[union-attr]
    assert cached[0] >= len(texts[0]) - 2 and cached[1:] == [39, 39]  # a head's last column needs the token after it


@pytest.mark.parametrize(
    "draft,family",
    [("model", "llama"), ("pard", "gpt2"), ("eagle-1", "llama"), ("mtp layers", "llama"), ("suffix", "qwen3_next")],
)
def test_a_call_that_goes_on_in_a_row_is_not_read_again(
    draft: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by the target nor by drafts, which are as right as if they had read it here."""
    target = build((BY_NAME | STATES)[family])
    made, text = DRAFTS[draft](target), random_ids(target, 1, 40)[0]
    widths, passes = list[int](), list[int]()
    for owner, name in ((CachedModel, "prefill"), (HeadRunner, "read")):
        own = getattr(owner, name)
        read = lambda self, ids, *more, own=own: (widths.append(ids.shape[1]), own(self, ids, *more))[1]  # noqa: E731
        monkeypatch.setattr(owner, name, read)
    for pool in (None, SessionPool()):
        model = AssistedModelForCausalLM.from_models(target, made, draft_length=3, sessions=pool)
        begun = model.generate(text[None], **CALL)[0]
        widths.clear()
        requests = Requests(model, 2, 9)
        requests.ask(begun, CALL)
        requests.ask(random_ids(target, 1, 5, seed=5)[0], CALL)
        found = requests.answers()[0]
        assert found.ids.tolist() == target.generate(begun[None], **CALL)[0].tolist()
        passes.append(requests.coming[0][1].recorder.target_passes)
        assert (max(widths) <= 6) == (pool is not None), widths
    assert passes[0] == passes[1]
