"""Typical acceptance (Medusa, 2401.10774): keeps every token that is probable enough. NOT exact.

This is the only rule of the package whose output does not follow the target's distribution. Hence its name, and no default
selects it. Knows tensors and drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .acceptance import Verdict, sample
from .drafts import Draft


@dataclass(frozen=True)
class LossyTypical:
    """Keep drafted tokens that are typical of the target: `generate(..., do_sample=True, lossy_typical=LossyTypical())`.

    A token x is kept if p(x) > min(epsilon, delta * exp(-H(p))), where H is the entropy of the target's distribution p at
    that position. The higher the entropy, the more tokens are typical. The longest path of kept tokens is accepted, and a
    token drawn from p follows it. The output is biased towards the draft, because a typical drafted token replaces the token
    that the target would have drawn.

    Args:
        epsilon: probability above which a token is always typical, in (0, 1]. Larger values keep fewer tokens.
        delta: a token is also typical if its probability exceeds this multiple of exp(-H). Must be positive. Larger values
            keep fewer tokens.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 1:
            raise ValueError(f"epsilon: {self.epsilon} is not possible; give a probability above 0 and at most 1")
        if not self.delta > 0:
            raise ValueError(f"delta: {self.delta} is not possible; give a number above 0")

    def judge(self, draft: Draft, p: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Verdict]:
        """Choose the longest path of typical tokens, and draw the token after it.

        p: [B, n + 1, V], the target's distribution after the committed text and after each node. Returns the path ([B, n]
        int64, node indices in order, padded with -1) and the verdict, as `core.acceptance.rejection_tree` does.
        """
        tokens, n = draft.tokens, draft.width
        node, row = torch.arange(n, device=tokens.device), torch.arange(len(tokens), device=tokens.device)
        above = node.expand_as(tokens) if draft.parents is None else draft.parents + 1  # the column of p for each node
        entropy = -(p * p.clamp(min=torch.finfo(p.dtype).tiny).log()).sum(-1)  # [B, n + 1]
        enough = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)
        likely = p[row[:, None], above, tokens.clamp(0, p.shape[-1] - 1)]
        typical = (likely > enough.gather(1, above)) & (node < draft.lengths[:, None])
        path = draft.ancestors()  # [B, n, n]: the path to node i, i included
        kept = ~(path & ~typical[:, None]).any(-1)
        depth = F.pad(path.sum(-1).where(kept, 0), (1, 0))  # [B, n + 1]; column 0: nothing is kept
        last = depth.argmax(-1)
        on_path = F.pad(path, (0, 0, 1, 0))[row, last]  # column 0: the empty path
        order = node.where(on_path, n).sort(-1).values
        return order.masked_fill(order == n, -1), Verdict(on_path.sum(-1), sample(p[row, last], generator))
