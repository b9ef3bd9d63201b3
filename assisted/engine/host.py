"""Numbers from the host on a device, without waiting for it.

A copy from ordinary memory to a CUDA device waits until all that was asked of the device is done; one from pinned memory
does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["on_device", "padded", "pinned"]


def on_device(values: Any, device: torch.device | str) -> torch.Tensor:
    """values: a number, or nested lists of them, as `torch.tensor` takes them."""
    if torch.device(device).type != "cuda":
        return torch.tensor(values, device=device)
    return pinned(values, device).to(device, non_blocking=True)


def pinned(values: Any, device: torch.device | str) -> torch.Tensor:
    """The same on the host, from where `copy_(..., non_blocking=True)` to the device waits for nothing."""
    return torch.tensor(values, pin_memory=torch.device(device).type == "cuda")


def padded(rows: Sequence[Sequence[int]], device: torch.device | str) -> torch.Tensor:
    """Rows of any length as [B, longest] int64, filled up with 0."""
    width = max(map(len, rows))
    return on_device([[*row, *[0] * (width - len(row))] for row in rows], device)
