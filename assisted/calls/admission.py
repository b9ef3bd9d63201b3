"""Which calls of `generate` fall back to autoregressive decoding, with a warning, which can't take over what earlier calls
have read, and which inputs raise an error.

Knows caches, positions and what goes into a forward pass beside the text; knows nothing of how a call runs.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ..core.drafts import DraftingStopped
from ..engine.hooks import is_offloaded
from ..engine.libraries import CACHE, is_of_caller
from ..engine.needs import Needs
from ..engine.parts import takes, unwrapped
from ..engine.pool import Lent, SessionPool
from ..engine.prepared import CallSettings
from ..engine.ranks import waits_for_others
from ..engine.session import Session, is_plain, using
from ..engine.states import has_uncounted_states, held
from ..engine.traits import SLOTS, STATES, Traits, change_of, reads_anew_at, turns_by_section
from ..engine.trust import Trust, blamed
from ..engine.verifiable import masks_of, mixes_tokens, obstacle_to, obstacle_to_reading_on
from ..fast.sources import Source
from ..loading.adapters import mixes_adapters, outside_layers
from .inputs import LoopInputs, beside_text
from .words import setting_of

MIXED = "adapter_names gives every row an adapter of its own"
_OF_PICTURES = {  # without effect after the prompt: they describe pictures, and which of the prompt's tokens are theirs
    *("image_grid_thw", "image_position_ids", "image_sizes", "mm_token_type_ids", "pixel_attention_mask"),
    *("second_per_grid_ts", "video_grid_thw"),
}


_RAW = {"audio", "audios", "image", "images", "video", "videos"}
_READ = {"image_grid_thw", "image_sizes", "input_features", "pixel_values", "pixel_values_videos", "video_grid_thw"}


def _mask_of(ids: Any, kwargs: dict[str, Any], config: GenerationConfig | None, own: GenerationConfig) -> Any:
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


def _padding_at_end(mask: Any) -> str | None:
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


def why_outside_the_loop(target: Any, kwargs: dict[str, Any], settings: CallSettings) -> str | None:
    """Why the target's own `generate` must run a call; None if it may ask for a loop. kwargs: of the call."""
    if kwargs.get("adapter_names") is not None:
        return MIXED
    given = {type(value) for value in kwargs.values() if isinstance(value, torch.Tensor)}
    return outside_layers(target) or settings.trust_in(target).between or blamed(given)


def going_on(
    target: Any,
    prompt: Any,
    config: GenerationConfig | None,
    own: GenerationConfig,
    kwargs: dict[str, Any],
    settings: CallSettings,
    drafts: bool,
) -> AbstractContextManager[None]:
    """A context for the session of a call, if its arguments have one. They are changed as the session needs it.

    prompt: [B, P] int64 or None. config, kwargs: of the call. own: the model's own config. drafts: whether
    the call drafts. Raises ValueError if a prompt then ends in padding.
    """
    traits, model = Traits.of(target), unwrapped(target)
    if isinstance(kwargs.get(CACHE), Session):
        if setting_of(kwargs, config, None, "use_cache") is False:
            raise ValueError(
                "use_cache: False leaves a session nothing to keep; leave out past_key_values or use_cache"
            )
        kwargs["use_cache"] = True  # without it, as in MPT's config, every forward pass would add the whole text
        if traits.cache_argument != CACHE:
            settings.note(
                "past_key_values: a session's text is read whole: states do not show how many tokens they have read"
            )
            del kwargs[CACHE]
    others = any(kwargs.get(name) is not None for name in ("inputs_embeds", "position_ids"))
    if traits.reads:
        others |= any(isinstance(value, torch.Tensor) for value in beside_text(kwargs).values())
    ids, resumes = None if others else prompt, True
    if isinstance(kwargs.get(CACHE), Session):
        reason = obstacle_to_reading_on(model, settings.trust_in(model))
        resumes = reason is None
        if not resumes:
            settings.note(f"past_key_values: a session's text is read whole in every call: {reason}")
    mask = _mask_of(ids, kwargs, config, own)
    if not traits.crosses and (padded := _padding_at_end(mask)) is not None:
        if drafts:
            raise ValueError(f"{padded}, or pass assisted=False for what the target's own generate makes of it")
        settings.note(padded)
    change = change_of(model) if isinstance(kwargs.get(CACHE), Session) else None
    return using(kwargs.get(CACHE), model, ids, mask, resumes, change)


