"""The kind of attention mask that a model takes, and how the columns of a forward pass follow one another, in chains or token
trees: masks for attention, `Columns` for recurrent layers.

Depends on drafts, not on models (traits.py), the cache or how a forward pass is run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ..core.drafts import Draft
from ..core.host import on_device

FEW = 2048  # numbers of a mask between nodes


class Unread(Draft):
    """A draft whose tensors get other values at every replay of a captured forward pass: the host must not read them."""


@dataclass(frozen=True)
class Masks:
    """The kind of attention mask that a model takes."""

    # the model takes 4-D masks, so rows of different lengths and token trees can share a forward pass. Otherwise
    # (ALiBi, flash attention, chunked attention) slots are right-aligned and only chains are verified.
    trees: bool
    # the sliding window of each layer type, None for full attention. With one entry, all layers share a mask; with
    # several, masks are a dict by layer type.
    windows: dict[str, int | None]
    additive: bool  # eager attention adds the mask; sdpa takes booleans

    def made(
        self,
        known: torch.Tensor,
        depths: torch.Tensor,
        draft: Draft | None,
        visible: torch.Tensor | None,
        top: int,
        dtype: torch.dtype,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """4-D masks, [R, 1, n, top]: which of the first `top` slots each column may attend to.

        known: [R, 1] int64, valid slots. depths: [R or 1, n], `column_depths`. draft: the tokens of the columns after the
        last committed one. visible: [R, any] bool, False at a prompt's padding; None without padding. dtype: of additive
        masks.
        """
        slots = places = torch.arange(top, device=known.device)
        where = known + depths  # [R, n]: a column's index in its row's text
        windowed = any(self.windows.values())
        if draft is None or draft.parents is None:
            seen = slots <= where[:, :, None]  # a chain fills its slots in text order
        elif (paths := None if windowed else _paths(draft)) is not None:
            made = bytearray()
            for length, of_row in zip(known[:, 0].tolist(), paths, strict=True):
                before, after = b"\1" * length, bytes(top - length - 1 - draft.width)
                made += b"".join(before + path + after for path in of_row)
            seen = torch.frombuffer(made, dtype=torch.bool).view(len(known), -1, top)
        else:
            columns = known + torch.arange(depths.shape[1], device=known.device)
            if windowed:
                places = slots.repeat(len(known), 1).scatter(1, columns, where)[:, None]
            seen = (slots < known)[:, None].repeat(1, depths.shape[1], 1)
            seen.scatter_(2, columns[:, None].expand(-1, depths.shape[1], -1), column_ancestors(draft))
        if visible is not None:
            hidden = min(visible.shape[1], top)
            seen = seen.clone()
            seen[:, :, :hidden] &= visible[:, None, :hidden]
        return self.dressed(seen, places, where, dtype)

    def dressed(
        self, seen: torch.Tensor, places: torch.Tensor, where: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """The masks as the model takes them.

        seen: [R, n, top] bool, the slots on each column's path. places: [top] or [R, 1, top], the index of each slot's token in
        its row's text. where: [R, n], the same of each column.
        """
        masks = {
            kind: self._dressed(seen if window is None else seen & (places > where[:, :, None] - window), dtype)
            for kind, window in self.windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _dressed(self, seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        seen = seen[:, None]
        if not self.additive:
            return seen
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def column_depths(draft: Draft | None, width: int, device: torch.device) -> torch.Tensor:
    """Depth of each column of a forward pass; the last committed token has depth 0. Returns [B or 1, n]."""
    if draft is None or draft.parents is None:
        return torch.arange(width, device=device)[None]
    if (rows := _parents(draft)) is not None:
        for above in rows:
            for node, parent in enumerate(above):
                above[node] = above[parent] + 1 if parent >= 0 else 1
        return on_device([[0, *depths] for depths in rows], device)
    return torch.nn.functional.pad(draft.depths(), (1, 0)).to(device)


def column_ancestors(draft: Draft) -> torch.Tensor:
    """Draft.ancestors with the last committed token, an ancestor of every node, as column 0. Returns [B, n + 1, n + 1]."""
    if (paths := _paths(draft)) is not None:
        made = bytearray(b"".join(path for of_row in paths for path in of_row))
        return torch.frombuffer(made, dtype=torch.bool).view(len(paths), draft.width + 1, -1)
    seen = torch.nn.functional.pad(draft.ancestors(), (1, 0, 1, 0))
    seen[:, :, 0] = True
    return seen


def _paths(draft: Draft) -> list[list[bytes]] | None:
    """`column_ancestors` on the host, a byte for each number; None where `_parents` is."""
    if (rows := _parents(draft)) is None:
        return None
    made = []
    for above in rows:
        paths = [b"\1" + bytes(draft.width)]
        for node, parent in enumerate(above, 1):
            path = paths[parent + 1]
            paths.append(path[:node] + b"\1" + path[node + 1 :])
        made.append(paths)
    return made


def _parents(draft: Draft) -> list[list[int]] | None:
    """The parents of a few nodes on the host, where lists take less time than many small operations; None for others."""
    parents, rows = draft.parents, len(draft.tokens)
    if parents is None or not parents.is_cpu or rows * draft.width**2 > FEW:
        return None
    if isinstance(draft, Unread) or torch.compiler.is_compiling():
        return None
    return parents.tolist()


@dataclass(frozen=True)
class Columns:
    """How the columns of a forward pass follow one another."""

    width: int  # n
    # [R, n, n] bool, whether column j is on the path to column i, itself included; None for a chain
    ancestors: torch.Tensor | None = None
    # [R, n - 1] int64, the column before each column but the first, on its path; None for a chain
    parents: torch.Tensor | None = None

    @classmethod
    def of(cls, width: int, draft: Draft | None, device: torch.device) -> Columns:
        """Those of a forward pass over the last committed token and a draft. draft: of the running rows."""
        if draft is None or draft.parents is None:
            return cls(width)
        return cls(width, column_ancestors(draft).to(device), draft.parents.to(device) + 1)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those of a tree; none of a chain."""
        return [] if self.ancestors is None or self.parents is None else [self.ancestors, self.parents]

    @functools.cached_property
    def descendants(self) -> torch.Tensor:
        """[R, n, n] float32, whether column i is on the path to column j, itself included; of a tree."""
        assert self.ancestors is not None
        return self.ancestors.transpose(-1, -2).float()

    def beside_path(self, device: torch.device) -> torch.Tensor:
        """[R or 1, 1, n, n] float32, minus infinity where column j is not on the path to column i, and 0 elsewhere."""
        if self.ancestors is None:
            return _beside_chain(self.width, device)
        return self._beside

    @functools.cached_property
    def _beside(self) -> torch.Tensor:
        assert self.ancestors is not None
        return torch.zeros_like(self.descendants).masked_fill_(~self.ancestors, float("-inf"))[:, None]

    def windows(self, size: int) -> torch.Tensor:
        """Of each column, the last `size` inputs on its path, oldest first, as indices into the `size` inputs before the
        forward pass followed by the n columns, [R or 1, n, size] int64."""
        known = self._known_windows
        if size not in known:
            known[size] = self._windows(size)
        return known[size]

    @functools.cached_property
    def _known_windows(self) -> dict[int, torch.Tensor]:
        return {}  # the layers of a forward pass share them

    def _windows(self, size: int) -> torch.Tensor:
        device = None if self.ancestors is None else self.ancestors.device
        back = torch.arange(size - 1, -1, -1, device=device)
        own = torch.arange(self.width, device=device)
        if self.ancestors is None:
            return (size + own[:, None] - back)[None]
        depths = self.ancestors.sum(2) - 1
        # the ancestors of a column by depth: the depths on a path differ
        by_depth = depths[:, None].where(self.ancestors, self.width).argsort(dim=2)
        wanted = depths[:, :, None] - back
        found = by_depth.gather(2, wanted.clamp(min=0))
        return torch.where(wanted >= 0, size + found, size + wanted)


@functools.cache  # captured passes refer to it by address
def _beside_chain(width: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # it outlives the mode
        return torch.full((1, 1, width, width), float("-inf"), device=device).triu(1)
