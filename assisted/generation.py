"""The loop that transformers' `generate` runs in place of its own (`custom_generate`), which is public for this purpose.

transformers prepares ids, processors, criteria and cache, and the loop drafts and verifies. The target is not changed. A call
that cannot be assisted is made again without the loop: then it is the target's own `generate`.
"""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from .admission import (
    beside_text,
    cache_name,
    constants,
    lent_to,
    must_be_plain,
    require_prompt,
    require_rows,
    set_in,
    setting_of,
    warn_plain,
)
from .decoding import decode
from .distribution import Distribution, Draws
from .drafters import Call, Drafting
from .drafters.grammar import guided
from .drafters.guarded import guard
from .engine.cache import SlotCache
from .engine.clock import now
from .engine.cross import Encoded
from .engine.libraries import (
    CACHE,
    forget_prepared,
    is_of_caller,
    optimized_for_decode,
    pad_token,
    prefill,
    with_prompt_of,
    without_gradients,
)
from .engine.parts import unwrapped
from .engine.pool import Lent, SessionPool
from .engine.prefetch import prefetching
from .engine.prepared import CallSettings
from .engine.ranks import Ranks, fingerprint
from .engine.recurrent import slots_for, target_runner
from .engine.rope import change_of
from .engine.runner import CachedModel
from .engine.session import Session, can_go_on, go_on
from .engine.states import held
from .engine.verifiable import masks_of, mixes_tokens, obstacle_to
from .fast.fused import prepare, with_same_bits
from .lengths.base import Length
from .lossy import LossyTypical
from .report import Recorder
from .text import Text

_OTHER_MODE = "this generation mode is neither greedy nor sampling"
_MODES = ("greedy_search", "sample")


class _Plainly(Exception):
    """Ends a call that has to be made again without drafts. Its text is the reason."""


@dataclass
class Prepared:
    """What transformers prepared for a loop over tokens.

    Args:
        model: the target without an adapter's wrapper.
        input_ids: [B, P] int64, the prompt, which is empty beside `inputs_embeds`.
        processors, criteria: lists of transformers' logits processors and stopping criteria.
        config: the settings of the call.
        kwargs: arguments of the model's forward, with the cache. Of an encoder-decoder, those of its decoder.
        encoded: of an encoder-decoder, what its encoder has read.
    """

    model: Any
    input_ids: torch.Tensor
    processors: Any
    criteria: Any
    config: GenerationConfig
    kwargs: dict[str, Any]
    encoded: Encoded | None = None

    @property
    def cache(self) -> DynamicCache | StaticCache:
        """The caller's cache, or the one that transformers made. Of an encoder-decoder, that of its self-attention."""
        found: DynamicCache | StaticCache = self.kwargs[cache_name(self.kwargs)]
        return found

    @property
    def returns_cache(self) -> bool:
        """Whether the caller gets the KV, including that of the prompt's padding."""
        given = self.cache if self.encoded is None else self.encoded.cache
        return bool(self.config.return_dict_in_generate) or is_of_caller(given)