def why_plain(inputs: LoopInputs, needs: Needs, settings: CallSettings, rows: int) -> str | None:
    """Why a call has to be decoded without drafts; None if it can be assisted. Asked in every call, because the target may have
    been moved, cast or patched since the last one. needs: of the call's drafters. rows: the most that a forward pass has."""
    if (reason := _of_inputs(inputs)) is not None:
        return reason
    model, trusted = inputs.model, settings.trust_in(inputs.model)
    reason = obstacle_to(model, trusted, needs) or mixes_tokens(model, trusted, settings.note, rows)
    if reason is None and not settings.fuses and not masks_of(model, trusted, False).trees:
        return obstacle_to(
            model, trusted, needs, False
        )  # its layers would have to run in another way than in this call
    return reason


def why_own_forward(inputs: LoopInputs, settings: CallSettings) -> str | None:
    """Why every forward pass must be the model's own; None if parts of it may run in faster forms."""
    if (reason := settings.trust_in(inputs.model).forward) is not None:
        return reason
    if further := inputs.constants:
        return f"its forward is given {min(further)}"
    if inputs.embeddings is not None and inputs.embeddings.dtype != inputs.model.dtype:
        return f"inputs_embeds are {inputs.embeddings.dtype}"
    return None if settings.fuses else 'fast="eager"'


def _of_inputs(inputs: LoopInputs) -> str | None:
    """Why the inputs of a call can't be assisted; None if they can."""
    model, config = inputs.model, inputs.config
    if mixes_adapters(model):
        return MIXED
    if waits_for_others(model):  # each of which has another text
        return "every process must run as many forward passes as the others"
    if model.training and getattr(model, "is_activation_checkpointing", False):
        return "in training mode, activation checkpointing leaves no cache to rewind; call model.eval() first"
    if config.use_cache is False:
        return "use_cache=False leaves no cache to rewind"
    if config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(config, name):
                return f"{name}=True returns the states of one-token forward passes"
    if (lasting := _lasting(inputs)) is not None:
        return f"{lasting} is not text, and would go into every forward pass"
    positions = inputs.kwargs.get("position_ids")
    if positions is None and turns_by_section(model) and inputs.beside:
        return (
            "pictures move the positions of the text after them, and this version of transformers does not say how far"
        )
    if positions is not None:
        read = inputs.known
        if bool((positions[..., read if read < positions.shape[-1] else 0 :] < 0).any()):
            return "position_ids below zero are not positions in a text"
        # four rows: those of the text, which only masks are made of, and three for rotary embeddings
        last = positions[1:, :, -1] if positions.ndim == 3 and len(positions) == 4 else positions[..., -1:]
        if positions.ndim > 3 or (positions.ndim == 3 and bool((last != last[:1]).any())):
            return "position_ids whose dimensions differ at the end of the prompt do not continue as in a text"
    return _cannot_rewind(inputs) or _reads_anew(inputs)


def _lasting(inputs: LoopInputs) -> str | None:
    """An argument beside the text that matters after the prompt; None if there is none.

    The model's own `prepare_inputs_for_generation` shows which ones reach the forward pass over the next token. All others
    reach the prompt only, which is read as `generate` reads it.
    """
    others, traits = inputs.beside, Traits.of(inputs.model)
    if not others:
        return None
    if not traits.reads or traits.crosses:
        return min(others)
    last: dict[str, Any] = {"use_cache": True, "is_first_iteration": False, **others}
    try:
        given = inputs.model.prepare_inputs_for_generation(inputs.ids[:, -1:], **last)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):  # it needs more than a text model
        return min(others)
    return min({name for name in others if given.get(name) is not None} - _OF_PICTURES, default=None)


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


def lent_to(
    inputs: LoopInputs, pool: SessionPool | None, settings: CallSettings
) -> AbstractContextManager[Lent | None]:
    """A context with a session of a pool for one call; with None if there is no pool, or if the call can't use it, which the
    settings then note."""
    if pool is None:
        return nullcontext()
    model, trusted = inputs.model, settings.trust_in(inputs.model)
    reason = _cannot_go_on(inputs, trusted, settings)
    if reason is None:
        try:
            state = _source(inputs, trusted, settings)
            config = model.config.get_text_config(decoder=True)
            # a row copies what it goes on from anyway, and other rows may begin with the same
            return pool.lent(model, state, inputs.ids[0], config, takes_over=not settings.refills)
        except (NotImplementedError, RuntimeError, TypeError) as error:  # packed in a tensor of its own kind
            reason = f"changes of the weights would not be noticed ({type(error).__name__}: {error})"
    settings.note(f"sessions: the prompt was read whole and is not kept: {reason}")
    return nullcontext()


def _source(inputs: LoopInputs, trusted: Trust, settings: CallSettings) -> Source:
    """The target with its weights, which are read once for all texts of the call."""
    if settings.source is None:
        settings.source = Source.of_model(inputs.model, trusted.code)
        settings.read = settings.source.weights  # which the fused model is compared with, too
    found: Source = settings.source
    return found


