"""Encoder-decoders as targets: the encoder reads its input once, and tokens are drafted for the decoder.

Everything beside plain `generate` of the target, for each family of encoder_decoders.py.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import half_right as moved
from covering import in_turns, one_in
from encoder_decoders import BY_NAME, FAMILIES, FRAMES, Family
from pairs import CALL, ENDS, ROUNDING, no_fallback, pair, said_by
from test_continued import Guided
from test_other_inputs import kept
from test_sampling import ALPHA, FEW_TOKENS, exact_texts, p_value_of_texts
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    EncoderDecoderCache,
    M2M100Config,
    M2M100ForConditionalGeneration,
    PreTrainedModel,
    WhisperFeatureExtractor,
    WhisperTokenizer,
    pipeline,
)

from assisted import AssistedModelForCausalLM, Medusa
from assisted.core.drafts import DraftingStopped
from assisted.engine.cross import Encoded

pytestmark = [
    pytest.mark.usefixtures("invariants"),
    pytest.mark.filterwarnings("ignore:.*generation_config.*"),
]
START = 3  # the decoder's first token


def half_right(target: PreTrainedModel) -> PreTrainedModel:
    """A copy that is right part of the time, with an encoder of its own."""
    return moved(target, noise=0.15)


@functools.cache
def target_of(name: str) -> tuple[PreTrainedModel, AssistedModelForCausalLM]:
    target = BY_NAME[name].build()
    return target, AssistedModelForCausalLM.from_models(target, draft=half_right(target), draft_length=4)


@functools.cache
def with_draft(name: str, draft: Any) -> AssistedModelForCausalLM:
    return AssistedModelForCausalLM.from_models(target_of(name)[0], draft=draft, draft_length=4)


def text_of(plain: torch.Tensor) -> torch.Tensor:
    """The decoder's text of an output: Whisper returns it without its beginning."""
    begins = bool((plain[:, 0] == START).all())
    return plain if begins else torch.nn.functional.pad(plain, (1, 0), value=START)


@pytest.mark.parametrize(
    ("family", "rows", "trees"),
    [
        pytest.param(family, rows, bool((number + place) % 2), id=f"{family.name}-{rows}")
        for number, family in enumerate(FAMILIES)
        for place, rows in enumerate((1, 3))
    ],
)
def test_tokens_are_those_of_plain_generate(family: Family, rows: int, trees: bool) -> None:
    target, _ = target_of(family.name)
    call = CALL | family.inputs(rows) | {"eos_token_id": ENDS if rows > 1 else None}
    plain = said_by(target, **call)
    assert plain.tolist() != said_by(target, **call | family.inputs(rows, seed=5)).tolist()  # the input matters
    model = AssistedModelForCausalLM.from_models(target, "suffix", 4)
    model.drafter = Guided(text_of(plain), trees=trees)
    with no_fallback():
        assert model.generate(**call).tolist() == plain.tolist()
    assert model.report.accepted > 0
    assert model.report.new_tokens > model.report.target_passes


@pytest.mark.parametrize(
    ("family", "draft"),
    [
        *((family, "draft") for family in FAMILIES),
        *in_turns(FAMILIES, ["suffix", "ngram", "recycle", "self:int8", ("ngram", "self:int8")]),
    ],
)
def test_drafts(family: Family, draft: Any) -> None:
    target, model = target_of(family.name)
    if draft != "draft":
        model = with_draft(family.name, draft)
    for rows in (1, 3):
        call = CALL | family.inputs(rows) | {"eos_token_id": ENDS if rows > 1 else None}
        with no_fallback():
            assert model.generate(**call).tolist() == said_by(target, **call).tolist()
    if draft in ("draft", "self:int8"):
        assert model.report.accepted > 0