@dataclass
class Generation:
    """One assisted call of `generate`.

    Args:
        pair: has the target, the `generation_config`, the `drafter` and the `graphs`.
        start_length: creates the draft length policy's state, given the number of rows and whether the call samples.
        ignored: called with name and value of each setting in the target's config that is ignored.
        recorder, settings, lossy, sessions: those of this call.
        drafts: whether to draft at all.
    """

    pair: Any
    start_length: Callable[[int, bool], Length]
    ignored: Callable[[str, Any], None]
    recorder: Recorder
    settings: CallSettings
    lossy: LossyTypical | None = None
    sessions: SessionPool | None = None
    drafts: bool = True
    _streamer: Any = field(default=None, init=False)
    _reached: bool = field(default=False, init=False)

    def run(self, inputs: Any, generation_config: GenerationConfig | None, kwargs: dict[str, Any]) -> Any:
        """The output of `generate`, whose arguments these are."""
        model = unwrapped(self.pair.target)
        generation_config, kwargs = self._as_the_pair(model, generation_config, kwargs)
        given, for_loop, healer = self._for_the_loop(generation_config, kwargs)
        runs = model if healer is None else _healing(model, healer)
        self._streamer = kwargs.get("streamer")
        first = () if inputs is None else (inputs,)  # its name differs between models

        def loop(
            _: Any,
            input_ids: torch.Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: GenerationConfig,
            inputs_tensor: Any = None,
            **kwargs: Any,
        ) -> Any:
            self._reached = True
            # both are ids for transformers
            input_ids = input_ids.long() if input_ids.dtype == torch.int32 else input_ids
            encoded, kwargs = Encoded.split(model, kwargs, inputs_tensor)
            return self._loop(
                Prepared(model, input_ids, logits_processor, stopping_criteria, generation_config, kwargs, encoded)
            )

        try:
            output = runs.generate(*first, generation_config=given, custom_generate=loop, **for_loop)
        except _Plainly as plainly:
            reason = str(plainly)
        else:
            if self._reached:
                return output
            reason = _OTHER_MODE
        self.recorder.ran("plain", reason)
        self.settings.note(f"without drafts: {reason}")
        self.recorder.warnings = self.settings.warnings
        warn_plain(reason)
        if not self._reached:
            return output
        if self._streamer is not None:
            kwargs = {**kwargs, "streamer": _AfterThePrompt(self._streamer)}
        forget_prepared(model)
        return read_plainly(model, first, generation_config, kwargs)

    def _as_the_pair(
        self, model: Any, config: GenerationConfig | None, kwargs: dict[str, Any]
    ) -> tuple[GenerationConfig | None, dict[str, Any]]:
        """The call's settings without transformers' own drafting methods, and with those of an adapter's wrapper, which may
        have a config that differs from the inner model's."""
        own = self.pair.generation_config
        if own is not model.generation_config:
            config = GenerationConfig() if config is None else copy.deepcopy(config)
            config.update(**own.to_dict(), defaults_only=True, allow_custom_entries=True)
            kwargs = config.update(**kwargs)
        elsewhere = set_in(own)
        for name, value in elsewhere.items():
            self.ignored(name, value)
        return config, kwargs | dict.fromkeys(elsewhere)

    def _for_the_loop(
        self, config: GenerationConfig | None, kwargs: dict[str, Any]
    ) -> tuple[GenerationConfig | None, dict[str, Any], Any]:
        """The same settings, without the stop strings, for which transformers needs a tokenizer that it doesn't pass on to a
        loop; and the tokenizer that heals the prompt's last token, if one is to."""
        tokenizer = kwargs.get("tokenizer")
        if tokenizer is None:
            return config, kwargs, None

        setting = functools.partial(setting_of, kwargs, config, self.pair.generation_config)
        changed: dict[str, Any] = {}
        if (strings := setting("stop_strings")) is not None:
            criteria = kwargs.get("stopping_criteria") or []
            changed["stop_strings"] = None
            if not any(type(criterion) is StopStringCriteria for criterion in criteria):  # a caller's goes first
                criteria = [*criteria, StopStringCriteria(tokenizer, strings)]
            changed["stopping_criteria"] = StoppingCriteriaList(criteria)
        return config, kwargs | changed, tokenizer if setting("token_healing") else None

    def _loop(self, call: Prepared) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Decode a prepared call with drafts. Raises `_Plainly` if that cannot be done."""
        if call.config.get_generation_mode() not in _MODES:
            raise _Plainly(_OTHER_MODE)
        require_prompt(call.input_ids, call.kwargs)
        drafter, model = self.pair.drafter, call.model
        reason = must_be_plain(model, call.input_ids, call.config, call.kwargs)
        if reason is None:  # asked in every call, because the target may have been moved, cast or patched
            trusted = self.settings.trust_in(model)
            reason = obstacle_to(model, trusted, drafter.needs) or mixes_tokens(model, trusted, self.settings.note)
        if reason is not None:
            raise _Plainly(reason)
        given, wanted = call.cache, call.returns_cache
        # such models keep tensors of their angles, which must not be inference tensors
        keeps = any(change_of(one) is not None for one in (model, *drafter.models))
        # results are copied outside of this mode, so that callers get ordinary tensors
        mode = torch.no_grad() if keeps else without_gradients(model, *drafter.modules)
        with lent_to(call.model, call.input_ids, call.kwargs, self.sessions, self.settings) as lent:
            with mode, optimized_for_decode(model), prefetching(model, self.settings.note):
                text, target, drafting = self._extend(call, lent)
                if wanted or lent is not None:
                    _read_to_the_end(target, text)
            if self._streamer is not None:
                self._streamer.end()
            if wanted:
                beside = "inputs_embeds" in call.kwargs or beside_text(call.kwargs)
                ids = None if beside else text.output()
                whole = isinstance(given, Session) and given.is_read_whole
                if not isinstance(given, Session) or not whole or ids is None or not _holds(target, ids):
                    _hand_back(target, given, model.config.get_text_config(decoder=True))
                elif can_go_on(target.cache):
                    given.keep(target.cache, ids, (drafter, drafting))
                else:
                    given.keep_copy(target.cache, ids, None, call.kwargs.get("attention_mask"))
                if call.encoded is not None:
                    call.encoded.hand_back()
            if lent is not None and _holds(target, read := text.output()):
                lent.keep(target.cache, read, (drafter, drafting))
        if not call.config.return_dict_in_generate:
            return text.output()
        output: Any = GenerateDecoderOnlyOutput if call.encoded is None else GenerateEncoderDecoderOutput
        return output(
            sequences=text.output(),
            scores=text.stacked(text.scores) if text.keep_scores else None,
            logits=text.stacked(text.logits) if text.keep_logits else None,
            **{CACHE: given if call.encoded is None else call.encoded.cache},
        )

    def _extend(self, call: Prepared, lent: Lent | None) -> tuple[Text, CachedModel, Drafting | None]:
        """Read the prompt and run the loop. Returns the finished text, the target with its KV, and the drafting unless it
        failed."""
        model, input_ids, config, settings = call.model, call.input_ids, call.config, self.settings
        trusted = settings.trust_in(model)
        attention_mask = call.kwargs.get("attention_mask")
        draws = Draws(input_ids.shape[0]) if settings.bits and config.do_sample else None
        state = torch.get_rng_state()  # a drafter's own draws must not change those of the next call
        distribution = Distribution(call.processors, config.do_sample, self.lossy, draws)
        criteria, ranks = call.criteria, settings.ranks
        if ranks.several:
            criteria = _shared_call(ranks, input_ids, criteria, distribution.do_sample)
        details = config.return_dict_in_generate
        text = Text(
            input_ids,
            criteria,
            pad_token(config),
            self._streamer,
            keep_scores=bool(details and config.output_scores),
            keep_logits=bool(details and config.output_logits),
        )
        # both grow: the report of a running call reads them
        self.recorder.follow(text.row_tokens, settings.warnings)
        embeddings = call.kwargs.get("inputs_embeds")  # of a prompt whose ids may also be in the text
        further = constants(call.kwargs)
        because = trusted.forward
        if further:
            because = because or f"its forward is given {min(further)}"
        elif embeddings is not None and embeddings.dtype != model.dtype:
            because = because or f"inputs_embeds are {embeddings.dtype}"
        elif not settings.fuses:
            because = because or 'fast="eager"'
        if because is not None:
            settings.mode = "eager"
            self.recorder.ran("own forward", because)
        masks = masks_of(model, trusted, settings.fuses)
        if (
            not masks.trees
            and (reason := obstacle_to(model, trusted, self.pair.drafter.needs, settings.fuses)) is not None
        ):
            raise _Plainly(reason)  # its layers would have to run in another way than in this call
        width = input_ids.shape[1] if embeddings is None else embeddings.shape[1]
        past = call.cache if isinstance(call.cache, DynamicCache) else None
        past = past if lent is None else lent.session
        session = past if isinstance(past, Session) else None
        settings.outlives = session is not None
        if session is not None and session.in_slots:
            known = session.get_seq_length()
            cache = session.go_on(text.rows, text.max_length)
        else:
            if past is not None:
                require_rows(past, text.rows)
            known = 0 if past is None else held(past)
            limit = text.max_length + max(0, width - input_ids.shape[1]) + known
            cache = slots_for(model, past, text.rows, limit, masks)
        self.recorder.cached_tokens = known
        cache.hide(attention_mask)
        length = self.start_length(text.rows, distribution.do_sample)
        drafter = self.pair.drafter
        prepared = prepare(model, settings)
        prepared = with_same_bits(prepared) if settings.bits else prepared
        prepared = prepared if call.encoded is None else call.encoded.around(prepared)
        target = target_runner(prepared, cache, masks, drafter.needs)
        self.recorder.passes = self.pair.graphs.serve(target, model, settings).runs
        target.constants = further
        # the KV that a caller gets includes the padding of rows that end early, and states can't go back to read it
        target.in_lockstep |= drafter.needs.lockstep or (call.returns_cache and not cache.can_rewind)
        if distribution.lossy is not None:
            _require_possible(distribution, text, target)
        started = now()
        if call.encoded is not None:
            logits = target.prefill(input_ids, attention_mask)
        else:
            logits = _read_in_parts(target, call, session if lent is None else lent)
        positions = call.kwargs.get("position_ids")  # autoregressive decoding continues from the last ones
        cache.begin_rounds(width, None if positions is None else _last_positions(positions, text.rows))
        if max(cache.unpadded) > target.context:
            warn_plain(f"the prompt is longer than the target's context of {target.context} tokens")
        self.recorder.read_prompt(now() - started)
        own_mask = None
        if attention_mask is not None and input_ids.shape[1] <= attention_mask.shape[1]:
            own_mask = attention_mask[:, attention_mask.shape[1] - input_ids.shape[1] :]
        earlier, shared = _earlier(session, drafter)
        started_by = Call(
            own_mask,
            distribution.for_draft(),
            length,
            text.max_length,
            target,
            settings,
            earlier=earlier,
            shared=shared,
            forks=session is not None and session.forks,
            states=target.states,
            encoded=call.encoded,
        )
        own = around = None
        if self.drafts:
            own, tokenizer = drafter.start(started_by), getattr(self.pair, "tokenizer", None)
            around, length = guided(own, length, distribution, tokenizer, drafter.needs.split)
        drafting = guard(around, settings, logits.shape[-1], text, distribution.do_sample)
        with distribution.matching(text):
            decode(target, drafting, text, distribution, length, logits, self.recorder)
        if settings.bits:
            torch.set_rng_state(state)
        self.recorder.predicted_speedup, self.recorder.state_bytes = length.predicted_speedup, cache.state_bytes
        return text, target, None if drafting.drafting is None else own


def read_plainly(model: Any, inputs: tuple[Any, ...], config: GenerationConfig | None, kwargs: dict[str, Any]) -> Any:
    """The output of the target's own `generate`, whose arguments these are. A session among them knows what it has read."""

    session = kwargs.get(CACHE)
    given = (kwargs, vars(config or model.generation_config))
    if isinstance(session, Session) and any((one.get("num_beams") or 1) > 1 for one in given):
        kwargs, session = {**kwargs, CACHE: None}, None  # transformers repeats no rows of a cache for its beams

    def run() -> Any:
        return model.generate(*inputs, generation_config=config, **kwargs)

    return session.read_by(run) if isinstance(session, Session) else run()


