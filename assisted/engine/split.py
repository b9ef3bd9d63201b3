"""The target in two parts. Its first layers run while drafting; verification then runs only the remaining ones.

Deals with parts of models and slots, not with distributions or drafting decisions. Falls back to the whole model.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..drafts import Draft, DraftingStopped
from .cache import SlotCache
from .host import wait
from .parts import Inject, Layers, Tap, back, few_ids, front, tapped, try_out
from .runner import CachedModel, Masks, Runnable

__all__ = ["Begun", "SplitModel", "timed"]


@dataclass(frozen=True)
class Begun:
    """The columns of a round that the front has read.

    Args:
        draft: the draft of these columns.
        end: how many layers the front has.
        hidden: [..., B, m, D], their output states for the first m of n + 1 columns; m is n or n + 1.
        lengths: each row's length before these columns.
    """

    draft: Draft
    end: int
    hidden: torch.Tensor
    lengths: list[int]


class SplitModel(CachedModel):
    """The target in two parts. Where the front ran while drafting, the target's forward pass runs only the back.

    A draft from elsewhere, or one changed since, goes through the whole model as in `CachedModel`.
    """

    def __init__(self, model: PreTrainedModel | Runnable, cache: SlotCache, masks: Masks, layers: Layers):
        super().__init__(model, cache, masks)
        self.layers = layers
        self.begun: Begun | None = None
        self.measured: list[int] | None = None  # layers to tap in the next forward pass
        self.states: dict[int, torch.Tensor] = {}  # tapped in the last forward pass
        self.seconds = 0.0  # of the last forward pass, if layers were tapped
        self._fronts: dict[int, tuple[CachedModel, Tap]] = {}
        self._backs: dict[int, tuple[CachedModel, Inject]] = {}

    def run_only(self, rows: list[int]) -> None:
        """No effect: all rows run, because the states kept of a round cover all of them."""

    def front(self, end: int) -> tuple[CachedModel, Tap]:
        """Layers [0, end) and the head, over the same slots."""
        if end not in self._fronts:
            model, tap = front(self.model, self.layers, end)
            self._fronts[end] = self.part(model, ("front", end), [tap]), tap
        return self._fronts[end]

    def __call__(self, ids: torch.Tensor, draft: Draft | None = None, used: list[int] | None = None) -> torch.Tensor:
        begun, self.begun = self.begun, None
        measured, self.measured = self.measured, None
        self.states = {}
        if (
            not self.runnable.is_own
            or draft is None
            or begun is None
            or not draft.is_that_of(begun.draft)
            or begun.lengths != self.cache.lengths
        ):
            return super().__call__(ids, draft, used)
        try:
            if measured is not None:
                return self._measure(measured, ids, draft, used)
            return self.finish(begun, ids, draft, used)
        except Exception as error:
            if not self.settings.ranks.may_go_on(error):
                raise
            name = type(error).__name__
            warnings.warn(
                f"Finishing the drafted tokens failed ({name}: {error}); reading them with the whole model.",
                DraftingStopped,
                stacklevel=2,
            )
            return super().__call__(ids, draft, used)

    def finish(self, begun: Begun, ids: torch.Tensor, draft: Draft, used: list[int] | None = None) -> torch.Tensor:
        """The target's forward pass over a draft that the front has begun, [B, n + 1, V]."""
        hidden = self._read_rest(begun, ids, used)
        if begun.end not in self._backs:
            model, inject = back(self.model, self.layers, begun.end)
            self._backs[begun.end] = self.part(model, ("back", begun.end), inject=inject), inject
        rest, inject = self._backs[begun.end]
        inject.hidden = hidden
        return rest(ids, draft, used)

    def _read_rest(self, begun: Begun, ids: torch.Tensor, used: list[int] | None) -> torch.Tensor:
        """The front's states of all columns. The last drafted token may not have been read until now."""
        done = begun.hidden.shape[-2]
        if done == ids.shape[1]:
            return begun.hidden
        known = self.cache.known
        reader, tap = self.front(begun.end)
        try:
            self.cache.commit([done] * len(known))
            reader(ids[:, done:], used=None if used is None else [max(0, count - done) for count in used])
        finally:
            self.cache.rewind(known)
        return torch.cat([begun.hidden, tap.hidden], -2)

    def _measure(self, ends: list[int], ids: torch.Tensor, draft: Draft, used: list[int] | None) -> torch.Tensor:
        """The whole model in one timed forward pass, with taps."""
        model, taps = tapped(self.model, self.layers, ends)
        whole = CachedModel(replace(self.runnable, module=model), self.cache, self.masks)
        whole.constants = self.constants
        logits, self.seconds = timed(lambda: whole(ids, draft, used), self.device)
        self.states = {end: tap.hidden for end, tap in taps.items()}
        return logits

    def exits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., 1, n, D] hidden states of any layer -> [n, V], their logits through the final norm and the head."""
        model, inject = back(self.model, self.layers, len(self.layers))
        inject.hidden = states
        return try_out(model, few_ids(model, states.shape[-2])).logits[0]  # the tokens' embeddings are not used


def timed(run: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """The result of `run`, and how many seconds it took. Waits for the device before and after."""
    wait(device)
    started = time.perf_counter()
    result = run()
    wait(device)
    return result, time.perf_counter() - started
