"""Which arguments of `generate` raise an error, and which calls fall back to autoregressive decoding, with a warning.

Knows transformers' arguments, caches and configs; knows nothing of how a call runs.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .distribution import require_temperature
from .drafters import NGram
from .drafts import DraftingStopped
from .engine.hooks import is_offloaded
from .engine.libraries import CACHE_NAMES as _CACHES
from .engine.libraries import (
    DummyLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    is_of_caller,
)
from .engine.parts import unwrapped
from .engine.pool import Lent, SessionPool
from .engine.prepared import CallSettings
from .engine.ranks import waits_for_others
from .engine.rope import change_of, reads_anew_at, turns_by_section
from .engine.session import Session, is_plain
from .engine.signatures import takes
from .engine.states import has_uncounted_states
from .engine.traits import Traits
from .engine.trust import Trust
from .engine.verifiable import obstacle_to_reading_on
from .fast.sources import Source
from .lengths import Adaptive, Confidence, DraftLength, Fixed
from .loading.adapters import mixes_adapters

OTHER_MODES = {  # with their counterparts here, if any
    "assistant_model": "make the pair with draft=THE MODEL",
    "assistant_tokenizer": "make the pair with draft_tokenizer=, or pass assistant_model= with it",
    "assistant_early_exit": 'make the pair with draft="early-exit:LAYER"',
    "prompt_lookup_num_tokens": 'make the pair with draft="ngram"',
    "use_mtp": 'make the pair with draft="mtp"',
    "custom_generate": "leave it out",
    "synced_gpus": "leave it out",
}
SET_MODES = ("assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp")  # those in a GenerationConfig
_OTHER_SETTINGS = (  # settings of transformers' own drafting, without effect here
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
    "assistant_ensemble_weight",
    "max_matching_ngram_size",
)
_COUNT: tuple[Any, Callable[[Any], bool], str] = (int, lambda value: value > 0, "a number of tokens, 1 or more")
_ASKED: dict[
    str, tuple[Any, Callable[[Any], bool], str]
] = {  # settings of transformers that a call may have: their types, what else holds for them, and both in words
    "num_assistant_tokens": _COUNT,
    "num_assistant_tokens_schedule": (
        str,
        lambda value: value in ("constant", "heuristic", "heuristic_transient"),
        '"constant", "heuristic" or "heuristic_transient"',
    ),
    "assistant_confidence_threshold": ((int, float), lambda value: 0 <= value <= 1, "a probability in [0, 1]"),
    "prompt_lookup_num_tokens": _COUNT,
    "max_matching_ngram_size": _COUNT,
}
_USUAL_TOKENS, _USUAL_NGRAM = 20, 2  # what transformers takes where only another of these settings is given
MIXED = "adapter_names gives every row an adapter of its own"
_CONSTANTS = (bool, int, float, str)
_LAYERS = {  # what slots can stand for
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
}
_TEXT_INPUTS = {"input_ids", "inputs_embeds", "attention_mask", "logits_to_keep", "use_cache", "position_ids", *_CACHES}
_OF_PICTURES = {  # without effect after the prompt: they describe pictures, and which of the prompt's tokens are theirs
    "image_grid_thw",
    "image_position_ids",
    "image_sizes",
    "mm_token_type_ids",
    "pixel_attention_mask",
    "second_per_grid_ts",
    "video_grid_thw",
}


_RAW = {"audio", "audios", "image", "images", "video", "videos"}
_READ = {"image_grid_thw", "image_sizes", "input_features", "pixel_values", "pixel_values_videos", "video_grid_thw"}


def _set_by(given: GenerationConfig | None, own: GenerationConfig | None) -> dict[str, Any]:
    """The settings of transformers' drafting in a caller's config that differ from the model's own config. Equal ones were not
    chosen for this call: pipelines pass a copy of the model's config."""
    names = (*SET_MODES, *_OTHER_SETTINGS)
    values = {name: getattr(given, name, None) for name in names}
    return {name: value for name, value in values.items() if value != getattr(own, name, None)}