def _healing(model: Any, tokenizer: Any) -> Any:
    """The same model as another object, whose `generate` lets this tokenizer heal the prompt, before it counts lengths."""
    other = copy.copy(model)
    vars(other)["heal_tokens"] = lambda input_ids, _=None: model.heal_tokens(input_ids, tokenizer)
    return other


class _AfterThePrompt(BaseStreamer):
    """A streamer that has the prompt already."""

    def __init__(self, streamer: Any):
        self.streamer, self.has_prompt = streamer, False

    def put(self, value: Any) -> None:
        if self.has_prompt:
            self.streamer.put(value)
        self.has_prompt = True

    def end(self) -> None:
        self.streamer.end()


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
    return StoppingCriteriaList([c if type(c) in known else _AnyRank(c, ranks) for c in criteria])


class _AnyRank(StoppingCriteria):
    """A criterion that may look at a clock: a row stops once it stops in any process."""

    def __init__(self, criterion: Any, ranks: Ranks):
        self.criterion, self.ranks = criterion, ranks

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        own = self.criterion(input_ids, scores, **kwargs)
        stopped = torch.as_tensor(own, device=input_ids.device).expand(len(input_ids))
        return torch.tensor(self.ranks.largest(stopped.tolist()), device=input_ids.device).bool()


