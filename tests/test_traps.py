"""What breaks elsewhere with a draft, and must not break here: each scenario beside plain `generate` of the target."""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import VOCABULARY, build, random_ids
from covering import in_turns
from pairs import BY_NAME, CALL, ENDS, ROUNDING, Listener, assistedly, no_fallback, pair, plainly, prompt, tokenizer
from safetensors.torch import load_file, save_file
from test_robustness import state
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, pipeline
from trees import Planted

from assisted import AssistedModelForCausalLM
from assisted.core import acceptance

MODELS = ["llama", "gpt2", "mistral-window", "gemma3", "bloom"]  # dense, learned positions, windows, ALiBi
ROWS = [1, 4]


pytestmark = pytest.mark.usefixtures("invariants")


def drafted(drafts: str, plain: torch.Tensor, ids: torch.Tensor, **call: Any) -> Any:
    """What is returned with a draft model's chains, or with random trees that hold what plain decoding said."""
    if drafts == "chains":
        return assistedly(ids, **call)
    model = AssistedModelForCausalLM.from_models(pair()[0], draft="suffix", draft_length=5)
    model.drafter = Planted(plain, seed=len(ids))
    with no_fallback():
        output = model.generate(ids, **(CALL | call))
    assert model.report is not None and model.report.accepted > 0
    return output


drafts_of_both_kinds = pytest.mark.parametrize("drafts", ["chains", "trees"])


# --- a second turn with a filled cache


def dense_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache()


def windowed_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config)


