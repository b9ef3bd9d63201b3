"""The host: its clock, copying numbers to a device without waiting for the device, free memory, and the name of the processor.

Everything that takes seconds asks the clock, with a device if its work is to be waited for.
A copy from pageable memory to a CUDA device waits for all queued work; a copy from pinned memory does not.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

_LARGE = 2**20  # bytes; smaller blocks are faster from memory that the process has freed before


def on_device(values: Any, device: torch.device | str) -> torch.Tensor:
    """values: a number or nested lists of numbers, as for `torch.tensor`."""
    if torch.device(device).type != "cuda":
        return torch.tensor(values, device=device)
    return pinned(values, device).to(device, non_blocking=True)


def pinned(values: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The same values on the host, in memory that `copy_(..., non_blocking=True)` can copy without waiting."""
    return torch.tensor(values, dtype=dtype, pin_memory=torch.device(device).type == "cuda")


def padded(rows: Sequence[Sequence[int]], device: torch.device | str, filler: int = 0) -> torch.Tensor:
    """Rows of any length as [B, longest] int64, padded on the right."""
    return on_device(filled(rows, filler), device).long()  # without a single number, `torch.tensor` makes float32


def filled(rows: Sequence[Sequence[int]], filler: int = 0) -> list[list[int]]:
    """The same as lists."""
    width = max(map(len, rows))
    return [[*row, *[filler] * (width - len(row))] for row in rows]


def zeros(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zeros for slots. In main memory, large ones take none before they are written: most of a batch's rows are often free."""
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or size < _LARGE:
        return like.new_zeros(shape)
    own = {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}  # a forked process gets copies
    try:
        return torch.frombuffer(mmap.mmap(-1, size, **own), dtype=like.dtype).view(shape)
    except OSError:
        return like.new_zeros(shape)  # which says that there is no room


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


_WIDEST = {"amx_tile": "AMX", "avx512_bf16": "AVX512-BF16", "avx512f": "AVX512", "avx2": "AVX2"}


@functools.cache
def processor() -> str:
    """The name of this machine's processor, on Linux with the widest instructions that multiply: "AMD EPYC (AVX2)". Virtual
    machines give processors of several generations one name."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    flags = {flag for line in lines if line.startswith("flags") for flag in line.split()}
    widest = next((f" ({name})" for flag, name in _WIDEST.items() if flag in flags), "")
    return next(named, platform.processor() or platform.machine()) + widest


def now(device: torch.device | None = None) -> float:
    """Seconds since a moment in the past; of a device, after all work queued on it is done."""
    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def timed(run: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """The result of `run`, and how many seconds it took. Waits for the device before and after."""
    started = now(device)
    result = run()
    return result, now(device) - started


@contextmanager
def once(settings: Any) -> Iterator[None]:
    """A context with one-time work of a call, which does not predict how long later steps take."""
    started = now()
    try:
        yield
    finally:
        settings.spent_once += now() - started


class Stopwatch:
    """Times steps without one-time work.

    settings: those of the call; they count the seconds of one-time work.
    """

    def __init__(self, settings: Any):
        self.settings = settings
        self.start()

    def start(self, before: float = 0.0) -> None:
        """Begin the first step. before: seconds that it has taken already."""
        self.times = [self._now() - before]

    def lap(self) -> None:
        """End a step and begin another one."""
        self.times.append(self._now())

    def since(self) -> float:
        """Seconds since the last step ended."""
        return self._now() - self.times[-1]

    def laps(self) -> list[float]:
        """Seconds of each step; if several processes work together, those of the slowest one."""
        return self.settings.ranks.largest([end - start for start, end in pairwise(self.times)])

    def _now(self) -> float:
        return now() - self.settings.spent_once
