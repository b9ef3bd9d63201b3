"""The two ways to capture forward passes: as CUDA graphs, one per shape, and as compiled code for a CPU, the same for all
shapes.

Knows runners and the buffers that captured passes read. Whether a replay can be trusted is decided in graphs.py.
"""

from __future__ import annotations

import copy
import functools
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from ..engine.cache import Paths, SlotCache
from ..engine.runner import Passes, Runner
from ..engine.shapes import WIDTHS, columns_for, rows_for, slots_for
from . import capture
from .capture import CodeReplay, CudaReplay, Pass
from .static_buffers import StaticBuffers

__all__ = ["Captures", "CompiledCode", "CudaGraphs", "Shape", "results"]

_AHEAD = 4096  # slots reserved at once where a call may need so many; more are reserved as they are needed
_REMEMBERED = 256  # sorts of passes that were asked for once
_FEW = 16  # passes over one column of several rows before code of their own is compiled, where there is code for more,
_SELDOM = 0.1  # and what share of all passes they must be: compiling takes as long as thousands of them

_Run = Callable[..., list[torch.Tensor]]
_T = TypeVar("_T")


class Shape(NamedTuple):
    """A captured pass: of which runner, rows, columns, slots that are looked at, whether over trees."""

    kind: Hashable
    rows: int
    columns: int
    top: int
    tree: bool


class Captures:
    """The captured forward passes of a model as it is now, and the buffers that they run over.

    Rows, columns and slots are rounded up, so that few shapes occur; what fills a pass up is computed and never kept. Shapes
    are of one sort if a capture of one of them vouches for the others.

    Args:
        compiled: compile passes before they are captured.
        constants: take the weights for constants of compiled code.

    Attributes:
        takes_constants: whether it compiles weights into code, where they may be copied.
        most: how many passes are kept; the least recently used one goes first.
        passes: the captured passes, by shape.
        replays: how many were replayed.
    """

    takes_constants: ClassVar[bool] = False
    most: ClassVar[int]

    def __init__(self, compiled: bool = False, constants: bool = False):
        self.compiled, self.constants = compiled, constants
        self.replays = 0
        self.passes: OrderedDict[Hashable, Pass] = OrderedDict()
        self.buffers: StaticBuffers | None = None
        self._asked: set[Hashable] = set()
        self._trusted: set[Hashable] = set()  # sorts whose captures gave the output of the eager pass
        self._functions: dict[Hashable, _Run] = {}  # compiled, by kind of runner, with chains or trees
        self._twins: dict[Hashable, Any] = {}  # the runners that compiled functions are made of

    def begin_call(self) -> None:
        """Another `generate` begins."""
        if self.buffers is not None:
            self.buffers.shown = None

    def clear(self) -> None:
        """Forget all that was captured."""
        fresh, replays = type(self)(self.compiled, self.constants), self.replays
        vars(self).update(vars(fresh))
        self.replays = replays

    def shape(self, runner: Runner, width: int, tree: bool) -> Shape | None:
        """The shape that a pass over so many columns is rounded up to; None for more than are captured."""
        cache = runner.cache
        rows = self._rows(len(cache.running), cache.rows)
        last = self._last(cache, rows)
        columns = self._columns(runner, rows, width, tree)
        if columns is None or columns > WIDTHS[-1] or last + width > runner.context:
            return None
        return Shape(runner.kind, rows, columns, self._slots(last + columns), tree)

    def sort(self, shape: Shape) -> Hashable:
        """What is the same for shapes of one sort."""
        return shape.kind, shape.tree

    def is_trusted(self, shape: Shape) -> bool:
        """Whether a capture of this sort gave the output of the eager pass."""
        return self.sort(shape) in self._trusted

    def trust(self, shape: Shape, by_eager: bool) -> None:
        """A replay gave what it should. by_eager: it was compared with the eager pass."""
        self._trusted.add(self.sort(shape))

    def is_expected(self, shape: Shape) -> bool:
        """Whether shapes of this sort are captured: from the second time on that one is asked for."""
        sort = self.sort(shape)
        if sort in self._trusted or sort in self._asked:
            return True
        if len(self._asked) >= _REMEMBERED:
            self._asked.clear()
        self._asked.add(sort)
        return False

    def wants_eager(self, trusted: bool, known: bool) -> bool:
        """Whether a replay is to be compared with the eager pass. trusted: of a trusted sort. known: it was captured before."""
        raise NotImplementedError

    def add(self, shape: Shape, runner: Runner, trusted: bool) -> list[torch.Tensor] | None:
        """Capture a pass over the buffers, which were fed. Returns the outputs of the same pass before its capture, None where
        a trusted sort makes a comparison needless."""
        raise NotImplementedError

    def replay(self, shape: Shape, runner: Runner) -> list[torch.Tensor]:
        """The outputs of a captured pass."""
        raise NotImplementedError

    def hold(self, cache: SlotCache, top: int) -> StaticBuffers:
        """The call's slots, moved to where the captured passes look for them."""
        buffers = self.buffers
        if buffers is not None and buffers.holds(cache, top):
            return buffers
        if buffers is None or not buffers.fits(cache, top):
            self.clear()
            room = max(top, slots_for(min(cache.limit + WIDTHS[-1], _AHEAD)))
            buffers = self.buffers = StaticBuffers(cache, room)
        buffers.take(cache)
        return buffers

    def gather(self, cache: SlotCache, path: Paths) -> tuple[bool, float]:
        """Move a tree's accepted columns together. Returns whether that was done, and the seconds its capture took."""
        buffers, seconds = self.buffers, 0.0
        rows = self._rows(len(cache.running), cache.rows)
        columns = columns_for(max(map(len, path)), rows)
        if buffers is None or columns is None or not buffers.holds(cache, self._last(cache, rows) + columns):
            return False, seconds
        key, started = ("gather", rows, columns), time.perf_counter()
        if key not in self.passes:
            buffers.stay(rows, columns)  # what runs before a capture moves nothing
            self._keep(key, self._captured(lambda: buffers.move(rows, columns), False))
            seconds = time.perf_counter() - started
        buffers.follow(cache, rows, columns, path)
        self.passes[key]()
        self.passes.move_to_end(key)
        return True, seconds

    def _rows(self, running: int, most: int) -> int:
        return rows_for(running, most)

    def _columns(self, runner: Runner, rows: int, width: int, tree: bool) -> int | None:
        return columns_for(width, rows)

    def _slots(self, top: int) -> int:
        return slots_for(top)

    def _last(self, cache: SlotCache, rows: int) -> int:
        """The most slots that count in one of the first rows, as they lie."""
        return max(cache.lengths[row] for row in cache.order[:rows])

    def _captured(self, run: Pass, trusted: bool) -> Pass:
        """trusted: passes of its sort are known to read nothing of the device."""
        return run

    def _keep(self, key: Hashable, captured: Pass) -> None:
        self.passes[key] = captured
        while len(self.passes) > self.most:
            self.passes.popitem(last=False)

    def _compiling(self) -> AbstractContextManager[None]:
        return capture.compiling(self.constants) if self.compiled else nullcontext()

    def _arguments(self, runner: Runner, shape: Shape) -> tuple[torch.Tensor | None, ...]:
        """The buffers that a pass of this shape reads."""
        kind, rows, columns, top, tree = shape
        buffers = self.buffers
        assert buffers is not None
        return (
            buffers.ids[:rows, :columns],
            buffers.numbers[:rows],
            buffers.parents[:rows, : columns - 1] if tree else None,
            buffers.visible[:rows, :top],
            None if runner.inject is None else buffers.states[kind][:rows, :columns],
        )

    def _function(self, runner: Runner, tree: bool) -> _Run:
        """What a runner makes of `_arguments`, over the slots of the buffers."""
        if (runner.kind, tree) in self._functions:
            return self._functions[runner.kind, tree]
        assert self.buffers is not None
        twin: Any = copy.copy(runner)
        _renew(twin, runner, self.buffers.slots)
        self._twins[runner.kind, tree] = twin

        def run(
            ids: torch.Tensor,
            numbers: torch.Tensor,
            parents: torch.Tensor | None,
            visible: torch.Tensor,
            states: torch.Tensor | None,
        ) -> list[torch.Tensor]:
            if states is not None:
                twin.inject.hidden = states
            logits = twin.static_forward(ids, numbers[:, :1], numbers[:, 1:2], parents, visible)
            return [logits, *(tap.hidden for tap in twin.taps)]

        if not self.compiled:
            return run
        made = self._functions[runner.kind, tree] = capture.compiled(run, self.constants)
        return made