def _read_prompt(target: CachedModel, call: Prepared) -> torch.Tensor:
    """Read the prompt into the target's slots as its own `generate` does. Returns the logits after it, [B, 1, V].

    If the caller gets the KV, the padding before short prompts is read as well: only the caller's next turn may use it.
    """
    model, input_ids = _OverSlots(target.model), call.input_ids
    kwargs = call.kwargs | {cache_name(call.kwargs): target.cache}
    tensors = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
    by_column = all(tensor.shape[:2] == input_ids.shape for tensor in tensors.values())

    def read(rows: list[int], first: int) -> torch.Tensor:
        part: dict[str, Any] = {n: tensor[rows, first:] for n, tensor in tensors.items()} if by_column else {}
        if target.last_only:
            part["last_only"] = True
        output = prefill(type(target.model), model, input_ids[rows, first:], call.config, {**kwargs, **part})
        return output.logits[:, -1:].to(input_ids.device)

    try:
        # with a caller's past, the mask is longer; of a prompt in chunks, only the last chunk's hidden states are there
        whole = call.returns_cache and not target.settings.bits  # then a cache has no keys and values of padding
        if whole or not by_column or getattr(call.config, "prefill_chunk_size", None) is not None:
            return read(list(range(len(input_ids))), 0)
        return target.by_groups(input_ids.shape[1], read)
    except IndexError as error:
        if input_ids.shape[1] > target.context:
            raise ValueError(
                f"input_ids: the prompt has {input_ids.shape[1]} tokens, but the target's context ends at {target.context}"
            ) from error
        raise


