"""What causal LMs and heads have in common as they run: a module, its slots, and the way its forward passes are run.

Captured forward passes (fast/graphs.py) need nothing else of a runner.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..core.drafts import Draft
from .cache import Paths, SlotCache
from .prefill import by_groups
from .prepared import CallSettings, PreparedModule

Chained = Callable[[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], list[torch.Tensor]]
"""Drafts a chain on the device: from a model's output after the text, [B, ...], and a function that reads a token of each row,
[B, 1] int64, and returns the output after it."""


class Inputs(NamedTuple):
    """What a captured forward pass reads.

    ids: [R, n] int64. known: [R, 1] int64, valid slots of each row. first: [R, 1] int64, position of column 0.
    parents: [R, n - 1] int64 for a tree, None for chains. visible: [R, top] bool, False at a prompt's padding; `top` slots
    are read, at least n more than the longest row has.
    """

    ids: torch.Tensor
    known: torch.Tensor
    first: torch.Tensor
    parents: torch.Tensor | None
    visible: torch.Tensor


class Passes:
    """Runs forward passes eagerly, operation by operation. `fast.graphs.Graphs` replays captured ones instead."""

    runs: str | None = None  # what captured forward passes run as

    def run(self, runner: Runner, ids: torch.Tensor, draft: Draft | None, used: list[int] | None) -> torch.Tensor:
        """One forward pass; see `CachedModel.__call__`."""
        return runner.eager(ids, draft, used)

    def gather(self, runner: Runner, path: Paths) -> bool:
        """Move a tree's accepted columns together, as `SlotCache.commit` does. False leaves that to the cache."""
        return False

    def twin(self, runner: Runner, top: int) -> Any:
        """The runner over the slots that captured functions read, for functions of `compute` that run it over `top` slots; None
        where that is not possible."""
        return None

    def compute(
        self,
        runner: Runner,
        key: Hashable,
        function: Callable[..., list[torch.Tensor]],
        inputs: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor] | None:
        """The results of a captured function of tensors, valid until the next replay; None leaves calling it to the caller.

        key: equal for functions that compute the same. The host reads no value in them.
        """
        return None

    def rounding(self, most: int) -> Callable[[int, int], int | None] | None:
        """If each shape is captured: the number of columns that a pass is rounded up to, given its columns and rows; None for a
        pass too wide to capture. most: rows of the call."""
        return None

    def chain(
        self, runner: Runner, ids: torch.Tensor, counts: list[int], steps: int, key: Hashable, function: Chained
    ) -> list[torch.Tensor] | None:
        """Forward passes over committed columns and then over one token after the other, in one captured function; None leaves
        them to the caller. Nothing is committed.

        ids: [B, n] int64, `counts[b]` columns of row b. steps: the most tokens that are read after them. key: equal for
        functions that compute the same. Returns what the function returns and, if the module reads states, its output after
        the columns.
        """
        return None

    def release(self, reason: str) -> None:
        """Free the memory of captured passes, and run eagerly from now on."""


class Runner:
    """A module, its slots, and how its forward passes are run.

    Args:
        prepared: the module, not changed.
        cache: its slots.
        context: the number of positions it supports.

    Attributes:
        passes: how its forward passes are run.
        settings: those of the call.
        constants: further arguments of every forward pass, from the caller of `generate`.
    """

    constants: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, prepared: PreparedModule, cache: SlotCache, device: torch.device, context: int):
        self.prepared, self.cache, self.device, self.context = prepared, cache, device, context
        self.passes, self.settings = Passes(), CallSettings()

    @property
    def runs(self) -> str:
        """What its forward passes run as, for `core.report.passes`."""
        return self.passes.runs or self.prepared.runs

    @property
    def is_capturable(self) -> bool:
        """Whether forward passes can run through `static_forward`."""
        raise NotImplementedError

    def eager(self, ids: torch.Tensor, draft: Draft | None = None, used: list[int] | None = None) -> torch.Tensor:
        """One forward pass, the reference for all other ways to run it; see `CachedModel.__call__`."""
        raise NotImplementedError

    def static_forward(self, inputs: Inputs) -> torch.Tensor:
        """The same forward pass as a function of tensors only; the host reads no value that changes between passes.

        Returns [R, n, V].
        """
        raise NotImplementedError

    def compute(
        self, key: Hashable, function: Callable[..., list[torch.Tensor]], *inputs: torch.Tensor | None
    ) -> list[torch.Tensor] | None:
        """As `Passes.compute`."""
        return self.passes.compute(self, key, function, inputs)

    def run_only(self, rows: list[int]) -> None:
        """Run the next forward passes over these rows only, because finished rows would waste time."""
        self.cache.run_only(rows)

    def by_groups(self, width: int, read: Callable[[list[int], int], torch.Tensor]) -> torch.Tensor:
        """Read a prompt of `width` columns; see `prefill.by_groups`. Rows are read apart only if `is_capturable`. Returns the
        output of all rows, [B, 1, ...]."""
        taps, alike = self.prepared.taps.values(), self.settings.bits
        return by_groups(self.cache, taps, width, self.device, read, self.is_capturable, alike)
