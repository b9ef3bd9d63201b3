"""The clock. Everything that takes seconds asks it, with a device if its work is to be waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch


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