def test_the_drafts_encoder_reads_the_input() -> None:
    """A perfect draft is right about every token: its encoder has read the same input, padding and repeated rows included."""
    for name in ("bart", "t5", "whisper"):
        target, _ = target_of(name)
        model = AssistedModelForCausalLM.from_models(target, draft=BY_NAME[name].build(), draft_length=4)
        call = CALL | BY_NAME[name].inputs(3) | {"num_return_sequences": 2, "do_sample": True, "top_k": 1}
        with no_fallback():
            assert model.generate(**call).tolist() == said_by(target, **call).tolist()
        assert model.report.accepted == model.report.drafted > 0


def test_a_draft_that_shares_the_encoder_does_not_run_it_again() -> None:
    target, _ = target_of("whisper")
    draft = BY_NAME["whisper"].build(decoder_layers=1)
    draft.model.encoder = target.model.encoder
    model = AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=4)
    ran = []
    hook = target.model.encoder.conv1.register_forward_hook(lambda *args: ran.append(1))
    call = CALL | BY_NAME["whisper"].inputs(2)
    ours = model.generate(**call)
    hook.remove()
    assert len(ran) == 1
    assert model.report.drafted > 0
    assert ours.tolist() == said_by(target, **call).tolist()


def test_a_causal_lm_drafts_from_the_text_so_far() -> None:
    target, _ = target_of("t5")
    model = AssistedModelForCausalLM.from_models(target, draft=pair()[0], draft_length=4)
    call = CALL | BY_NAME["t5"].inputs(2)
    with no_fallback():
        assert model.generate(**call).tolist() == said_by(target, **call).tolist()
    assert model.report.drafted > 0


def test_the_encoders_text_is_copied_from() -> None:
    ids = torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0]])
    states = torch.zeros(4, 4, 8)
    mask = (ids != 0).long().repeat_interleave(2, 0)
    assert Encoded(states, mask, ids).tokens(10) == [[5, 6, 7], [5, 6, 7], [8, 9], [8, 9]]
    assert Encoded(states, None, ids).tokens(9) == [[], [], [], []]  # another vocabulary
    assert Encoded(states, None, torch.zeros(2, 8, 24)).tokens(10) == [[], [], [], []]  # sound
    target, _ = target_of("bart")
    model = with_draft("bart", "ngram")
    call = CALL | {"input_ids": torch.arange(20, 60)[None], "max_new_tokens": 8}
    plain = target.generate(**call)
    call["input_ids"] = torch.cat([call["input_ids"], plain], 1)
    plain = target.generate(**call)
    call["input_ids"] = torch.cat([call["input_ids"][:, :-9], plain], 1)  # what it would write
    assert model.generate(**call).tolist() == said_by(target, **call).tolist()
    assert model.report.drafted > 0


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_sampled_tokens_follow_the_targets_distribution(name: str) -> None:
    target, model = target_of(name)
    call = BY_NAME[name].inputs(1)
    expected = exact_texts(
        target, lambda tokens: call | {"decoder_input_ids": torch.tensor([[START, *tokens]])}, **FEW_TOKENS
    )
    torch.manual_seed(1)
    with no_fallback():
        sequences = model.generate(**call, **FEW_TOKENS, max_new_tokens=3, num_return_sequences=3000, draft_length=1)
    assert 0 < model.report.accepted < model.report.drafted
    assert p_value_of_texts(sequences[:, -3:], expected) > ALPHA


