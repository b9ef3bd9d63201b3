"""Turns and clocks: who is measured when, and when the first token comes. Knows neither models nor contestants."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from transformers.generation.streamers import BaseStreamer

__all__ = ["FirstToken", "Progress", "now", "silent", "turns"]

T = TypeVar("T")
Progress = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done, in [0, 1]."""


def silent(what: str, share: float) -> None:
    """The progress that nobody sees."""


def turns(
    contestants: Sequence[T],
    prompts: int = 1,
    repeats: int = 1,
    seconds: float | None = None,
    progress: Callable[[float], Any] = lambda share: None,
) -> Iterator[tuple[T, int, int]]:
    """Whose turn it is: (contestant, prompt, repeat). Everybody takes a turn at each prompt, and who begins changes.

    prompts, repeats: how many. seconds: no repeat begins that would end later than this after the start, if it takes as long
    as the one before; one is always made. progress: called after each prompt with the share that is done.
    """
    began, took = time.perf_counter(), 0.0
    order = list(contestants)
    for repeat in range(repeats):
        started = time.perf_counter()
        if seconds is not None and repeat and started + took > began + seconds:
            return
        for prompt in range(prompts):
            for one in order:
                yield one, prompt, repeat
            order = order[1:] + order[:1]
            progress((repeat + (prompt + 1) / prompts) / repeats)
        took = time.perf_counter() - started


def now(device: torch.device) -> float:
    """Seconds, when the device has computed all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


class FirstToken(BaseStreamer):
    """A streamer that looks at the clock when the first token comes, after the prompt.

    Attributes:
        started: when it was made.
        seconds: from then on until the first token; not a number before.
    """

    def __init__(self, device: torch.device):
        self.started = now(device)
        self.seconds = float("nan")
        self._pieces = 0

    def put(self, value: torch.Tensor) -> None:
        self._pieces += 1
        if self._pieces == 2:
            self.seconds = time.perf_counter() - self.started

    def end(self) -> None:
        pass
