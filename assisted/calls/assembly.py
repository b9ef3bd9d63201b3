"""What one call runs, put together once, for `generate` and for `generate_many`: a target over slots, with a text and drafts.

Knows how a target, its slots and a drafter are made for a call; what the text is and when it ends is given.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from ..core.text import Text
from ..distribution import Distribution
from ..engine.cache import SlotCache
from ..engine.libraries import optimized_for_decode, without_gradients
from ..engine.masks import Masks
from ..engine.prepared import CallSettings
from ..engine.recurrent import slots_for, target_runner
from ..engine.runner import CachedModel
from ..engine.session import Session
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
    """What one call runs.

    Args:
        inputs, settings, text, distribution, length: those of the call.
        drafter, tokenizer: those of the pair.
        target: over its slots, which have read nothing of the prompt yet.
        known: how many columns of the prompt the slots hold.
        passes: what the target's forward passes will run as.
        session: in which the call goes on, if it does.
        own: the state of the drafter, once it has been started.
    """

    inputs: LoopInputs
    settings: CallSettings
    text: Text
    distribution: Distribution
    length: Length
    drafter: Drafter
    tokenizer: Any
    target: CachedModel
    known: int
    passes: str
    session: Session | None
    own: Drafting | None = None

    def drafting(self) -> Guarded:
        """Start the drafter, once the target has read the prompt; with guesses from the call's grammar, if it has one."""
        session, distribution = self.session, self.distribution
        earlier, shared = self._earlier()
        about = Call(
            self.inputs.own_mask,
            distribution.for_draft(),
            self.length,
            self.text.max_length,
            self.target,
            self.settings,
            earlier=earlier,
            shared=shared,
            forks=session is not None and session.forks,
            states=self.target.states,
            encoded=self.inputs.encoded,
        )
        self.own = self.drafter.start(about)
        splits = self.drafter.needs.split
        around, self.length = guided(self.own, self.length, distribution, self.tokenizer, splits)
        return self.guarded(around)

    def guarded(self, drafting: Drafting | None) -> Guarded:
        """A drafting that costs only speed if it fails; of None, one that proposes nothing."""
        do_sample, vocabulary = self.distribution.do_sample, self.target.traits.vocabulary
        return guard(drafting, self.settings, vocabulary, self.text, do_sample)

    def kept_by(self, drafting: Guarded) -> tuple[Drafter, Drafting | None]:
        """What a session keeps of the drafts: the drafter and its state, if it has not failed."""
        return self.drafter, None if drafting.drafting is None else self.own

    def _earlier(self) -> tuple[weakref.ref[Drafting] | None, int]:
        """The drafting of the call before, by the same drafter, and how many tokens of its text are this text's."""
        if self.session is None or self.session.kept is None:
            return None, 0
        by, drafting = self.session.kept
        is_usable = drafting is not None and by is self.drafter
        return weakref.ref(drafting) if is_usable else None, self.session.shared


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
    masks = masks_of(model, settings.trust_in(model), settings.fuses)
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
