"""The hook into transformers' `generate`, which replaces its loop over tokens.

The target's own GenerationMixin prepares ids, processors, criteria and cache. Only the sampling loop is replaced, in a class
derived from the target's that shares its attributes. The target's own class and state are not changed.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StaticCache
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from .admission import SET_MODES, cache_name, constants, must_be_plain, require_prompt, require_rows, warn_plain
from .decoding import decode
from .distribution import Distribution
from .drafters import Call
from .engine.cache import SlotCache
from .engine.parts import unwrapped
from .engine.prefetch import prefetching
from .engine.ranks import Ranks, fingerprint
from .engine.recurrent import held, slots_for
from .engine.rope import change_of
from .engine.runner import CachedModel, CallSettings, without_gradients
from .engine.verifiable import masks_of, obstacle_to
from .fast.runner import open_runner
from .lengths.base import Length
from .lossy import LossyTypical
from .report import Recorder
from .text import Text

__all__ = ["CALL", "HookedCall", "hooked"]


@dataclass
class HookedCall:
    """The data that the hook needs about the current `generate`.

    Args:
        model: the pair, which has the `generation_config`, `drafter` and `graphs`.
        start_length: creates the draft length policy's state, given the number of rows and whether the call samples.
        overridden: called with name and value of each setting in the target's config that is ignored.
        recorder, settings, lossy: those of this call.
        reached: whether the hook was reached, which happens in greedy and sampling modes.
    """

    model: Any
    start_length: Callable[[int, bool], Length]
    overridden: Callable[[str, Any], None]
    recorder: Recorder
    settings: CallSettings
    lossy: LossyTypical | None = None
    reached: bool = False


CALL: ContextVar[HookedCall] = ContextVar("assisted_call")


class _GenerateHook:
    """Overrides the method of GenerationMixin that loops over tokens, and the source of its settings."""

    @property
    def generation_config(self) -> GenerationConfig:
        """The target's. An adapter's wrapper may have one that differs from the inner model's."""
        return CALL.get().model.generation_config

    def _prepare_generation_config(self: Any, *args: Any, **kwargs: Any) -> tuple[GenerationConfig, dict[str, Any]]:
        """Ignore transformers' own drafting methods in the model's config, in favor of this model's."""
        prepared, others = super()._prepare_generation_config(*args, **kwargs)  # type: ignore[misc]
        for name in SET_MODES:
            value = getattr(prepared, name, None)
            if value is not None and value is not False:
                setattr(prepared, name, None)
                CALL.get().overridden(name, value)
        return prepared, others

    def _sample(
        self: Any,
        input_ids: torch.LongTensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        tokenizer: Any = None,  # for stop strings, which already have it
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | torch.LongTensor:
        call = CALL.get()
        call.reached = True
        require_prompt(input_ids, model_kwargs)
        drafter, target = call.model.drafter, unwrapped(call.model.target)
        trusted = call.settings.trust_in(target)
        reason = must_be_plain(self, input_ids, generation_config, model_kwargs)
        if synced_gpus:  # fully sharded data parallel: every process has another text
            reason = "every process must run as many forward passes as the others"
        if reason is None:  # asked in every call, because the target may have been moved, cast or patched
            reason = obstacle_to(target, trusted, drafter.run_target)
        if reason is not None:
            call.recorder.ran("plain", reason)
            warn_plain(reason)
            return super()._sample(  # type: ignore[misc]
                input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **model_kwargs
            )
        given = model_kwargs[cache_name(model_kwargs)]
        details = bool(generation_config.return_dict_in_generate)
        wanted = details or getattr(given, "_is_user_defined", False)
        # such models keep tensors of their angles, which must not be inference tensors
        keeps = any(change_of(model) is not None for model in (self, *drafter.models))
        # results are copied outside of this mode, so that callers get ordinary tensors
        mode = torch.no_grad() if keeps else without_gradients(self, *drafter.modules)
        with mode, self._optimize_model_for_decode(), prefetching(self):
            text, target = _extend(
                self,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                streamer,
                given,
                model_kwargs,
                wanted,
            )
            if wanted:
                _read_to_the_end(target, text)
        if streamer is not None:
            streamer.end()
        if wanted:
            _hand_back(target, given, self.config.get_text_config(decoder=True))
        if not details:
            return text.output()
        return GenerateDecoderOnlyOutput(
            sequences=text.output(),
            scores=text.stacked(text.scores) if text.keep_scores else None,
            logits=text.stacked(text.logits) if text.keep_logits else None,
            past_key_values=given,
        )


def _extend(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any,
    given: DynamicCache | StaticCache,
    model_kwargs: dict[str, Any],
    wanted: bool,
) -> tuple[Text, CachedModel]:
    """Read the prompt and run the loop. Returns the finished text, and the target with its KV.

    wanted: whether the caller gets the KV, including that of the prompt's padding.
    """
    call = CALL.get()
    trusted = call.settings.trust_in(unwrapped(call.model.target))
    masks = masks_of(model, trusted)
    attention_mask = model_kwargs.get("attention_mask")
    distribution = Distribution(logits_processor, generation_config.do_sample, call.lossy)
    ranks = call.settings.ranks
    if ranks.several:
        stopping_criteria = _shared_call(ranks, input_ids, stopping_criteria, distribution.do_sample)
    pad = generation_config._pad_token_tensor
    details = generation_config.return_dict_in_generate
    text = Text(
        input_ids,
        stopping_criteria,
        None if pad is None else int(pad),
        streamer,
        keep_scores=bool(details and generation_config.output_scores),
        keep_logits=bool(details and generation_config.output_logits),
    )
    call.recorder.row_tokens = text.row_tokens  # which grows: the report of a running call reads it
    embeddings = model_kwargs.get("inputs_embeds")  # of a prompt whose ids may also be in the text
    further = constants(model_kwargs)
    because = trusted.forward
    if further:
        because = because or f"its forward is given {min(further)}"
    elif embeddings is not None and embeddings.dtype != model.dtype:
        because = because or f"inputs_embeds are {embeddings.dtype}"
    elif not call.settings.fuses:
        because = because or 'fast="eager"'
    if because is not None:
        call.settings.mode = "eager"
        call.recorder.ran("own forward", because)
    width = input_ids.shape[1] if embeddings is None else embeddings.shape[1]
    past = given if isinstance(given, DynamicCache) else None
    if past is not None:
        require_rows(past, text.rows)
    limit = text.max_length + max(0, width - input_ids.shape[1]) + (0 if past is None else held(past))
    cache = slots_for(model, past, text.rows, limit, masks)
    cache.hide(attention_mask)
    model_kwargs[cache_name(model_kwargs)] = cache
    length = call.start_length(text.rows, distribution.do_sample)
    drafter = call.model.drafter
    target = open_runner(model, lambda form: drafter.run_target(form, cache, masks), call.settings, call.model.graphs)
    target.constants = further
    if distribution.lossy is not None:
        _require_possible(distribution, text, target)
    started = time.perf_counter()
    logits = _read_prompt(target, input_ids, generation_config, model_kwargs, wanted)
    positions = model_kwargs.get("position_ids")  # autoregressive decoding continues from the last ones
    cache.begin_rounds(width, None if positions is None else _last_positions(positions, text.rows))
    if max(cache.unpadded) > target.context:
        warn_plain(f"the prompt is longer than the target's context of {target.context} tokens")
    call.recorder.verify_seconds = call.recorder.prompt_seconds = time.perf_counter() - started
    own_mask = None
    if attention_mask is not None and input_ids.shape[1] <= attention_mask.shape[1]:
        own_mask = attention_mask[:, attention_mask.shape[1] - input_ids.shape[1] :]
    drafting = drafter.start(Call(own_mask, distribution.for_draft(), length, text.max_length, target, call.settings))
    decode(target, drafting, text, distribution, length, logits, call.recorder)
    call.recorder.predicted_speedup = length.predicted_speedup
    return text, target


def _shared_call(ranks: Ranks, input_ids: torch.Tensor, criteria: Any, do_sample: bool) -> Any:
    """Check that all processes have the same prompt, and let them draw the same numbers and stop at the same token.

    Returns the stopping criteria. Raises ValueError for different prompts.
    """
    if not all(ranks.agree(fingerprint(input_ids.tolist(), do_sample))):
        raise ValueError(
            f"input_ids: each of {ranks.size} processes has a part of the target, and they were given different prompts or "
            "different values of do_sample; give all of them the same"
        )
    if do_sample and ranks.share_generator(input_ids.device):
        warnings.warn(
            "The processes' random generators had different states; all of them use that of the first one. The target's own "
            "`generate` needs equal states: call torch.manual_seed or transformers.set_seed in every process.",
            stacklevel=2,
        )
    known = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)  # they depend on the text alone
    return StoppingCriteriaList([c if isinstance(c, known) else _AnyRank(c, ranks) for c in criteria])


