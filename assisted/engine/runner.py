"""Runs a causal LM during a `generate`: cache slots, positions, masks. This is the eager path.

Follows transformers' forward conventions; independent of drafting, acceptance and text. Target and draft model use the
same class. A column is a token's place in a forward pass, and its keys and values go to a slot of the cache. A position is
the number that the position embedding gets: the token's index in its text, without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..core.acceptance import top1
from ..core.drafts import Draft
from ..core.host import on_device
from .cache import Paths, SlotCache
from .masks import Masks, Unread, column_depths
from .needs import NOTHING, Needs, States
from .parts import Inject, device_of
from .passes import WIDTHS, Inputs, Passes, Runner
from .prepared import PreparedModule
from .traits import Change, Traits, change_of


class CachedModel(Runner):
    """A causal LM with its slots.

    Args:
        model: any causal LM, the `Decoder` of an encoder-decoder, or a `PreparedModule` of one; it is not changed.
        cache: its slots.
        masks: `Traits.of(model).masks`, or 2-D ones for somebody's code (`masks_of`).
        needs: what drafters need of it.

    Attributes:
        bare: the model as it is run, without taps; parts for drafting are made of it.
        states: the hidden states that `needs` asks for, of the last forward pass.
        begun: runs the next forward pass if a drafter has begun it (`Split`). Called like this runner; returns None if the
            draft is another one.
    """

    in_lockstep = False  # whether all rows of a batch must keep the same number of columns
    is_repeatable = True  # whether a forward pass that failed can be run again
    lends_slots = True  # whether a drafter may read and write them while it drafts
    change: Change | None = None  # of the rotary angles, if this call may reach it
    masks: Masks
    top1: Callable[[torch.Tensor], torch.Tensor] = staticmethod(
        top1
    )  # finds the top-1 tokens of scores; a call may set a faster way
    begun: Callable[[torch.Tensor, Draft | None], torch.Tensor | None] | None = None

    def __init__(self, model: PreTrainedModel | PreparedModule, cache: SlotCache, masks: Masks, needs: Needs = NOTHING):
        self.bare = model if isinstance(model, PreparedModule) else PreparedModule(model)
        prepared, self.needs = self.bare.tapped(needs), needs
        self.model: Any = prepared.module
        traits = self.traits = Traits.of(self.model)
        super().__init__(prepared, cache, device_of(self.model), traits.context)
        self.states, cache.move = States(prepared.taps, cache), prepared.move
        self.last_only = prepared.last_only
        self.masks = masks
        # whether `prefill` can read after a past: through the whole forward
        self.reads_on = traits.takes_logits_to_keep
        change = change_of(self.model)
        if not prepared.is_own and change is None:  # its angles may change beyond the context, as dynamic ones do
            change = Change(self.context, once=False)
        if change is not None and cache.limit + WIDTHS[-1] > change.position:
            self.change, self.in_lockstep = change, True

    def prefill(self, ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Read a prompt, [B, P] int64, as `generate` does. Returns the logits after it, [B, 1, V].

        After `SlotCache.go_on`, the prompt's further columns, without a mask.
        """
        self._begin_states()
        self.cache.hide(attention_mask)
        past = max((layer.filled for layer in self.cache.slot_layers), default=0) - min(0, *self.cache.padding)

        def read(rows: list[int], first: int) -> torch.Tensor:
            mask = None if attention_mask is None else attention_mask[rows, first:]
            kwargs: dict[str, Any] = {"attention_mask": mask}
            if self.traits.takes_positions:
                if mask is None or self.traits.counts_padding:
                    kwargs["position_ids"] = past + torch.arange(first, ids.shape[1], device=self.device)[None]
                else:
                    kwargs["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0).to(self.device)
            if self.traits.takes_logits_to_keep:
                kwargs["logits_to_keep"] = 1
            if self.last_only:
                kwargs["last_only"] = True
            return self._forward(ids[rows, first:], kwargs)[:, -1:]

        logits = self.by_groups(ids.shape[1], read)
        self.cache.begin_rounds(ids.shape[1])
        return logits

    def __call__(self, ids: torch.Tensor, draft: Draft | None = None, used: list[int] | None = None) -> torch.Tensor:
        """One forward pass over n columns after each row's length. Only `commit` keeps any of them.

        ids: [B, n] int64, the last committed token followed by the draft's tokens. draft: the draft, needed if it is a tree.
        used: how many columns of each row are needed, None for all; the others may be after the end of the context.
        Returns [B, n, V], zeros for rows that don't run.
        """
        self._begin_states()
        begun, self.begun = self.begun, None
        logits = None if begun is None else begun(ids, draft)
        return self.passes.run(self, ids, draft, used) if logits is None else logits

    def _begin_states(self) -> None:
        """Let `states` become those of the next forward pass."""
        self.states.end()
        self.states = States(self.prepared.taps, self.cache)

    def run_only(self, rows: list[int]) -> None:
        if not self.needs.split:  # the states of the columns begun are those of all rows
            super().run_only(rows)

    def eager(self, ids: torch.Tensor, draft: Draft | None = None, used: list[int] | None = None) -> torch.Tensor:
        cache, width = self.cache, ids.shape[1]
        rows = cache.running
        if rows != list(range(cache.rows)):
            ids = ids[rows]
            used = None if used is None else [used[row] for row in rows]
            draft = None if draft is None or draft.parents is None else draft.of_rows(rows)
        cache.place(width, self.device)
        depths = column_depths(draft, width, self.device)
        kwargs: dict[str, Any] = {}
        if self.traits.takes_positions:
            kwargs["position_ids"] = self._positions(depths, used)
        if cache.layers and not cache.slot_layers:
            pass  # states alone, which take a mask with the prompt only
        elif not self.masks.trees:
            kwargs["attention_mask"] = cache.mask(width, self.device)
        elif width > 1 or len(rows) > 1 or cache.visible is not None or set(self.masks.windows.values()) != {None}:
            known = cache.ends(self.device)
            visible = None if cache.visible is None else cache.visible[rows].to(self.device)
            kwargs["attention_mask"] = self.masks.made(known, depths, draft, visible, cache.top, self.model.dtype)
        return cache.spread(self._forward(ids, kwargs))

    def placed(
        self, ids: torch.Tensor, positions: torch.Tensor, masks: torch.Tensor | dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """A forward pass over columns that the cache has already placed, [R, n] of the running rows. Returns [R, n, V]."""
        return self._forward(ids, {"position_ids": positions, "attention_mask": masks})

    def static_forward(self, inputs: Inputs) -> torch.Tensor:
        ids, known, first, parents, visible = inputs
        width, top = ids.shape[1], visible.shape[1]
        self.cache.place_at(known, width, top)
        draft = None if parents is None else Unread(ids[:, 1:], known[:, 0], parents=parents)
        depths = column_depths(draft, width, self.device)
        positions = (first + depths).clamp(max=self.context - 1)  # unused columns may be after the end
        kwargs: dict[str, Any] = {"position_ids": positions} if self.traits.takes_positions else {}
        if not self.cache.layers or self.cache.slot_layers:  # states take a mask with the prompt only
            kwargs["attention_mask"] = self.masks.made(known, depths, draft, visible, top, self.model.dtype)
        return self._forward(ids, kwargs)

    def part(
        self,
        model: PreTrainedModel | PreparedModule,
        kind: Hashable,
        states: Iterable[int] = (),
        inject: Inject | None = None,
    ) -> CachedModel:
        """A part of the model, or a copy, over the same slots, run in the same way.

        kind: identifies the part. states: the hidden states that it keeps. inject: the module that holds its input states.
        """
        prepared = model if isinstance(model, PreparedModule) else replace(self.bare, module=model)
        needs = replace(self.needs, states=frozenset(states))
        part = type(self)(replace(prepared, kind=kind, inject=inject), self.cache, self.masks, needs)
        part.passes, part.settings, part.constants = self.passes, self.settings, self.constants
        return part

    @property
    def is_capturable(self) -> bool:
        """Whether forward passes can run through `static_forward`. Not with 2-D masks or an encoder, and not
        where unused columns would change the others."""
        alone = not (self.traits.crosses or self.traits.counts_padding)
        return alone and self.masks.trees and not (self.cache.right_aligned or self.in_lockstep)

    def commit(self, counts: list[int], path: Paths | None = None, moved: bool = False) -> None:
        """Keep `counts[b]` columns of the last forward pass: the first ones, or those of a tree's accepted `path`, which may
        be `moved` already."""
        if path is not None and (moved or all(column == to for columns in path for to, column in enumerate(columns))):
            path = None
        moved = path is not None and self.passes.gather(self, path)
        self.cache.commit(counts, None if moved else path)

    def save_memory(self) -> None:
        """After an error: free what can be computed again, and take as little memory as possible from now on."""
        self.passes.release("it ran out of memory")
        self.passes = Passes()
        self.cache.save_memory()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def catch_up(self) -> None:
        """Bring the cache up to date with all committed tokens. Slots always are."""

    def room(self, lengths: list[int]) -> int:
        """Positions left after the longest of these texts until the model's context ends or its rotary angles change."""
        # aligned rows all end at the same slot, finished rows too
        aligned = 0 if self.masks.trees else max(self.cache.lengths) + 1
        ahead = max(0, -min(self.cache.prompt_padding))  # positions ahead of columns, if the caller's began later
        room = self.context - max(*lengths, aligned) - ahead
        own = None if self.change is None else self.change.room(max(self.first_positions()))
        return room if own is None else min(room, own)

    def first_positions(self) -> list[int]:
        """Position of each running row's next token."""
        counts = self.cache.known if self.traits.counts_padding else self.cache.unpadded
        return [counts[row] for row in self.cache.running]

    def _positions(self, depths: torch.Tensor, used: list[int] | None) -> torch.Tensor:
        """Positions of the forward pass just placed, [B, n]. Unused columns beyond the context get position 0."""
        positions = on_device(self.first_positions(), self.device)[:, None] + depths
        if used is None or self.cache.top - min(0, *self.cache.padding) <= self.context:
            return positions
        return positions.masked_fill(depths >= on_device(used, self.device)[:, None], 0)

    def _forward(self, ids: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        if self.prepared.through_parts and self.masks.trees and "logits_to_keep" not in kwargs:
            return self._through_parts(ids, kwargs)  # not for prompts, nor with 2-D masks
        kwargs[self.traits.cache_argument] = self.cache
        given = {"input_ids": ids.to(self.device), "use_cache": True, "return_dict": True, **self.constants, **kwargs}
        return self.model(**given).logits

    def _through_parts(self, ids: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        hidden = self.prepared.embedded(ids.to(self.device))
        mask = kwargs.get("attention_mask")
        return self.prepared.run_columns(self.prepared, hidden, kwargs["position_ids"], mask, self.cache)