def require_own_drafting(config: GenerationConfig | None, own: GenerationConfig | None, kwargs: dict[str, Any]) -> None:
    """Raise ValueError for arguments that choose or configure transformers' own drafting.

    config, kwargs: of a call of `generate`. own: the model's own config.
    """
    given = {**_set_by(config, own), **kwargs}
    for name, instead in OTHER_MODES.items():
        if given.get(name) is not None and given[name] is not False:
            raise ValueError(f"{name}: this model has its own drafter; {instead}, or pass assisted=False")
    for name in _OTHER_SETTINGS:
        if given.get(name) is not None:
            raise ValueError(
                f"{name}: this configures transformers' own drafting, which does not run here; use draft_length and "
                "the draft specs, or pass assisted=False"
            )


@dataclass(frozen=True)
class Asked:
    """What a call asks for in transformers' words, in those of this package.

    Args:
        draft: for this call; None for the pair's own.
        draft_tokenizer: of a draft model.
        length: for this call; None if nothing is said of it.
        settings: the settings that these stand for, which are the nearest and not the same.
    """

    draft: Any
    draft_tokenizer: Any
    length: DraftLength | None
    settings: dict[str, Any]

    def __str__(self) -> str:
        given = ", ".join(f"{name} = {value!r}" for name, value in self.settings.items())
        draft = [f"draft={self.draft!r}"] if "prompt_lookup_num_tokens" in self.settings else []
        taken = " and ".join([*draft, f"draft_length={self.length!r}"])
        return f"{given}: this call drafts with {taken}, the nearest that this package has"


def asked_for(config: GenerationConfig | None, own: GenerationConfig | None, kwargs: dict[str, Any]) -> Asked | None:
    """What the arguments of a call ask for in transformers' words: an assistant, how long to draft, prompt lookup; None if they
    do not. config, own, kwargs: as for `require_own_drafting`.

    Raises ValueError for values that are not possible, and for two that exclude each other.
    """
    given = {**_set_by(config, own), **{name: kwargs[name] for name in _ASKED if name in kwargs}}
    settings = {name: given[name] for name in _ASKED if given.get(name) is not None}
    assistant, lookup = kwargs.get("assistant_model"), settings.get("prompt_lookup_num_tokens")
    if assistant is None and (not settings or settings.keys() == {"max_matching_ngram_size"}):
        return None
    for name, value in settings.items():
        kinds, holds, words = _ASKED[name]
        if isinstance(value, bool) or not isinstance(value, kinds) or not holds(value):
            raise ValueError(f"{name}: {value!r} is not possible; give {words}")
    others = settings.keys() - {"prompt_lookup_num_tokens", "max_matching_ngram_size"}
    if lookup is not None and (assistant is not None or others):
        other = "assistant_model" if assistant is not None else min(others)
        raise ValueError(
            f"prompt_lookup_num_tokens: it drafts from the text, and {other} is of a draft model; pass one of them"
        )
    length: DraftLength | None = None
    if lookup is not None:
        ngram = settings.get("max_matching_ngram_size", _USUAL_NGRAM)
        return Asked(NGram(max_ngram=ngram, min_ngram=1), None, Fixed(lookup), settings)
    if others:
        tokens, threshold = (settings.get(n) for n in ("num_assistant_tokens", "assistant_confidence_threshold"))
        if settings.get("num_assistant_tokens_schedule", "constant") != "constant":
            length = Adaptive()
        elif threshold:
            length = Confidence(threshold, tokens or _USUAL_TOKENS)
        else:
            length = Fixed(tokens or _USUAL_TOKENS)
    return Asked(assistant, kwargs.get("assistant_tokenizer") if assistant is not None else None, length, settings)


def without(
    asked: Asked, config: GenerationConfig | None, kwargs: dict[str, Any]
) -> tuple[GenerationConfig | None, dict[str, Any]]:
    """The arguments of a call without what it has asked for. The caller's config is not changed."""
    names = {*asked.settings} | ({"assistant_model", "assistant_tokenizer"} if asked.draft is not None else set())
    if config is not None and asked.settings:
        config = copy.deepcopy(config)
        for name in asked.settings:
            setattr(config, name, None)
    return config, {name: value for name, value in kwargs.items() if name not in names}


