"""Candidate generators of transformers and others as drafts: exact whatever they return, also beside other drafters."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from architectures import half_right
from covering import in_turns
from pairs import CALL, ENDS, no_fallback, pair, prompt, require_plain, said_by
from test_sampling import ALPHA, PROMPT, SEQUENCES, counts, exact_distribution, p_value, tiny
from test_sampling import NEW_TOKENS as SAMPLED
from transformers import GenerationConfig, LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    CandidateGenerator,
    PromptLookupCandidateGenerator,
)

from assisted import AssistedModelForCausalLM, Candidates
from assisted.core.drafts import DraftingStopped

pytestmark = pytest.mark.usefixtures("invariants")


def lookup() -> PromptLookupCandidateGenerator:
    return PromptLookupCandidateGenerator(num_output_tokens=4, max_matching_ngram_size=2, max_length=10_000)


def assisted_by(draft: Any, do_sample: bool = False, temperature: float = 1.0) -> Any:
    """A function that makes transformers' generator with a draft model."""

    def made(ids: torch.Tensor) -> AssistedCandidateGenerator:
        config = GenerationConfig(max_length=10_000, min_length=0, do_sample=do_sample, pad_token_id=0)
        config.top_k = 0 if do_sample else None
        mask = {"attention_mask": torch.ones_like(ids)}
        warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)] if temperature != 1 else [])
        draft.generation_config.update(num_assistant_tokens=3, num_assistant_tokens_schedule="constant")
        draft.generation_config.update(assistant_confidence_threshold=0.0)
        return AssistedCandidateGenerator(ids, draft, config, mask, logits_processor=warpers)

    return made


class Told(CandidateGenerator):
    """Returns what `answer` makes of the text, and records what it is told."""

    def __init__(self, answer: Any):
        self.answer, self.told = answer, []

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return self.answer(input_ids)

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        self.told.append((input_ids.shape[1], tuple(scores.shape), num_matches))


def with_draft(draft: Any, **kwargs: Any) -> AssistedModelForCausalLM:
    return AssistedModelForCausalLM.from_models(pair()[0], draft=draft, draft_length=4, **kwargs)


def texts(model: AssistedModelForCausalLM, **kwargs: Any) -> None:
    """The text is the target's in one row, and after a prompt that repeats."""
    for ids in (prompt()["ids"], prompt()["ids"].repeat(1, 3)):
        call = CALL | {"max_new_tokens": 30} | kwargs
        assert model.generate(ids, **call).tolist() == said_by(pair()[0], ids, **call).tolist()


@pytest.mark.parametrize(
    "draft",
    [
        lookup(),
        Candidates(lambda ids: lookup()),
        Candidates(assisted_by(half_right(pair()[0]))),
        Candidates(assisted_by(half_right(pair()[0])), honest_logits=True),
        ["suffix", lookup()],
        [Candidates(assisted_by(half_right(pair()[0]))), "ngram"],
    ],
    ids=["lookup", "made", "model", "model, honest", "after suffix", "before ngram"],
)
def test_text_is_the_targets(draft):
    model = with_draft(draft)
    with no_fallback():
        texts(model)
    assert model.totals.accepted > 0


def test_continued_turns():
    model, target = with_draft(Candidates(assisted_by(half_right(pair()[0])))), pair()[0]
    ids, cache, own = prompt()["ids"], None, None
    for _ in range(3):
        with no_fallback():
            ours = model.generate(ids, past_key_values=cache, return_dict_in_generate=True, **CALL)
        theirs = target.generate(ids, past_key_values=own, return_dict_in_generate=True, **CALL)
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        cache, own = ours.past_key_values, theirs.past_key_values
        ids = torch.cat([ours.sequences, prompt(seed=3)["ids"]], 1)


@pytest.mark.parametrize("honest", [False, True])
def test_batches_have_a_generator_for_each_row(honest):
    """Rows of different lengths, which end at different times; each generator sees its row without padding."""
    seen: list[torch.Tensor] = []
    make = assisted_by(half_right(pair()[0]))
    model = with_draft([Candidates(lambda ids: seen.append(ids) or make(ids), honest_logits=honest), "suffix"])
    given = prompt(4)
    inputs = {"inputs": given["ids"], "attention_mask": given["attention_mask"]}
    call = CALL | {"eos_token_id": ENDS}
    require_plain(model, **inputs, **call)
    assert model.totals.accepted > 3
    assert [ids[0, :3].tolist() for ids in seen] == [given["ids"][row, 2 * row :][:3].tolist() for row in range(4)]
    assert model.generate(**inputs, **(call | {"do_sample": True})).shape[0] == 4


def test_a_generator_learns_what_became_of_its_drafts():
    expected = said_by(pair()[0], prompt()["ids"], **CALL)
    right = Told(lambda ids: (torch.cat([ids, expected[:, ids.shape[1] : ids.shape[1] + 9]], 1), None))
    model = with_draft(right)
    with no_fallback():
        model.generate(prompt()["ids"], **CALL)
    assert model.report.accepted == model.report.drafted == sum(matches for *_, matches in right.told) > 10
    for length, shape, matches in right.told:  # the budget cuts what is longer
        assert shape == (1, matches + 1, 96) and matches <= 4
        assert length <= expected.shape[1]


def changed(ids: torch.Tensor) -> tuple[torch.Tensor, None]:
    """In place: another's tensor."""
    ids.fill_(7)
    return torch.cat([ids, ids[:, :2]], 1), None


def failing(ids: torch.Tensor) -> Any:
    raise RuntimeError("no candidates today")


