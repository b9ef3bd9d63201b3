"""Many prompts in few rows: every answer is that of its prompt alone, and rows do not wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, RECURRENT, build, half_right, random_ids
from automata import brackets
from covering import in_turns, only, over, some
from eagle_heads import random_head, trained_head, written
from medusa_heads import knowing, random_heads
from methods import HEADS, METHODS, in_parallel
from mtp_heads import trained_layers
from pairs import BY_NAME, CALL, ENDS, pair, tokenizer
from test_sampling import ALPHA, PROMPT, SEQUENCES, counts, exact_distribution, p_value, tiny, towards
from test_sampling import NEW_TOKENS as SAMPLED
from transformers import StoppingCriteria
from transformers.utils import logging

from assisted import (
    MTP,
    AssistedModelForCausalLM,
    DraftModel,
    DraftTree,
    Eagle,
    LayerSkip,
    Medusa,
    Merged,
    NGram,
    Suffix,
)
from assisted.many import Answer
from assisted.many.reading import Reading
from assisted.methods.shared.model_drafter import ModelDrafting
from assisted.methods.suffix.tree import END

EARLY = CALL | {"eos_token_id": ENDS}
STATES = {one.name: one for one in RECURRENT}

pytestmark = pytest.mark.usefixtures("invariants")


def prompts(target: Any, count: int = 9) -> list[torch.Tensor]:
    """Of several lengths, [P] each."""
    return [random_ids(target, 1, 1 + 7 * (number % 4), seed=number)[0] for number in range(count)]


def known(target: Any) -> list[torch.Tensor]:
    """Prompts after which trained heads know what the target writes."""
    ids, lengths = written(target)
    texts = [row[: length - 26] for row, length in zip(ids, lengths, strict=True)]
    return [texts[number] for number in (0, 1, 0, 2, 3, 4, 0, 1)]


def alone(target: Any, texts: list[torch.Tensor], **kwargs: Any) -> dict[int, list[int]]:
    """What the target writes after each prompt by itself."""
    return {number: target.generate(text[None], **kwargs)[0].tolist() for number, text in enumerate(texts)}


def answered(model: AssistedModelForCausalLM, texts: list[torch.Tensor], **kwargs: Any) -> dict[int, list[int]]:
    found = list(model.generate_many(texts, **kwargs))
    assert len({answer.index for answer in found}) == len(found)
    assert all(answer.ids[: answer.prompt_tokens].tolist() == texts[answer.index].tolist() for answer in found)
    return {answer.index: answer.ids.tolist() for answer in found}


DRAFTS: dict[str, Callable[[Any], Any]] = {
    "suffix": lambda target: "suffix",
    "suffix tree": lambda target: Suffix(tree=True, min_probability=0.01),
    "ngram": lambda target: NGram(3, 1),
    "model": half_right,
    "draft tree": lambda target: DraftTree(half_right(target), nodes=24, beam=4, candidates=4),
    "pard": lambda target: in_parallel(half_right(target)),
    "list": lambda target: ["suffix", half_right(target)],
    "merged": lambda target: Merged(("ngram", half_right(target))),
    "window": lambda target: DraftModel(half_right(target), draft_window=3),
    "eagle-1": lambda target: Eagle(trained_head(target, 1, steps=15, unrolled=1), tree=False),
    "eagle, window": lambda target: Eagle(trained_head(target, 3, steps=15, unrolled=1), draft_window=3),
    "mtp layers": lambda target: MTP(trained_layers(target)),
    "layer-skip": lambda target: LayerSkip(0.25, window=8, every=1),
    "self": lambda target: "self:int8-torchao",
    "list of heads": lambda target: ["suffix", HEADS["medusa"](target), "early-exit:1", HEADS["eagle"](target)],
    "merged heads": lambda target: Merged((HEADS["eagle"](target), HEADS["medusa"](target))),
}
HEADED = (
    "medusa",
    "eagle-3, trees",
    "p-eagle",
    "mtp, trees",
    "assistant, chains",
    "assistant, trees",
    "dflash, chains",
)
DRAFTS |= {
    one.name: one.draft for one in METHODS if one.name in (*HEADED, "dspark, trees", "early-exit", "early-exit:1")
}
FAST = ("eagle-1", "medusa", "mtp layers", "early-exit:1", "assistant, trees", "dflash, chains", "list of heads")


@pytest.mark.parametrize("draft,rows", only(in_turns(list(DRAFTS), [3, 1, 16]), {*list(DRAFTS)[:8], *FAST}))
def test_every_answer_is_that_of_its_prompt_alone(draft: str, rows: int) -> None:
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, DRAFTS[draft](target), draft_length=4)
    texts = [*prompts(target), *known(target)]
    expected = alone(target, texts, **EARLY)
    assert answered(model, texts, rows=rows, **EARLY) == expected
    report = model.report
    assert report is not None and not report.warnings
    new = [len(expected[number]) - len(text) for number, text in enumerate(texts)]
    assert sorted(report.row_tokens) == sorted(new) and report.new_tokens == sum(new)
    assert draft in ("ngram", "p-eagle") or report.accepted > 0


def parts_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each part of a prompt that the target reads from now on."""
    read, own = list[int](), Reading.read_on

    def read_on(one: Reading, most: int) -> int:
        read.extend([tokens] if (tokens := own(one, most)) else [])
        return tokens

    monkeypatch.setattr(Reading, "read_on", read_on)
    return read


