"""Texts through a batch with a fixed number of rows: a row whose text has ended gets the next one, the others go on.

transformers prepares processors and criteria with a prompt; the rounds are those of `decoding`. Knows drafters by their
interface, and nothing of who asks for a text. A prompt is read into the slots of its row alone, all but its last token, which
the next round reads.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..calls.admission import why_outside_the_loop, why_plain
from ..calls.assembly import assemble, running
from ..calls.costs import CallLengths
from ..calls.inputs import LoopInputs
from ..calls.words import require_numbers, require_own_drafting
from ..core.drafts import Round
from ..core.host import now
from ..core.report import Recorder
from ..decoding import decode
from ..distribution import Distribution, needs_prompt
from ..engine.pool import in_common
from ..engine.prepared import CallSettings
from ..engine.ranks import ranks_of
from ..engine.session import LEAST
from ..engine.traits import Traits, change_of
from ..engine.verifiable import masks_of, obstacle_to_refills
from ..generation import Generation
from ..grammars.processor import grammar_of
from ..methods import Call, Drafting
from .distributions import OfRows
from .reading import Reading, shares
from .texts import Answer, Asked, Rows

_NOT_HERE = {  # arguments of `generate` that belong to a single batch
    "attention_mask": "prompts have no padding here",
    "custom_generate": "leave it out",
    "input_ids": "give the prompts as the first argument",
    "inputs": "give the prompts as the first argument",
    "inputs_embeds": "give token ids",
    "lossy_typical": "leave it out",
    "num_return_sequences": "give the prompt as often",
    "past_key_values": "leave it out",
    "position_ids": "leave it out",
    "return_dict_in_generate": "leave it out",
    "sessions": "leave it out",
    "streamer": "answers come as they end",
}
_OTHERS = "draft with text (suffix, ngram), with a model or with heads"
_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria)


class Preparation(Generation):
    """What transformers prepares for a call, instead of its output."""

    @classmethod
    def of(cls, pair: Any, draft_length: Any, kwargs: dict[str, Any]) -> Preparation:
        """That of a pair's call. kwargs: of `generate`. Raises ValueError for what rows that change their texts cannot run."""
        require_own_drafting(kwargs.get("generation_config"), pair.generation_config, kwargs)
        require_numbers(kwargs.get("generation_config"), pair.generation_config, kwargs)
        asks = pair.settings.of_call(draft_length)
        settings = CallSettings(asks.fast, ranks=ranks_of(pair.target, *pair.drafter.modules))
        if (reason := why_outside_the_loop(pair.target, kwargs, settings)) is not None:
            raise ValueError(f"target: {reason}; generate_many cannot run it, so call generate")
        if asks.exact is not None:
            raise ValueError(f"exact: {asks.exact!r} is not kept by generate_many; call generate, or set exact to None")
        lengths = CallLengths(pair, asks.draft_length, settings.ranks)
        made = cls(pair, lengths.start, pair._warn_ignored, Recorder(pair.watch, started=now()), settings, asks)
        made.lengths = lengths
        return made

    lengths: CallLengths

    def inputs(self, prompt: torch.Tensor, kwargs: dict[str, Any]) -> LoopInputs:
        """What transformers prepares for a prompt, [P] int64. kwargs: of `generate`."""
        others = {name: value for name, value in kwargs.items() if name != "generation_config"}
        others["attention_mask"] = torch.ones_like(prompt[None])
        found: LoopInputs = self.run(prompt[None], kwargs.get("generation_config"), others)
        return found

    def end(self) -> None:
        """The call is over, and is counted."""
        self.settings.over = True
        self.recorder.once_seconds = self.settings.spent_once
        self.lengths.end()
        self.pair._count(self.recorder, self.lengths if self.recorder.tokens else None)

    def _loop(self, inputs: LoopInputs) -> Any:
        if inputs.config.get_generation_mode() not in ("greedy_search", "sample"):
            raise ValueError("num_beams: generate_many is greedy or samples; call generate for other modes")
        return inputs


