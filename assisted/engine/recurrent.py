"""Targets with recurrent states: linear attention, convolutions, state-space models, and hybrids of these.

Uses transformers' cache layers for states; independent of drafting and acceptance. States are copied before a verifying
forward pass and restored if it was partly rejected. The next forward pass then reads the accepted tokens again.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from ..drafts import Draft
from .cache import Paths, SlotCache, SlotLayer
from .libraries import (
    DummyLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)
from .masks import Masks
from .needs import NOTHING, Needs
from .prepared import PreparedModule
from .runner import CachedModel
from .traits import Traits

_LAG = 16  # columns; a longer unread tail gets its own forward pass, because every pass would read it again


class StateAndSlotLayer(LinearAttentionLayer, SlotLayer):
    """A layer that has both attention and a recurrent state."""

    def __init__(self, slots: SlotCache, number_of_states: int):
        SlotLayer.__init__(self, slots)
        LinearAttentionLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Keys and values are positional arguments, states are keyword arguments."""
        kind: Any = SlotLayer if args else LinearAttentionLayer
        kind.lazy_initialization(self, *args, **kwargs)


class RecurrentCache(SlotCache):
    """Slots for attention layers, states for recurrent ones. All rows have the same length.

    Invariant between rounds: the slots hold all committed tokens except the last. The states have read a prefix of these;
    `RecurrentModel.unread` holds the remainder.

    Args:
        rows, limit: as for SlotCache.
        config: the model's; it determines the kinds of layers.
    """

    def __init__(self, rows: int, limit: int, config: Any):
        super().__init__(rows, limit, right_aligned=True)
        self.config = config
        self.layers = [self._own(layer) for layer in DynamicCache(config=config).layers]
        self.width = 0  # columns of the last forward pass
        self._saved: list[torch.Tensor] = []
        self._saved_lengths: list[int] = []
        self.is_saved = False  # whether the saved states equal the current ones

    @classmethod
    def holding(cls, cache: Cache | None, rows: int, limit: int, config: Any) -> RecurrentCache:
        """A copy of a caller's cache, which is not changed."""
        own = cls(rows, limit, config)
        if cache is None or not (length := held(cache)):
            return own
        own.reserve(length)
        for layer, given in zip(own.layers, cache.layers, strict=True):
            if isinstance(layer, SlotLayer):
                layer.hold(given, length)
            if isinstance(layer, LinearAttentionLayer):
                _copy_states(given, layer)
        return own

    def place(self, width: int, device: torch.device) -> None:
        """As SlotCache."""
        super().place(width, device)
        self.width = width

    def save(self) -> None:
        """Save the current states."""
        states = self._states()
        if len(self._saved) != len(states):
            self._saved = [torch.empty_like(state) for state in states]
        for saved, state in zip(self._saved, states, strict=True):
            saved.copy_(state)
        self.is_saved = True
        self._saved_lengths = list(self.lengths)

    def go_back(self) -> None:
        """Restore states and lengths to what they were at the last `save`."""
        for saved, state in zip(self._saved, self._states(), strict=True):
            state.copy_(saved)
        self.lengths, self.is_saved = list(self._saved_lengths), True

    def forget(self) -> None:
        """Set the states to zero."""
        for state in self._states():
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
            for saved, state in zip(self._saved, self._states(), strict=True):
                state.copy_(saved)
        else:
            raise RuntimeError("a recurrent state can't take back tokens; run this cache through RecurrentModel")
        super().commit(counts)

    def step_back(self, columns: int) -> None:
        """Let the next forward pass overwrite the last columns, which the states have not read."""
        self.lengths = [length - columns for length in self.lengths]

    def rewind(self, known: list[int]) -> None:
        """Not possible; raises ValueError unless there is nothing to discard."""
        if known != self.known:
            raise ValueError(
                "a recurrent state can't be rewound; ask Traits.of(model).is_rewindable before drafting with a target"
            )

    def to_dynamic(self, config: Any) -> DynamicCache:
        """As SlotCache, once the states have read what the slots hold. The config is always the model's own."""
        cache = super().to_dynamic(self.config)
        for layer, own in zip(cache.layers, self.layers, strict=True):
            if isinstance(own, LinearAttentionLayer):
                _copy_states(own, layer)
        return cache

    def _own(self, layer: Any) -> Any:
        if isinstance(layer, DummyLayer):
            return layer
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            return SlotLayer(self)
        if isinstance(layer, CacheLayerMixin):
            return StateAndSlotLayer(self, layer.number_of_states)
        return layer

    def _states(self) -> list[torch.Tensor]:
        layers = [layer for layer in self.layers if isinstance(layer, LinearAttentionLayer)]
        kept = [states for layer in layers for states in (layer.conv_states, layer.recurrent_states)]
        return [state for states in kept for state in states.values() if state is not None]


class RecurrentModel(CachedModel):
    """A causal LM with recurrent layers. It verifies several tokens at once and restores its states if some are rejected.

    If all columns of a forward pass are accepted, its states are right. Otherwise the previous states are restored, and the
    next forward pass reads the accepted columns again, before its own. So each round takes one forward pass, as for other
    targets. Only the logits of the new columns are returned.
    """

    in_lockstep = True
    is_repeatable = False  # some of its states have read the columns
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

    def commit(self, counts: list[int], path: Paths | None = None) -> None:
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


def target_runner(
    model: PreTrainedModel | PreparedModule, cache: SlotCache, masks: Masks, needs: Needs = NOTHING
) -> CachedModel:
    """A target over the slots from `slots_for`. needs: those of all drafters."""
    return (RecurrentModel if isinstance(cache, RecurrentCache) else CachedModel)(model, cache, masks, needs)


def slots_for(model: PreTrainedModel, given: Cache | None, rows: int, limit: int, masks: Masks) -> SlotCache:
    """A target's slots, with a copy of a caller's cache."""
    if not Traits.of(model).is_recurrent:
        return SlotCache.of(given, rows, limit, right_aligned=not masks.trees)
    return RecurrentCache.holding(given, rows, limit, model.config.get_text_config(decoder=True))


def held(cache: Cache) -> int:
    """How many tokens a caller's cache holds, counted by its keys; states have no length."""
    return cache.get_seq_length() if any(isinstance(layer, CacheLayerMixin) for layer in cache.layers) else 0


def has_uncounted_states(cache: Cache) -> bool:
    """Whether a caller's cache holds states, but no keys from which to count their tokens."""
    return held(cache) == 0 and any(any(getattr(layer, "has_previous_state", {}).values()) for layer in cache.layers)


def _copy_states(source: Any, layer: Any) -> None:
    """Copy the states of one layer of a cache into another."""
    for name in ("conv_states", "recurrent_states"):
        states = {index: None if state is None else state.clone() for index, state in getattr(source, name).items()}
        setattr(layer, name, states)
    for name in (
        "is_conv_states_initialized",
        "is_recurrent_states_initialized",
        "has_previous_state",
        "conv_kernel_size",
    ):
        setattr(layer, name, dict(getattr(source, name)))
    layer.dtype, layer.device = source.dtype, source.device