def setting_of(kwargs: dict[str, Any], config: GenerationConfig | None, own: GenerationConfig | None, name: str) -> Any:
    """A setting of a call of `generate`: its argument, or that of its config, or the model's own."""
    places = (kwargs.get(name), getattr(config, name, None), getattr(own, name, None))
    return next((value for value in places if value is not None), None)


def mask_of(ids: Any, kwargs: dict[str, Any], config: GenerationConfig | None, own: GenerationConfig) -> Any:
    """The attention mask of a prompt. Where none is given, `generate` hides pad tokens, unless they are end tokens as well."""
    mask = kwargs.get("attention_mask")
    pad, ends = (setting_of(kwargs, config, own, name) for name in ("pad_token_id", "eos_token_id"))
    if (
        mask is not None
        or pad is None
        or not isinstance(ids, torch.Tensor)
        or pad in (ends if isinstance(ends, list) else [ends])
    ):
        return mask
    return ids.ne(pad).long()


def padding_at_end(mask: Any) -> str | None:
    """What is wrong with an attention mask, [B, P] or None, that hides the end of a row, but not all of it; else None."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or mask.shape[1] == 0:
        return None
    rows = (mask.any(1) & (mask[:, -1] == 0)).nonzero()[:, 0].tolist()
    if not rows:
        return None
    return (
        f"attention_mask: row {rows[0]} ends in padding (if a mask is left out, pad tokens count), so the text after it does "
        "not follow from the prompt; pad on the left (tokenizer.padding_side = 'left')"
    )


def require_numbers(config: GenerationConfig | None, own: GenerationConfig | None, kwargs: dict[str, Any]) -> None:
    """Raise ValueError for settings of sampling that transformers takes, but that leave nothing to draw a token from.

    config, own, kwargs: as for `require_own_drafting`.
    """

    setting = functools.partial(setting_of, kwargs, config, own)
    if not setting("do_sample"):
        return
    if isinstance(temperature := setting("temperature"), float) and temperature > 0:
        require_temperature(temperature)
    for name in ("top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty"):
        if isinstance(value := setting(name), float) and math.isnan(value):
            raise ValueError(f"{name}: {value} is no number; give one, or leave it out")


def set_in(config: GenerationConfig) -> dict[str, Any]:
    """transformers' own drafting methods that a config chooses, with their values."""
    values = {name: getattr(config, name, None) for name in SET_MODES}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def must_be_plain(
    model: Any, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> str | None:
    """Why a call has to be decoded without drafts; None if it can be assisted.

    model: the target, as `generate` runs it. The others are arguments of its loop over tokens.
    """
    if mixes_adapters(model):
        return MIXED
    if waits_for_others(model):  # each of which has another text
        return "every process must run as many forward passes as the others"
    if model.training and getattr(model, "is_activation_checkpointing", False):
        return "in training mode, activation checkpointing leaves no cache to rewind; call model.eval() first"
    if generation_config.use_cache is False:
        return "use_cache=False leaves no cache to rewind"
    if generation_config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(generation_config, name):
                return f"{name}=True returns the states of one-token forward passes"
    if (lasting := _lasting(model, input_ids, model_kwargs)) is not None:
        return f"{lasting} is not text, and would go into every forward pass"
    positions = model_kwargs.get("position_ids")
    if positions is None and turns_by_section(model) and beside_text(model_kwargs):
        return (
            "pictures move the positions of the text after them, and this version of transformers does not say how far"
        )
    if positions is not None:
        past = model_kwargs.get(cache_name(model_kwargs))
        read = 0 if past is None else past.get_seq_length()
        if bool((positions[..., read if read < positions.shape[-1] else 0 :] < 0).any()):
            return "position_ids below zero are not positions in a text"
        # four rows: those of the text, which only masks are made of, and three for rotary embeddings
        last = positions[1:, :, -1] if positions.ndim == 3 and len(positions) == 4 else positions[..., -1:]
        if positions.ndim > 3 or (positions.ndim == 3 and bool((last != last[:1]).any())):
            return "position_ids whose dimensions differ at the end of the prompt do not continue as in a text"
    name = cache_name(model_kwargs)
    by_masks = Traits.of(model).masks.trees
    reason = _cannot_rewind(model_kwargs.get(name), name, bool(generation_config.return_dict_in_generate), by_masks)
    return reason or _reads_anew(model, input_ids, generation_config, model_kwargs)


def beside_text(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `generate` that are neither text nor constants: pictures, sounds and what describes them."""

    def is_nothing(value: Any) -> bool:
        # {}: for a model that reads images too, generate prepares their features, and finds none in text
        return value is None or isinstance(value, _CONSTANTS) or (isinstance(value, dict) and not value)

    return {name: value for name, value in model_kwargs.items() if name not in _TEXT_INPUTS and not is_nothing(value)}


def _lasting(model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> str | None:
    """An argument beside the text that matters after the prompt; None if there is none.

    The model's own `prepare_inputs_for_generation` shows which ones reach the forward pass over the next token. All others
    reach the prompt only, which is read as `generate` reads it.
    """
    others = beside_text(model_kwargs)
    if not others:
        return None
    if not Traits.of(model).reads or Traits.of(model).crosses:
        return min(others)
    try:
        given = model.prepare_inputs_for_generation(
            input_ids[:, -1:], use_cache=True, is_first_iteration=False, **others
        )
    except (
        AttributeError,
        KeyError,
        IndexError,
        RuntimeError,
        TypeError,
        ValueError,
    ):  # it needs more than a text model
        return min(others)
    lasting = {name for name in others if given.get(name) is not None} - _OF_PICTURES
    return min(lasting, default=None)


def require_tensors(model: Any, kwargs: dict[str, Any]) -> None:
    """Raise ValueError for pictures and sounds that no processor has made tensors of, and for those that a model can't read.

    kwargs: of a call of `generate`.
    """
    for name in sorted(kwargs.keys() & _RAW):
        raise ValueError(
            f"{name}: generate takes the tensors that a processor makes of it; write processor = "
            'AutoProcessor.from_pretrained(...) and model.generate(**processor(text=..., images=..., return_tensors="pt"))'
        )
    for name in sorted(kwargs.keys() & _READ):
        value, kind = kwargs[name], type(unwrapped(model)).__name__
        if value is not None and not takes(unwrapped(model), name):
            raise ValueError(
                f"{name}: {kind} does not read it; load a checkpoint whose config names a class that does, or leave it out"
            )
        if not isinstance(value, (torch.Tensor, list, tuple, type(None))):
            raise ValueError(
                f"{name}: {type(value).__name__} is not a tensor; AutoProcessor makes one of a picture or a sound"
            )


def constants(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `generate` for the model's own forward that do not depend on the position, for every forward pass."""
    return {
        name: value
        for name, value in model_kwargs.items()
        if name not in _TEXT_INPUTS and isinstance(value, _CONSTANTS)
    }


def lent_to(
    model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any], pool: SessionPool | None, settings: CallSettings
) -> AbstractContextManager[Lent | None]:
    """A context with a session of a pool for one call; with None if there is no pool, or if the call can't use it, which the
    settings then note. The others are as for `must_be_plain`."""
    if pool is None:
        return nullcontext()
    trusted = settings.trust_in(model)
    reason = _cannot_go_on(model, input_ids, model_kwargs, trusted, settings)
    if reason is None:
        try:
            state = Source.of_model(model, trusted.code)
            settings.read = state.weights  # which the fused model is compared with, too
            return pool.lent(model, state, input_ids[0], model.config.get_text_config(decoder=True))
        except (NotImplementedError, RuntimeError, TypeError) as error:  # packed in a tensor of its own kind
            reason = f"changes of the weights would not be noticed ({type(error).__name__}: {error})"
    settings.note(f"sessions: the prompt was read whole and is not kept: {reason}")
    return nullcontext()


def _cannot_go_on(
    model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any], trusted: Trust, settings: CallSettings
) -> str | None:
    """Why a call can't go on from another text's keys and values; None if it can."""
    if len(input_ids) > 1:
        return f"its {len(input_ids)} rows are read together; pass one prompt at a time"
    if model_kwargs.get("inputs_embeds") is not None:
        return "it consists of embeddings"
    if not is_plain(input_ids, model_kwargs.get("attention_mask"), 1):
        return "it has padding; leave that out"
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions[0].tolist() != list(range(input_ids.shape[1])):
        return "position_ids do not count from 0"
    if settings.bits:
        return "exact='bits' reads every prompt in one way"
    if Traits.of(model).crosses:
        return "an encoder reads every input anew"
    if further := {**constants(model_kwargs), **beside_text(model_kwargs)}:
        return f"the model's forward is given {min(further)}"
    if not trusted.is_own or trusted.hooks:
        return trusted.forward or trusted.between or "a hook may change what is read"
    if is_offloaded(model):
        return "changes of offloaded weights would not be noticed"
    if change_of(model) is not None:
        return "the model's rotary angles depend on the length of the text"
    if settings.ranks.several:
        return "several processes might find different texts"
    return obstacle_to_reading_on(model, trusted)