@pytest.mark.parametrize(
    "draft,family,rows,least",
    [
        ("suffix", "llama", 4, 3 * 40 + 42 + 20),
        ("model", "gemma2", 4, 3 * 40 + 42 + 20),
        ("eagle-1", "llama", 4, 3 * 40 + 42 + 20),
        ("list of heads", "llama", 3, 3 * 40 + 42 + 20),
        ("early-exit:1", "mistral", 2, 4 * 40 + 20),
        ("model", "gpt2", 1, 4 * 40),  # the last but one is read where the document was
        ("suffix", "qwen3_next", 4, 3 * 40),  # states are copied at the end of the beginning alone
        ("eagle-1", "lfm2", 4, 3 * 40),
    ],
)
def test_a_beginning_that_texts_share_is_read_once(
    draft: str, family: str, rows: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions about one document, one of them again, another text, and half of the document."""
    target = build((BY_NAME | STATES)[family])
    model = AssistedModelForCausalLM.from_models(target, DRAFTS[draft](target), draft_length=4)
    document = random_ids(target, 1, 40, seed=5)[0]
    texts = [torch.cat([document, random_ids(target, 1, 3 + number, seed=number)[0]]) for number in range(4)]
    texts += [texts[0], random_ids(target, 1, 9, seed=9)[0], torch.cat([document[:20], document[:6]])]
    expected, read = alone(target, texts, **EARLY), parts_read(monkeypatch)
    assert answered(model, texts, rows=rows, **EARLY) == expected
    report = model.report
    assert report is not None and not report.warnings
    shared = sum(len(text) - 1 for text in texts) - sum(read)
    assert report.shared_tokens == report.cached_tokens == shared >= least
    assert f"{shared} tokens of the prompt were known and not read again, {shared} of them by another row" in str(
        report
    )


WITH_HEADS: dict[str, Callable[[Any], Any]] = {
    "medusa": lambda target: Medusa(knowing(target, written(target)[0][:1], 18)),
    "window": lambda target: DraftModel(half_right(target), draft_window=8),
    **{name: DRAFTS[name] for name in FAST if name not in ("medusa", "list of heads")},
}


@pytest.mark.parametrize("draft", WITH_HEADS)
def test_a_refilled_row_takes_as_many_rounds_as_its_prompt_alone(draft: str) -> None:
    """A head that had lost the prompt, or had that of the row's last text, would be exact and slow."""
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, WITH_HEADS[draft](target), draft_length=3)
    texts, passes, rounds = known(target), 0, []
    texts = [text if draft != "medusa" else texts[0] for text in texts]  # the only one that it knows
    for text in texts:
        model.generate(text[None], **CALL)
        assert model.report is not None
        passes += model.report.target_passes
    model.watch = lambda round: rounds.append(len(round.unfinished))
    answered(model, texts, rows=2, **CALL)
    if draft in ("eagle-1", "mtp layers"):
        assert model.drafter.why_not_in_c == "steps in C are those of one row"  # not that of one that reads alone
    # the first pass of `generate` reads the prompt and brings a token, too, which takes a row a round of its own
    assert sum(rounds) <= passes + len(texts) and passes < 0.9 * len(texts) * CALL["max_new_tokens"]


@over("architecture", ARCHITECTURES)
def test_all_architectures(architecture: Any) -> None:
    target = build(architecture)
    model = AssistedModelForCausalLM.from_models(target, half_right(target), draft_length=3)
    texts = prompts(target, 6)
    try:
        found = answered(model, texts, rows=2, **EARLY)
    except ValueError as error:
        assert architecture.masks == "2d" or str(error).startswith("target: "), error
        return
    assert found == alone(target, texts, **EARLY)