def generate_many(
    preparation: Preparation, prompts: Iterable[Any], rows: int, kwargs: dict[str, Any]
) -> Iterator[Answer]:
    """See `AssistedModelForCausalLM.generate_many`. kwargs: of `generate`."""
    for name, instead in _NOT_HERE.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: generate_many does not take it; {instead}, or call generate")
    if rows < 1:
        raise ValueError(f"rows: {rows} rows hold no text; give 1 or more")
    device = preparation.pair.device
    waiting = (_ids(prompt, number).to(device) for number, prompt in enumerate(prompts))
    first = next(waiting, None)
    if first is None:
        return iter(())
    inputs = preparation.inputs(first, kwargs)
    batch, numbered = Batch(preparation, inputs, rows), enumerate(itertools.chain([first], waiting))
    distribution = Distribution(inputs.processors, inputs.config.do_sample)

    def take() -> Asked | None:
        number, prompt = next(numbered, (0, None))
        return None if prompt is None else asked_of(inputs, number, prompt, distribution)

    def answers() -> Iterator[Answer]:
        for asked, answer in batch.answers(take):
            if asked.error is not None:
                raise asked.error
            yield answer

    return answers()


CHUNK = 256
"""Tokens of prompts that are read between two rounds, in a batch whose texts somebody is waiting for."""


