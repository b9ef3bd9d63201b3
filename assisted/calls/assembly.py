"""What one call runs, put together once, for `generate` and for `generate_many`: a target over slots, with a text and drafts;
and how the target reads the prompt.

Knows how a target, its slots and a drafter are made for a call; what the text is and when it ends is given.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from ..core.text import Text
from ..distribution import Distribution
from ..engine.cache import SlotCache
from ..engine.libraries import CACHE, optimized_for_decode, prefill, with_prompt_of, without_gradients
from ..engine.masks import Masks
from ..engine.needs import States
from ..engine.pool import Lent
from ..engine.prepared import CallSettings
from ..engine.recurrent import slots_for, target_runner
from ..engine.runner import CachedModel
from ..engine.session import Session, can_go_on, go_on
from ..engine.states import held
from ..engine.traits import change_of
from ..engine.verifiable import masks_of
from ..fast import native
from ..fast.fused import prepare, with_same_bits
from ..lengths.base import Length
from ..methods import Call, Drafter, Drafting
from ..methods.grammar import guided
from ..methods.shared.guarded import Guarded, guard
from .admission import require_rows
from .inputs import LoopInputs


@dataclass
class Assembly:
    """What one call runs."""

    # inputs, settings, text, distribution, length: those of the call
    inputs: LoopInputs
    settings: CallSettings
    text: Text
    distribution: Distribution
    length: Length
    # drafter, tokenizer: those of the pair
    drafter: Drafter
    tokenizer: Any
    target: CachedModel  # over its slots, which have read nothing of the prompt yet
    known: int  # how many columns of the prompt the slots hold
    passes: str  # what the target's forward passes will run as
    session: Session | None  # in which the call goes on, if it does
    own: Drafting | None = None  # the state of the drafter, once it has been started

    def drafting(self) -> Guarded:
        """Start the drafter, once the target has read the prompt; with guesses from the call's grammar, if it has one."""
        distribution = self.distribution
        self.own = self.drafter.start(self.about(self.target, self.session, self.target.states, self.inputs.own_mask))
        splits = self.drafter.needs.split
        around, self.length = guided(self.own, self.length, distribution, self.tokenizer, splits, self.tell)
        return self.guarded(around)

    def tell(self, row: int, reason: str) -> None:
        """A row gets no drafts any more."""
        self.settings.warn(reason)
        self.text.tell(row, reason)

    def about(
        self, target: CachedModel, session: Session | None, states: States, mask: torch.Tensor | None = None
    ) -> Call:
        """The call as a drafter sees it. mask: of the prompt."""
        by, drafting = (None, None) if session is None or session.kept is None else session.kept
        return Call(
            mask,
            self.distribution.for_draft(),
            self.length,
            self.text.max_length,
            target,
            self.settings,
            earlier=weakref.ref(drafting) if drafting is not None and by is self.drafter else None,
            shared=0 if session is None else session.shared,
            forks=session is not None and session.forks,
            states=states,
            encoded=self.inputs.encoded,
        )

    def guarded(self, drafting: Drafting | None) -> Guarded:
        """A drafting that costs only speed if it fails; of None, one that proposes nothing."""
        do_sample, vocabulary = self.distribution.do_sample, self.target.traits.vocabulary
        return guard(drafting, self.settings, vocabulary, self.text, do_sample)

    def kept_by(self, drafting: Guarded) -> tuple[Drafter, Drafting | None]:
        """What a session keeps of the drafts: the drafter and its state, if it has not failed."""
        return self.drafter, None if drafting.drafting is None else self.own


def assemble(
    pair: Any,
    inputs: LoopInputs,
    settings: CallSettings,
    text: Text,
    distribution: Distribution,
    length: Length,
    past: DynamicCache | None = None,
) -> Assembly:
    """Put together what a call runs.

    pair: has the `drafter`, the `graphs` and the `tokenizer`. past: what the target has read already; a session goes on.
    Raises ValueError if it has other rows than the text.
    """
    model, drafter = inputs.model, pair.drafter
    session = past if isinstance(past, Session) else None
    settings.outlives = session is not None
    masks = masks_of(model, settings.trust_in(model), settings.fuses, settings.refills)
    known, cache = _slots(inputs, text, past, masks)
    cache.hide(inputs.mask)
    prepared = prepare(model, settings)
    if settings.bits:
        prepared = with_same_bits(prepared)
    if inputs.encoded is not None:
        prepared = inputs.encoded.around(prepared)
    target = target_runner(prepared, cache, masks, drafter.needs)
    passes = pair.graphs.serve(target, model, settings).runs
    target.constants, target.top1 = inputs.constants, native.top1
    # the KV that a caller gets includes the padding of rows that end early, and states can't go back to read it
    target.in_lockstep |= drafter.needs.lockstep or (inputs.returns_cache and not cache.can_rewind)
    tokenizer = getattr(pair, "tokenizer", None)
    return Assembly(inputs, settings, text, distribution, length, drafter, tokenizer, target, known, passes, session)


def _slots(inputs: LoopInputs, text: Text, past: DynamicCache | None, masks: Masks) -> tuple[int, SlotCache]:
    """How many columns the slots of a call hold, and the slots: those of a session, or others with a copy of a past."""
    if isinstance(past, Session) and past.in_slots:
        return past.get_seq_length(), past.go_on(text.rows, text.max_length)
    if past is not None:
        require_rows(past, text.rows)
    known = 0 if past is None else held(past)
    limit = text.max_length + max(0, inputs.width - inputs.ids.shape[1]) + known
    return known, slots_for(inputs.model, past, text.rows, limit, masks)


