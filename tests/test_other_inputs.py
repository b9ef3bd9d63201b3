"""Caches of other kinds, prompts of embeddings: assisted where the result can be had, else plain decoding and one warning.

Everything beside plain `generate` of the target.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from architectures import random_ids
from covering import in_turns
from pairs import CALL, ENDS, ROUNDING, no_fallback, padded
from test_continued import Guided, target_of
from transformers import (
    DynamicCache,
    QuantizedCache,
    StaticCache,
)
from transformers.utils import is_optimum_quanto_available

from assisted.core.drafts import DraftingStopped

MODELS = ["llama", "gpt2", "gemma3", "mistral-window", "bloom", "qwen3_next"]


pytestmark = pytest.mark.usefixtures("invariants")


def batch(name: str, rows: int) -> dict[str, torch.Tensor]:
    ids, mask = padded(target_of(name)[0], rows, seed=3)
    return {"input_ids": ids, "attention_mask": mask}


def kept(cache: Any) -> list[torch.Tensor]:
    return [
        states
        for layer in cache.layers
        if hasattr(layer, "keys")
        for states in (layer.keys, layer.values)
        if states is not None
    ]


def require_same(ours: Any, plain: Any) -> None:
    assert type(ours) is type(plain)
    assert int(ours.get_seq_length()) == int(plain.get_seq_length())
    for mine, theirs in zip(kept(ours), kept(plain), strict=True):
        assert (mine - theirs).abs().max() < 10 * ROUNDING


# --- caches


@pytest.mark.parametrize("name,rows", in_turns(MODELS, [1, 4]))
def test_a_static_cache_of_the_calls_own_is_a_matter_of_storage(name: str, rows: int) -> None:
    target, model = target_of(name)
    call = CALL | batch(name, rows) | {"eos_token_id": ENDS, "cache_implementation": "static"}
    plain = target.generate(**call)
    model.drafter = Guided(plain)
    with no_fallback():
        assert model.generate(draft_length=4, **call).tolist() == plain.tolist()
    assert model.report is not None
    assert model.report.accepted > 0


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("qwen3_next", "bloom")])
def test_a_static_cache_that_is_returned_holds_what_plain_leaves(name: str) -> None:
    target, model = target_of(name)
    call = (
        CALL
        | batch(name, 4)
        | {"eos_token_id": ENDS, "cache_implementation": "static", "return_dict_in_generate": True}
    )
    plain = target.generate(**call)
    model.drafter = Guided(plain.sequences)
    with no_fallback():
        ours = model.generate(draft_length=4, **call)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    require_same(ours.past_key_values, plain.past_key_values)


@pytest.mark.parametrize("name", ["qwen3_next", "bloom"])
def test_a_static_cache_that_cannot_be_filled_is_filled_by_plain_decoding(name: str) -> None:
    target, model = target_of(name)
    call = CALL | batch(name, 4) | {"cache_implementation": "static", "return_dict_in_generate": True}
    plain = target.generate(**call)
    with pytest.warns(UserWarning, match="without drafts.*cannot be filled"):
        ours = model.generate(draft_length=4, **call)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    require_same(ours.past_key_values, plain.past_key_values)


def caches() -> dict[str, Any]:
    found: dict[str, Any] = {
        "static": lambda config: StaticCache(config=config, max_cache_len=64),
        "offloaded": lambda config: DynamicCache(config=config, offloading=True),
    }
    if is_optimum_quanto_available():
        found["quantized"] = lambda config: QuantizedCache(
            "quanto", config=config, nbits=4, residual_length=4, q_group_size=8
        )
    return found


def warned(run: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run()
    return result, [str(w.message) for w in caught if issubclass(w.category, DraftingStopped)]


@pytest.mark.parametrize(
    "kind",
    # quanto compiles its kernels when they are first called
    [pytest.param(kind, marks=[pytest.mark.slow] if kind == "quantized" else []) for kind in caches()],
)
@pytest.mark.parametrize(("name", "rows"), [("llama", 1), ("gemma3", 4)])
def test_other_caches_of_the_callers_are_filled_by_plain_decoding(name: str, kind: str, rows: int) -> None:
    if kind == "offloaded" and not torch.accelerator.is_available():
        pytest.skip("offloading needs an accelerator")
    target, model = target_of(name)
    if kind == "quantized" and name == "gemma3":
        pytest.skip("transformers has no quantized cache with windows")
    first, second = caches()[kind](target.config), caches()[kind](target.config)
    call = CALL | batch(name, rows)
    plain = target.generate(past_key_values=first, **call)
    ours, messages = warned(lambda: model.generate(past_key_values=second, **call))
    assert len(messages) == 1
    assert "past_key_values" in messages[0]
    assert ours.tolist() == plain.tolist()
    assert int(first.get_seq_length()) == int(second.get_seq_length())
    if kind == "static":
        require_same(second, first)
    more = torch.cat([plain, random_ids(target, rows, 3, seed=5)], 1)
    call |= {"input_ids": more, "attention_mask": torch.ones_like(more), "max_new_tokens": 8}
    ours, messages = warned(lambda: model.generate(past_key_values=second, **call))
    assert len(messages) == 1
    assert ours.tolist() == target.generate(past_key_values=first, **call).tolist()


@pytest.mark.slow
@pytest.mark.quant
@pytest.mark.skipif(not is_optimum_quanto_available(), reason="no quanto here")
def test_a_quantized_cache_makes_another_text_and_that_is_plains() -> None:
    target, model = target_of("llama")
    settings = {"backend": "quanto", "nbits": 2, "residual_length": 2, "q_group_size": 8}
    call = CALL | batch("llama", 1) | {"cache_implementation": "quantized", "cache_config": settings}
    ours, messages = warned(lambda: model.generate(**call))
    assert len(messages) == 1
    assert ours.tolist() == target.generate(**call).tolist()


def test_states_that_tell_no_length_go_on_plainly() -> None:
    target, model = target_of("mamba2")
    cache = DynamicCache(config=target.config)
    ids = random_ids(target, 1, 9)
    model.generate(ids, cache_params=cache, **CALL)
    _, messages = warned(lambda: model.generate(ids, cache_params=cache, **CALL))
    assert len(messages) == 1


# --- embeddings


@pytest.mark.parametrize(
    ("name", "rows", "lockstep", "with_ids"),
    [
        (name, rows, lockstep, (number + (rows > 1) + lockstep) % 2 > 0)
        for number, name in enumerate(["llama", "gpt2", "gemma3", "mistral-window", "qwen3_next"])
        for rows, lockstep in ((1, False), (4, True), (4, False))[number % 2 :][:2]
    ],
)
def test_a_prompt_of_embeddings(name: str, rows: int, lockstep: bool, with_ids: bool) -> None:
    mode: dict[str, Any] = {"logits_processor": [lambda ids, scores: scores]} if lockstep else {}
    target, model = target_of(name)
    given = batch(name, rows)
    ids = given.pop("input_ids")
    embeddings = target.get_input_embeddings()(ids).detach() + 0.05
    call = CALL | given | {"inputs_embeds": embeddings, "eos_token_id": ENDS, "return_dict_in_generate": True} | mode
    if with_ids:
        call["input_ids"] = ids
    plain = target.generate(**call)
    model.drafter = Guided(plain.sequences)
    with no_fallback():
        ours = model.generate(draft_length=4, **call)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for mine, theirs in zip(kept(ours.past_key_values), kept(plain.past_key_values), strict=True):
        assert (mine - theirs).abs().max() < 10 * ROUNDING
    assert model.report is not None
    assert model.report.accepted > 0


# --- models that read images, too
