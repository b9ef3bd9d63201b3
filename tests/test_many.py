"""Many prompts in few rows: every answer is that of its prompt alone, and rows do not wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, RECURRENT, build, half_right, random_ids
from covering import in_turns, over
from eagle_heads import random_head
from methods import in_parallel
from pairs import BY_NAME, CALL, ENDS, pair, tokenizer
from test_sampling import ALPHA, PROMPT, SEQUENCES, counts, exact_distribution, p_value, tiny, towards
from test_sampling import NEW_TOKENS as SAMPLED
from transformers import StoppingCriteria

from assisted import AssistedModelForCausalLM, DraftTree, Eagle, Merged, NGram, Suffix
from assisted.many import Answer
from assisted.methods.shared.model_drafter import ModelDrafting
from assisted.methods.suffix.tree import END

EARLY = CALL | {"eos_token_id": ENDS}

pytestmark = pytest.mark.usefixtures("invariants")


def prompts(target: Any, count: int = 9) -> list[torch.Tensor]:
    """Of several lengths, [P] each."""
    return [random_ids(target, 1, 1 + 7 * (number % 4), seed=number)[0] for number in range(count)]


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
}


@pytest.mark.parametrize("draft,rows", in_turns(list(DRAFTS), [3, 1, 16]))
def test_every_answer_is_that_of_its_prompt_alone(draft: str, rows: int) -> None:
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, DRAFTS[draft](target), draft_length=4)
    texts = prompts(target)
    expected = alone(target, texts, **EARLY)
    assert answered(model, texts, rows=rows, **EARLY) == expected
    report = model.report
    assert report is not None and not report.warnings
    new = [len(expected[number]) - len(text) for number, text in enumerate(texts)]
    assert sorted(report.row_tokens) == sorted(new) and report.new_tokens == sum(new)
    assert draft == "ngram" or report.accepted > 0


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


def test_sampled_answers_follow_the_targets_distribution() -> None:
    target = tiny(0)
    model = AssistedModelForCausalLM.from_models(target, towards(target, tiny(1)), draft_length=2)
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
    states = build(next(one for one in RECURRENT if one.name == "mamba2"))
    for draft in (Eagle(random_head(target, 3)), "early-exit:1", "recycle", states, ["suffix", states]):
        model = AssistedModelForCausalLM.from_models(target, draft)
        with pytest.raises(ValueError, match="draft: "):
            model.generate_many(texts, **EARLY)
    recurrent = AssistedModelForCausalLM.from_pretrained("zoo:hybrid", draft="suffix")
    with pytest.raises(ValueError, match="target: "):
        recurrent.generate_many(texts, **EARLY)