def _cannot_rewind(cache: Any, name: str, handed_back: bool, by_masks: bool) -> str | None:
    """Why slots cannot replace a cache; None if they can.

    handed_back: the caller gets the cache, and may also read its entries for padding. by_masks: the model reads 4-D masks;
    other models (ALiBi) leave other values for padding in a static cache.

    A static cache that `generate` made can be replaced: it only decides where keys and values are stored. A quantized cache
    changes the text, and an offloaded cache saves memory on purpose.
    """
    kind = type(cache).__name__
    if getattr(cache, "offloading", False):
        return f"{name}: an offloaded {kind} saves memory that drafting would need"
    if type(cache) is StaticCache and not is_of_caller(cache):
        states = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
        return f"{name}: a {kind} of this model cannot be filled" if handed_back and (states or not by_masks) else None
    if type(cache) is Session and cache.in_slots:
        return None
    if type(cache) not in (DynamicCache, Session):
        return f"{name}: a {kind} cannot be rewound here; use a DynamicCache, or leave out cache_implementation"
    for part in (cache, *cache.layers):
        held = [value for value in vars(part).values() if callable(value)]  # methods of its own, or kinds of layers
        if not _LAYERS.issuperset(held if part is cache else [type(part), *held]):
            return f"{name}: slots cannot stand for its {type(part).__name__}, which is not as transformers makes it"
    if has_uncounted_states(cache):
        return f"{name}: states without keys and values do not show how many tokens they have read"
    return None


