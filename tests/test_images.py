"""Targets that read images: pixels go to the forward pass over the prompt, and then text is drafted.

Everything beside plain `generate` of the target, for each family of image_models.py.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import half_right
from covering import first_of_kinds, in_turns, one_in, only
from image_models import BY_NAME, FAMILIES, IMAGE, Family
from methods import METHODS, Method
from pairs import CALL, ENDS, no_fallback, pair, said_by
from test_continued import Guided
from test_sampling import ALPHA, FEW_TOKENS, exact_texts, p_value_of_texts
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from assisted import AssistedModelForCausalLM
from assisted.core.drafts import DraftingStopped
from assisted.engine.traits import Traits

pytestmark = pytest.mark.usefixtures("invariants")


DRAFTS = [*METHODS, Method("self", lambda target: "self:int8")]


@functools.cache
def target_of(name: str) -> tuple[PreTrainedModel, AssistedModelForCausalLM]:
    target = BY_NAME[name].build()
    return target, AssistedModelForCausalLM.from_models(target, draft=half_right(target), draft_length=4)


def guided(name: str, plain: torch.Tensor, trees: bool = False) -> AssistedModelForCausalLM:
    model = AssistedModelForCausalLM.from_models(target_of(name)[0], "suffix", 4)
    model.drafter = Guided(plain, trees=trees)
    return model


def rows_in_turns(options: list[Any]) -> list[Any]:
    """Every family with one row and with three, each with one of two options, the other ones for the next family."""
    return [
        pytest.param(family, rows, options[(number + place) % 2], id=f"{family.name}-{rows}")
        for number, family in enumerate(FAMILIES)
        for place, rows in enumerate((1, 3))
    ]


def other_picture(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"pixel_values": 0.3 * call["pixel_values"].flip(-1)}


@pytest.mark.parametrize(("family", "rows", "trees"), rows_in_turns([False, True]))
def test_tokens_after_a_picture_are_those_of_plain_generate(family: Family, rows: int, trees: bool) -> None:
    target, _ = target_of(family.name)
    call = CALL | family.inputs(rows) | {"eos_token_id": ENDS if rows > 1 else None}
    plain = said_by(target, **call)
    assert plain.tolist() != said_by(target, **other_picture(call)).tolist()  # it matters
    model = guided(family.name, plain, trees)
    with no_fallback():
        assert model.generate(**call).tolist() == plain.tolist()
    assert model.report.accepted > 0
    assert model.report.target_passes < plain.shape[1] * rows


@pytest.mark.parametrize(("family", "rows"), in_turns(FAMILIES, [1, 3]))
def test_text_alone_is_drafted_for(family: Family, rows: int) -> None:
    """Those with three-dimensional positions, too."""
    target, model = target_of(family.name)
    inputs = family.inputs(rows)
    ids = inputs["input_ids"].where(inputs["input_ids"] < 90, 7)
    call = CALL | {"input_ids": ids, "attention_mask": inputs["attention_mask"]}
    with no_fallback():
        assert model.generate(**call).tolist() == said_by(target, **call).tolist()
    assert model.report.drafted > 0


@pytest.mark.parametrize(("method", "family"), only(in_turns(DRAFTS, FAMILIES), first_of_kinds(DRAFTS)))
def test_every_method_goes_on_after_a_picture(method: Any, family: Family) -> None:
    target, _ = target_of(family.name)
    if (method.name, family.name) == ("layer-skip", "qwen3_5"):
        with pytest.raises(ValueError, match=r"^target: .*keeps a recurrent state"):
            AssistedModelForCausalLM.from_models(target, draft=method.draft(target))
        return
    model = AssistedModelForCausalLM.from_models(target, draft=method.draft(target), draft_length=4)
    for rows in (1, 3):
        call = CALL | family.inputs(rows)
        with no_fallback():
            assert model.generate(**call).tolist() == said_by(target, **call).tolist()
    if method.name not in ("ngram", "suffix", "suffix tree"):
        assert model.report.drafted > 0


def test_a_text_model_drafts_for_one_that_sees() -> None:
    """It reads placeholders where the target sees a picture."""
    target, _ = target_of("llava")
    draft = pair()[0]
    assert Traits.of(draft).vocabulary == Traits.of(target).vocabulary
    model = AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=4)
    call = CALL | BY_NAME["llava"].inputs(3)
    with no_fallback():
        assert model.generate(**call).tolist() == said_by(target, **call).tolist()
    assert model.report.drafted > 0


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "llava", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_sampled_tokens_follow_the_targets_distribution(name: str) -> None:
    target, model = target_of(name)
    call, types = BY_NAME[name].inputs(1, padded=False), BY_NAME[name].types

    def after(tokens: tuple[int, ...]) -> dict[str, Any]:
        ids = torch.cat([call["input_ids"], torch.tensor([[*tokens]], dtype=torch.long)], 1)
        text = call | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return text | ({} if types is None else {types: torch.nn.functional.pad(call[types], (0, len(tokens)))})

    expected = exact_texts(target, after, **FEW_TOKENS)
    torch.manual_seed(1)
    with no_fallback():
        sequences = model.generate(**call, **FEW_TOKENS, max_new_tokens=3, num_return_sequences=3000, draft_length=1)
    assert 0 < model.report.accepted < model.report.drafted
    assert p_value_of_texts(sequences[:, -3:], expected) > ALPHA


@pytest.mark.parametrize(("family", "rows"), in_turns(FAMILIES, [3, 1]))
def test_a_conversation_about_a_picture_goes_on(family: Family, rows: int) -> None:
    target, model = target_of(family.name)
    first = CALL | family.inputs(rows) | {"max_new_tokens": 8}
    texts: list[list[torch.Tensor]] = []
    for generate in (target.generate, model.generate):
        cache = DynamicCache(config=target.config.get_text_config(decoder=True))
        with no_fallback():
            text = generate(past_key_values=cache, **first)
            more = torch.nn.functional.pad(text, (0, 3), value=9)
            width = more.shape[1] - first["input_ids"].shape[1]
            call = CALL | {"input_ids": more}
            call["attention_mask"] = torch.nn.functional.pad(first["attention_mask"], (0, width), value=1)
            if family.types is not None:
                call[family.types] = torch.nn.functional.pad(first[family.types], (0, width))
            texts.append([text, generate(past_key_values=cache, **call)])
    assert [text.tolist() for text in texts[1]] == [text.tolist() for text in texts[0]]
    assert model.report.drafted > 0


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_a_session_does_not_take_one_picture_for_another(name: str) -> None:
    """Its text is the same, and only the picture differs: a session must not go on from the slots of the first call."""
    target, model = target_of(name)
    family = BY_NAME[name]
    call = CALL | family.inputs(1)
    session, cache = model.session(), DynamicCache(config=target.config.get_text_config(decoder=True))
    assert model.generate(past_key_values=session, **call).tolist() == said_by(target, **call).tolist()
    assert not session.in_slots
    text = target.generate(past_key_values=cache, **call)
    more = CALL | {"input_ids": torch.nn.functional.pad(text, (0, 3), value=9)}
    ours = model.generate(past_key_values=session, **more)
    assert ours.tolist() == target.generate(past_key_values=cache, **more).tolist()


def test_several_answers_scores_and_a_plain_call() -> None:
    target, model = target_of("qwen2_5_vl")
    call = CALL | BY_NAME["qwen2_5_vl"].inputs(2)
    more = {"num_return_sequences": 2, "do_sample": True, "top_k": 1}
    assert model.generate(**call | more).tolist() == said_by(target, **call | more).tolist()
    more = {"return_dict_in_generate": True, "output_logits": True}
    ours, plain = (generate(**call, **more) for generate in (model.generate, target.generate))
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for mine, theirs in zip(ours.logits, plain.logits, strict=True):
        assert (mine - theirs).abs().max() < 1e-3
    more = {"cache_implementation": "static"}
    with no_fallback():
        assert model.generate(**call, **more).tolist() == said_by(target, **call, **more).tolist()
    assert model.generate(**call, assisted=False).tolist() == plain.sequences.tolist()
    assert model.report.way == "plain"


# --- what cannot be drafted for, and bad input


def test_a_prompt_that_ends_in_a_picture_has_three_positions_to_go_on_from() -> None:
    target, model = target_of("qwen2_5_vl")
    call = CALL | BY_NAME["qwen2_5_vl"].inputs(1)
    end = int((call["input_ids"][0] == IMAGE).nonzero().max()) + 1
    call |= {name: call[name][:, :end] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
    with pytest.warns(DraftingStopped, match="dimensions differ at the end of the prompt"):
        assert model.generate(**call).tolist() == said_by(target, **call).tolist()


def test_a_picture_needs_a_processor_and_a_target_that_sees() -> None:
    _, model = target_of("llava")
    call = CALL | BY_NAME["llava"].inputs(1)
    with pytest.raises(ValueError, match=r"^images: generate takes the tensors that a processor makes"):
        model.generate(input_ids=call["input_ids"], images=[object()])
    with pytest.raises(ValueError, match=r"^pixel_values: object is not a tensor"):
        model.generate(**call | {"pixel_values": object()})
    with pytest.raises(ValueError, match=r"^pixel_values: LlamaForCausalLM does not read it"):
        pair()[1].generate(**call)
    call["input_ids"] = call["input_ids"].where(call["input_ids"] != IMAGE, 7)
    with pytest.raises(
        ValueError, match=r"(?i)image (features and image tokens|tokens and image features) do not match"
    ):
        model.generate(**call)


def test_what_goes_into_every_forward_pass_is_decoded_plainly() -> None:
    target, model = pair("gpt2")
    call = CALL | {"input_ids": torch.tensor([[5, 6, 7]]), "token_type_ids": torch.tensor([[8, 9, 9]])}
    with pytest.warns(DraftingStopped, match="token_type_ids is not text"):
        assert model.generate(**call).tolist() == said_by(target, **call).tolist()


# --- loading and saving


@pytest.mark.parametrize("name", one_in(3, list(BY_NAME)))
def test_a_checkpoint_is_loaded_as_the_class_that_it_names(name: str, tmp_path: Path) -> None:
    target, _ = target_of(name)
    target.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "processor_config.json").write_text('{"processor_class": "LlavaProcessor"}')
    model = AssistedModelForCausalLM.from_pretrained(tmp_path / "model", draft_length=4)
    assert type(model.target) is type(target)
    call = CALL | BY_NAME[name].inputs(2)
    plain = target.generate(**call)
    model.save_pretrained(tmp_path / "pair")
    again = AssistedModelForCausalLM.from_pretrained(tmp_path / "pair")
    auto = AutoModelForCausalLM.from_pretrained(tmp_path / "pair")
    for one in (model, again, auto):
        with no_fallback(DraftingStopped):
            assert one.generate(**call).tolist() == plain.tolist()
    assert (tmp_path / "pair" / "processor_config.json").is_file()
    assert (tmp_path / "pair" / "target" / "processor_config.json").is_file()
