"""An EAGLE head during one `generate`: its slots, its masks, its positions.

Knows the head and slots; nothing of drafts or of the text. Column s of a row is the target's feature of one token with the
token behind it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from ..drafts import Draft
from ..engine.cache import SlotCache
from ..engine.host import on_device
from ..engine.parts import Inject, Tap
from ..engine.prefill import groups
from ..engine.runner import Replayer
from .eagle import EagleHead

__all__ = ["HeadRunner", "Level"]


class Level(NamedTuple):
    """A level of a token tree as the head has read it.

    states: [B, n, H], zeros for rows that don't run. seen: [B, n, S] bool, the slots that each column sees. positions: [B, 1]
    int64, of the columns of the next level.
    """

    states: torch.Tensor
    seen: torch.Tensor
    positions: torch.Tensor


class HeadRunner:
    """A head and the slots of what it has read.

    Args:
        head: the head, not changed.
        target: whose embeddings it may share.
        limit: the most slots that will be needed.
        first: [B, 1] int64, position of each row's first column; negative where padding precedes the text.
        attention_mask: [B, n] of the first n columns, 0 where a column is padding; None where none is.
    """

    kind: Hashable = "head"
    taps: Sequence[Tap] = ()
    graphs: Replayer | None = None  # what runs its steps along a chain, None for the eager path

    def __init__(
        self,
        head: EagleHead,
        target: PreTrainedModel,
        limit: int,
        first: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ):
        self.head = self.model = head
        self.context = head.config.max_position_embeddings
        self.inject = Inject(None)  # holds the states that a step goes on from
        self.device = head.device
        self.target = target
        self.first = first.to(self.device)
        self.cache = SlotCache(len(first), limit)
        self.cache.hide(attention_mask)
        before = (-first[:, 0]).tolist()
        self.cache.padding, self.cache.prompt_padding = before, list(before)
        self.is_capturable = min(before) >= 0  # a past puts columns further than slots tell

    def read(self, tokens: torch.Tensor, states: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Read, and keep, what became text: `counts[b]` columns of row b. Returns the states after them, [B, H].

        tokens: [B, n] int64. states: [B, n, H], from `EagleHead.fuse`. Rows with fewer columns are filled up on the right.
        """
        if not self.cache.layers:
            return self._read_first(tokens, states, counts)
        states = self(tokens, states)
        self.cache.commit(list(counts))
        return _last(states, counts)

    def _read_first(self, tokens: torch.Tensor, states: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """The same of the first columns, most of them the prompt's: in passes over rows of similar length."""
        cache, width = self.cache, tokens.shape[1]
        state = states[:, 0].clone()
        for rows, first in groups(cache.visible, cache.running, self.device):
            columns = torch.arange(first, width, device=self.device)
            seen = None
            if cache.visible is not None:
                hidden = cache.visible[rows, first:].to(self.device)
                seen = torch.nn.functional.pad(hidden, (0, len(columns) - hidden.shape[1]), value=True)[:, None]
                # a column of padding sees itself: attention to nothing is not a number
                own = columns == columns[:, None]
                seen = None if bool(hidden.all()) else ((columns <= columns[:, None]) & seen) | own
            own_counts = [counts[row] - first for row in rows]
            last_only = min(own_counts) == len(columns)
            with cache.reading(rows, first):
                made = self.head(
                    self.head.embed(tokens[rows, first:], self.target),
                    states[rows, first:],
                    (columns + self.first[rows]).clamp(min=0),
                    None if seen is None else seen[:, None],
                    cache,
                    last_only,
                )
            state[rows] = made[:, 0] if last_only else _last(made, own_counts)
        cache.begin_rounds()
        cache.rewind(list(counts))
        return state

    def __call__(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """A step over n columns behind each row's length, each seeing those before it; nothing is kept before `commit`.

        tokens: [B, n] int64. states: [B, n, H], from `EagleHead.fuse` or of an earlier step. Returns states [B, n, H], zeros
        for rows that don't run.
        """
        self.inject.hidden = states
        made = None if self.graphs is None else self.graphs.run(self, tokens, None)
        return self.eager(tokens) if made is None else made

    def eager(self, ids: torch.Tensor, draft: Draft | None = None) -> torch.Tensor:
        """The step itself, going on from the states in `inject`: the reference for every other way of running it."""
        cache, width = self.cache, ids.shape[1]
        cache.place(width, self.device)
        slots = self._behind() + torch.arange(width, device=self.device)  # [rows, n]
        seen = None
        # where all that is there is seen, the layer knows how
        if cache.visible is not None or not (width == cache.top or width == len(slots) == 1):
            seen = torch.arange(cache.top, device=self.device) <= slots[:, :, None]
        if seen is not None and cache.visible is not None:
            hidden = min(cache.visible.shape[1], cache.top)
            seen[:, :, :hidden] &= cache.of_running(cache.visible)[:, None, :hidden].to(self.device)
            # a column of padding sees itself: attention to nothing is not a number
            seen.scatter_(2, slots[:, :, None], True)
        states = self.head(
            self.head.embed(cache.of_running(ids), self.target),
            cache.of_running(self.inject.hidden),
            (slots + cache.of_running(self.first)).clamp(min=0),
            None if seen is None else seen[:, None],
            cache,
        )
        return cache.spread(states)

    def static_forward(
        self,
        ids: torch.Tensor,
        behind: torch.Tensor,
        first: torch.Tensor,
        parents: torch.Tensor | None,
        visible: torch.Tensor,
    ) -> torch.Tensor:
        """The same of tensors alone: see `CachedModel.static_forward`. Of a chain: parents is None."""
        cache, columns = self.cache, torch.arange(ids.shape[1], device=self.device)
        cache.row_index = torch.arange(len(ids), device=self.device)[:, None]
        cache.start, cache.top = behind + columns, visible.shape[1]
        slots, own = torch.arange(cache.top, device=self.device), cache.start[:, :, None]
        seen = ((slots < own) & visible[:, None]) | (slots == own)
        states: torch.Tensor = self.head(
            self.head.embed(ids, self.target),
            self.inject.hidden,
            (first + columns).clamp(0, self.context - 1),
            seen[:, None],
            cache,
        )
        return states

    def root(self, state: torch.Tensor, room: int) -> Level:
        """The committed text as what the first level of a token tree goes on from. state: [B, H], the head's after it. room:
        the most columns that will be read of the tree."""
        slots = torch.arange(max(self.cache.lengths) + room, device=self.device)
        known = on_device(self.cache.lengths, self.device)[:, None]
        seen = slots < known
        if self.cache.visible is not None:
            hidden = min(self.cache.visible.shape[1], len(slots))
            seen[:, :hidden] &= self.cache.visible[:, :hidden].to(self.device)
        return Level(state[:, None], seen[:, None], (known + self.first).clamp(min=0))

    def level(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], above: Level) -> Level:
        """A step over one level of a token tree; nothing is kept before `commit`.

        tokens: of the level's n columns, by row. parents: of each its place in the level above.
        """
        cache, running = self.cache, self.cache.running
        rows, width, before = len(running), len(tokens[0]), above.states.shape[1]
        cache.place(width, self.device)
        # all that the device has to be told, in one copy
        table = on_device(
            [
                [tokens[row] for row in running],
                [[row * before + place for place in parents[row]] for row in running],
                [range(cache.lengths[row], cache.lengths[row] + width) for row in running],
            ],
            self.device,
        )
        ids, parent, slots = table.unbind()
        # a column sees what its parent sees, and itself
        seen = above.seen.flatten(0, 1).index_select(0, parent.flatten()).view(rows, width, -1)
        seen.scatter_(2, slots[:, :, None], True)
        states = self.head(
            self.head.embed(ids, self.target),
            above.states.flatten(0, 1).index_select(0, parent.flatten()).view(rows, width, -1),
            cache.of_running(above.positions),
            seen[:, None, :, : cache.top],
            cache,
        )
        return Level(cache.spread(states), cache.spread(seen), above.positions + 1)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., Vd] over the draft vocabulary."""
        return self.head.logits(states, self.target)

    def _behind(self) -> torch.Tensor:
        return on_device([self.cache.lengths[row] for row in self.cache.running], self.device)[:, None]


def _last(states: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """[B, n, H] -> [B, H]: those of the last column that counts in each row."""
    width = states.shape[1]
    last = [row * width + max(count - 1, 0) for row, count in enumerate(counts)]
    return states.flatten(0, 1).index_select(0, on_device(last, states.device))