def _cannot_go_on(inputs: LoopInputs, trusted: Trust, settings: CallSettings) -> str | None:
    """Why a call can't go on from another text's keys and values; None if it can."""
    model, ids = inputs.model, inputs.ids
    if len(ids) > 1:
        return f"its {len(ids)} rows are read together; pass one prompt at a time"
    if inputs.embeddings is not None:
        return "it consists of embeddings"
    if not is_plain(ids, inputs.mask, 1):
        return "it has padding; leave that out"
    positions = inputs.kwargs.get("position_ids")
    if positions is not None and positions[0].tolist() != list(range(ids.shape[1])):
        return "position_ids do not count from 0"
    if settings.bits:
        return "exact='bits' reads every prompt in one way"
    if Traits.of(model).crosses:
        return "an encoder reads every input anew"
    if further := inputs.constants | inputs.beside:
        return f"the model's forward is given {min(further)}"
    if not trusted.is_own or trusted.hooks:
        return trusted.forward or trusted.between or "a hook may change what is read"
    if is_offloaded(model):
        return "changes of offloaded weights would not be noticed"
    if change_of(model) is not None:
        return "the model's rotary angles depend on the length of the text"
    if settings.ranks.several:
        return "several processes might find different texts"
    return obstacle_to_reading_on(model, trusted, settings.refills)


def _cannot_rewind(inputs: LoopInputs) -> str | None:
    """Why slots cannot replace a call's cache; None if they can.

    A static cache that `generate` made can be replaced: it only decides where keys and values are stored. But models that
    don't read 4-D masks (ALiBi) leave other values for padding in it, which the caller may get. A quantized cache changes the
    text, and an offloaded cache saves memory on purpose.
    """
    name = inputs.cache_name
    cache: Any = inputs.kwargs.get(name)
    kind = type(cache).__name__
    if getattr(cache, "offloading", False):
        return f"{name}: an offloaded {kind} saves memory that drafting would need"
    if type(cache) is StaticCache and not is_of_caller(cache):
        states = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
        lacks = inputs.config.return_dict_in_generate and (states or not Traits.of(inputs.model).masks.trees)
        return f"{name}: a {kind} of this model cannot be filled" if lacks else None
    if type(cache) is Session and cache.in_slots:
        return None
    if type(cache) not in (DynamicCache, Session):
        return f"{name}: a {kind} cannot be rewound here; use a DynamicCache, or leave out cache_implementation"
    for part in (cache, *cache.layers):
        held = [value for value in vars(part).values() if callable(value)]  # methods of its own, or kinds of layers
        if not (SLOTS | STATES).issuperset(held if part is cache else [type(part), *held]):
            return f"{name}: slots cannot stand for its {type(part).__name__}, which is not as transformers makes it"
    if has_uncounted_states(cache):
        return f"{name}: states without keys and values do not show how many tokens they have read"
    return None


def _reads_anew(inputs: LoopInputs) -> str | None:
    """Why a call cannot be assisted in which the target would drop its cache and read its text again."""
    limit = reads_anew_at(inputs.model)
    if limit is None or change_of(inputs.model) is None:
        return None
    read, length = inputs.known, inputs.ids.shape[1]
    if length < limit < inputs.config.max_length or (length >= limit and 0 < read < limit):
        return f"this model reads its text again at {limit} tokens, where its rotary embedding changes"
    return None


def warn_of_restarts(inputs: LoopInputs, settings: CallSettings) -> None:
    """Warn of a prompt that the model's own forward reads in parts, although its recurrent layers begin anew in each: the text
    is that of plain `generate` with the same arguments, which differs from the text without them."""
    past, size = inputs.kwargs.get(inputs.cache_name), getattr(inputs.config, "prefill_chunk_size", None)
    if isinstance(past, Session):
        return
    known = held(past) if hasattr(past, "layers") else 0
    new = inputs.width - known
    part = "past_key_values" if known and new > 1 else "prefill_chunk_size" if size and new > size else None
    if part is None:
        return
    if (reason := obstacle_to_reading_on(inputs.model, settings.trust_in(inputs.model))) is not None:
        instead = "pass model.session()" if part == "past_key_values" else "leave it out"
        settings.note(f"{part}: the text differs from the one without it, since in this model {reason}; {instead}")
        warnings.warn(settings.warnings[-1], stacklevel=2)


def require_prompt(inputs: LoopInputs) -> None:
    """Raise ValueError for a prompt without tokens and without embeddings."""
    if inputs.ids.shape[1] == 0 and inputs.embeddings is None:
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


def warn_plain(reason: str) -> None:
    warnings.warn(f"Using autoregressive decoding, without drafts: {reason}.", DraftingStopped, stacklevel=3)