@over("architecture,draft", RECURRENT, ["suffix", "eagle-1", "mtp, trees", "early-exit:1"])
def test_recurrent_architectures(architecture: Any, draft: str) -> None:
    """A refilled row has the states of its new text, and the other rows keep theirs."""
    target = build(architecture)
    try:
        model = AssistedModelForCausalLM.from_models(target, DRAFTS[draft](target), draft_length=3)
    except ValueError as error:
        assert draft in ("mtp, trees", "early-exit:1"), error
        return
    texts = [*prompts(target, 5), *known(target)[:3]]
    try:
        found = answered(model, texts, rows=3, **EARLY)
    except ValueError as error:
        assert architecture.name in ("nemotron_h", "zamba2") and "reads a token alone" in str(error), error
        return
    assert found == alone(target, texts, **EARLY)
    assert model.report is not None and not model.report.warnings


@pytest.mark.parametrize(
    "settings,fast",
    in_turns(
        [
            {"repetition_penalty": 1.3},
            {"no_repeat_ngram_size": 2, "bad_words_ids": [[7]]},
            {"min_length": 12, "suppress_tokens": [9, 11]},
            {"max_new_tokens": None, "max_length": 24},
            {"do_sample": True, "top_k": 1},
            {"draft_length": "adaptive"},
            {"draft_length": "confidence"},
        ],
        ["auto", "eager"],
    ),
)
def test_settings(settings: dict[str, Any], fast: str) -> None:
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, half_right(target), draft_length=3, fast=fast)
    texts = prompts(target)
    own = EARLY | {name: value for name, value in settings.items() if name != "draft_length"}
    assert answered(model, texts, rows=3, **EARLY | settings) == alone(target, texts, **own)


def test_stop_strings() -> None:
    target, words = build(BY_NAME["llama"]), tokenizer()
    model = AssistedModelForCausalLM.from_models(target, half_right(target), draft_length=3, tokenizer=words)
    texts = prompts(target)
    call = EARLY | {"stop_strings": ["a", "b", "c"], "tokenizer": words}
    assert answered(model, texts, rows=3, **call) == alone(target, texts, **call)


@pytest.mark.parametrize("draft", ["suffix", "model", "draft tree", "medusa", "eagle-1", "early-exit:1", "list"])
def test_every_text_has_a_grammar_of_its_own(draft: str) -> None:
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, DRAFTS[draft](target))
    texts, processor = prompts(target), brackets(packed=True)
    expected = [target.generate(text[None], **EARLY, logits_processor=[brackets()])[0].tolist() for text in texts]
    for _ in range(2):  # the caller's processor is not used up
        found = answered(model, texts, rows=3, **EARLY, logits_processor=[processor])
        assert found == dict(enumerate(expected))
    assert model.report is not None and model.report.accepted > 0 and not model.report.warnings


SAMPLED_DRAFTS: dict[str, Callable[[Any], Any]] = {
    "model": lambda target: towards(target, tiny(1, layers=2)),
    "eagle": lambda target: Eagle(random_head(target, 1)),
    "medusa": lambda target: Medusa(random_heads(16, 5, 2)),
    "early-exit": lambda target: "early-exit:1",
}


