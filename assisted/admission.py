"""What of a call can be assisted: which arguments are refused, and which calls are decoded plainly, with a warning.

Knows transformers' arguments, caches and configs; nothing of how a call is run.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from .engine.masks import Masks
from .engine.recurrent import has_uncounted_states
from .engine.rope import change_of, reads_anew_at
from .loading.adapters import mixes_adapters
from .loading.quantization import rounds_by_pass

__all__ = [
    "MIXED",
    "OTHER_MODES",
    "SET_MODES",
    "cache_name",
    "must_be_plain",
    "require_own_drafting",
    "require_prompt",
    "require_rows",
    "warn_plain",
]

OTHER_MODES = {  # and what stands for them here, where something does
    "assistant_model": "make the pair with draft=THE MODEL",
    "assistant_tokenizer": "make the pair with draft_tokenizer=",
    "assistant_early_exit": 'make the pair with draft="early-exit:LAYER"',
    "prompt_lookup_num_tokens": 'make the pair with draft="ngram"',
    "use_mtp": "leave it out",
    "custom_generate": "leave it out",
    "synced_gpus": "leave it out",
}
SET_MODES = ("assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp")  # those that a GenerationConfig holds
_OTHER_SETTINGS = (  # of transformers' own drafting, without effect here
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
    "assistant_ensemble_weight",
    "max_matching_ngram_size",
)
MIXED = "adapter_names gives every row an adapter of its own"
_CACHES = ("past_key_values", "cache_params")
_TEXT_INPUTS = {
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "logits_to_keep",
    "use_cache",
    "position_ids",
    *_CACHES,
}


def _set_by(given: GenerationConfig | None, own: GenerationConfig | None) -> dict[str, Any]:
    """What a caller's config sets of transformers' drafting. What the model's own config says as well was not decided for
    this call: pipelines pass on a copy of that."""
    names = (*SET_MODES, *_OTHER_SETTINGS)
    values = {name: getattr(given, name, None) for name in names}
    return {name: value for name, value in values.items() if value != getattr(own, name, None)}


def require_own_drafting(config: GenerationConfig | None, own: GenerationConfig | None, kwargs: dict[str, Any]) -> None:
    """Refuse arguments that choose or set a way to draft of transformers', and those that go against this one.

    config, kwargs: of a call of `generate`. own: the model's own config.
    """
    given = {**_set_by(config, own), **kwargs}
    for name, instead in OTHER_MODES.items():
        if given.get(name) is not None and given[name] is not False:
            raise ValueError(f"{name}: this model drafts in its own way; {instead}, or pass assisted=False")
    for name in _OTHER_SETTINGS:
        if given.get(name) is not None:
            raise ValueError(
                f"{name}: a setting of transformers' own drafting, which does not run here; see draft_length and the "
                "draft specs, or pass assisted=False"
            )


def must_be_plain(
    model: Any, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> str | None:
    """Why a call cannot be assisted although its result can be had plainly; None where it can.

    model: the target, as `generate` runs it. The others: of its loop over tokens.
    """
    if "prepare_inputs_for_generation" in model.__dict__:
        return "the model's prepare_inputs_for_generation was replaced, as PEFT does for learned prompts"
    if mixes_adapters(model):
        return MIXED
    if model.training and getattr(model, "is_activation_checkpointing", False):
        return "in training mode, activation checkpointing leaves no cache to rewind"
    if (why := rounds_by_pass(model)) is not None:
        return f"{why}: a pass over several tokens rounds them otherwise than one by one"
    if generation_config.use_cache is False:
        return "use_cache=False leaves no cache to rewind"
    if generation_config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(generation_config, name):
                return f"{name}=True asks for the states of one-token passes"
    for name, value in model_kwargs.items():
        if name not in _TEXT_INPUTS and value is not None and not isinstance(value, bool):
            return f"{name} is more than text, which is all that is drafted for"
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions.ndim != 2:
        return f"position_ids of {positions.ndim} dimensions do not count one text"
    name = cache_name(model_kwargs)
    by_masks = Masks.of(model).trees
    reason = _cannot_rewind(model_kwargs.get(name), name, bool(generation_config.return_dict_in_generate), by_masks)
    return reason or _reads_anew(model, input_ids, generation_config, model_kwargs)


def _cannot_rewind(cache: Any, name: str, handed_back: bool, by_masks: bool) -> str | None:
    """Why slots cannot take the place of a cache, None where they can.

    handed_back: to the caller, who may look at what it holds of padding, too. by_masks: the model reads 4-D masks; others
    (ALiBi) leave something else of padding in a static cache.

    A static cache that nobody holds is a matter of where keys and values are stored. Rounded ones make another text, and what
    is kept off the device was not to lie on it.
    """
    kind = type(cache).__name__
    if getattr(cache, "offloading", False):
        return f"{name}: a {kind} that is offloaded saves memory which drafting would need"
    if type(cache) is StaticCache and not getattr(cache, "_is_user_defined", False):
        states = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
        return (
            f"{name}: a {kind} of this model is not filled here" if handed_back and (states or not by_masks) else None
        )
    if type(cache) is not DynamicCache:
        return f"{name}: a {kind} cannot be rewound here; a DynamicCache can, and so can no cache_implementation at all"
    if has_uncounted_states(cache):
        return f"{name}: states without keys and values don't say how many tokens they have read"
    return None


def _reads_anew(
    model: Any, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> str | None:
    """Why a call cannot be assisted in which the target would drop its cache on the way."""
    limit = reads_anew_at(model)
    if limit is None or change_of(model) is None:
        return None
    past, length = model_kwargs.get(cache_name(model_kwargs)), input_ids.shape[1]
    read = 0 if past is None else past.get_seq_length()
    if length < limit < generation_config.max_length or (length >= limit and 0 < read < limit):
        return f"this model reads its text anew at {limit} tokens, where its rotary embedding changes"
    return None


def require_prompt(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
    """Refuse a prompt of no tokens and no embeddings."""
    if input_ids.shape[1] == 0 and model_kwargs.get("inputs_embeds") is None:
        raise ValueError("input_ids: the prompt is empty; give at least one token, such as the tokenizer's bos_token")


def require_rows(cache: Any, rows: int) -> None:
    """Refuse a cache of other rows than the call has. rows: of the call, each prompt as often as it is to be continued."""
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if keys is not None and keys.dim() == 4 and len(keys) != rows:
            raise ValueError(
                f"past_key_values: it holds {len(keys)} rows, and this call has {rows} (num_return_sequences counts); repeat "
                "its rows with batch_repeat_interleave(), or leave one of the two arguments out"
            )


def cache_name(model_kwargs: dict[str, Any]) -> str:
    """What `generate` calls the cache of this model."""
    return next((name for name in _CACHES if model_kwargs.get(name) is not None), _CACHES[0])


def warn_plain(reason: str) -> None:
    warnings.warn(f"Decoding plainly, without drafts: {reason}.", stacklevel=3)
