"""The arguments of `generate` that the fuzzer draws, and the objects that they stand for.

`drawn` writes numbers and names, `made` turns them into what `generate` takes: anew for every call, since some have a state.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from automata import any_grammar
from pairs import tokenizer
from transformers import GenerationConfig

from . import changes

__all__ = ["Stream", "drawn", "made"]

STOPS = ["ab", "k", "Z", "q7", "!!"]


def _tokens(chance: random.Random, size: int, count: int) -> list[int]:
    return sorted(chance.sample(range(3, size), count))


# Each writes arguments; their weights say how often.
DRAWN: list[tuple[int, Callable[[random.Random, int, int], dict[str, Any]]]] = [
    (4, lambda c, rows, size: {"repetition_penalty": c.choice((0.8, 1.1, 1.5))}),
    (3, lambda c, rows, size: {"no_repeat_ngram_size": c.choice((1, 2, 3))}),
    (3, lambda c, rows, size: {"min_new_tokens": c.choice((1, 5, 25))}),
    (1, lambda c, rows, size: {"min_length": c.choice((10, 50))}),
    (2, lambda c, rows, size: {"bad_words_ids": [[t] for t in _tokens(c, size, 5)] + [_tokens(c, size, 2)]}),
    (2, lambda c, rows, size: {"suppress_tokens": _tokens(c, size, 9)}),
    (1, lambda c, rows, size: {"begin_suppress_tokens": _tokens(c, size, 30)}),
    (2, lambda c, rows, size: {"sequence_bias": [[[t], c.choice((-4.0, 4.0))] for t in _tokens(c, size, 6)]}),
    (1, lambda c, rows, size: {"forced_eos_token_id": 2}),
    (1, lambda c, rows, size: {"forced_bos_token_id": 5}),
    (1, lambda c, rows, size: {"exponential_decay_length_penalty": (c.choice((3, 8)), 1.3), "eos_token_id": 2}),
    (1, lambda c, rows, size: {"encoder_repetition_penalty": 1.4}),
    (2, lambda c, rows, size: {"guidance_scale": c.choice((0.7, 1.5))}),
    (1, lambda c, rows, size: {"guidance_scale": 1.5, "negative": c.randrange(9)}),
    (2, lambda c, rows, size: {"renormalize_logits": True}),
    (1, lambda c, rows, size: {"remove_invalid_values": True}),
    (1, lambda c, rows, size: {"watermarking": True}),
    (3, lambda c, rows, size: {"do_sample": True, "top_k": 1}),
    (1, lambda c, rows, size: {"do_sample": True, "temperature": 1e-5, "top_p": 0.5}),
    (5, lambda c, rows, size: {"processors": [c.choice(("counting", "shift", "in place"))]}),
    (4, lambda c, rows, size: {"criteria": [c.choice(("calls", "sum", "token"))]}),
    (3, lambda c, rows, size: {"stop_strings": STOPS}),
    (2, lambda c, rows, size: {"max_time": 1000.0}),
    (1, lambda c, rows, size: {"huge": c.choice((10**5, 10**9))}),
    (4, lambda c, rows, size: {"streamer": True}),
    (3, lambda c, rows, size: {"num_return_sequences": c.choice((2, 3)), "do_sample": True, "top_k": 1}),
    (4, lambda c, rows, size: {"return_dict_in_generate": True, c.choice(("output_scores", "output_logits")): True}),
    (2, lambda c, rows, size: {"prefix_allowed": c.randrange(9)}),
    (2, lambda c, rows, size: {"config_object": True}),
    (3, lambda c, rows, size: {"grammar": c.randrange(99)}),
    # a quantized cache has optimum-quanto compile C++ first, as its 4-bit weights do
    (1, lambda c, rows, size: {"cache_implementation": c.choice(("dynamic", "static", "static"))}),
    (1, lambda c, rows, size: {"use_cache": False}),
    (1, lambda c, rows, size: {"num_beams": 2}),
    (1, lambda c, rows, size: {"embeds": True}),
    (1, lambda c, rows, size: {"prefill_chunk_size": c.choice((3, 8))}),
    (1, lambda c, rows, size: {"output_hidden_states": True, "return_dict_in_generate": True}),
]


def drawn(chance: random.Random, rows: int, size: int) -> dict[str, Any]:
    """Arguments for a call of `rows` rows on a vocabulary of `size`."""
    weights = [weight for weight, _ in DRAWN]
    return chance.choices(DRAWN, weights)[0][1](chance, rows, size)


class Stream:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.values.append("end")


class Counting:
    """Scores depend on how often it was called, and on the prefix: out of order, the text differs."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, (7 * self.calls + ids.shape[1]) % scores.shape[1]] += 3.0
        return scores