HOSTILE = {
    "raises": (failing, "no candidates today"),
    "returns nothing": (lambda ids: None, "TypeError"),
    "a list": (lambda ids: (ids.tolist(), None), "got list"),
    "two rows": (lambda ids: (ids.repeat(2, 2), None), r"expected \[1, 13 or more\], got \[2, 26\]"),
    "one dimension": (lambda ids: (ids[0], None), r"expected \[1, 1"),
    "shorter": (lambda ids: (ids[:, :-1], None), r"got \[1, 1"),
    "floats": (lambda ids: (torch.cat([ids, ids], 1).float(), None), "expected integers"),
    "another text": (lambda ids: (torch.cat([ids.flip(1) + 1, ids], 1), None), "do not begin with the text"),
    "changes its argument": (changed, "do not begin with the text"),
    "beyond the vocabulary": (lambda ids: (torch.cat([ids, ids * 0 + 96], 1), None), "ids from 0 to 95"),
    "negative": (lambda ids: (torch.cat([ids, ids * 0 - 1], 1), None), "ids from 0 to 95"),
}


@pytest.mark.parametrize(("answer", "do_sample"), in_turns(list(HOSTILE), [False, True]))
def test_what_does_not_fit_costs_speed_alone(answer, do_sample):
    hostile, said = HOSTILE[answer]
    ids, call = prompt()["ids"], CALL | {"do_sample": do_sample}
    torch.manual_seed(3)
    expected = with_draft(Told(lambda ids: (ids, None))).generate(ids, **call)
    torch.manual_seed(3)
    with pytest.warns(DraftingStopped, match=f"Drafting failed.*{said}"):
        ours = with_draft(Told(hostile)).generate(ids, **call)
    assert ours.tolist() == expected.tolist()
    assert do_sample or ours.tolist() == said_by(pair()[0], ids, **call).tolist()


NO_LAW = {
    "too few": (lambda n: torch.zeros(1, n - 1, 96), "candidate logits: expected"),
    "another vocabulary": (lambda n: torch.zeros(1, n, 95), "candidate logits: expected"),
    "no tensor": (lambda n: [[0.0]], "candidate logits: expected"),
    "NaN": (lambda n: torch.full((1, n, 96), torch.nan), "no numbers"),
    "infinite": (lambda n: torch.full((1, n, 96), torch.inf), "no numbers"),
    "all forbidden": (lambda n: torch.full((1, n, 96), -torch.inf), "no numbers"),
    "the token forbidden": (
        lambda n: torch.zeros(1, n, 96).index_fill(2, torch.tensor(9), -torch.inf),
        "probability 0",
    ),
}


@pytest.mark.parametrize("logits", NO_LAW)
def test_dishonest_logits_end_drafting(logits):
    made, said = NO_LAW[logits]
    answer = Told(lambda ids: (torch.cat([ids, torch.full((1, 3), 9)], 1), made(3)))
    model = with_draft(Candidates(answer, honest_logits=True))
    with pytest.warns(DraftingStopped, match=said):
        model.generate(prompt()["ids"], **(CALL | {"do_sample": True}))
    with no_fallback():  # greedy decoding does not look at them, nor does the default
        texts(model)
        with_draft(answer).generate(prompt()["ids"], **(CALL | {"do_sample": True}))


def sampled(target: Any, draft: Any, **kwargs: Any) -> float:
    """p-value of sampled texts against the exact distribution."""
    model = AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=2)
    torch.manual_seed(21)
    call = {"max_new_tokens": SAMPLED, "do_sample": True, "top_k": 0, "num_return_sequences": SEQUENCES // 8, **kwargs}
    with no_fallback():
        found = model.generate(PROMPT[:1], **call)
    assert model.totals.accepted > 0
    return p_value(counts(found), exact_distribution(target, top_k=0, **kwargs))


def test_drawn_tokens_with_honest_logits_follow_the_targets_distribution():
    target = tiny(0, layers=2)
    draft = Candidates(assisted_by(tiny(1), do_sample=True, temperature=0.7), honest_logits=True)
    assert sampled(target, draft) > ALPHA


def top_1(ids: torch.Tensor, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Argmax tokens, and the softmax logits that they were not drawn from: what transformers' class for Gemma 4 does."""
    text, found = ids, []
    for _ in range(2):
        found.append(model(text).logits[:, -1:])
        text = torch.cat([text, found[-1].argmax(-1)], 1)
    return text, torch.cat(found, 1)


def test_argmax_tokens_with_softmax_logits():
    """Exact by default; wrong once they are called honest, which is why they must not be."""
    target, other = tiny(0, layers=2), tiny(1)
    for honest in (False, True):
        wrong = Candidates(lambda ids: Told(lambda ids: top_1(ids, other)), honest_logits=honest)
        assert (sampled(target, wrong) > ALPHA) is not honest


def test_what_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"draft: this Prompt.* drafts for one sequence, and the call has 2; pass a function"
    ):
        with_draft(lookup()).generate(prompt(2)["ids"], **CALL)
    needy = Told(failing)
    needy.requires_model_outputs = True
    with pytest.raises(ValueError, match=r"draft: Told reads the target's hidden states"):
        with_draft(needy)
    with pytest.raises(TypeError, match=r"generator: .*Candidates\(lambda"):
        with_draft(Candidates(PromptLookupCandidateGenerator))
    with pytest.warns(DraftingStopped, match="returned int, not a CandidateGenerator"):
        with_draft(Candidates(lambda ids: 3)).generate(prompt()["ids"], **CALL)
    model = with_draft(lookup())
    with pytest.raises(ValueError, match=r"draft: a candidate generator is an object in memory"):
        model.save_pretrained(tmp_path)
    assert json.loads(model.config.to_json_string())["draft"] == {"method": "candidates", "honest_logits": False}
