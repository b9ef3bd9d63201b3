"""Where the rows of a training step may attend: the steps of a draft unrolled over a text, and masks that stand for its next
tokens. Knows neither heads nor models."""

from __future__ import annotations

import torch
from torch import Tensor


def unrolled_mask(columns: int, step: int, device: torch.device | str = "cpu") -> Tensor:
    """The attention mask in step `step` (0-based) of training, [1, 1, n, (step + 1) * n] bool, true where a column may attend.

    The keys of all steps are concatenated. A column sees the true features up to its own. Each later step adds one token to
    its own continuation, so there it sees only its own column. Two steps over three columns:

                step 0    step 1
                0 1 2     0 1 2
            0   1         1
            1   1 1         1
            2   1 1 1         1
    """
    own = torch.eye(columns, dtype=torch.bool, device=device)
    return torch.cat([torch.ones_like(own).tril(), *[own] * step], -1)[None, None]


def rows_of(length: int, tokens: int, keep: float, least: float, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """The rows of a step, [N] int64 each: the token of the text that a row's masks follow, and the row's depth.

    Depth 0 is the text itself. A row at depth j exists only where there is one at depth j - 1. Draws random numbers.
    """
    if length <= tokens:
        raise ValueError(f"context: {length} tokens are too few to draft {tokens} from")
    anchors = [torch.arange(length, device=device)]
    left = torch.randperm(length - tokens + 1, device=device)
    for depth in range(1, tokens):
        left = left[: max(1, round(max(keep**depth, least) * (length - tokens + 1)))]
        anchors.append(left.sort().values)
    return torch.cat(anchors), torch.cat([torch.full_like(row, depth) for depth, row in enumerate(anchors)])


def seen_by(anchors: Tensor, depths: Tensor) -> Tensor:
    """[N, N] bool, whether row i attends to row j: to the text up to its anchor, and to the masks before it.

    The text 0 1 2, with masks of depth 1 and 2 after token 0:

                0 1 2 m m
            0   1
            1   1 1
            2   1 1 1
            m   1     1
            m   1     1 1
    """
    anchor, depth = anchors[:, None], depths[:, None]
    return ((depths == 0) & (anchors <= anchor)) | ((anchors == anchor) & (depths <= depth))