class Batch:
    """Rows whose texts come and go between rounds.

    Args:
        generation, inputs: of the first text. What depends on the model and the draft holds for all.
        rows: maximum number of texts at a time.
        chunk: of tokens of prompts that are read between two rounds. None reads a prompt at once, and asks no pool.

    Raises ValueError for what cannot run in such rows.
    """

    def __init__(self, generation: Preparation, inputs: LoopInputs, rows: int, chunk: int | None = None):
        pair, settings = generation.pair, generation.settings
        settings.refills = True
        # without a chunk, all texts have the processors of the first one
        _require_possible(inputs if chunk is None else replace(inputs, processors=()), pair, settings)
        self.recorder, self.drafter, self.chunk = generation.recorder, pair.drafter, chunk
        self.pool = None if chunk is None else generation.asks.sessions
        self.free = list(range(rows))
        self.reading: list[Reading] = []
        self.begun: dict[int, Reading] = {}  # by row, the prompt that it holds, also after the end of its text
        self.shares = chunk is None or self.pool is not None  # prompts take over what others have read
        self.waits: Callable[[], bool] = lambda: False
        self.waited = False  # nothing was read of the prompt that came first, since another one was read to its end
        self.distribution = OfRows([None] * rows)
        self.text = text = Rows(
            rows,
            inputs.ids.device,
            lambda: bool(self.reading or (self.free and self.waits())),
            self.distribution.failed,
        )
        self.distribution.give(0, Distribution(inputs.processors, inputs.config.do_sample))  # for drafters that start
        length = generation.start_length(rows, self.distribution.do_sample)
        of_rows = replace(inputs, ids=text.ids, kwargs={inputs.cache_name: inputs.cache})
        self.call = call = assemble(pair, of_rows, settings, text, self.distribution, length)
        call.target.cache.begin_rounds()
        self.drafting = call.drafting()
        _require_renewal(call.own, type(pair.spec).__name__)
        self.distribution.give(0, None)
        self.recorder.row_tokens, self.recorder.warnings = [], settings.warnings
        self.watch, self.recorder.watch = self.recorder.watch, self._watch

    def answers(self, take: Callable[[], Asked | None], waits: Callable[[], bool] = lambda: False) -> Iterator[Any]:
        """Each text with its `Answer`, in the order in which they end.

        take: the next text, if there is one now. waits: asked between rounds whether there is.
        """
        call, text = self.call, self.text
        self.waits = waits
        while True:
            with running(call.inputs.model, self.drafter):
                while self.free and (asked := take()) is not None:
                    self._admit(self.free.pop(0), asked)
                left = list(self._read_on())
                text.ran = False
                decode(call.target, self.drafting, text, self.distribution, call.length, None, self.recorder)
                ended = list(text.take())
                for row, asked, answer in ended:
                    self._end(row, asked, answer)
            if not (ended or left or self.reading or text.asked):
                return
            self.recorder.row_tokens += [text.row_tokens[row] for row, _, _ in ended]
            for asked, answer in [*left, *((asked, answer) for _, asked, answer in ended)]:
                yield asked, answer

    def _admit(self, row: int, asked: Asked) -> None:
        width, context = len(asked.prompt), self.call.target.context
        if width > context:
            raise ValueError(
                f"prompts: number {asked.index} has {width} tokens, but the target's context ends at {context}"
            )
        self.reading.append(Reading(self.call, row, asked, self.pool))
        self._follow(self.reading[-1])

    def _follow(self, one: Reading) -> None:
        """Let a prompt take over what another one has read, or will have, of the tokens with which both begin."""
        prompt, end, source = one.asked.prompt, one.read + LEAST - 1, None
        for other in (*self.reading[: self.reading.index(one)], *self.begun.values()) if self.shares else ():
            has_begun, text = self.begun.get(other.row) is other, other.asked.prompt
            if self.call.target.needs.states:  # which are those of prompts alone, as far as they were read here
                text = text[: 0 if other.known else None]
            elif has_begun:
                text = self.text.ids[other.row, : self.text.lengths[other.row]]
            shared = in_common(prompt[:-1], text[:-1])
            # recurrent states are copied when the other one has read so much and no more
            stops = one.in_parts and other.in_parts and not has_begun and other.read <= shared
            if shared > end and (one.slots.can_rewind or stops):
                end, source = shared, other
        if source is None:
            return
        if self.begun.get(source.row) is source:
            one.take(self.call.target.cache, source.row, end, source.states)
        elif source.read >= end:
            one.take(source.slots, 0, end, source.states)
        else:
            one.after, one.until = source, end

    def _ahead(self, one: Reading) -> int:
        """Tokens of a prompt to be read until it can begin, or until another one can go on that waits for it."""
        return min([one.rest, *(other.until - one.read for other in self.reading if other.after is one)])

    def _read_on(self) -> Iterator[tuple[Asked, Answer]]:
        """Read on in prompts, `chunk` tokens of all. Once one has been read, its first token comes with the next round, before
        others are read on. Returns those that nobody waits for any more."""
        for one in [one for one in self.reading if one.asked.left()]:
            self.reading.remove(one)
            self.free.append(one.row)
            one.lent.close()
            for other in [other for other in self.reading if other.after is one]:
                other.after = None
                self._follow(other)
            yield one.asked, Answer(one.asked.index, one.asked.prompt, len(one.asked.prompt))
        left = self.chunk or sys.maxsize
        while ready := [one for one in self.reading if one.after is None and (left > 0 or not one.rest)]:
            begins = False
            parts = shares([self._ahead(one) for one in ready], left, self.text.rows, self.waited)
            if left:
                self.waited = not parts[0] and ready[0].rest > 0
            for one, part in sorted(zip(ready, parts, strict=True), key=lambda found: self._ahead(found[0])):
                if part or not one.rest:
                    left -= self._read_part(one, part)
                    begins |= part > 0 and not one.rest
            left = 0 if begins and self.chunk is not None else left

    def _read_part(self, one: Reading, most: int) -> int:
        """Read on in a prompt, and begin with its text if that was the end. Returns how many tokens were read."""
        started = now()
        read = one.read_on(most)
        seconds = now() - started
        for recorder in filter(None, (self.recorder, one.asked.recorder)):
            recorder.read_prompt(seconds)
        for other in self.reading:
            if other.after is one and one.read >= other.until:
                other.take(one.slots, 0, other.until, one.states)
        if not one.rest:
            self.reading.remove(one)
            self.begun[one.row] = one
            for recorder in filter(None, (self.recorder, one.asked.recorder)):
                recorder.cached_tokens += one.known + one.shared
                recorder.shared_tokens += one.shared
            self._begin(one.row, one.asked, one.join())
            one.end(self.shares)
        return read

    def _begin(self, row: int, asked: Asked, call: Call) -> None:
        """Begin with a text, of which the target has read all but the last token. call: that of the text alone."""
        self.text.begin(row, asked)
        self.distribution.give(row, asked.distribution)
        self.call.length.renew(row)
        if self.drafting.drafting is not None:
            try:
                self.drafting.drafting.renew(self.text, row, call)
            except Exception as error:
                self.drafting.stop(f"Drafting failed ({type(error).__name__}: {error}); continuing without drafts.")

    def _end(self, row: int, asked: Asked, answer: Answer) -> None:
        """Free a row, and leave what was read to later calls."""
        if asked.recorder is not None:
            asked.recorder.row_tokens = [len(answer.new_tokens)]
        try:
            for grammar in asked.distribution.grammars.values():
                grammar.finish(answer.ids[None], [len(answer.ids)])
        except Exception as error:  # of a library, or of the caller's matcher
            asked.error = asked.error or error
        self.distribution.give(row, None)
        self.free.append(row)
        self.begun[row].leave(answer.ids, self.drafter)

    def _watch(self, round: Round) -> None:
        if self.watch is not None:
            self.watch(round)
        rows = len(round.unfinished)
        for row in round.unfinished:
            if (recorder := self.text.asked[row].recorder) is not None:
                shares = {name: getattr(round, name) / rows for name in ("draft_seconds", "verify_seconds")}
                recorder.see(replace(round, unfinished=[row], **shares))

    def close(self) -> None:
        """Give up what is being written."""
        for one in (*self.reading, *self.begun.values()):
            one.lent.close()


