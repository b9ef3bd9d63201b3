"""Turns, clocks and progress bars: who is measured when, and when the first token comes. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from tqdm.auto import tqdm
from transformers.generation.streamers import BaseStreamer

from ...core.host import now

T = TypeVar("T")
Progress = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done, in [0, 1]."""


def silent(what: str, share: float) -> None:
    """The progress that is not shown."""


class Bars:
    """A bar on standard error for one thing after the other: `bars("measuring", 0.5)`. Close it, or use it in a `with`."""

    def __init__(self) -> None:
        self.what = ""
        self.bar: Any = None

    def __call__(self, what: str, share: float) -> None:
        if what != self.what:
            self.close()
            form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
            self.what, self.bar = what, tqdm(total=1.0, desc=what, leave=False, bar_format=form)
        self.bar.update(share - self.bar.n)

    def close(self) -> None:
        """End the bar that is shown."""
        if self.bar is not None:
            self.bar.close()
        self.what, self.bar = "", None

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *details: Any) -> None:
        self.close()


def turns(
    methods: Sequence[T],
    prompts: int = 1,
    repeats: int = 1,
    seconds: float | None = None,
    progress: Callable[[float], Any] = lambda share: None,
    least: int = 1,
) -> Iterator[tuple[T, int, int]]:
    """Yields whose turn it is: (method, prompt, repeat). Everybody takes a turn at each prompt; who begins changes.

    Args:
        prompts, repeats: how many.
        seconds: a repeat begins only if it would end this long after the start, should it take as long as the last one.
        progress: called after each prompt with the share that is done.
        least: number of repeats that are made in any case.
    """
    began, took = now(), 0.0
    order = list(methods)
    for repeat in range(repeats):
        started = now()
        if seconds is not None and repeat >= least and started + took > began + seconds:
            return
        for prompt in range(prompts):
            for one in order:
                yield one, prompt, repeat
            order = order[1:] + order[:1]
            progress((repeat + (prompt + 1) / prompts) / repeats)
        took = now() - started


class FirstToken(BaseStreamer):
    """A streamer that notes when the first token and the end come. What it gets before that is the prompt.

    Attributes:
        started: when it was made.
        seconds, total: from then until the first token, and until the end; NaN before it comes.
    """

    def __init__(self, device: torch.device):
        self.device, self.started = device, now(device)
        self.seconds = self.total = float("nan")
        self._pieces = 0

    def put(self, value: torch.Tensor) -> None:
        self._pieces += 1
        if self._pieces == 2:
            self.seconds = now() - self.started

    def end(self) -> None:
        self.total = now(self.device) - self.started
