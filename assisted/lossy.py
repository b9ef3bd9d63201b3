"""Typical acceptance (Medusa, 2401.10774): keeps what is likely enough instead of what keeps the distribution. NOT exact.

The only rule of this package whose output does not follow the target's distribution, which is why its name says so
and nothing takes it by default. Knows tensors and drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .acceptance import Verdict, sample
from .drafts import Draft

__all__ = ["LossyTypical"]


@dataclass(frozen=True)
class LossyTypical:
    """Keep drafted tokens that are typical of the target: `generate(..., do_sample=True, lossy_typical=LossyTypical())`.

    A token x is kept if p(x) > min(epsilon, delta * exp(-H(p))), with H the entropy of the target's distribution p
    there: where the target is unsure, much is typical. Of all paths that are kept the longest one counts, and a
    token drawn from the target's distribution follows it. What drafts say is preferred to what the target would have
    drawn, so the text leans towards the draft.

    Args:
        epsilon: probability above which every token is typical, in (0, 1]. Larger keeps less.
        delta: share of exp(-H) above which one is, above 0. Larger keeps less.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 1:
            raise ValueError(f"epsilon: {self.epsilon} is no probability; give more than 0 and at most 1")
        if not self.delta > 0:
            raise ValueError(f"delta: {self.delta} is not possible; give more than 0")

    def judge(self, draft: Draft, p: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Verdict]:
        """p: [B, n + 1, V], the target's distribution after the committed text and after each node. Returns the
        path, [B, n] int64 node indices in order padded with -1, and the verdict, as `acceptance.rejection_tree`."""
        tokens, n = draft.tokens, draft.width
        node, row = torch.arange(n, device=tokens.device), torch.arange(len(tokens), device=tokens.device)
        above = node.expand_as(tokens) if draft.parents is None else draft.parents + 1  # the column that a node follows
        entropy = -(p * p.clamp(min=torch.finfo(p.dtype).tiny).log()).sum(-1)  # [B, n + 1]
        enough = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)
        likely = p[row[:, None], above, tokens.clamp(0, p.shape[-1] - 1)]
        typical = (likely > enough.gather(1, above)) & (node < draft.lengths[:, None])
        path = draft.ancestors()  # [B, n, n]: of node i, itself included
        kept = ~(path & ~typical[:, None]).any(-1)
        depth = F.pad(path.sum(-1).where(kept, 0), (1, 0))  # [B, n + 1]; column 0 keeps nothing
        last = depth.argmax(-1)
        on_path = F.pad(path, (0, 0, 1, 0))[row, last]  # column 0 has no path
        order = node.where(on_path, n).sort(-1).values
        return order.masked_fill(order == n, -1), Verdict(on_path.sum(-1), sample(p[row, last], generator))
