"""A prompt that is read in parts, between the rounds of other rows.

Knows slots, and the pool of what was read before; nothing of rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from ..calls.admission import lent_to
from ..calls.assembly import Assembly
from ..engine.cache import SlotCache
from ..engine.needs import States
from ..engine.pool import SessionPool
from ..engine.recurrent import slots_for
from ..engine.runner import CachedModel
from ..engine.session import copy_columns, go_on, take_over
from ..engine.states import held
from ..engine.verifiable import obstacle_to_reading_on
from ..methods import Call, Drafter
from .texts import Asked


class Reading:
    """A prompt that is read in parts, in slots of its own, perhaps after what a pool or another row has of it. At its end, its
    row takes them over.

    Attributes:
        read: columns that have been read, here or before. known, shared: those of them that a pool, or another row had read.
        in_parts: whether the target can read on after a part.
        after, until: the prompt that will have read so many of its columns, for which it waits; None if it does not.
    """

    after: Reading | None = None
    until = shared = 0

    def __init__(self, call: Assembly, row: int, asked: Asked, pool: SessionPool | None):
        self.call, self.row, self.asked, self.lent = call, row, asked, ExitStack()
        target, settings, model = call.target, call.settings, call.inputs.model
        reads_on = target.reads_on and obstacle_to_reading_on(model, settings.trust_in(model), refills=True) is None
        self.in_parts, self.found = reads_on, None
        # drafters that need states need those of the last column
        ids = asked.prompt[None, : -1 if target.needs.states else None]
        if asked.inputs is not None and reads_on and ids.shape[1]:
            inputs = replace(asked.inputs, ids=ids, kwargs={asked.inputs.cache_name: asked.inputs.cache})
            self.found = self.lent.enter_context(lent_to(inputs, pool, settings))
        session = None if self.found is None else self.found.session
        if session is not None and session.in_slots:
            self.known, self.slots = session.get_seq_length(), session.go_on(1, asked.limit)
        else:
            self.known = 0 if session is None else held(session)
            self.slots = slots_for(model, session, 1, asked.limit, target.masks)
        self.read = self.known
        self.runner = CachedModel(target.bare, self.slots, target.masks, replace(target.needs, split=False))
        self.runner.settings = target.settings
        self.parts: list[dict[int, torch.Tensor]] = []  # of the hidden states that drafters need, [1, n, D] each

    @property
    def rest(self) -> int:
        """Tokens to be read."""
        return len(self.asked.prompt) - 1 - self.read

    @property
    def states(self) -> States:
        """The hidden states of all columns that have been read here."""
        names = self.parts[0] if self.parts else ()
        taps: Any = {name: SimpleNamespace(hidden=torch.cat([part[name] for part in self.parts], 1)) for name in names}
        return States(taps, SlotCache(1, 0))

    def read_on(self, most: int) -> int:
        """Read further tokens, if possible no more than so many. Returns how many."""
        found = None if self.slots.can_rewind else self.found
        ends = [] if found is None else [end for end in found.ends if end > self.read]
        before, end = self.read, self.read + (min(most, self.rest) if self.in_parts else self.rest)
        for stop in [*(one for one in ends if one < end), end]:
            self._read(self.asked.prompt[None, self.read : stop])
            if found is not None and stop in ends:
                found.mark(self.slots, self.asked.prompt[None, : stop + 1])
        return self.read - before

    def _read(self, ids: torch.Tensor) -> None:
        go_on(self.slots, self.read, self.asked.limit)
        if ids.shape[1]:
            self.runner.prefill(ids, None)
            self.parts.append({name: self.runner.states.of_running(name) for name in self.runner.states})
        elif not (self.read or self.slots.can_rewind):  # states get their shapes from a token that does not count
            self.runner.prefill(self.asked.prompt[None, :1], None)
            for state in self.slots.states():
                state.zero_()
            go_on(self.slots, 0, self.asked.limit)
        self.read += ids.shape[1]
        self.slots.begin_rounds(self.read)

    def take(self, slots: SlotCache, row: int, end: int, states: States) -> None:
        """Take over columns up to `end` that a row of other slots holds. states: of its text, as far as drafters need them."""
        copy_columns(slots, row, self.slots, 0, self.read, end)
        self.parts.append({name: states.of_running(name)[:, self.read : end] for name in states})
        self.read, self.shared, self.after = end, end - self.read, None

    def join(self) -> Call:
        """All is read: give the row its slots. Returns the call of this text alone, as drafters see it."""
        take_over(self.call.target.cache, self.row, self.slots)
        return self.call.about(self.runner, None if self.found is None else self.found.session, self.states)

    def end(self, keeps_states: bool) -> None:
        """Its text has begun in the row, which has all that is needed further."""
        if self.found is not None:
            self.found.session.forget()
        self.parts = self.parts if keeps_states else []
        del self.slots, self.runner

    def leave(self, ids: torch.Tensor, drafter: Drafter) -> None:
        """The text has ended. ids: [L] int64, all of it."""
        target = self.call.target
        with self.lent:
            if self.found is not None:
                slots = slots_for(self.call.inputs.model, None, 1, len(ids), target.masks)
                copy_columns(target.cache, self.row, slots, 0, 0)
                self.found.keep(slots, ids[None], (drafter, None))


def shares(rests: Sequence[int], most: int, rows: int, waited: bool) -> list[int]:
    """How many tokens of each prompt are read before the next round, no more than `most` in all.

    The shortest rest goes first, and if it is read to its end, no others are, so that its text begins without them. The prompt
    that came first gets at least a row's share every second time, so that further ones don't hold it up.

    rests: tokens to be read of each prompt, in the order in which they came. rows: of the batch. waited: whether nothing was
    read of the first one before the last round.
    """
    found, order = [0] * len(rests), sorted(range(len(rests)), key=rests.__getitem__)
    if waited or rests[order[0]] > most:
        found[0] = min(rests[0], most, max(1, most // rows))
    left = most - found[0]
    for place in order:
        more = min(rests[place] - found[place], left)
        found[place], left = found[place] + more, left - more
        if found[place] == rests[place] > 0:
            break
    return found
