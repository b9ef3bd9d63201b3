"""An EAGLE head during one `generate`: its slots, its masks, its positions.

Knows the head and slots; nothing of drafts or of the text. Column s of a row is the target's feature of one token with the
token behind it.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..cache import SlotCache
from ..heads.eagle import EagleHead
from ..host import on_device

__all__ = ["HeadRunner"]


class HeadRunner:
    """A head and the slots of what it has read.

    Args:
        head: the head, not changed.
        target: whose embeddings it may share.
        limit: the most slots that will be needed.
        first: [B, 1] int64, position of each row's first column; negative where padding precedes the text.
        attention_mask: [B, n] of the first n columns, 0 where a column is padding; None where none is.
    """

    def __init__(
        self,
        head: EagleHead,
        target: PreTrainedModel,
        limit: int,
        first: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ):
        self.head = head
        self.device = head.device
        self.target = target
        self.first = first.to(self.device)
        self.cache = SlotCache(len(first), limit)
        self.cache.hide(attention_mask)
        self.cache.begin_rounds()

    def __call__(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """A step over n columns behind each row's length, each seeing those before it; nothing is kept before `commit`.

        tokens: [B, n] int64. states: [B, n, H], from `EagleHead.fuse` or of an earlier step. Returns states [B, n, H], zeros
        for rows that don't run.
        """
        width = tokens.shape[1]
        self.cache.place(width, self.device)
        slots = self._behind() + torch.arange(width, device=self.device)
        if self.cache.visible is None and (width == self.cache.top or width == len(slots) == 1):
            return self._step(tokens, states, slots, slots, None)  # all that is there is seen: the layer knows how
        seen = torch.arange(self.cache.top, device=slots.device) <= slots[:, :, None]
        return self._step(tokens, states, slots, slots, seen)

    def level(self, tokens: torch.Tensor, states: torch.Tensor, depth: int, ancestors: torch.Tensor) -> torch.Tensor:
        """A step over one level of a token tree, as `__call__`; the levels above lie directly before it.

        depth: of the level, 1 for the root's children. ancestors: [B, n, e + n] bool, which of the tree's e + n columns
        each one sees, itself included.
        """
        width, above = tokens.shape[1], ancestors.shape[-1] - tokens.shape[1]
        self.cache.place(width, self.device)
        slots = self._behind() + torch.arange(width, device=self.device)
        root = self._behind() - above  # [rows, 1]: columns before the tree
        seen = (torch.arange(self.cache.top, device=slots.device) < root)[:, None].repeat(1, width, 1)
        columns = root + torch.arange(above + width, device=slots.device)
        seen = seen.scatter(2, columns[:, None].expand(-1, width, -1), self.cache.of_running(ancestors))
        return self._step(tokens, states, slots, (root + depth - 1).expand(-1, width), seen)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., Vd] over the draft vocabulary."""
        return self.head.logits(states, self.target)

    def _step(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        slots: torch.Tensor,
        places: torch.Tensor,
        seen: torch.Tensor | None,
    ) -> torch.Tensor:
        """slots, places: [rows, n], where the columns of the rows that run are written, and where they stand in the text.
        seen: [rows, n, top] bool, but for padding; None where all is."""
        cache = self.cache
        if seen is not None and cache.visible is not None:
            hidden = min(cache.visible.shape[1], cache.top)
            seen[:, :, :hidden] &= self.cache.of_running(cache.visible)[:, None, :hidden].to(seen.device)
            seen.scatter_(
                2, slots[:, :, None], True
            )  # a column of padding sees itself: attention to nothing is not a number
        states = self.head(
            self.head.embed(self.cache.of_running(tokens), self.target),
            self.cache.of_running(states),
            (places + self.cache.of_running(self.first)).clamp(min=0),
            None if seen is None else seen[:, None],
            cache,
        )
        return cache.spread(states)

    def _behind(self) -> torch.Tensor:
        return on_device([self.cache.lengths[row] for row in self.cache.running], self.device)[:, None]