class CudaGraphs(Captures):
    """CUDA graphs, one per shape. The first replay of every call is compared with the eager pass; a new shape of a trusted sort
    is compared with the same pass before its capture."""

    most = 48

    def __init__(self, compiled: bool = False, constants: bool = False):
        super().__init__(compiled, constants)
        self._confirmed = False  # whether a replay of this call was compared with the eager pass
        self._pool: Any = None  # what the captured passes share their memory in

    def begin_call(self) -> None:
        super().begin_call()
        self._confirmed = False

    def trust(self, shape: Shape, by_eager: bool) -> None:
        super().trust(shape, by_eager)
        self._confirmed = self._confirmed or by_eager

    def wants_eager(self, trusted: bool, known: bool) -> bool:
        return not (self._confirmed if known else trusted)

    def add(self, shape: Shape, runner: Runner, trusted: bool) -> list[torch.Tensor] | None:
        assert self.buffers is not None
        run = functools.partial(self._function(runner, shape.tree), *self._arguments(runner, shape))
        first = None
        if trusted or self.compiled:  # a compiler works when its code is first called
            with self._compiling():
                first = run()
        with self.buffers.other_ids():
            self._keep(shape, self._captured(run, trusted or self.compiled))
        return first

    def replay(self, shape: Shape, runner: Runner) -> list[torch.Tensor]:
        # copies: another replay may overwrite them, since captured passes share their memory
        return [output.clone() for output in self.passes[shape]()]

    def _captured(self, run: Pass, trusted: bool) -> Pass:
        assert self.buffers is not None
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return CudaReplay(run, self.buffers.device, self._pool, trusted)


