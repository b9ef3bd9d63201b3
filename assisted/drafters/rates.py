"""How often guesses that come with a probability are right: learned from what became of earlier ones.

Knows tensors, on whatever device they are; nothing of what makes the guesses. Nothing here waits for the device.
"""

from __future__ import annotations

import torch

from ..estimates import MEMORY

__all__ = ["Rates"]

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
_BINS = len(_EDGES) + 1
_RANKS = 3  # the best guess, the second, all others
_POOLED, _OWN = 2.0, 4.0  # weight of the word that is given beside what was seen, of all levels and of one


class Rates:
    """How often a guess is right, by its probability, its rank among the guesses at its place, and a level.

    A head gives its guesses probabilities without knowing the law that they are judged by: a greedy target takes the best
    guess far more often than a head says that was trained on the target's law. Nor does it always know which tokens come
    between. Before anything is learned a guess is taken at its word; the past fades round by round.

    Args:
        levels: kinds of places that are counted apart and lean on each other while little was seen of one.
    """

    def __init__(self, levels: int = 1):
        self.levels = levels
        self.right = torch.zeros(levels, _RANKS * _BINS)
        self.seen = torch.zeros(levels, _RANKS * _BINS)
        self._lines: tuple[torch.Tensor, torch.Tensor] | None = None
        self._edges = torch.tensor(_EDGES)
        self._ranks = torch.arange(0)

    def of(self, probabilities: torch.Tensor, level: int | torch.Tensor = 0) -> torch.Tensor:
        """The rate of each guess, shaped as they are. probabilities: [..., k] float32, of the guesses at each place, best
        first. level: of all places, or [..., 1] int64. What is impossible, or no number, stays impossible."""
        base, slope = self._fitted(probabilities.device)
        cells = self._cells(probabilities, level)
        return torch.where(probabilities > 0, base[cells] + slope[cells] * probabilities, 0.0)

    def see(
        self, probabilities: torch.Tensor, level: int | torch.Tensor, right: torch.Tensor, asked: torch.Tensor
    ) -> None:
        """What became of a round's guesses. Called once for all of them.

        probabilities, level: as in `of`. right: [..., k] bool, the guesses that were. asked: [...] bool, places that the
        text came to; nothing is learned of others.
        """
        device = probabilities.device
        cells = self._cells(probabilities, level).flatten()
        counted = asked[..., None].expand_as(right)

        def more(before: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
            added = torch.zeros(before.numel(), device=device).index_add(0, cells, which.flatten().float())
            return before.to(device) * MEMORY + added.view_as(before)

        # new tensors: these may be inference tensors, which are not to be changed elsewhere
        self.right, self.seen = more(self.right, right & counted), more(self.seen, counted)
        self._lines = None

    def _cells(self, probabilities: torch.Tensor, level: int | torch.Tensor) -> torch.Tensor:
        device, guesses = probabilities.device, probabilities.shape[-1]
        edges, ranks = self._edges, self._ranks
        if edges.device != device or len(ranks) != guesses:
            self._edges = edges = edges.to(device)
            self._ranks = ranks = _BINS * torch.arange(guesses, device=device).clamp(max=_RANKS - 1)
        cells = torch.bucketize(probabilities.contiguous(), edges, right=True) + ranks
        return cells if self.levels == 1 else cells + _BINS * _RANKS * level

    def _fitted(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """For each cell, base and slope of its rate over the probability."""
        if self._lines is None or self._lines[0].device != device:
            right, seen = self.right.to(device), self.seen.to(device)
            of_all, seen_of_all = right.sum(0), seen.sum(0) + _POOLED
            base = (right + _OWN * of_all / seen_of_all) / (seen + _OWN)
            slope = _OWN * _POOLED / seen_of_all / (seen + _OWN)
            self._lines = base.flatten(), slope.flatten()
        return self._lines
