"""Runs a block drafter during one `generate`. Its slots hold the keys and values of the context alone; those of a block's own
rows are written after them and never kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.drafts import Draft
from ...core.host import filled, on_device
from ...engine.passes import Inputs
from ...engine.tree_reader import NodeReader
from ..shared.runner import HeadRunner


class BlockRunner(HeadRunner):
    """A block drafter with its slots. Slot s holds the target's state of token s, whatever was drafted for it. Args: as for
    `HeadRunner`."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.prepared = replace(self.prepared, inject=None)  # a block begins with tokens alone

    def read(self, tokens: Tensor, states: Tensor, counts: Sequence[int]) -> Tensor:
        """Keep the context of committed text, `counts[b]` columns of row b, and draft the block after it.

        tokens: [B, n] int64, of the columns after: the last one of each row is the anchor. states: [B, n, H], from
        `BlockHead.fuse`. Rows with fewer columns are padded on the right. Returns the block's final states, [B, block_size, H],
        zeros for rows that don't run.
        """
        cache, width = self.cache, states.shape[1]
        columns = torch.arange(width, device=self.device)
        if cache.layers:
            cache.place(width, self.device)
            positions = cache.ends(self.device) + columns + cache.of_running(self.first)
            self.head.remember(cache.of_running(states), positions.clamp(min=0), cache)
            cache.commit(list(counts))
        else:
            # rows that have ended may have moved to the end already
            self.head.remember(states[cache.order], (columns + self.first[cache.order]).clamp(min=0), cache)
            cache.begin_rounds()
            cache.rewind(list(counts))
        last = on_device([max(count - 1, 0) for count in counts], tokens.device)
        anchors = tokens.gather(1, last[:, None])
        return self.passes.run(self, self.head.block_ids(anchors), None, None)

    def eager(self, ids: Tensor, draft: Draft | None = None, used: list[int] | None = None) -> Tensor:
        """The pass over a block itself. ids: [B, block_size] int64."""
        cache, ids = self.cache, self.cache.of_running(ids)
        cache.place(ids.shape[1], self.device)
        slots, known = torch.arange(cache.top, device=self.device), cache.ends(self.device)
        seen = cache.hide_padding(slots < known + ids.shape[1])
        return cache.spread(self._block(ids, known, seen, slots, cache.of_running(self.first)))

    def static_forward(self, inputs: Inputs) -> Tensor:
        ids, known, first, _, visible = inputs
        block, top = self.head.config.block_size, visible.shape[1]
        self.cache.place_at(known, block, top)
        slots = torch.arange(top, device=self.device)
        seen = ((slots < known) & visible) | ((slots >= known) & (slots < known + block))
        # a captured pass may have more columns, which no row of the block may see
        made = self._block(ids[:, :block], known, seen, slots, first - known)
        return F.pad(made, (0, 0, 0, ids.shape[1] - block))

    def _block(self, ids: Tensor, known: Tensor, seen: Tensor, slots: Tensor, first: Tensor) -> Tensor:
        """ids: [R, n]. known, first: [R, 1], valid slots and the position of slot 0. seen: [R, top] bool. slots: [top]."""
        own = known + torch.arange(ids.shape[1], device=self.device)
        rows, masks = self.head.embed_block(ids, self.target), self.head.masks(seen[:, None], slots - own[:, :, None])
        return self.head(rows, (own + first).clamp(min=0), masks, self.cache)


class Block(NodeReader):
    """What a drafted block predicts, given the tokens before. It needs no further forward pass of the drafter's layers.

    Args:
        runner: whose head it is.
        states: [B, block_size, H], as the runner returned them.
        anchors: [B, 1] int64, the last committed tokens.
        least: the lowest confidence at which a token is drafted; 0 ignores the confidence.
    """

    def __init__(self, runner: BlockRunner, states: Tensor, anchors: Tensor, least: float = 0.0):
        super().__init__(len(states))
        self.head, self.least = runner.head, least
        self.states = states[:, self.head.config.first_row :]
        self.base = runner.logits(self.states)
        self.vocabulary = None if self.head.d2t is None else self.head.draft_tokens
        anchors = anchors.to(self.states.device)
        self._logits, self._memory = self._after(torch.zeros_like(anchors), anchors, None)

    def _after(self, places: Tensor, tokens: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The logits of drafted tokens, [B, n, Vd], and the head's memory: see `BlockHead.after`. `sure` is [B, n] bool: which
        of them are to be drafted, which does not depend on the tokens themselves.

        places: [B, n] int64, which tokens of the draft. tokens: [B, n], the one before each.
        """
        states, base = (
            of_all.gather(1, places[:, :, None].expand(-1, -1, of_all.shape[-1])) for of_all in (self.states, self.base)
        )
        self.sure = torch.ones_like(tokens, dtype=torch.bool)
        if self.least > 0:
            self.sure = torch.sigmoid(self.head.confidence(tokens, states)) >= self.least
        return self.head.after(tokens, states, base, memory)

    def logits(self) -> Tensor:
        """[B, 1, Vd], of the first drafted token; minus infinity if it is not to be drafted."""
        return self._logits.masked_fill(~self.sure[:, :, None], float("-inf"))

    def over_all(self, logits: Tensor) -> Tensor:
        return self.head.over_all(logits)

    def read(
        self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], depths: Sequence[Sequence[int]]
    ) -> Tensor:
        tokens, parents, depths = filled(tokens), filled(parents, -1), filled(depths, 1)
        read, above, places = on_device([tokens, parents, depths], self.states.device).unbind()
        memory = self._memory
        if memory is not None:  # that of the root, then of the columns
            memory = memory.gather(1, (above + 1)[:, :, None].expand(-1, -1, memory.shape[-1]))
        logits, memory = self._after(places, read, memory)
        if self._memory is not None and memory is not None:
            self._memory = torch.cat([self._memory, memory], 1)
        self.add(tokens, parents)
        return logits.masked_fill(~self.sure[:, :, None], float("-inf"))

    def chain(self, place: int, tokens: Tensor) -> Tensor:
        """[B, Vd], of the drafted token `place`, after those of the chain. tokens: [B, 1], the one before."""
        if place > 0:
            tokens = tokens.to(self.states.device)
            self._logits, self._memory = self._after(torch.full_like(tokens, place), tokens, self._memory)
        return self._logits[:, 0]
