"""A prompt that is read in parts, between the rounds of other rows.

Knows slots, and the pool of what was read before; nothing of rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from ..calls.admission import lent_to
from ..calls.assembly import Assembly
from ..engine.cache import SlotCache
from ..engine.pool import SessionPool
from ..engine.recurrent import slots_for
from ..engine.runner import CachedModel
from ..engine.session import give_back, go_on
from ..engine.states import held
from ..methods import Drafter
from .texts import Asked


class Reading:
    """A prompt that is read in parts, in slots of its own, perhaps after what a pool has of it; then its row takes them over.

    Attributes:
        read: columns that have been read, in this batch or before it.
    """

    def __init__(self, call: Assembly, row: int, asked: Asked, pool: SessionPool | None):
        self.row, self.asked, self.lent = row, asked, ExitStack()
        target, session = call.target, None
        self.found = None
        if asked.inputs is not None and target.reads_on:
            inputs = replace(asked.inputs, ids=asked.prompt[None], kwargs={asked.inputs.cache_name: asked.inputs.cache})
            self.found = self.lent.enter_context(lent_to(inputs, pool, call.settings))
        if self.found is not None:
            session = self.found.session
        if session is not None and session.in_slots:
            self.known, self.slots = session.get_seq_length(), session.go_on(1, asked.limit)
        else:
            self.known = 0 if session is None else held(session)
            self.slots = slots_for(call.inputs.model, session, 1, asked.limit, target.masks)
        self.read = self.known
        self.runner = CachedModel(target.bare, self.slots, target.masks)
        self.runner.settings = target.settings
        if asked.recorder is not None:
            asked.recorder.cached_tokens = self.known

    @property
    def rest(self) -> int:
        """Tokens to be read."""
        return len(self.asked.prompt) - 1 - self.read

    def read_on(self, most: int) -> int:
        """Read further tokens, if possible no more than so many. Returns how many."""
        rest = self.asked.prompt[self.read : -1]
        part = rest[:most] if self.runner.reads_on else rest
        go_on(self.slots, self.read, self.asked.limit)
        if len(part):
            self.runner.prefill(part[None], None)
        else:
            self.slots.begin_rounds()
        self.read += len(part)
        return len(part)

    def leave(self, cache: SlotCache, ids: torch.Tensor, drafter: Drafter) -> None:
        """The text has ended. cache: of the rows. ids: [L] int64, all of it."""
        assert self.found is not None
        with self.lent:
            give_back(cache, self.row, self.slots, self.read)
            self.found.keep(self.slots, ids[None], (drafter, None))


def shares(rests: Sequence[int], most: int, rows: int) -> list[int]:
    """How many tokens of each prompt are read before the next round, no more than `most` in all.

    The shortest rest goes first. The prompt that came first gets at least a row's share, so that further ones don't hold it up.

    rests: tokens to be read of each prompt, in the order in which they came. rows: of the batch.
    """
    first = min(rests[0], max(1, most // rows))
    found, left = [first, *[0] * (len(rests) - 1)], most - first
    for place in sorted(range(len(rests)), key=rests.__getitem__):
        more = min(rests[place] - found[place], left)
        found[place], left = found[place] + more, left - more
    return found