def _reads_anew(
    model: Any, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> str | None:
    """Why a call cannot be assisted in which the target would drop its cache and read its text again."""
    limit = reads_anew_at(model)
    if limit is None or change_of(model) is None:
        return None
    past, length = model_kwargs.get(cache_name(model_kwargs)), input_ids.shape[1]
    read = 0 if past is None else past.get_seq_length()
    if length < limit < generation_config.max_length or (length >= limit and 0 < read < limit):
        return f"this model reads its text again at {limit} tokens, where its rotary embedding changes"
    return None


def require_prompt(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
    """Raise ValueError for a prompt without tokens and without embeddings."""
    if input_ids.shape[1] == 0 and model_kwargs.get("inputs_embeds") is None:
        raise ValueError("input_ids: the prompt is empty; give at least one token, such as the tokenizer's bos_token")


def require_rows(cache: Any, rows: int) -> None:
    """Raise ValueError for a cache with more or fewer rows than the call. rows: of the call, with num_return_sequences."""
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if keys is not None and keys.dim() == 4 and len(keys) != rows:
            raise ValueError(
                f"past_key_values: it has {len(keys)} rows, and this call has {rows} (num_return_sequences included); "
                "repeat its rows with batch_repeat_interleave(), or leave out one of the two arguments"
            )


def cache_name(model_kwargs: dict[str, Any]) -> str:
    """The argument in which `generate` passes the cache of this model."""
    return next((name for name in _CACHES if model_kwargs.get(name) is not None), _CACHES[0])


def warn_plain(reason: str) -> None:
    warnings.warn(f"Using autoregressive decoding, without drafts: {reason}.", DraftingStopped, stacklevel=3)
