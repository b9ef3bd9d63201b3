"""Models whose angles change with the length of the text: no pass covers both sides of a change, and the text is plain's."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from architectures import build, half_right, random_ids
from covering import in_turns
from pairs import BY_NAME, ENDS, no_fallback, padded
from transformers import DynamicCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from assisted import AssistedModelForCausalLM, Suffix
from assisted.core.drafts import DraftingStopped
from assisted.engine.runner import CachedModel
from assisted.engine.traits import Change, change_of, reads_anew_at

ORIGINAL = 64
THETA = {"rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 3.0, 2.0, 1.5],
}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": LONG,
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "proportional": {"factor": 4.0, "partial_rotary_factor": 1.0},
}
CHANGING = ("longrope", "dynamic")
CALL = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def model_of(kind: str, name: str = "llama", **fields: Any) -> Any:
    # dynamic angles change where the config's context ends, the others' at a length of their own
    context = ORIGINAL if kind == "dynamic" else 256
    parameters = {"rope_type": kind, **THETA, **KINDS[kind]}
    if name == "phimoe":
        parameters |= {"short_mscale": 1.0, "long_mscale": 1.2}
    return build(BY_NAME[name], rope_parameters=parameters, max_position_embeddings=context, **fields)


def batch(model: Any, rows: int, length: int) -> dict[str, torch.Tensor]:
    ids, mask = padded(model, rows, length, seed=0, step=7)
    return {"input_ids": ids, "attention_mask": mask}


def begin_anew(model: Any) -> None:
    """Dynamic angles stay what the longest text has made of them until a model reads a short one."""
    with torch.no_grad():
        model(random_ids(model, 1, 4))


@functools.cache
def plainly(kind: str, rows: int, length: int) -> Any:
    target = model_of(kind)
    begin_anew(target)
    return target.generate(**batch(target, rows, length), **CALL)


def test_every_kind_of_transformers_is_tried() -> None:
    assert {*ROPE_INIT_FUNCTIONS, "default"} == KINDS.keys()


CASES = [(kind, "draft") for kind in KINDS]
CASES += [(kind, draft) for kind in CHANGING for draft in ("suffix", "recycle", "early-exit:1", "layer-skip")]


@pytest.mark.parametrize("case,rows", in_turns(CASES, [1, 3]))
def test_text_across_the_change(case: tuple[str, str], rows: int) -> None:
    kind, draft = case
    target = model_of(kind)
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target) if draft == "draft" else draft)
    for length in (50, 63, 65):
        inputs, plain = batch(target, rows, length), plainly(kind, rows, length)
        begin_anew(target)
        with no_fallback(DraftingStopped):
            warnings.filterwarnings("ignore", ".* longer than the target's context of 64 tokens")  # dynamic angles
            assisted = model.generate(**inputs, draft_length=4, **CALL)
        assert assisted.tolist() == plain.tolist()
        assert model.report is not None
        if length == 50:
            assert model.report.drafted > 0


@pytest.mark.parametrize("kind", CHANGING)
def test_passes_of_fixed_width_have_the_angles_of_the_longest_row(kind: str) -> None:
    """Which is not in each of the parts in which seventeen rows are read."""
    target = model_of(kind)
    model = AssistedModelForCausalLM.from_models(target, draft="suffix", draft_length=2, exact="bits")
    inputs = {name: torch.cat([whole, whole[-1:].repeat(15, 1)]) for name, whole in batch(target, 2, 60).items()}
    begin_anew(target)
    plain = target.generate(**inputs, **CALL | {"max_new_tokens": 12})
    begin_anew(target)
    warnings.filterwarnings("ignore", ".* longer than the target's context of 64 tokens")  # dynamic angles
    assert model.generate(**inputs, **CALL | {"max_new_tokens": 12}).tolist() == plain.tolist()
    assert model.report is not None and model.report.passes == "fixed widths"


@pytest.mark.parametrize("kind", CHANGING)
def test_rows_that_end_early_and_turns(kind: str) -> None:
    target = model_of(kind)
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target))
    call = CALL | {"eos_token_id": ENDS, "return_dict_in_generate": True, "max_new_tokens": 12}
    inputs = batch(target, 3, 40)
    turns: list[Any] = []
    for generate in (target.generate, model.generate):
        begin_anew(target)
        text, mask, past, seen = inputs["input_ids"], inputs["attention_mask"], DynamicCache(), []
        for turn in range(4):
            output = generate(input_ids=text, attention_mask=mask, past_key_values=past, **call)
            past, seen = output.past_key_values, [*seen, output.sequences.tolist()]
            new = random_ids(target, 3, 5, seed=turn)
            text = torch.cat([output.sequences, new], 1)
            mask = torch.cat([mask, mask.new_ones(3, text.shape[1] - mask.shape[1])], 1)
        turns.append(seen)
    assert turns[0] == turns[1]


def test_trees_before_the_change_while_other_rows_have_ended() -> None:
    """The padding of rows that ended takes no position that the draft was not made for."""
    model = model_of("longrope")
    inputs = {"input_ids": random_ids(model, 3, 20), "attention_mask": torch.ones(3, 20, dtype=torch.long)}
    plain = model.generate(**inputs, **CALL)
    ends = plain[0, 30].item()  # of the first row, early
    corpus = plain.tolist()
    for row in corpus:
        row[27::5] = [3] * len(row[27::5])
    call = CALL | {"eos_token_id": ends, "max_new_tokens": 60}
    plain = model.generate(**inputs, **call)
    draft = Suffix(tree=True, corpus=corpus, min_probability=0.01)
    pair = AssistedModelForCausalLM.from_models(model, draft=draft, draft_length=4)
    assert pair.generate(**inputs, **call).tolist() == plain.tolist()
    assert pair.report.accepted > 0


@pytest.mark.parametrize("name", ["phi3", "phimoe"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_model_that_reads_its_text_anew(name: str, rows: int) -> None:
    target = model_of("longrope", name, original_max_position_embeddings=ORIGINAL)
    assert reads_anew_at(target) == ORIGINAL + 1
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target))
    for length, crosses in ((10, False), (50, True), (64, True), (65, False), (80, False)):
        inputs = batch(target, rows, length)
        plain = target.generate(**inputs, **CALL)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assisted = model.generate(**inputs, draft_length=4, **CALL)
        assert assisted.tolist() == plain.tolist()
        assert model.report is not None
        assert any(issubclass(warning.category, DraftingStopped) for warning in caught) == crosses
        assert (model.report.drafted > 0) != crosses
        assert any("rotary embedding" in said for said in model.report.warnings) == crosses


def test_a_turn_that_begins_beyond_the_change_is_read_anew() -> None:
    target = model_of("longrope", "phi3", original_max_position_embeddings=ORIGINAL)
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target))
    inputs, texts = batch(target, 1, 40), []
    for generate in (target.generate, model.generate):
        past = DynamicCache()
        first = generate(**inputs, past_key_values=past, **CALL | {"max_new_tokens": 10})
        second = torch.cat([first, random_ids(target, 1, 30)], 1)
        texts.append(generate(second, past_key_values=past, **CALL).tolist())
    assert texts[0] == texts[1]


def test_a_model_can_be_trained_after_a_call() -> None:
    """What a model keeps of its angles are ordinary tensors."""
    for kind in CHANGING:
        target = model_of(kind)
        model = AssistedModelForCausalLM.from_models(target, draft="suffix")
        model.generate(**batch(target, 1, 60), **CALL)
        ids = random_ids(target, 1, 70)
        target(ids, labels=ids).loss.backward()


def test_room() -> None:
    once, always = Change(8, once=True), Change(8, once=False)
    assert [change.room(first) for change in (once, always) for first in (0, 7, 8, 20)] == [
        8,
        1,
        None,
        None,
        8,
        1,
        1,
        1,
    ]


def test_where_angles_change() -> None:
    assert change_of(model_of("longrope")) == Change(ORIGINAL, once=True)
    assert change_of(model_of("dynamic")) == Change(ORIGINAL, once=False)
    assert all(change_of(model_of(kind)) is None for kind in KINDS if kind not in CHANGING)


def test_far_from_the_change_rows_keep_their_own_lengths() -> None:
    target = model_of("longrope")
    target.config.rope_parameters["original_max_position_embeddings"] = 1024
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target))
    runners: list[CachedModel] = []
    original = CachedModel.__init__

    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        runners.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachedModel, "__init__", watched)
        model.generate(**batch(target, 2, 20), **CALL)
    assert runners and not any(runner.in_lockstep for runner in runners)


@pytest.mark.parametrize("assisted", [True, False])
@pytest.mark.parametrize(
    ("kind", "name"), [("longrope", "llama"), ("dynamic", "llama"), ("longrope", "phi3"), ("yarn", "qwen3")]
)
def test_a_session_across_the_change(kind: str, name: str, assisted: bool) -> None:
    """A prompt that is read whole has the angles of its end everywhere: before the change, and after it, a session keeps what
    has the same."""
    target = model_of(kind, name, **({"original_max_position_embeddings": ORIGINAL} if name == "phi3" else {}))
    model = AssistedModelForCausalLM.from_models(target, "suffix", draft_length=4)
    session, text, known = model.session(), random_ids(target, 1, 30), []
    for turn in range(6):
        call = CALL | {"max_new_tokens": 12, "attention_mask": torch.ones_like(text)}
        begin_anew(target)
        plain = target.generate(text, **call)
        begin_anew(target)
        found = model.generate(text, past_key_values=session, assisted=assisted, **call)
        assert found.tolist() == plain.tolist()
        known.append(model.report.cached_tokens)
        text = torch.cat([plain, random_ids(target, 1, 3, seed=turn)], 1) if turn < 4 else text[:, :40]
    if assisted:  # prompts of 30, 45, 60, 75, 90 and 40 tokens
        after = {"longrope": [0, 86, 0], "dynamic": [0, 0, 0], "yarn": [71, 86, 39]}
        across = 0 if name == "phi3" else 56  # its own generate reads its text again in that call
        assert known == [0, 41, across, *after[kind]]
