"""How the columns of a forward pass follow one another, as recurrent layers need to know it: chains and token trees."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ..core.drafts import Draft
from .masks import column_ancestors


@dataclass(frozen=True)
class Columns:
    """How the columns of a forward pass follow one another.

    Args:
        width: n.
        ancestors: [R, n, n] bool, whether column j is on the path to column i, itself included; None for a chain.
        parents: [R, n - 1] int64, the column before each column but the first, on its path; None for a chain.
    """

    width: int
    ancestors: torch.Tensor | None = None
    parents: torch.Tensor | None = None

    @classmethod
    def of(cls, width: int, draft: Draft | None, device: torch.device) -> Columns:
        """Those of a forward pass over the last committed token and a draft. draft: of the running rows."""
        if draft is None or draft.parents is None:
            return cls(width)
        return cls(width, column_ancestors(draft).to(device), draft.parents.to(device) + 1)

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


@functools.lru_cache(64)
def _beside_chain(width: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # it outlives the mode
        return torch.full((1, 1, width, width), float("-inf"), device=device).triu(1)