class CompiledCode(Captures):
    """Compiled code for a CPU, which leaves sizes open: the same for all shapes, but for one row, or one column of several.

    It is compared with the eager pass when that code is made. Weights are constants of it where they may be copied: if they
    have changed since, it is made anew. Whatever else changes in a model, the compiler notices in the first pass of a
    sort in every call.
    """

    takes_constants = True
    most = 512  # they share one code

    def __init__(self, compiled: bool = True, constants: bool = False):
        super().__init__(compiled, constants)
        self._grounds: dict[Hashable, tuple[Any, ...]] = {}  # what the checked passes of a sort rely on
        # by sort: passes over one column, and `replays` before them
        self._filled_up: dict[Hashable, tuple[int, int]] = {}
        self._checked: set[Hashable] = set()  # sorts of which this call has had a pass checked

    def begin_call(self) -> None:
        super().begin_call()
        self._checked.clear()

    def sort(self, shape: Shape) -> Hashable:
        # one is a size that a compiler makes code of its own for
        return shape.kind, shape.tree, shape.rows == 1, shape.columns == 1

    def wants_eager(self, trusted: bool, known: bool) -> bool:
        return not trusted

    def add(self, shape: Shape, runner: Runner, trusted: bool) -> list[torch.Tensor] | None:
        replay = CodeReplay(self._function(runner, shape.tree), self._arguments(runner, shape))
        self._keep(shape, replay)
        if trusted:  # the compiler may find that this size needs code of its own
            self._seen_to(shape, runner, replay, replay.look)
            return None
        with self._compiling():
            return replay()

    def replay(self, shape: Shape, runner: Runner) -> list[torch.Tensor]:
        replay = self.passes[shape]
        assert isinstance(replay, CodeReplay)
        if replay.checked and self.sort(shape) in self._checked:
            return replay()
        return self._seen_to(shape, runner, replay, replay.check)

    def _seen_to(self, shape: Shape, runner: Runner, replay: CodeReplay, see: Callable[[], _T]) -> _T:
        """What `see` returns of a pass. What the compiler finds holds for all passes of its sort."""
        sort, twin = self.sort(shape), self._twins[runner.kind, shape.tree]
        _renew(twin, runner, twin.cache)  # the model may have become another one of the same kind since the last call
        with self._compiling():
            seen = see()
        if not _identical(replay.ground, self._grounds.get(sort, ())):
            for key, other in self.passes.items():
                alike = isinstance(key, Shape) and self.sort(key) == sort
                if alike and isinstance(other, CodeReplay) and other is not replay:
                    other.forget()
        self._grounds[sort] = replay.ground
        self._checked.add(sort)
        return seen

    def _rows(self, running: int, most: int) -> int:
        # what is left of a batch does not become a single row, which is a size of its own to a compiler
        return min(max(running, 2), most)

    def _columns(self, runner: Runner, rows: int, width: int, tree: bool) -> int | None:
        return 2 if width == 1 and self._fills_up(runner.kind, rows, tree) else width

    def _slots(self, top: int) -> int:
        return slots_for(top, True)

    def _fills_up(self, kind: Hashable, rows: int, tree: bool) -> bool:
        """Whether a pass over one column is run over two: for one row always, which takes as long; for several rows while there
        is code for more columns, and few such passes."""
        if rows == 1:
            return True
        one, two = (self.sort(Shape(kind, rows, columns, 0, tree)) for columns in (1, 2))
        if one in self._trusted or two not in self._trusted:
            return False
        count, before = self._filled_up.get(one, (0, self.replays))
        self._filled_up[one] = count + 1, before
        return count < _FEW or count < _SELDOM * (self.replays - before)


def results(outputs: list[torch.Tensor], runner: Runner, buffers: StaticBuffers, width: int) -> torch.Tensor:
    """The logits of a replay, [B, n, V], zeros for rows that don't run. The runner's taps hold the tapped outputs."""
    cache, running = runner.cache, len(runner.cache.running)
    logits, *states = (output[:running, :width] for output in outputs)
    for tap, hidden in zip(runner.taps, states, strict=True):
        tap.hidden = hidden
    if cache.running == list(range(cache.rows)):
        return logits
    spread = logits.new_zeros(cache.rows, *logits.shape[1:])
    return spread.index_copy_(0, buffers.numbers[:running, 2], logits)


def _renew(twin: Any, runner: Runner, slots: SlotCache) -> None:
    """Let a runner over the buffers' slots run the module that this one runs."""
    vars(twin).update(vars(runner))
    twin.cache, twin.passes = slots, Passes()  # the buffers' lengths are of no call


def _identical(one: tuple[Any, ...], two: tuple[Any, ...]) -> bool:
    return len(one) == len(two) and all(a is b for a, b in zip(one, two, strict=True))