def shift(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    moved = (7 * ids.sum(-1, keepdim=True) + torch.arange(scores.shape[1])) % 5
    return scores + 0.5 * moved


def in_place(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores[:, 10:20] = -float("inf")
    return scores


class Calls:
    """Ends every row at its twelfth call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return torch.full((len(ids),), self.calls >= 12)


def by_sum(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
    return ids.sum(-1) % 17 == 0


def by_token(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
    return ids[:, -1] > 88


PROCESSORS: dict[str, Callable[[], Any]] = {"counting": Counting, "shift": lambda: shift, "in place": lambda: in_place}
CRITERIA: dict[str, Callable[[], Any]] = {"calls": Calls, "sum": lambda: by_sum, "token": lambda: by_token}


def _allowed(seed: int, size: int) -> Callable[[int, torch.Tensor], list[int]]:
    return lambda row, ids: [2, *range((int(ids[-1]) * 5 + seed + row) % 7 + 3, size, 2)]


def made(written: dict[str, Any], model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """What `generate` takes for arguments that `drawn` wrote, prompt and mask apart; `inputs_embeds` of the prompt's ids."""
    size = model.config.get_text_config().vocab_size
    call = {"do_sample": False, **written}
    if "processors" in call:
        call["logits_processor"] = [PROCESSORS[name]() for name in call.pop("processors")]
    if "grammar" in call:
        call["logits_processor"] = [any_grammar(call.pop("grammar")), *call.get("logits_processor", ())]
    if "criteria" in call:
        call["stopping_criteria"] = [CRITERIA[name]() for name in call.pop("criteria")]
    if (limit := call.pop("huge", None)) is not None:  # ends early; what is made for the whole length is not asked for
        call.pop("cache_implementation", None)
        call.pop("num_beams", None)
        call["max_new_tokens"] = limit
        call["stopping_criteria"] = [*call.get("stopping_criteria", ()), Calls()]
    if call.pop("cache_layers", False):
        call["past_key_values"] = changes.cache_of_coarse_layers(model)
    call.pop("kept", None)
    if call.pop("streamer", False):
        call["streamer"] = Stream()
    if "stop_strings" in call:
        call["tokenizer"] = tokenizer(size)
    if "negative" in call:
        generator = torch.Generator().manual_seed(call.pop("negative"))
        call["negative_prompt_ids"] = torch.randint(3, 90, (len(ids), 4), generator=generator)
    if "prefix_allowed" in call:
        call["prefix_allowed_tokens_fn"] = _allowed(call.pop("prefix_allowed"), size)
    if call.pop("watermarking", False):
        call["watermarking_config"] = WATERMARK
    if call.pop("embeds", False):
        call["inputs_embeds"] = model.get_input_embeddings()(ids).detach()
    if call.pop("config_object", False):
        settings = {name: call.pop(name) for name in list(call) if name in _SETTINGS}
        call["generation_config"] = GenerationConfig(**settings)
    return call


WATERMARK = {"bias": 2.5, "seeding_scheme": "selfhash", "greenlist_ratio": 0.25}
_SETTINGS = set(GenerationConfig().to_dict()) - {"transformers_version"} | {"max_new_tokens", "do_sample"}
