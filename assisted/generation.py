"""The loop that transformers' `generate` runs in place of its own (`custom_generate`), which is public for this purpose.

transformers prepares ids, processors, criteria and cache, and the loop drafts and verifies. The target is not changed. A call
that cannot be assisted is made again without the loop: then it is the target's own `generate`.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from .calls.admission import lent_to, require_prompt, warn_of_restarts, warn_plain, why_own_forward, why_plain
from .calls.assembly import Assembly, assemble, hand_back, leave, read_prompt, read_to_the_end, running
from .calls.inputs import LoopInputs, Settings
from .calls.words import set_in, setting_of
from .core.host import now
from .core.report import Recorder
from .core.text import Text
from .decoding import decode
from .distribution import Distribution, Draws
from .engine.cross import Encoded
from .engine.libraries import CACHE, forget_prepared, pad_token
from .engine.parts import unwrapped
from .engine.pool import Lent
from .engine.prefetch import prefetching
from .engine.prepared import CallSettings
from .engine.ranks import Ranks, fingerprint
from .engine.runner import CachedModel
from .engine.session import Session
from .lengths.base import Length

_OTHER_MODE = "this generation mode is neither greedy nor sampling"
_MODES = ("greedy_search", "sample")


class _Plainly(Exception):
    """Ends a call that has to be made again without drafts. Its text is the reason."""


@dataclass
class Generation:
    """One assisted call of `generate`."""

    pair: Any  # has the target, the `generation_config`, the `drafter` and the `graphs`
    # creates the draft length policy's state, given the number of rows and whether the call samples
    start_length: Callable[[int, bool], Length]
    # called with name and value of each setting in the target's config that is ignored
    ignored: Callable[[str, Any], None]
    # recorder, settings, asks: those of this call
    recorder: Recorder
    settings: CallSettings
    asks: Settings
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
                LoopInputs(model, input_ids, logits_processor, stopping_criteria, generation_config, kwargs, encoded)
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

    def _loop(self, inputs: LoopInputs) -> Any:
        """The output of a prepared call, decoded with drafts. Raises `_Plainly` if that cannot be done."""
        if inputs.config.get_generation_mode() not in _MODES:
            raise _Plainly(_OTHER_MODE)
        require_prompt(inputs)
        model, drafter, settings = inputs.model, self.pair.drafter, self.settings
        if (because := why_own_forward(inputs, settings)) is not None:
            settings.mode = "eager"
            self.recorder.ran("own forward", because)
        if (reason := why_plain(inputs, drafter.needs, settings, len(inputs.ids))) is not None:
            raise _Plainly(reason)
        warn_of_restarts(inputs, settings)
        given, do_sample = inputs.cache, inputs.config.do_sample
        draws = Draws(len(inputs.ids)) if settings.bits and do_sample else None
        state = torch.get_rng_state()  # a drafter's own draws must not change those of the next call
        with lent_to(inputs, self.asks.sessions, settings) as lent:
            with running(model, drafter), prefetching(model, settings.note):
                call = self._assembled(inputs, Distribution(inputs.processors, do_sample, self.asks.lossy, draws), lent)
                kept = self._decode(call, lent)
                if settings.bits:
                    torch.set_rng_state(state)
                if inputs.returns_cache or lent is not None:
                    read_to_the_end(call.target, call.text)
            if self._streamer is not None:
                self._streamer.end()
            if inputs.returns_cache:
                hand_back(call, kept, given)
            if lent is not None:
                leave(call, kept, lent)
        return _output(call.text, inputs, given)

    def _assembled(self, inputs: LoopInputs, distribution: Distribution, lent: Lent | None) -> Assembly:
        """The call put together, with its text, in the slots of the session that was lent, or of the caller's."""
        config, settings, criteria = inputs.config, self.settings, inputs.criteria
        if settings.ranks.several:
            criteria = _shared_call(settings.ranks, inputs.ids, criteria, distribution.do_sample)
        details = config.return_dict_in_generate
        text = Text(
            inputs.ids,
            criteria,
            pad_token(config),
            self._streamer,
            keep_scores=bool(details and config.output_scores),
            keep_logits=bool(details and config.output_logits),
        )
        self.recorder.follow(text.row_tokens, settings.warnings)  # both grow: the report of a running call reads them
        past = inputs.cache if isinstance(inputs.cache, DynamicCache) else None
        length = self.start_length(text.rows, distribution.do_sample)
        past = past if lent is None else lent.session
        call = assemble(self.pair, inputs, settings, text, distribution, length, past)
        self.recorder.cached_tokens, self.recorder.passes = call.known, call.passes
        if distribution.lossy is not None:
            _require_possible(distribution, text, call.target)
        return call

    def _decode(self, call: Assembly, lent: Lent | None) -> tuple[Any, Any]:
        """Read the prompt and run the loop. Returns what a session keeps of the drafts."""
        started, spent = now(), self.settings.spent_once
        logits = read_prompt(call, lent)
        longest, context = max(call.target.cache.unpadded), call.target.context
        if longest > context:
            warn_plain(f"the prompt is longer than the target's context of {context} tokens")
        seconds = now(call.target.device) - started - (self.settings.spent_once - spent)
        self.recorder.read_prompt(seconds)
        room = call.text.room - 1
        call.length.prompt_read(room, seconds, call.target.passes.rounding(call.text.rows), is_short=longest <= room)
        drafting = call.drafting() if self.asks.drafts else call.guarded(None)
        with call.distribution.matching(call.text):
            decode(call.target, drafting, call.text, call.distribution, call.length, logits, self.recorder)
        self.recorder.predicted_speedup = call.length.predicted_speedup
        self.recorder.state_bytes = call.target.cache.state_bytes
        return call.kept_by(drafting)


def _output(text: Text, inputs: LoopInputs, given: Any) -> Any:
    """What `generate` returns. given: the cache."""
    if not inputs.config.return_dict_in_generate:
        return text.output()
    output: Any = GenerateDecoderOnlyOutput if inputs.encoded is None else GenerateEncoderDecoderOutput
    return output(
        sequences=text.output(),
        scores=text.stacked(text.scores) if text.keep_scores else None,
        logits=text.stacked(text.logits) if text.keep_logits else None,
        **{CACHE: given if inputs.encoded is None else inputs.encoded.cache},
    )


def read_plainly(model: Any, inputs: tuple[Any, ...], config: GenerationConfig | None, kwargs: dict[str, Any]) -> Any:
    """The output of the target's own `generate`, whose arguments these are. A session among them knows what it has read."""

    session = kwargs.get(CACHE)
    given = (kwargs, vars(config or model.generation_config))
    if isinstance(session, Session) and any((one.get("num_beams") or 1) > 1 for one in given):
        kwargs, session = {**kwargs, CACHE: None}, None  # transformers repeats no rows of a cache for its beams
    prompt = next((one for one in (*inputs, *map(kwargs.get, ("input_ids", "inputs_embeds"))) if one is not None), None)
    if isinstance(session, Session) and prompt is not None:
        session.require_rows(len(prompt) * next((n for one in given if (n := one.get("num_return_sequences"))), 1))

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
