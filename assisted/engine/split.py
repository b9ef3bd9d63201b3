"""The target in two parts. Its first layers run while drafting; verification then runs only the remaining ones.

Deals with parts of models and slots, not with distributions or drafting decisions. Falls back to the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..core.drafts import Draft
from ..core.host import timed
from .parts import Inject, back, few_ids, front, try_out
from .runner import CachedModel

_States = Mapping[int, torch.Tensor]


@dataclass(frozen=True)
class Begun:
    """The columns of a round that the front has read."""

    draft: Draft  # the draft of these columns
    end: int  # how many layers the front has
    # of layer `end - 1`, and others that are needed of layers before: [..., B, m, D] for the first m of n + 1 columns;
    # m is n or n + 1
    states: _States
    lengths: list[int]  # each row's length before these columns
    # run the whole model instead of the back, and measure the states after these numbers of layers; None does not
    measured: Sequence[int] | None = None


class Split:
    """A target in two parts. Where the front ran while drafting, the target's next forward pass runs only the back.

    A draft from elsewhere, or one changed since, goes through the whole model.

    Args:
        target: the target of a call, whose needs include a split.

    Attributes:
        measured: after a forward pass for which `begin` was told to measure layers, their output states, by number of layers.
        seconds: that this forward pass took.
    """

    def __init__(self, target: CachedModel):
        self.target, self.layers = target, target.needs.layers
        self.measured: _States = {}
        self.seconds = 0.0
        self._fronts: dict[int, CachedModel] = {}
        self._backs: dict[int, tuple[CachedModel, Inject]] = {}

    def front(self, end: int) -> CachedModel:
        """Layers [0, end) and the head, over the target's slots. Its states are those of layer `end - 1`, and the needed ones
        before."""
        if end not in self._fronts:
            model = front(self.target.bare.module, self.layers, end)
            states = {end, *(state for state in self.target.needs.states if state < end)}
            self._fronts[end] = self.target.part(model, ("front", end), states)
        return self._fronts[end]

    def begin(self, draft: Draft, end: int, read: Sequence[_States], measured: Sequence[int] | None = None) -> None:
        """Let the target's next forward pass, if it verifies this draft, go on after layer `end - 1`.

        read: the front's states, of one forward pass after the other. measured: as in `Begun`.
        """
        begun = Begun(draft, end, _joined(read), list(self.target.cache.lengths), measured)
        self.target.begun = partial(self._go_on, begun)

    def _go_on(self, begun: Begun, ids: torch.Tensor, draft: Draft | None) -> torch.Tensor | None:
        """The target's forward pass, [B, n + 1, V]; None if the whole model must run."""
        self.measured = {}
        same = draft is not None and draft.is_that_of(begun.draft) and begun.lengths == self.target.cache.lengths
        if not same or not self.target.prepared.is_own:
            return None
        try:
            run = self.finish if begun.measured is None else self._measure
            return run(begun, ids, draft)
        except Exception as error:
            if not self.target.settings.ranks.may_go_on(error):
                raise
            name = type(error).__name__
            self.target.settings.warn(
                f"Finishing the drafted tokens failed ({name}: {error}); reading them with the whole model."
            )
            return None

    def finish(self, begun: Begun, ids: torch.Tensor, draft: Draft | None) -> torch.Tensor:
        """The target's forward pass over a draft that the front has begun, [B, n + 1, V]."""
        states, end = self._read_rest(begun, ids), begun.end
        if end not in self._backs:
            model, inject = back(self.target.bare.module, self.layers, end)
            after = (state for state in self.target.needs.states if state > end)
            self._backs[end] = self.target.part(model, ("back", end), after, inject), inject
        rest, inject = self._backs[end]
        inject.hidden = states[end]
        logits = rest(ids, draft)
        self._show({**states, **rest.states})
        return logits

    def _read_rest(self, begun: Begun, ids: torch.Tensor) -> _States:
        """The front's states of all columns. The last drafted token may not have been read until now."""
        done = begun.states[begun.end].shape[-2]
        if done == ids.shape[1]:
            return begun.states
        cache, reader = self.target.cache, self.front(begun.end)
        known = cache.known
        try:
            cache.commit([done] * len(known))
            reader(ids[:, done:])
        finally:
            cache.rewind(known)
        return _joined([begun.states, reader.states])

    def _measure(self, begun: Begun, ids: torch.Tensor, draft: Draft | None) -> torch.Tensor:
        """The whole model in one timed forward pass that also keeps the states after the measured numbers of layers."""
        target, ends = self.target, begun.measured or ()
        needs = replace(target.needs, states=target.needs.states | set(ends))
        whole = CachedModel(target.bare, target.cache, target.masks, needs)
        whole.constants = target.constants
        logits, self.seconds = timed(lambda: whole(ids, draft), target.device)
        self.measured = {end: whole.states[end] for end in ends}
        self._show(whole.states)
        return logits

    def _show(self, states: _States) -> None:
        """Let the target's own taps hold these states, as if it had run as a whole."""
        for index, tap in self.target.prepared.taps.items():
            tap.hidden = states[index]

    def exits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., 1, n, D] hidden states of any layer -> [n, V], their logits through the final norm and the head."""
        model, inject = back(self.target.bare.module, self.layers, len(self.layers))
        inject.hidden = states
        return try_out(model, few_ids(model, states.shape[-2])).logits[0]  # the tokens' embeddings are not used


def _joined(read: Sequence[_States]) -> _States:
    """States of several forward passes, column after column."""
    return {index: torch.cat([states[index] for states in read], -2) for index in read[0]}
