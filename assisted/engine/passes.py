"""What causal LMs and heads have in common as they run: a module, its slots, and the way its forward passes are run.

Captured forward passes (fast/graphs.py) need nothing else of a runner. Prompts of different lengths are read in groups of
similar length, and the shapes of captured passes are rounded up, so that few occur.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..core.drafts import Draft
from .cache import Paths, SlotCache
from .parts import Tap
from .prepared import CallSettings, PreparedModule

Chained = Callable[[torch.Tensor, Callable[..., torch.Tensor]], list[torch.Tensor]]
"""Drafts on the device: from a model's output after the text, [B, ...], and a function that reads tokens. For chains, it reads
one of each row, [B, 1] int64, and returns the output after it. For trees, of runners with `next_level`, it also takes the
place of each token's parent in the level before, [B, n] int64, and returns the outputs after all of them, [B, n, ...]."""


Mover = Callable[[torch.Tensor], object]
"""Moves the columns of an accepted path, [R, n] int64, to the slots that a chain would use."""
Unfused = tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]
"""What a module that reads states makes them of, [B, n, ...], and how."""


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

    def mover(self, runner: Runner, columns: int) -> Mover | None:
        """What moves a tree's accepted columns in a function of `compute`, before the host knows them; None leaves that to
        `gather`. columns: of the last forward pass."""
        return None

    def compute(
        self,
        runner: Runner,
        key: Hashable,
        function: Callable[..., list[torch.Tensor]],
        inputs: Sequence[torch.Tensor | None],
        moves: bool = False,
    ) -> list[torch.Tensor] | None:
        """The results of a captured function of tensors, valid until the next replay; None leaves calling it to the caller.

        key: equal for functions that compute the same. The host reads no value in them. moves: the function changes tensors
        at fixed addresses, but none if its inputs are zeros.
        """
        return None

    def rounding(self, most: int) -> Callable[[int, int], int | None] | None:
        """If each shape is captured: the number of columns that a pass is rounded up to, given its columns and rows; None for a
        pass too wide to capture. most: rows of the call."""
        return None

    def chain(
        self,
        runner: Runner,
        ids: torch.Tensor,
        counts: list[int],
        steps: int,
        key: Hashable,
        function: Chained,
        states: Unfused | None = None,
    ) -> list[torch.Tensor] | None:
        """Forward passes over committed columns and then over one token (or level) after the other, in one captured function;
        None leaves them to the caller. Nothing is committed.

        ids: [B, n] int64, `counts[b]` columns of row b. steps: the most columns that are read after them. key: equal for
        functions that compute the same. states: what the module reads beside `ids`, if it is not what its `inject` holds.
        Returns what the function returns and, if the module reads states, its output after the columns. The module's taps then
        hold the states of all columns and tokens.
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
        """What its forward passes run as, for `report.passes`."""
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

    def replayed(self, slots: Any, shape: Any) -> None:
        """Take over what a replay has left, beside its outputs, in a runner over the static `slots`. shape: of the forward
        pass."""

    def compute(
        self,
        key: Hashable,
        function: Callable[..., list[torch.Tensor]],
        *inputs: torch.Tensor | None,
        moves: bool = False,
    ) -> list[torch.Tensor] | None:
        """As `Passes.compute`."""
        return self.passes.compute(self, key, function, inputs, moves)

    def mover(self, columns: int) -> Mover | None:
        """As `Passes.mover`."""
        return self.passes.mover(self, columns)

    def run_only(self, rows: list[int]) -> None:
        """Run the next forward passes over these rows only, because finished rows would waste time."""
        self.cache.run_only(rows)

    def by_groups(self, width: int, read: Callable[[list[int], int], torch.Tensor]) -> torch.Tensor:
        """Read a prompt of `width` columns; see `prefill.by_groups`. Rows are read apart only if `is_capturable`. Returns the
        output of all rows, [B, 1, ...]."""
        taps, alike = self.prepared.taps.values(), self.settings.bits
        return by_groups(self.cache, taps, width, self.device, read, self.is_capturable, alike)


Group = tuple[list[int], int]
"""Rows, ascending, and the first column that is not padding in any of them."""

_PRICE = 512  # columns that take as long as one more forward pass
_PRICE_CPU = 32


def by_groups(
    cache: SlotCache,
    taps: Iterable[Tap],
    width: int,
    device: torch.device,
    read: Callable[[list[int], int], torch.Tensor],
    apart: bool,
    alike: bool = False,
) -> torch.Tensor:
    """Read a prompt of `width` columns, in the groups of rows that take the least work. Taps then hold the states of all rows
    that run.

    read: a forward pass over given rows, starting at a given column, that returns the output at the last column,
    [rows, 1, ...]. apart: whether rows may be read apart; otherwise all are read at once. alike: read each
    row as if it were alone. Returns the output of all rows, [B, 1, ...].
    """
    taps, rows = list(taps), sorted(cache.running)
    cache.alike = alike
    hidden = 0 if cache.visible is None else cache.visible.shape[1]
    apart = apart and not cache.layers and hidden <= width
    parts: list[Group] = groups(cache.visible, rows, device, alike) if apart else [(rows, 0)]
    if parts == [(cache.order, 0)]:
        return read(rows, 0)
    if parts == [(cache.running, 0)]:
        with cache.reading(rows, 0):
            return cache.spread(read(rows, 0))
    last: torch.Tensor | None = None
    states: list[torch.Tensor] = []
    for rows, first in parts:
        with cache.reading(rows, first):
            part = read(rows, first)
        if last is None:
            last = part.new_zeros(cache.rows, *part.shape[1:])
            states = [tap.hidden.new_zeros(cache.rows, width, tap.hidden.shape[-1]) for tap in taps]
        last[rows] = part
        for of_all, tap in zip(states, taps, strict=True):
            of_all[rows, first:] = tap.hidden
    for of_all, tap in zip(states, taps, strict=True):
        tap.hidden = of_all
    assert last is not None
    return last


def groups(visible: torch.Tensor | None, rows: Sequence[int], device: torch.device, alike: bool = False) -> list[Group]:
    """The forward passes that read these rows of a batch with the least work, each from its own first column to the end.

    visible: [B, n] bool, False at padding; None without padding. alike: each row by itself, without any padding before its
    first token. Padding after it is read.
    """
    starts = [0] * len(rows) if visible is None else _first(visible, rows)
    if alike or len(rows) == 1:
        return [([row], first) for row, first in zip(rows, starts, strict=True)]
    if visible is None:
        return [(list(rows), 0)]
    price = _PRICE_CPU if device.type == "cpu" else _PRICE
    width = visible.shape[1]
    ordered = sorted(zip(starts, rows, strict=True), reverse=True)  # the shortest row first
    # for the first i rows: the least work, and the start of their last group
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, len(ordered) + 1):
        longest = width - ordered[end - 1][0]
        best.append(min((best[i][0] + price + (end - i) * longest, i) for i in range(end)))
    found: list[Group] = []
    end = len(ordered)
    while end:
        start = best[end][1]
        found.append((sorted(row for _, row in ordered[start:end]), ordered[end - 1][0]))
        end = start
    return found


def _first(visible: torch.Tensor, rows: Sequence[int]) -> list[int]:
    """The first column of each row that is not padding; the last column in rows that are all padding."""
    counts = visible[list(rows)]
    first = counts.int().argmax(1).where(counts.any(1), visible.shape[1] - 1)
    found: list[int] = first.tolist()
    return found


WIDTHS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # columns of a captured forward pass; wider ones run eagerly
CHEAP = 64  # columns over all rows that take a GPU about as long as one
_NARROW = 8  # columns and rows below which no further shapes are made, since none of them would be faster
_LEAST = 256  # slots that a captured forward pass reads, at least


def rows_for(rows: int, most: int) -> int:
    """Rows of a captured forward pass: a power of two from 8 on, or all rows."""
    return min(most, max(_NARROW, 1 << (rows - 1).bit_length()))


def columns_for(width: int, rows: int) -> int | None:
    """Columns of a captured forward pass; None if it is too wide to capture. One column, or powers of two from 8 on while
    additional columns cost almost nothing; beyond that also sizes in between.
    """
    if width == 1:
        return 1
    least = min(_NARROW, 1 << (CHEAP // rows).bit_length() >> 1)  # of many rows, fewer columns are cheap
    power = max(least, 1 << (width - 1).bit_length())
    if power * rows <= CHEAP and power in WIDTHS:
        return power
    return next((size for size in WIDTHS if size >= width), None)


def columns_among(most: int, width: int, rows: int) -> int | None:
    """`columns_for`, where `rows` of at most so many rows run."""
    return columns_for(width, rows_for(rows, most))


def slots_for(top: int, sizes_open: bool = False) -> int:
    """Slots of a captured forward pass: powers of two, and above 1024 also 3/4 of each power. With sizes_open, multiples of
    1/8 of a power.
    """
    power = max(_LEAST, 1 << (top - 1).bit_length())
    if sizes_open:
        step = power // 8
        return -(-top // step) * step
    between = power // 4 * 3
    return between if between > 1024 and top <= between else power