@contextmanager
def running(model: Any, drafter: Drafter) -> Iterator[None]:
    """A context for the forward passes of a call, without gradients."""
    # such models keep tensors of their angles, which must not be inference tensors
    keeps = any(change_of(one) is not None for one in (model, *drafter.models))
    # results are copied outside of this mode, so that callers get ordinary tensors
    mode = torch.no_grad() if keeps else without_gradients(model, *drafter.modules)
    with mode, optimized_for_decode(model):
        yield


def read_prompt(call: Assembly, lent: Lent | None) -> torch.Tensor:
    """Read a call's prompt into the target's slots as its own `generate` does. Returns the logits after it, [B, 1, V]."""
    inputs, target = call.inputs, call.target
    if inputs.encoded is not None:
        logits = target.prefill(inputs.ids, inputs.mask)
    else:
        logits = _read_in_parts(target, inputs, call.session if lent is None else lent)
    positions = inputs.kwargs.get("position_ids")  # autoregressive decoding continues from the last ones
    target.cache.begin_rounds(inputs.width, None if positions is None else _last_positions(positions, call.text.rows))
    return logits


def _read(target: CachedModel, inputs: LoopInputs) -> torch.Tensor:
    """Read a prompt that is no encoder's, as `read_prompt` does.

    If the caller gets the KV, the padding before short prompts is read as well: only the caller's next turn may use it.
    """
    model, input_ids = _OverSlots(target.model), inputs.ids
    kwargs = inputs.kwargs | {inputs.cache_name: target.cache}
    tensors = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
    by_column = all(tensor.shape[:2] == input_ids.shape for tensor in tensors.values())

    def read(rows: list[int], first: int) -> torch.Tensor:
        part: dict[str, Any] = {n: tensor[rows, first:] for n, tensor in tensors.items()} if by_column else {}
        if target.last_only:
            part["last_only"] = True
        output = prefill(type(target.model), model, input_ids[rows, first:], inputs.config, {**kwargs, **part})
        return output.logits[:, -1:].to(input_ids.device)

    try:
        # with a caller's past, the mask is longer; of a prompt in chunks, only the last chunk's hidden states are there
        whole = inputs.returns_cache and not target.settings.bits  # then a cache has no keys and values of padding
        if whole or not by_column or getattr(inputs.config, "prefill_chunk_size", None) is not None:
            return read(list(range(len(input_ids))), 0)
        return target.by_groups(input_ids.shape[1], read)
    except IndexError as error:
        if input_ids.shape[1] > target.context:
            raise ValueError(
                f"input_ids: the prompt has {input_ids.shape[1]} tokens, but the target's context ends at {target.context}"
            ) from error
        raise


def _read_in_parts(target: CachedModel, inputs: LoopInputs, marks: Session | Lent | None) -> torch.Tensor:
    """As `_read`, and keep the states after parts of the prompt, where slots can't go back to them."""
    cache, taps, hidden = target.cache, target.prepared.taps.values(), []
    if marks is None or cache.can_rewind or target.settings.bits:
        return _read(target, inputs)
    for end in marks.ends:
        tensors = {name: value[..., :end] for name, value in inputs.kwargs.items() if isinstance(value, torch.Tensor)}
        config = with_prompt_of(end, inputs.config)
        _read(target, replace(inputs, ids=inputs.ids[:, :end], kwargs=inputs.kwargs | tensors, config=config))
        hidden.append([tap.hidden for tap in taps])
        cache.begin_rounds(end)
        marks.mark(cache, inputs.ids[:, : end + 1])
        go_on(cache, end, cache.limit)
    logits = _read(target, inputs)
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


def read_to_the_end(target: CachedModel, text: Text) -> None:
    """Complete the KV to what transformers' `generate` returns, which includes the end token of a row that ended early and
    the padding after it."""
    target.catch_up()
    target.run_only(list(range(text.rows)))
    cache, shortest, longest = target.cache, min(text.lengths), max(text.lengths)
    if shortest < longest:
        cache.rewind([known - length + shortest for known, length in zip(cache.known, text.lengths, strict=True)])
        target(text.output()[:, shortest - 1 : longest - 1])
        cache.commit([longest - shortest] * text.rows)


def hand_back(call: Assembly, drafts: Any, given: DynamicCache | StaticCache) -> None:
    """Put what the target's slots hold into the cache that the caller passed or receives. drafts: see `Assembly.kept_by`."""
    target, inputs = call.target, call.inputs
    ids = None if inputs.embeddings is not None or inputs.beside else call.text.output()
    if not isinstance(given, Session) or not given.is_read_whole or ids is None or not _holds(target, ids):
        _fill(given, target, inputs.model.config.get_text_config(decoder=True))
    elif can_go_on(target.cache):
        given.keep(target.cache, ids, drafts)
    else:
        given.keep_copy(target.cache, ids, None, inputs.mask)
    if inputs.encoded is not None:
        inputs.encoded.hand_back()


def leave(call: Assembly, drafts: Any, lent: Lent) -> None:
    """Leave what the target's slots hold to later calls with the same pool. drafts: see `Assembly.kept_by`."""
    if _holds(call.target, read := call.text.output()):
        lent.keep(call.target.cache, read, drafts)


def _holds(target: CachedModel, ids: torch.Tensor) -> bool:
    """Whether a target's slots hold a text from its first token on."""
    return all(known == ids.shape[1] - 1 for known in target.cache.known)


def _fill(given: DynamicCache | StaticCache, target: CachedModel, config: Any) -> None:
    """Fill a cache from the target's slots."""
    if isinstance(given, DynamicCache):
        windowed = given.layer_class_to_replicate is None
        given.layers = target.cache.to_dynamic(config if windowed else None).layers
        return
    for index, layer in enumerate(target.cache.to_dynamic(None).layers):
        if layer.is_initialized:
            given.update(layer.keys, layer.values, index)