class _AnyRank(StoppingCriteria):
    """A criterion that may look at a clock: a row stops once it stops in any process."""

    def __init__(self, criterion: Any, ranks: Ranks):
        self.criterion, self.ranks = criterion, ranks

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        own = self.criterion(input_ids, scores, **kwargs)
        stopped = torch.as_tensor(own, device=input_ids.device).expand(len(input_ids))
        return torch.tensor(self.ranks.largest(stopped.tolist()), device=input_ids.device).bool()


def hooked(target: PreTrainedModel) -> Any:
    """The target with our sampling loop: an object of a derived class that shares its attributes."""
    owner = unwrapped(target)
    other: Any = object.__new__(_hooked_class(type(owner)))  # type: ignore[arg-type]
    other.__dict__ = owner.__dict__
    return other


@functools.cache
def _hooked_class(target_class: Any) -> type:
    prepare = target_class.prepare_inputs_for_generation

    @functools.wraps(prepare)  # `generate` reads its signature
    def prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The target's own, but it keeps our slots where the target would drop its cache for a long prompt (Phi-3)."""
        inputs: dict[str, Any] = prepare(self, *args, **kwargs)
        cache = kwargs.get("past_key_values")
        return inputs | {"past_key_values": cache} if isinstance(cache, SlotCache) else inputs

    own = {"__module__": target_class.__module__, "prepare_inputs_for_generation": prepare_inputs}
    return type(target_class.__name__, (_GenerateHook, target_class), own)