@pytest.mark.parametrize(("name", "rows"), [("bart", 1), ("t5", 3), ("whisper", 3)])
def test_output_and_cache_are_those_of_plain_generate(name: str, rows: int) -> None:
    target, model = target_of(name)
    more = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True, "eos_token_id": ENDS}
    call = CALL | BY_NAME[name].inputs(rows) | more
    plain, ours = target.generate(**call), model.generate(**call)
    assert type(ours) is type(plain)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for mine, theirs in zip(ours.logits, plain.logits, strict=True):
        alive = theirs.abs().sum(-1) > 0
        assert (mine - theirs)[alive & (mine.abs().sum(-1) > 0)].abs().max() < 1e-3
    caches = [
        kept(cache.self_attention_cache) + kept(cache.cross_attention_cache)
        for cache in (ours.past_key_values, plain.past_key_values)
    ]
    for mine, theirs in zip(*caches, strict=True):
        assert mine.shape == theirs.shape
        assert (mine - theirs).abs().max() < 10 * ROUNDING


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_a_callers_cache_is_filled(name: str) -> None:
    target, model = target_of(name)
    call = CALL | BY_NAME[name].inputs(2)
    caches = [EncoderDecoderCache(DynamicCache(), DynamicCache()) for _ in range(2)]
    with no_fallback():
        ours = model.generate(past_key_values=caches[0], **call)
    assert ours.tolist() == target.generate(past_key_values=caches[1], **call).tolist()
    halves = [[*kept(cache.self_attention_cache), *kept(cache.cross_attention_cache)] for cache in caches]
    assert len(halves[0]) == len(halves[1]) > 0
    for mine, theirs in zip(*halves, strict=True):
        assert (mine - theirs).abs().max() < 10 * ROUNDING
    with pytest.warns(DraftingStopped, match="EncoderDecoderCache cannot be rewound"):
        again = model.generate(past_key_values=caches[0], **call)  # it holds something now
    assert again.tolist() == target.generate(past_key_values=caches[1], **call).tolist()


@pytest.mark.parametrize("name", ["bart", "t5", "whisper"])
def test_a_text_that_is_begun(name: str) -> None:
    """By the caller's decoder ids, with padding before shorter rows."""
    target, model = target_of(name)
    ids = torch.tensor([[START, 7, 8, 9], [0, 0, START, 7]])
    mask = (torch.arange(4) >= torch.tensor([[0], [2]])).long()
    begun = {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    if name == "whisper":
        begun = {"decoder_input_ids": ids[:1].repeat(2, 1)}
    call = CALL | BY_NAME[name].inputs(2) | begun
    with no_fallback():
        assert model.generate(**call).tolist() == said_by(target, **call).tolist()
    assert model.report.drafted > 0


def spoken(seconds: int, **settings: Any) -> dict[str, Any]:
    """Arguments for features of several segments, each as long as Whisper's encoder reads at once."""
    features = torch.randn(2, 8, FRAMES * seconds, generator=torch.manual_seed(7))
    mask = torch.ones(2, FRAMES * seconds, dtype=torch.long)
    mask[1, FRAMES * (seconds - 1) :] = 0
    ids = {"eos_token_id": 2, "pad_token_id": 0, "max_new_tokens": 12, "do_sample": False}
    return {"input_features": features, "attention_mask": mask, **ids, **settings}


@pytest.mark.parametrize("settings", [{}, {"condition_on_prev_tokens": True}, {"return_segments": True}], ids=str)
def test_whisper_goes_on_from_segment_to_segment(settings: dict[str, Any]) -> None:
    target = BY_NAME["whisper"].build()
    target.generation_config.no_timestamps_token_id = 70  # those above are times
    target.generation_config.prev_sot_token_id = 4
    target.generation_config.is_multilingual = False
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target), draft_length=4)
    call = spoken(3, return_timestamps=True, **settings)
    plain = target.generate(**call)
    with no_fallback(DraftingStopped):
        ours = model.generate(**call)
    ours, plain = (found["sequences"] if isinstance(found, dict) else found for found in (ours, plain))
    assert ours.tolist() == plain.tolist()
    assert model.report.drafted > 0
    assert len(model.report.row_tokens) > 2  # those of every segment
    assert model.report.new_tokens == sum(model.report.row_tokens) > model.report.target_passes


# --- what is refused, and what runs plainly


@pytest.mark.parametrize(
    "draft", ["early-exit:1", "layer-skip", Medusa("nowhere"), ["suffix", "early-exit:1"]], ids=str
)
def test_what_runs_parts_of_a_causal_lm_is_refused(draft: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^draft: \w+ reads or runs parts of a causal LM, and T5For\w+ is an encoder-decoder"
    ):
        AssistedModelForCausalLM.from_models(target_of("t5")[0], draft=draft)