def asked_of(
    inputs: LoopInputs,
    index: int,
    prompt: torch.Tensor,
    distribution: Distribution | None = None,
    written: int = 0,
    **more: Any,
) -> Asked:
    """What is asked of a row.

    inputs: that transformers has prepared. distribution: None makes one of these. written: how many of the prompt's last tokens
    belong to the answer, so that grammars begin before them. The others: see `Asked`.

    Raises ValueError for processors that must see the tokens of all rows in order, and for criteria that may depend on others.
    """
    if distribution is None:
        distribution = Distribution(inputs.processors, inputs.config.do_sample)
    distribution = distribution.anew()
    _require_own_criteria(inputs)
    if distribution.in_order:
        raise ValueError("logits_processor: rows cannot come and go with one that is not known; call generate")
    for grammar in distribution.grammars.values():
        grammar.begin(prompt[None, : len(prompt) - written], Traits.of(inputs.model).vocabulary)
    new, most, width = inputs.config.max_new_tokens, inputs.config.max_length, len(prompt)
    ends = {t for one in inputs.criteria if type(one) is EosTokenCriteria for t in one.eos_token_id.flatten().tolist()}
    criteria = StoppingCriteriaList([one for one in inputs.criteria if type(one) is StopStringCriteria])
    limit = width + new if new is not None else max(most, width + 1)
    return Asked(index, prompt, limit, distribution, frozenset(ends), criteria or None, inputs=inputs, **more)


def _require_possible(inputs: LoopInputs, pair: Any, settings: CallSettings) -> None:
    """Raise ValueError for targets, drafts, processors and criteria that can't change texts row by row."""
    model, needs = inputs.model, pair.drafter.needs
    trusted = settings.trust_in(model)
    reason = why_plain(inputs, needs, settings, 2) or trusted.forward or obstacle_to_refills(model, trusted)
    if reason is None and (further := inputs.constants):
        reason = f"the model's forward is given {min(further)}"
    if reason is None:
        is_lockstep = not masks_of(model, trusted, settings.fuses, True).trees or change_of(model) is not None
        reason = "the target's rows advance in lockstep" if is_lockstep or settings.ranks.several else None
    if reason is not None:
        raise ValueError(f"target: {reason}; generate_many cannot run it, so call generate with batches")
    if needs.lockstep:
        raise ValueError(f"draft: the rows of {type(pair.spec).__name__} advance in lockstep; {_OTHERS}")
    if inputs.config.prefill_chunk_size is not None:  # which some layers' states depend on
        raise ValueError("prefill_chunk_size: rows read their prompts in parts of their own; leave it out")
    for one in inputs.processors:
        if grammar_of(one) is None and needs_prompt(one):
            raise ValueError(f"{type(one).__name__}: it may depend on the first prompt; leave its setting out")
    _require_own_criteria(inputs)


def _require_own_criteria(inputs: LoopInputs) -> None:
    for criterion in inputs.criteria:
        if type(criterion) not in _CRITERIA:
            raise ValueError(f"stopping_criteria: {type(criterion).__name__} may depend on the batch; leave it out")


def _require_renewal(drafting: Drafting | None, name: str) -> None:
    parts = () if drafting is None else drafting.parts()
    if drafting is not None and not parts and type(drafting).renew is Drafting.renew:
        raise ValueError(f"draft: {name} can't begin with another text while others go on; {_OTHERS}")
    for part in parts:
        _require_renewal(part, name)


def _ids(prompt: Any, number: int) -> torch.Tensor:
    """A prompt's tokens, [P] int64: of a list of ids, a tensor [P] or [1, P], or what a tokenizer returns, without padding."""
    found = prompt["input_ids"] if hasattr(prompt, "keys") else prompt
    if isinstance(found, str):
        raise ValueError(f"prompts: number {number} is text; pass token ids, such as tokenizer(text).input_ids")
    ids = torch.as_tensor(found)
    if hasattr(prompt, "keys") and (mask := prompt.get("attention_mask")) is not None and ids.shape[:-1] in ((), (1,)):
        ids = ids[torch.as_tensor(mask).view(ids.shape) != 0]
    ids = ids[0] if ids.ndim == 2 and len(ids) == 1 else ids
    if ids.ndim != 1 or not len(ids) or ids.is_floating_point():
        raise ValueError(
            f"prompts: number {number} has the shape {tuple(ids.shape)}; pass token ids of one text, [P] or [1, P]"
        )
    return ids.long()