def _read_prompt(
    target: CachedModel, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], whole: bool
) -> torch.Tensor:
    """Read the prompt as the target's own `generate` does. Returns the logits after it, [B, 1, V].

    whole: also read the padding before short prompts, whose KV only a caller's next turn may use.
    """
    model: Any = target.model

    tensors = {name: value for name, value in model_kwargs.items() if isinstance(value, torch.Tensor)}
    by_column = all(tensor.shape[:2] == input_ids.shape for tensor in tensors.values())

    def read(rows: list[int], first: int) -> torch.Tensor:
        part: dict[str, Any] = {n: tensor[rows, first:] for n, tensor in tensors.items()} if by_column else {}
        if target.last_only:
            part["last_only"] = True
        output = model._prefill(input_ids[rows, first:], generation_config, {**model_kwargs, **part})
        return output.logits[:, -1:].to(input_ids.device)

    try:
        if whole or not by_column:  # with a caller's past, the mask is longer
            return read(list(range(len(input_ids))), 0)
        return target.by_groups(input_ids.shape[1], read)
    except IndexError as error:
        if input_ids.shape[1] > target.context:
            raise ValueError(
                f"input_ids: the prompt has {input_ids.shape[1]} tokens, but the target's context ends at {target.context}"
            ) from error
        raise


def _last_positions(positions: torch.Tensor, rows: int) -> list[int]:
    """Position of each row's last column. positions: [B or 1, any] int64."""
    return positions[:, -1].expand(rows).tolist()


def _require_possible(distribution: Distribution, text: Text, target: CachedModel) -> None:
    """Raise ValueError for a lossy rule in greedy decoding, or if rows advance in lockstep."""
    if not distribution.do_sample:
        raise ValueError(
            "lossy_typical: greedy decoding has only one correct token; pass do_sample=True, or leave it out"
        )
    if distribution.in_order or text.in_lockstep or (target.in_lockstep and text.rows > 1):
        raise ValueError(
            "lossy_typical: does not work with logits processors, criteria or streamers that must see a batch token by "
            "token, nor with batches of recurrent models; leave it out"
        )


def _read_to_the_end(target: CachedModel, text: Text) -> None:
    """Complete the KV to what transformers' `generate` returns, which includes the end token of a row that ended early and
    the padding after it."""
    target.catch_up()
    target.run_only(list(range(text.rows)))
    cache, shortest, longest = target.cache, min(text.lengths), max(text.lengths)
    if shortest < longest:
        cache.rewind([known - length + shortest for known, length in zip(cache.known, text.lengths, strict=True)])
        target(text.output()[:, shortest - 1 : longest - 1])
        cache.commit([longest - shortest] * text.rows)


def _hand_back(target: CachedModel, given: DynamicCache | StaticCache, config: Any) -> None:
    """Fill the cache that the caller passed or receives from the target's slots."""
    if isinstance(given, DynamicCache):
        windowed = given.layer_class_to_replicate is None
        given.layers = target.cache.to_dynamic(config if windowed else None).layers
        return
    for index, layer in enumerate(target.cache.to_dynamic(None).layers):
        if layer.is_initialized:
            given.update(layer.keys, layer.values, index)
