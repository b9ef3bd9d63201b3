"""Targets with recurrent states of any kind: linear attention, convolutions, state-space models, and hybrids of these.

Independent of drafting and acceptance. States are copied before a verifying forward pass and restored if it was partly
rejected. The next forward pass then reads the accepted tokens again. `delta.py` does better for one kind of state.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..core.drafts import Draft
from .cache import Paths, SlotCache
from .masks import Columns, Masks, Unread
from .needs import NOTHING, Needs
from .parts import with_children
from .passes import Inputs
from .prepared import PreparedModule
from .runner import CachedModel
from .states import ColumnCache, StateCache
from .stepped import by_position
from .traits import Traits

_LAG = 16  # columns; a longer unread tail gets its own forward pass, because every pass would read it again


class RecurrentCache(StateCache):
    """States that are copied before a forward pass, and restored. All rows have the same length.

    Invariant between rounds: the slots hold all committed tokens except the last. The states have read a prefix of these;
    `RecurrentModel.unread` holds the remainder.
    """

    def __init__(self, rows: int, limit: int, config: Any):
        super().__init__(rows, limit, config, right_aligned=True)
        self.width = 0  # columns of the last forward pass

    def place(self, width: int, device: torch.device) -> None:
        """As SlotCache."""
        super().place(width, device)
        self.width = width

    def forget(self) -> None:
        """Set the states to zero."""
        for state in self.states():
            state.zero_()

    def commit(self, counts: list[int], path: Paths | None = None) -> None:
        """Keep the first columns of the last forward pass, the same number in every row. Fewer than all restores the states.

        Raises ValueError for token trees and unequal counts, RuntimeError if no states were saved before the forward pass.
        """
        if path is not None or len(set(counts)) > 1:
            raise ValueError(
                f"counts: {counts} with path {path}: states follow one chain, and all rows advance in lockstep"
            )
        if counts[0] == self.width:
            self.is_saved = False
        elif self.is_saved:
            for saved, state in zip(self._saved, self.states(), strict=True):
                state.copy_(saved)
        else:
            raise RuntimeError("a recurrent state can't take back tokens; run this cache through RecurrentModel")
        super().commit(counts)

    def step_back(self, columns: int) -> None:
        """Let the next forward pass overwrite the last columns, which the states have not read."""
        self.lengths = [length - columns for length in self.lengths]


class RecurrentModel(CachedModel):
    """A causal LM with recurrent layers. It verifies several tokens at once and restores its states if some are rejected.

    If all columns of a forward pass are accepted, its states are right. Otherwise the previous states are restored, and the
    next forward pass reads the accepted columns again, before its own. So each round takes one forward pass, as for other
    targets. Only the logits of the new columns are returned.
    """

    in_lockstep = True
    is_repeatable = False  # some of its states have read the columns
    lends_slots = False  # its states have not read all that the slots hold
    cache: RecurrentCache

    def __init__(self, model: PreTrainedModel | PreparedModule, cache: SlotCache, masks: Masks, needs: Needs = NOTHING):
        super().__init__(model, cache, masks, needs)
        self.unread = torch.empty(cache.rows, 0, dtype=torch.long, device=self.device)  # [B, k], committed
        self.ids = self.unread  # [B, k + n], of the last forward pass

    def __call__(self, ids: torch.Tensor, draft: Draft | None = None, used: list[int] | None = None) -> torch.Tensor:
        """As CachedModel. Raises ValueError for a token tree."""
        if draft is not None and draft.parents is not None:
            raise ValueError("draft: recurrent layers read chains, not token trees; check masks.trees before drafting")
        if self.unread.shape[1] > _LAG or self._would_straddle():
            self.catch_up()
        unread = self.unread.shape[1]
        self.ids = torch.cat([self.unread, ids.to(self.device)], 1)
        self.cache.step_back(unread)
        if ids.shape[1] > 1 and not self.cache.is_saved:
            self.cache.save()
        if used is not None:
            used = [unread + count for count in used]
        logits = super().__call__(self.ids, None, used)
        for tap in self.prepared.taps.values():
            tap.hidden = tap.hidden[:, unread:]
        return logits[:, unread:]

    def _would_straddle(self) -> bool:
        """Whether the rotary angles of the unread columns differ from those of the new ones."""
        if self.change is None:
            return False
        new = max(self.first_positions())
        room = self.change.room(new - self.unread.shape[1])
        return room is not None and room <= self.unread.shape[1]

    def commit(self, counts: list[int], path: Paths | None = None, moved: bool = False) -> None:
        """As CachedModel, for equal counts and without a path."""
        kept = self.unread.shape[1] + counts[0]
        self.cache.commit([self.unread.shape[1] + count for count in counts], path)
        self.unread = self.ids[:, : 0 if kept == self.ids.shape[1] else kept]

    def catch_up(self) -> None:
        """Let the states read all committed tokens except the last."""
        if unread := self.unread.shape[1]:
            self.cache.step_back(unread)
            super().__call__(self.unread)
            self.cache.commit([unread] * self.cache.rows)
            self.unread = self.unread[:, :0]


class ColumnModel(CachedModel):
    """A causal LM whose recurrent layers all run over columns (`delta.by_position`): rows need not advance in lockstep, and
    token trees can be verified."""

    cache: ColumnCache

    def __init__(self, model: PreTrainedModel | PreparedModule, cache: SlotCache, masks: Masks, needs: Needs = NOTHING):
        prepared = model if isinstance(model, PreparedModule) else PreparedModule(model)
        module = with_children(prepared.module, by_position(prepared.module))
        super().__init__(replace(prepared, module=module), cache, masks, needs)

    @property
    def is_capturable(self) -> bool:
        """Not as compiled code, which keeps no states between forward passes."""
        return self.settings.mode != "compile" and super().is_capturable

    def eager(self, ids: torch.Tensor, draft: Draft | None = None, used: list[int] | None = None) -> torch.Tensor:
        own = draft if draft is None or draft.parents is None else draft.of_rows(self.cache.running)
        self.cache.columns = Columns.of(ids.shape[1], own, self.device)
        return super().eager(ids, draft, used)

    def static_forward(self, inputs: Inputs) -> torch.Tensor:
        (rows, width), parents = inputs.ids.shape, inputs.parents
        draft = None if parents is None else Unread(inputs.ids[:, 1:], inputs.known[:, 0], parents=parents)
        self.cache.columns = Columns.of(width, draft, self.device)
        logits = super().static_forward(inputs)
        self.cache.keep((self.prepared.kind, rows, width, parents is not None), rows)
        return logits

    def replayed(self, slots: ColumnCache, shape: Any) -> None:
        key = shape.kind, shape.rows, shape.columns, shape.tree
        self.cache.forget_read()  # of an eager forward pass that was compared
        self.cache.columns, read = Columns(shape.columns), slots.kept[key]
        read.compute = functools.partial(self.compute, ("states", *key), moves=True)
        self.cache.note_together(read)

    def commit(self, counts: list[int], path: Paths | None = None, moved: bool = False) -> None:
        self.cache.advance(counts, path)  # before the slots are moved, after which the path is none
        super().commit(counts, path, moved)


def target_runner(
    model: PreTrainedModel | PreparedModule, cache: SlotCache, masks: Masks, needs: Needs = NOTHING
) -> CachedModel:
    """A target over the slots from `slots_for`. needs: those of all drafters."""
    kinds: dict[type[SlotCache], type[CachedModel]] = {RecurrentCache: RecurrentModel, ColumnCache: ColumnModel}
    return kinds.get(type(cache), CachedModel)(model, cache, masks, needs)


def slots_for(model: PreTrainedModel, given: Cache | None, rows: int, limit: int, masks: Masks) -> SlotCache:
    """A target's slots, with a copy of a caller's cache. masks: of a target with states, trees if it can run over columns."""
    if not Traits.of(model).is_recurrent:
        return SlotCache.of(given, rows, limit, right_aligned=not masks.trees)
    kind = ColumnCache if masks.trees else RecurrentCache
    return kind.holding(given, rows, limit, model.config.get_text_config(decoder=True))
