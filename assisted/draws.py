"""Drawing tokens so that drafts change nothing: a uniform number for each row and position. What is drawn at a position then
depends on its distribution alone. Knows tensors only."""

from __future__ import annotations

import torch

_BLOCK = 1024  # positions


class Draws:
    """The numbers of one call. Takes one number of torch's default generator.

    Args:
        rows: batch size B.
    """

    def __init__(self, rows: int):
        self.generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        self.numbers = torch.empty(rows, 0, dtype=torch.float64)

    def sample(self, p: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One token from each distribution p, [B, k, V], for these positions of the text, [B, k] int64. Returns [B, k] int64.

        The first token whose cumulative probability is above the number.
        """
        while self.numbers.shape[1] <= int(positions.max()):
            more = torch.rand(len(self.numbers), _BLOCK, dtype=torch.float64, generator=self.generator)
            self.numbers = torch.cat([self.numbers, more], 1)
        sums = p.double().cumsum(-1)
        found = self.numbers.gather(1, positions.cpu()).to(p.device)[..., None]
        return (sums > found * sums[..., -1:]).int().argmax(-1)