def grown(
    ids: torch.Tensor, mask: torch.Tensor, sequences: torch.Tensor, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next turn's prompt: the answer and some tokens of the user's; and its mask."""
    more = random_ids(pair()[0], len(ids), 5, seed)
    longer = torch.cat([sequences, more], 1)
    return longer, torch.cat([mask, mask.new_ones(len(ids), longer.shape[1] - mask.shape[1])], 1)


@pytest.mark.parametrize("make", [dense_cache, windowed_cache])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3"])
def test_a_cache_of_the_callers_is_filled_as_plain_fills_it(name: str, make: Any) -> None:
    plain, ours = make(pair(name)[0]), make(pair(name)[0])
    plainly(name=name, past_key_values=plain, **prompt())
    assistedly(name=name, past_key_values=ours, **prompt())
    same_cache(ours, plain)


def same_cache(ours: DynamicCache, plain: DynamicCache, mask: torch.Tensor | None = None) -> None:
    """The same kind of layers with the same contents, but where the prompt's padding lies."""
    assert ours.get_seq_length() == plain.get_seq_length()
    for layer, reference in zip(ours.layers, plain.layers, strict=True):
        assert type(layer) is type(reference)
        assert layer.keys.shape == reference.keys.shape
        seen = torch.ones(len(layer.keys), ours.get_seq_length(), dtype=torch.bool)
        if mask is not None:
            seen[:, : mask.shape[1]] = mask.bool()
        seen = seen[:, -layer.keys.shape[2] :]
        for states, expected in ((layer.keys, reference.keys), (layer.values, reference.values)):
            assert (states - expected).transpose(1, 2)[seen].abs().max() < 10 * ROUNDING


@pytest.mark.parametrize(
    ("name", "source", "new_ids_only", "rows"),
    [  # every two of these meet
        (name, source, (number + place) % 2 > 0, ROWS[place // 2 if number else 1 - place // 2])
        for number, name in enumerate(("llama", "mistral-window"))
        for place, source in enumerate(("plain", "assisted", "forward", "forward-windowed"))
    ],
)
def test_a_filled_cache_is_continued(name: str, source: str, new_ids_only: bool, rows: int) -> None:
    start = prompt(rows)
    ids, mask = start["ids"], start["attention_mask"]
    if source in ("plain", "assisted"):
        call = plainly if source == "plain" else assistedly
        first = call(ids, name, attention_mask=mask, return_dict_in_generate=True)
        sequences, cache = first.sequences, first.past_key_values
    else:
        make = dense_cache if source == "forward" else windowed_cache
        sequences, cache = ids, make(pair(name)[0])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            pair(name)[0](ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    longer, longer_mask = grown(ids, mask, sequences, seed=3)
    given = longer[:, cache.get_seq_length() :] if new_ids_only else longer
    call = {"attention_mask": longer_mask, "max_new_tokens": 40}  # a draft that has not seen the past is often wrong
    ours, plain = assistedly(given, name, past_key_values=cache, **call), plainly(longer, name, **call)
    assert ours[:, given.shape[1] :].tolist() == plain[:, longer.shape[1] :].tolist()


# --- stopping


class StopsAt:
    """Stops a row at its first token out of `tokens`, or the whole batch at a length; remembers what it was shown."""

    def __init__(self, tokens: tuple[int, ...] = (), length: int = sys.maxsize):
        self.tokens, self.length = torch.tensor(tokens, dtype=torch.long), length
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append(input_ids.tolist())
        return torch.isin(input_ids[:, -1], self.tokens) | (input_ids.shape[1] >= self.length)


@pytest.mark.parametrize(("rows", "ends"), [(1, None), (4, ENDS)], ids=["endless", "ends"])
@pytest.mark.parametrize(
    "stop", [{"length": n} for n in (14, 17, 19, 20)] + [{"tokens": tuple(range(40, 70))}], ids=str
)
def test_a_criterion_is_met_inside_an_accepted_block(stop: dict[str, Any], rows: int, ends: list[int] | None) -> None:
    reference, ours = StopsAt(**stop), StopsAt(**stop)
    plain = plainly(stopping_criteria=[reference], eos_token_id=ends, **prompt(rows))
    start, model = prompt(rows), pair()[1]
    call = CALL | {"attention_mask": start["attention_mask"], "eos_token_id": ends}
    with no_fallback():
        output = model.generate(start["ids"], stopping_criteria=[ours], draft_length=6, **call)
    assert output.tolist() == plain.tolist()
    assert ours.seen == reference.seen  # every prefix once, in order, and none behind the end


def test_a_criterion_ends_blocks_that_are_accepted_whole() -> None:
    target, _ = pair()
    model = AssistedModelForCausalLM.from_models(target, draft=target, draft_length=4)
    ids = prompt()["ids"]
    for length in range(14, 24):
        reference, ours = StopsAt(length=length), StopsAt(length=length)
        plain = plainly(ids, stopping_criteria=[reference])
        assert model.generate(ids, stopping_criteria=[ours], draft_length=8, **CALL).tolist() == plain.tolist()
        assert ours.seen == reference.seen
        assert model.report.row_tokens == (length - ids.shape[1],)


def test_a_criterion_may_read_the_scores() -> None:
    shown: dict[str, list[int]] = {"plain": [], "ours": []}

    def criterion(name: str) -> Any:
        def stop(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
            shown[name].append(len(scores))
            assert scores[-1].argmax(-1).tolist() == input_ids[:, -1].tolist()
            return torch.tensor([False])

        return [stop]

    details = {**prompt(), "return_dict_in_generate": True, "output_scores": True}
    plainly(stopping_criteria=criterion("plain"), **details)
    assistedly(stopping_criteria=criterion("ours"), **details)
    assert shown["ours"] == shown["plain"]


@pytest.mark.parametrize("ends", [[2], ENDS])
@pytest.mark.parametrize("rows", ROWS)
def test_the_drafts_own_settings_do_not_matter(rows: int, ends: list[int]) -> None:
    target, model = pair()
    stubborn = copy.deepcopy(model.drafter.model)
    stubborn.config.eos_token_id = 70
    stubborn.generation_config.update(eos_token_id=70, repetition_penalty=2.0, do_sample=True, temperature=0.3)
    other = AssistedModelForCausalLM.from_models(target, draft=stubborn, draft_length=4)
    start = prompt(rows)
    plain = plainly(eos_token_id=ends, **start)
    for each in (model, other):
        ours = each.generate(start["ids"], attention_mask=start["attention_mask"], **(CALL | {"eos_token_id": ends}))
        assert ours.tolist() == plain.tolist()
    assert other.report.accepted == model.report.accepted > 0


# --- logits processors


class Remembers:
    """A stateful processor, such as a grammar: it must be shown each committed prefix once, in order."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids.tolist())
        forbidden = (input_ids.sum(1) + len(self.seen)) % 7 == 0  # depends on the past calls, too
        return scores.index_fill(1, torch.arange(3, 40), float("-inf")) if forbidden.any() else scores


@drafts_of_both_kinds
@pytest.mark.parametrize(("rows", "ends"), [(1, None), (4, ENDS)], ids=["endless", "ends"])
def test_stateful_processors_see_each_prefix_once_in_order(rows: int, ends: list[int] | None, drafts: str) -> None:
    reference, ours = Remembers(), Remembers()
    plain = plainly(logits_processor=[reference], eos_token_id=ends, **prompt(rows))
    output = drafted(drafts, plain, logits_processor=[ours], eos_token_id=ends, **prompt(rows))
    assert output.tolist() == plain.tolist()
    assert ours.seen == reference.seen


@pytest.mark.parametrize("rows", ROWS)
def test_stateful_processors_see_each_prefix_once_when_sampling(rows: int) -> None:
    torch.manual_seed(0)
    ours = Remembers()
    output = assistedly(logits_processor=[ours], do_sample=True, temperature=0.4, max_new_tokens=40, **prompt(rows))
    width = prompt(rows)["ids"].shape[1]
    assert ours.seen == [output[:, :length].tolist() for length in range(width, output.shape[1])]


def allowed(row: int, ids: torch.Tensor) -> list[int]:
    return list(range(3 + (int(ids[-1]) + row) % 5, VOCABULARY))


PROCESSED: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.4},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[40], [41, 42], *([n] for n in range(50, 70))]},
    "min_new_tokens": {"min_new_tokens": 18, "eos_token_id": ENDS},
    "min_length": {"min_length": 28, "eos_token_id": ENDS},
    "suppress_tokens": {"suppress_tokens": list(range(30, 60))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 90))},
    "forced_eos_token_id": {"forced_eos_token_id": 2, "eos_token_id": [2]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 1.3), "eos_token_id": [2]},
    "sequence_bias": {"sequence_bias": [[[n], 2.0] for n in range(3, 20)] + [[[30, 31], -9.0]]},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": allowed},
    "guidance_scale": {"guidance_scale": 1.5},
    "remove_invalid_values": {"remove_invalid_values": True},
    "several": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 9, "eos_token_id": ENDS},
}


@pytest.mark.parametrize(
    ("name", "rows", "drafts"),
    [
        *((name, 4, "chains") for name in PROCESSED),
        *((name, 1, "chains") for name in ("forced_eos_token_id", "guidance_scale", "several")),
        *((name, 3, "trees") for name in ("repetition_penalty", "no_repeat_ngram_size", "min_new_tokens", "several")),
        ("exponential_decay_length_penalty", 1, "trees"),
    ],
)
def test_processors_change_the_text_as_they_do_plainly(name: str, rows: int, drafts: str) -> None:
    details = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    call = {**prompt(rows), **PROCESSED[name]}
    plain = plainly(**call, **details)
    ours = drafted(drafts, plain.sequences, **call, **details)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert drafted(drafts, plain.sequences, **call).tolist() == plain.sequences.tolist()
    same_steps(ours, plain)
    same_cache(ours.past_key_values, plain.past_key_values, call["attention_mask"])


# --- outputs


def same_steps(ours: Any, plain: Any) -> None:
    """Scores and logits of every step are those of plain decoding, in the rows that had not ended."""
    assert type(ours) is type(plain)
    new = plain.sequences[:, -len(plain.logits) :]
    for name in ("scores", "logits"):
        mine, theirs = torch.stack(getattr(ours, name), 1), torch.stack(getattr(plain, name), 1)  # [B, steps, V]
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype
        unfinished = (new == CALL["pad_token_id"]).cumsum(1) == 0
        assert torch.allclose(mine[unfinished], theirs[unfinished], atol=ROUNDING)


@pytest.mark.parametrize("name,case", in_turns(MODELS, [(1, None), (4, ENDS), (4, None), (1, ENDS)]))
def test_scores_and_logits(name: str, case: tuple[int, list[int] | None]) -> None:
    rows, ends = case
    details = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "eos_token_id": ends}
    plain = plainly(name=name, **prompt(rows), **details)
    ours = assistedly(name=name, **prompt(rows), **details)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    same_steps(ours, plain)
    same_cache(ours.past_key_values, plain.past_key_values, prompt(rows)["attention_mask"])
    assert ours.attentions is ours.hidden_states is None


def test_what_was_not_asked_for_is_not_returned() -> None:
    ours = assistedly(return_dict_in_generate=True, **prompt())
    assert ours.scores is ours.logits is None
    assert isinstance(assistedly(output_scores=True, output_logits=True, **prompt()), torch.Tensor)


class Listens(Listener):
    """Also of what kind it is."""

    def put(self, value: torch.Tensor) -> None:
        self.heard.append((value.dtype, value.device, value.tolist()))


@drafts_of_both_kinds
@pytest.mark.parametrize(
    ("rows", "more"),
    [(1, {}), (1, {"eos_token_id": ENDS}), (4, {}), (4, {"eos_token_id": ENDS}), (1, {"stops": 19})],
    ids=str,
)
def test_streamers_are_told_the_same_and_nothing_behind_the_end(rows: int, more: dict[str, Any], drafts: str) -> None:
    def call(streamer: Listens) -> dict[str, Any]:
        stops = {"stopping_criteria": [StopsAt(length=more["stops"])]} if "stops" in more else more
        return {"streamer": streamer, **stops, **prompt(rows)}

    reference, ours = Listens(), Listens()
    plain = plainly(**call(reference))
    drafted(drafts, plain, **call(ours))
    assert ours.heard == reference.heard


@pytest.mark.parametrize("rows", ROWS)
def test_several_sequences_a_prompt(rows: int) -> None:
    torch.manual_seed(0)
    call = {"do_sample": True, "num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True}
    plain, ours = plainly(**prompt(rows), **call), assistedly(**prompt(rows), **call)
    assert ours.sequences.shape == plain.sequences.shape
    assert [step.shape for step in ours.scores] == [step.shape for step in plain.scores]
    assert len(pair()[1].report.row_tokens) == 3 * rows
    width = prompt(rows)["ids"].shape[1]
    assert ours.sequences[:, :width].tolist() == prompt(rows)["ids"].repeat_interleave(3, 0).tolist()
    assert len({tuple(row) for row in ours.sequences.tolist()}) == 3 * rows


def test_a_seed_fixes_what_is_sampled() -> None:
    texts = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        texts.append(assistedly(do_sample=True, **prompt(4)).tolist())
    assert texts[0] == texts[1] != texts[2]


def test_without_a_prompt_in_chunks_and_with_hidden_tokens_in_the_middle() -> None:
    assert assistedly(None).tolist() == plainly(None).tolist()
    start = prompt(4, 20)
    start["attention_mask"][:, 9:12] = 0
    chunks = {**prompt(1, 21), "prefill_chunk_size": 4}
    for call, names in ((chunks, ("llama", "mistral-window", "gpt2")), (start, ("llama", "mistral-window", "bloom"))):
        for name in names:
            assert assistedly(name=name, **call).tolist() == plainly(name=name, **call).tolist()


# --- vocabularies


def resized(model: PreTrainedModel, entries: int) -> PreTrainedModel:
    other = copy.deepcopy(model)
    other.resize_token_embeddings(entries, mean_resizing=False)
    return other


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("entries", [VOCABULARY - 6, VOCABULARY + 6])
def test_a_twin_with_a_padded_vocabulary_drafts(entries: int, do_sample: bool, rows: int) -> None:
    (target, _), words = pair(), tokenizer(VOCABULARY - 10)
    twin = resized(target, entries)
    model = AssistedModelForCausalLM.from_models(target, draft=twin, tokenizer=words, draft_tokenizer=words)
    torch.manual_seed(0)
    start = prompt(rows)
    call = CALL | {"attention_mask": start["attention_mask"], "do_sample": do_sample, "draft_length": 4}
    with no_fallback():
        ours = model.generate(start["ids"], **call)
    assert model.report.acceptance_rate > (0.5 if entries > VOCABULARY else 0.1)  # the smaller twin lacks six tokens
    if not do_sample:
        assert ours.tolist() == plainly(**start).tolist()


def test_q_is_the_distribution_the_draft_was_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = []
    block = acceptance.block

    def watched(tokens: torch.Tensor, lengths: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> Any:
        judged.append((tokens, p, q))
        return block(tokens, lengths, p, q)

    monkeypatch.setattr(acceptance, "block", watched)
    torch.manual_seed(0)
    assistedly(do_sample=True, temperature=0.7, top_k=5, repetition_penalty=1.2, **prompt())
    for tokens, p, q in judged:
        assert (q.gather(2, tokens[:, :, None]) > 0).all()
        for distribution in (p, q):
            assert ((distribution > 0).sum(-1) <= 5).all()
            assert torch.allclose(distribution.sum(-1), torch.ones(()))


# --- leaks and costs


def test_nothing_leaks_from_one_call_to_the_next() -> None:
    target, model = pair()
    before = state(target), state(model.drafter.model), model.config.to_dict()
    first = assistedly(**prompt())
    length, counts = model.draft_length, (model.report.drafted, model.report.target_passes)
    torch.manual_seed(0)
    assistedly(do_sample=True, top_k=3, repetition_penalty=1.5, draft_length=7, eos_token_id=ENDS, **prompt(4))
    assistedly(draft_length="confidence", max_new_tokens=40, return_dict_in_generate=True, **prompt(4))
    assert model.draft_length == length
    assert (state(target), state(model.drafter.model), model.config.to_dict()) == before
    assert assistedly(**prompt()).tolist() == first.tolist()
    assert (model.report.drafted, model.report.target_passes) == counts


def test_a_generation_config_of_the_callers_and_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    target, model = pair()
    config, start = GenerationConfig(**CALL, repetition_penalty=1.3), prompt(4)
    before = config.to_dict()
    call = {"generation_config": config, "attention_mask": start["attention_mask"]}
    plain = target.generate(start["ids"], **call)
    with no_fallback():
        assert model.generate(start["ids"], **call).tolist() == plain.tolist()
    assert config.to_dict() == before
    monkeypatch.setattr(target.generation_config, "repetition_penalty", 1.5)
    assert model.generation_config is target.generation_config
    assert assistedly(**prompt()).tolist() == plainly(**prompt()).tolist()


# --- a forward, a folder, a pipeline


def test_pipelines_take_the_model_without_complaint(caplog: pytest.LogCaptureFixture) -> None:
    target, model = pair()
    characters = tokenizer()
    call = {"max_new_tokens": 16, "do_sample": False}
    plain = pipeline("text-generation", model=target, tokenizer=characters)
    text = plain("Hello", **call)[0]["generated_text"]
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        ours = pipeline("text-generation", model=model, tokenizer=characters)
        assert ours("Hello", **call) == [{"generated_text": text}]
        assert ours(["Hello", "Good day"], num_return_sequences=2, max_new_tokens=16, do_sample=True)
    finally:
        logger.removeHandler(caplog.handler)
    assert model.report.accepted > 0
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# --- drafts that are not what they seem


@pytest.mark.parametrize(
    ("kind", "width", "rows"),
    [(kind, width, 1) for kind in ("llama", "gpt2") for width in (10, 26, 40)] + [("llama", 26, 4)],
)
def test_a_draft_whose_context_is_shorter_than_the_text(kind: str, width: int, rows: int) -> None:
    """It drafts up to the end of its context; then a warning says why it stops, whether its positions are learned or not."""
    target, draft = build(BY_NAME["llama"]), build(BY_NAME[kind], max_position_embeddings=32)
    model = AssistedModelForCausalLM.from_models(target, draft, draft_length=3)
    ids = random_ids(target, rows, width)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        found = model.generate(ids, **CALL | {"max_new_tokens": 16})
    assert found.tolist() == target.generate(ids, **CALL | {"max_new_tokens": 16}).tolist()
    said = [str(one.message) for one in given if "context ends at 32 tokens" in str(one.message)]
    assert len(said) == (width > 10) == len(model.report.warnings)
    assert (model.report.drafted > 0) == (width < 40)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_draft_that_lacks_a_tensor(kind: str, tmp_path: Path) -> None:
    """transformers draws it at random. Tied weights and buffers may be absent."""
    target = build(BY_NAME["llama"])
    build(BY_NAME[kind], tie_word_embeddings=True).save_pretrained(tmp_path)
    AssistedModelForCausalLM.from_models(target, str(tmp_path))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if "mlp" in name)
    save_file({n: tensor for n, tensor in tensors.items() if n != name}, file, {"format": "pt"})
    for spec in (str(tmp_path), f"draft-tree:{tmp_path}"):
        with pytest.raises(ValueError, match=f"draft: the checkpoint .* lacks {name}"):
            AssistedModelForCausalLM.from_models(target, spec)
    save_file(tensors | {name: torch.zeros(3)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match="draft: loading"):
        AssistedModelForCausalLM.from_models(target, str(tmp_path))


def test_tokenizers_that_are_handed_out_pad_on_the_left() -> None:
    pair = AssistedModelForCausalLM.from_pretrained("zoo:target")
    assert pair.tokenizer.padding_side == "left"
    assert AssistedModelForCausalLM.from_models(pair.target).tokenizer.padding_side == "left"


def test_a_prompt_that_ends_in_padding_is_an_error() -> None:
    """Plain `generate` goes on after the padding, and writes what does not follow from the prompt."""
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, "ngram")
    ids, mask = random_ids(target, 2, 9), torch.ones(2, 9, dtype=torch.int64)
    model.generate(ids, attention_mask=mask, **CALL)
    assert not model.report.warnings
    mask[0] = 0  # a row without a text
    model.generate(ids, attention_mask=mask, **CALL)
    mask[1, 6:] = 0
    padded, embeds = ids.where(mask.bool(), CALL["pad_token_id"]), target.get_input_embeddings()(ids).detach()
    for given in ({"inputs": ids, "attention_mask": mask}, {"inputs": padded}, {"inputs": padded[1:]}):
        with pytest.raises(ValueError, match=r"attention_mask: row [01] ends in padding.*padding_side = 'left'"):
            model.generate(**given, **CALL)
    with pytest.raises(ValueError, match="attention_mask: row 1"):
        model.generate(inputs_embeds=embeds, attention_mask=mask, **CALL)
    text = model.generate(ids, attention_mask=mask, assisted=False, **CALL)
    assert text.tolist() == target.generate(ids, attention_mask=mask, **CALL).tolist()
    assert "ends in padding" in model.report.warnings[0]


def test_padding_in_a_pipeline_and_beside_many_prompts() -> None:
    pair = AssistedModelForCausalLM.from_pretrained("zoo:target")
    tokenizer, texts = pair.tokenizer, ["def mean(values):\n", "a = 1"]
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    call = {"max_new_tokens": 8, "do_sample": False}
    alone = [pair.target.generate(tokenizer(text, return_tensors="pt").input_ids, **call)[0].tolist() for text in texts]
    for side in ("left", "right"):
        tokenizer.padding_side = side
        prompts = [tokenizer(text, padding="max_length", max_length=20, return_tensors="pt") for text in texts]
        answers = sorted(pair.generate_many(prompts, **call), key=lambda answer: answer.index)
        assert [answer.ids.tolist() for answer in answers] == alone
    asked = pipeline("text-generation", model=pair, tokenizer=tokenizer, batch_size=2, device="cpu")
    tokenizer.padding_side = "right"  # newer pipelines set it to the left
    with pytest.raises(ValueError, match="attention_mask: row 1 ends in padding"):
        asked(texts, **call)
    tokenizer.padding_side = "left"
    for text, ids, (found,) in zip(texts, alone, asked(texts, **call), strict=True):
        assert found["generated_text"] == text + tokenizer.decode(ids[len(tokenizer(text).input_ids) :])