@pytest.mark.parametrize("draft", some(list(SAMPLED_DRAFTS), {"model", "eagle"}))
def test_sampled_answers_follow_the_targets_distribution(draft: str) -> None:
    target = tiny(0, layers=2)
    model = AssistedModelForCausalLM.from_models(target, SAMPLED_DRAFTS[draft](target), draft_length=2)
    torch.manual_seed(11)
    many = (PROMPT[0] for _ in range(SEQUENCES // 2))
    call = {"max_new_tokens": SAMPLED, "do_sample": True, "top_k": 0}
    found = torch.stack([answer.ids for answer in model.generate_many(many, rows=64, **call)])
    assert 0 < model.totals.accepted < model.totals.drafted
    assert p_value(counts(found), exact_distribution(target, top_k=0)) > ALPHA


def test_rows_do_not_wait_for_each_other() -> None:
    """Of texts that end at different times, three rows take as many passes as the tokens of all, divided by three, and hardly
    more; batches of three take as many as the longest text of each."""
    target, _ = pair()
    model = AssistedModelForCausalLM.from_models(target, "suffix", draft_length=1)
    passes: list[int] = []
    model.watch = lambda round: passes.append(len(round.unfinished))
    texts = prompts(target, 24)
    found = list(model.generate_many(texts, rows=3, **EARLY))
    longest = max(len(answer.new_tokens) for answer in found)
    assert len(passes) <= sum(len(answer.new_tokens) for answer in found) / 3 + longest
    assert sum(count == 3 for count in passes) >= len(passes) - longest


def test_prompts_are_taken_when_there_is_room() -> None:
    target, model = pair()
    taken: list[int] = []

    def source() -> Iterator[torch.Tensor]:
        for number, text in enumerate(prompts(target)):
            taken.append(number)
            yield text

    answers = model.generate_many(source(), rows=3, **EARLY)
    first = next(answers)
    assert isinstance(first, Answer) and first.index in taken and len(taken) == 3
    second = next(answers)
    assert len(taken) <= 5 and not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
    answers.close()  # type: ignore[attr-defined]
    report = model.report
    assert report is not None and report.new_tokens == len(first.new_tokens) + len(second.new_tokens)
    text = prompts(target)[0][None]  # the pair is as before
    assert model.generate(text, **CALL).tolist() == target.generate(text, **CALL).tolist()


def test_ways_to_give_a_prompt() -> None:
    target, model = pair()
    (text,) = prompts(target, 4)[3:]
    ways = [text, text[None], text.tolist(), {"input_ids": text[None]}]
    assert len({tuple(answer.ids.tolist()) for answer in model.generate_many(ways, rows=2, **CALL)}) == 1
    assert list(model.generate_many([], **CALL)) == []


def test_progress_is_shown_if_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    target, model = pair()
    logging.enable_progress_bar()  # another test may have disabled it
    for prompts_given, shown in ((prompts(target, 4), "4/4"), (iter(prompts(target, 4)), "4text")):
        found = {one.index: one.ids.tolist() for one in model.generate_many(prompts_given, progress=True, **CALL)}
        assert found == alone(target, prompts(target, 4), **CALL)
        assert shown in capsys.readouterr().err
    list(model.generate_many(prompts(target, 4), **CALL))
    assert not capsys.readouterr().err


def test_past_outputs_are_remembered_without_prompts() -> None:
    target, _ = pair()
    model = AssistedModelForCausalLM.from_models(target, Suffix(remember=True), draft_length=4)
    texts = prompts(target)
    expected = alone(target, texts, **EARLY)
    assert answered(model, texts, rows=3, **EARLY) == expected
    past = "".join(map(chr, (token + 1 for token in model.drafter.past.text))).split(chr(END + 1))  # type: ignore[attr-defined]
    written = ["".join(chr(token + 1) for token in expected[n][len(text) :]) for n, text in enumerate(texts)]
    assert sorted(past[:-1]) == sorted(written)


@pytest.mark.parametrize("method", ["propose", "renew", "observe"])
def test_a_drafter_that_fails_costs_only_speed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, half_right(target), draft_length=4)
    calls: list[int] = []
    own = getattr(ModelDrafting, method)

    def fails(self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) > 5:
            raise RuntimeError("no more drafts")
        return own(self, *args)

    monkeypatch.setattr(ModelDrafting, method, fails)
    texts = prompts(target)
    with pytest.warns(UserWarning, match="no more drafts"):
        assert answered(model, texts, rows=3, **EARLY) == alone(target, texts, **EARLY)
    assert len(calls) == 6


class Never(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"rows": 0}, "rows: 0"),
    "mask": ({"attention_mask": torch.ones(1, 3)}, "attention_mask"),
    "beams": ({"num_beams": 2}, "num_beams"),
    "sequences": ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences"),
    "details": ({"return_dict_in_generate": True}, "return_dict_in_generate"),
    "criteria": ({"stopping_criteria": [Never()]}, "stopping_criteria: Never"),
    "processor": ({"logits_processor": [lambda ids, scores: scores]}, "first prompt"),
    "min_new_tokens": ({"min_new_tokens": 3}, "MinNewTokens"),
    "parts of prompts": ({"prefill_chunk_size": 8}, "prefill_chunk_size"),
    "no cache": ({"use_cache": False}, "use_cache"),
    "unknown": ({"assistant_model": "x"}, "assistant_model"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    target, model = pair()
    kwargs, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        model.generate_many(prompts(target), **EARLY | kwargs)


@pytest.mark.parametrize("bad", ["text", [], torch.zeros(2, 3, dtype=torch.int64), [0.5]], ids=str)
def test_bad_prompts(bad: Any) -> None:
    target, model = pair()
    with pytest.raises(ValueError, match="prompts: number 0"):
        model.generate_many([bad], **EARLY)
    with pytest.raises(ValueError, match="prompts: number 2"):
        list(model.generate_many([*prompts(target, 2), bad], **EARLY))


def test_pairs_that_it_does_not_run() -> None:
    target = build(BY_NAME["llama"])
    texts = prompts(target)
    lockstep = build(STATES["mamba2"])  # its states are put back from copies
    for draft, why in (("recycle", "another text"), (lockstep, "lockstep"), (["suffix", lockstep], "lockstep")):
        model = AssistedModelForCausalLM.from_models(target, draft)
        with pytest.raises(ValueError, match=f"draft: .*{why}"):
            model.generate_many(texts, **EARLY)
    for name, why in (("bloom", "lockstep"), ("zamba2", "reads a token alone in another way")):
        model = AssistedModelForCausalLM.from_models(build((BY_NAME | STATES)[name]), "suffix")
        with pytest.raises(ValueError, match=f"target: .*{why}"):
            model.generate_many(texts, **EARLY)