def _read_in_parts(target: CachedModel, call: Prepared, marks: Session | Lent | None) -> torch.Tensor:
    """As `_read_prompt`, and keep the states after parts of the prompt, where slots can't go back to them."""
    cache, taps, hidden = target.cache, target.prepared.taps.values(), []
    if marks is None or cache.can_rewind or target.settings.bits:
        return _read_prompt(target, call)
    for end in marks.ends:
        tensors = {name: value[..., :end] for name, value in call.kwargs.items() if isinstance(value, torch.Tensor)}
        part = replace(call, input_ids=call.input_ids[:, :end], kwargs=call.kwargs | tensors)
        _read_prompt(target, replace(part, config=with_prompt_of(end, call.config)))
        hidden.append([tap.hidden for tap in taps])
        cache.begin_rounds(end)
        marks.mark(cache, call.input_ids[:, : end + 1])
        go_on(cache, end, cache.limit)
    logits = _read_prompt(target, call)
    if hidden:
        for tap, *parts in zip(taps, *hidden, strict=True):
            tap.hidden = torch.cat([*parts, tap.hidden], 1)
    return logits


class _OverSlots:
    """A model that keeps our slots where its `generate` would drop its cache for a long prompt (Phi-3)."""

    def __init__(self, model: Any):
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        return self._model(**inputs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = self._model.prepare_inputs_for_generation(*args, **kwargs)
        cache = kwargs.get(CACHE)
        return inputs | {CACHE: cache} if isinstance(cache, SlotCache) else inputs


def _last_positions(positions: torch.Tensor, rows: int) -> list[int]:
    """Position of each row's last column. positions: [B or 1, any] int64, or [any, B or 1, any] with equal last columns."""
    return positions.view(-1, *positions.shape[-2:])[-1, :, -1].expand(rows).tolist()


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


def _earlier(session: Session | None, drafter: Any) -> tuple[weakref.ref[Drafting] | None, int]:
    """The drafting of the call before, by the same drafter, and how many tokens of its text are this text's."""
    if session is None or session.kept is None:
        return None, 0
    by, drafting = session.kept
    return (None if drafting is None or by is not drafter else weakref.ref(drafting)), session.shared


def _holds(target: CachedModel, ids: torch.Tensor) -> bool:
    """Whether a target's slots hold a text from its first token on."""
    return all(known == ids.shape[1] - 1 for known in target.cache.known)


def _hand_back(target: CachedModel, given: DynamicCache | StaticCache, config: Any) -> None:
    """Fill the cache that the caller passed or receives from the target's slots."""
    if isinstance(given, DynamicCache):
        windowed = given.layer_class_to_replicate is None
        given.layers = target.cache.to_dynamic(config if windowed else None).layers
        return
    for index, layer in enumerate(target.cache.to_dynamic(None).layers):
        if layer.is_initialized:
            given.update(layer.keys, layer.values, index)