def test_an_encoder_decoder_does_not_draft_for_a_causal_lm() -> None:
    with pytest.raises(ValueError, match=r"^draft: T5For\w+ is an encoder-decoder, and this target has nothing"):
        AssistedModelForCausalLM.from_models(pair()[0], draft=target_of("t5")[0])


def test_a_decoder_whose_positions_follow_its_tokens_is_refused() -> None:
    """Its forward pass over several rows counts positions alone."""
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 96}
    sizes |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    target = M2M100ForConditionalGeneration(M2M100Config(**sizes, init_std=0.5)).eval()
    with pytest.raises(ValueError, match=r"^target: M2M100\w+ cannot take back rejected tokens: its forward passes"):
        AssistedModelForCausalLM.from_models(target)


def test_beams_and_attentions_run_plainly() -> None:
    target, model = target_of("bart")
    call = CALL | BY_NAME["bart"].inputs(2)
    for more in ({"num_beams": 2}, {"return_dict_in_generate": True, "output_attentions": True}):
        with pytest.warns(DraftingStopped):
            ours = model.generate(**call, **more)
        plain = target.generate(**call, **more)
        assert (ours if "num_beams" in more else ours.sequences).tolist() == (
            plain if "num_beams" in more else plain.sequences
        ).tolist()
    assert model.report.new_tokens == 40
    with pytest.raises(ValueError, match=r"^session: an encoder-decoder"):
        model.session()


def test_a_draft_whose_encoder_cannot_read_the_input_costs_speed_only() -> None:
    target, model = target_of("t5")
    call = CALL | BY_NAME["t5"].inputs(2)
    encoded = target.get_encoder()(input_ids=call.pop("input_ids"), attention_mask=call["attention_mask"])
    with pytest.warns(DraftingStopped, match="encoder"):
        ours = model.generate(encoder_outputs=encoded, **call)
    assert ours.tolist() == said_by(target, encoder_outputs=encoded, **call).tolist()


# --- loading and saving


@pytest.mark.parametrize("name", one_in(3, ["t5", "bart", "marian", "whisper", "mbart"]))
def test_a_pair_is_loaded_and_saved(name: str, tmp_path: Path) -> None:
    target, _ = target_of(name)
    target.save_pretrained(tmp_path / "model")
    half_right(target).save_pretrained(tmp_path / "small")
    model = AssistedModelForCausalLM.from_pretrained(tmp_path / "model", draft=str(tmp_path / "small"), draft_length=4)
    assert type(model.target) is type(target)
    model.save_pretrained(tmp_path / "pair")
    call = CALL | BY_NAME[name].inputs(2)
    plain = type(target).from_pretrained(tmp_path / "model").generate(**call)  # Marian's positions are not stored
    for load in (AssistedModelForCausalLM, AutoModelForCausalLM):
        again = load.from_pretrained(tmp_path / "pair")
        assert again.generate(**call).tolist() == plain.tolist()
        assert again.report.accepted > 0


def test_a_pipeline_of_the_target_takes_the_pair() -> None:
    target = BY_NAME["whisper"].build()
    target.generation_config.update(is_multilingual=False, no_timestamps_token_id=95)
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target), draft_length=4)
    words = [*map(chr, range(33, 126)), "<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"]
    tokenizer = WhisperTokenizer(vocab={word: number for number, word in enumerate(words)}, merges=[])
    features = WhisperFeatureExtractor(feature_size=8, chunk_length=1, hop_length=16_000 // FRAMES)
    listener = pipeline("automatic-speech-recognition", model=target, tokenizer=tokenizer, feature_extractor=features)
    sound = torch.randn(16_000, generator=torch.manual_seed(3)).numpy()
    call = {"max_new_tokens": 12, "do_sample": False, "num_beams": 1, "eos_token_id": 2, "pad_token_id": 0}
    expected = listener(sound.copy(), generate_kwargs=call)
    listener.model = model
    with no_fallback():
        assert listener(sound.copy(), generate_kwargs=call) == expected
    assert len(expected["text"]) > 5 and model.report.drafted > 0
