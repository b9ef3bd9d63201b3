"""The host: copying numbers to a device without waiting for the device, free memory, and the name of the processor.

A copy from pageable memory to a CUDA device waits for all queued work; a copy from pinned memory does not.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def on_device(values: Any, device: torch.device | str) -> torch.Tensor:
    """values: a number or nested lists of numbers, as for `torch.tensor`."""
    if torch.device(device).type != "cuda":
        return torch.tensor(values, device=device)
    return pinned(values, device).to(device, non_blocking=True)


def pinned(values: Any, device: torch.device | str) -> torch.Tensor:
    """The same values on the host, in memory that `copy_(..., non_blocking=True)` can copy without waiting."""
    return torch.tensor(values, pin_memory=torch.device(device).type == "cuda")


def padded(rows: Sequence[Sequence[int]], device: torch.device | str, filler: int = 0) -> torch.Tensor:
    """Rows of any length as [B, longest] int64, padded on the right."""
    return on_device(filled(rows, filler), device).long()  # without a single number, `torch.tensor` makes float32


def filled(rows: Sequence[Sequence[int]], filler: int = 0) -> list[list[int]]:
    """The same as lists."""
    width = max(map(len, rows))
    return [[*row, *[filler] * (width - len(row))] for row in rows]


def free_memory() -> int:
    """Bytes of main memory that can be allocated, files that the system keeps in memory included; 0 if it does not report
    them."""
    about = Path("/proc/meminfo")
    lines = about.read_text().splitlines() if about.is_file() else []
    available = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    if available is not None:
        return int(available) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or main memory, has no room; torch has no class of its own for main memory."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


@functools.cache
def processor() -> str:
    """The name of this machine's processor; on Linux, it is only in a file."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
