"""Two ways to capture forward passes: CUDA graphs, one per shape, and compiled code for a CPU, the same for all shapes.

Uses runners and the buffers that captured passes read. graphs.py decides whether a replay can be trusted.
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

from ..engine.cache import Paths, SlotCache, SlotLayer
from ..engine.passes import Inputs, Passes, Runner
from ..engine.shapes import WIDTHS, columns_for, rows_for, slots_for
from . import capture
from .capture import CodeReplay, CudaReplay, Pass
from .products import may_take
from .sources import identical
from .static_buffers import StaticBuffers

_AHEAD = 4096  # slots reserved at once, if a call may need as many; further ones are reserved on demand
_REMEMBERED = 256  # sorts of forward passes that were requested once
_FEW = 16  # one-column passes over several rows before code for them is compiled, if code for more columns exists
_SELDOM = 0.1  # their minimum share of all passes for that: compiling takes as long as thousands of them

_Run = Callable[..., list[torch.Tensor]]
_T = TypeVar("_T")


class Shape(NamedTuple):
    """The shape of a captured forward pass: kind of runner, rows, columns, slots read, and whether it reads trees."""

    kind: Hashable
    rows: int
    columns: int
    top: int
    tree: bool


class Captures:
    """The captured forward passes of a model in its current state, and the buffers that they run over.

    Rows, columns and slots are rounded up, so that few shapes occur; the padding is computed and discarded. Shapes are of one
    sort if verifying a capture of one of them is enough to trust the others.

    Args:
        compiled: compile forward passes before capturing them.
        constants: treat weights as constants of compiled code.

    Attributes:
        takes_constants: whether weights are compiled into code, if they may be copied.
        runs: what the passes run as, for `report.passes`.
        most: how many captured passes are kept; the least recently used one is dropped first.
        passes: the captured passes, by shape.
        replays: how many passes were replayed.
    """

    takes_constants: ClassVar[bool] = False
    runs: ClassVar[str]
    most: ClassVar[int]

    def __init__(self, compiled: bool = False, constants: bool = False):
        self.compiled, self.constants = compiled, constants
        self.replays = 0
        self.passes: OrderedDict[Hashable, Pass] = OrderedDict()
        self.buffers: StaticBuffers | None = None
        self._asked: set[Hashable] = set()
        self._trusted: set[Hashable] = set()  # sorts whose captures reproduced the eager forward pass
        self._functions: dict[Hashable, _Run] = {}  # compiled, by kind of runner, with chains or trees
        self._twins: dict[Hashable, Any] = {}  # the runners inside the compiled functions
        self._frozen: dict[Hashable, bool] = {}  # whether weights are constants, by kind of runner

    def begin_call(self) -> None:
        """Prepare for another `generate`."""
        if self.buffers is not None:
            self.buffers.shown = None

    def clear(self) -> None:
        """Discard all captures."""
        fresh, replays = type(self)(self.compiled, self.constants), self.replays
        vars(self).update(vars(fresh))
        self.replays = replays

    def shape(self, runner: Runner, width: int, tree: bool) -> Shape | None:
        """The shape that a forward pass over `width` columns is rounded up to; None if it is too large to capture."""
        cache = runner.cache
        rows = self._rows(len(cache.running), cache.rows)
        last = self._last(cache, rows)
        columns = self._columns(runner, rows, width, tree)
        if columns is None or columns > WIDTHS[-1] or last + width > runner.context:
            return None
        return Shape(runner.prepared.kind, rows, columns, self._slots(last + columns), tree)

    def sort(self, shape: Shape) -> Hashable:
        """A key that is equal for shapes of one sort."""
        return shape.kind, shape.tree

    def is_trusted(self, shape: Shape) -> bool:
        """Whether a capture of this sort reproduced the eager forward pass."""
        return self.sort(shape) in self._trusted

    def trust(self, shape: Shape, by_eager: bool) -> None:
        """Record that a replay was correct. by_eager: it was compared with the eager forward pass."""
        self._trusted.add(self.sort(shape))

    def is_expected(self, shape: Shape) -> bool:
        """Whether shapes of this sort are captured, which begins at the second request."""
        sort = self.sort(shape)
        if sort in self._trusted or sort in self._asked:
            return True
        if len(self._asked) >= _REMEMBERED:
            self._asked.clear()
        self._asked.add(sort)
        return False

    def wants_eager(self, shape: Shape) -> bool:
        """Whether a replay must be compared with the eager pass."""
        raise NotImplementedError

    def add(self, shape: Shape, runner: Runner) -> list[torch.Tensor] | None:
        """Capture a forward pass over the filled buffers. Returns the outputs of the same pass before its capture, or None if
        they need not be compared."""
        raise NotImplementedError

    def replay(self, shape: Shape, runner: Runner) -> list[torch.Tensor]:
        """Replay a captured forward pass and return its outputs."""
        raise NotImplementedError

    def lend(self, layer: SlotLayer, top: int, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Let a call that begins read its prompt into the buffers, so that its slots need neither be moved nor exist twice; see
        `SlotCache.lender`."""
        cache = layer.slots
        room = slots_for(min(cache.limit, max(top, _AHEAD - WIDTHS[-1])) + WIDTHS[-1])
        if self.buffers is None or not self.buffers.fits(cache, room):
            self.clear()
            self.buffers = StaticBuffers(cache.rows, room, key_states.device)
        return self.buffers.lend(layer, key_states, value_states)

    def hold(self, cache: SlotCache, top: int) -> StaticBuffers:
        """The buffers that captured passes read, with the call's slots moved there."""
        buffers = self.buffers
        if buffers is not None and buffers.holds(cache, top):
            return buffers
        if buffers is None or not buffers.fits(cache, top):
            self.clear()
            room = max(top, slots_for(min(cache.limit + WIDTHS[-1], _AHEAD)))
            device = next(layer for layer in cache.slot_layers if layer.is_initialized).device
            buffers = self.buffers = StaticBuffers(cache.rows, room, device)
        buffers.take(cache)
        return buffers

    def gather(self, cache: SlotCache, path: Paths) -> tuple[bool, float]:
        """Move a tree's accepted columns together. Returns whether this was done, and the seconds spent on its capture."""
        buffers, seconds = self.buffers, 0.0
        rows = self._rows(len(cache.running), cache.rows)
        columns = columns_for(max(map(len, path)), rows)
        if buffers is None or columns is None or not buffers.holds(cache, self._last(cache, rows) + columns):
            return False, seconds
        key, started = ("gather", rows, columns), time.perf_counter()
        if key not in self.passes:
            buffers.stay(rows, columns)  # the run before the capture moves nothing
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
        """The most valid slots in any of the first rows, in storage order."""
        return max(cache.lengths[row] for row in cache.order[:rows])

    def _captured(self, run: Pass, trusted: bool) -> Pass:
        """trusted: the host is known to read no values from the device in passes of this sort."""
        return run

    def _keep(self, key: Hashable, captured: Pass) -> None:
        self.passes[key] = captured
        while len(self.passes) > self.most:
            self.passes.popitem(last=False)

    def _compiling(self, runner: Runner) -> AbstractContextManager[None]:
        return capture.compiling(self._takes_constants(runner)) if self.compiled else nullcontext()

    def _takes_constants(self, runner: Runner) -> bool:
        """Whether the weights are constants of this runner's code, which keeps another copy of them. Decided once per kind."""
        kind = runner.prepared.kind
        if kind not in self._frozen:
            self._frozen[kind] = self.constants and may_take(runner.prepared.low_bit_bytes)
        return self._frozen[kind]

    def _arguments(self, runner: Runner, shape: Shape) -> tuple[torch.Tensor | None, ...]:
        """The buffers that a forward pass of this shape reads."""
        kind, rows, columns, top, tree = shape
        buffers = self.buffers
        assert buffers is not None
        return (
            buffers.ids[:rows, :columns],
            buffers.numbers[:rows],
            buffers.parents[:rows, : columns - 1] if tree else None,
            buffers.visible[:rows, :top],
            None if runner.prepared.inject is None else buffers.states[kind][:rows, :columns],
        )

    def _function(self, runner: Runner, tree: bool) -> _Run:
        """The runner's forward pass as a function of `_arguments`, over the slots of the buffers."""
        kind = runner.prepared.kind
        if (kind, tree) in self._functions:
            return self._functions[kind, tree]
        assert self.buffers is not None
        twin: Any = copy.copy(runner)
        _renew(twin, runner, self.buffers.slots)
        self._twins[kind, tree] = twin

        def run(
            ids: torch.Tensor,
            numbers: torch.Tensor,
            parents: torch.Tensor | None,
            visible: torch.Tensor,
            states: torch.Tensor | None,
        ) -> list[torch.Tensor]:
            if states is not None:
                twin.prepared.inject.hidden = states
            logits = twin.static_forward(Inputs(ids, numbers[:, :1], numbers[:, 1:2], parents, visible))
            return [logits, *(tap.hidden for tap in twin.prepared.taps.values())]

        if not self.compiled:
            return run
        made = self._functions[kind, tree] = capture.compiled(run, self._takes_constants(runner))
        return made


class CudaGraphs(Captures):
    """CUDA graphs, one per shape. The first replay of every call is compared with the eager forward pass. A new shape of a
    trusted sort is compared with the same function before its capture."""

    most, runs = 48, "CUDA graphs"

    def __init__(self, compiled: bool = False, constants: bool = False):
        super().__init__(compiled, constants)
        self._confirmed = False  # whether a replay of this call was compared with the eager forward pass
        self._pool: Any = None  # the memory that all captured passes share

    def begin_call(self) -> None:
        super().begin_call()
        self._confirmed = False

    def trust(self, shape: Shape, by_eager: bool) -> None:
        super().trust(shape, by_eager)
        self._confirmed = self._confirmed or by_eager

    def wants_eager(self, shape: Shape) -> bool:
        return not (self._confirmed if shape in self.passes else self.is_trusted(shape))

    def add(self, shape: Shape, runner: Runner) -> list[torch.Tensor] | None:
        assert self.buffers is not None
        run = functools.partial(self._function(runner, shape.tree), *self._arguments(runner, shape))
        first, trusted = None, self.is_trusted(shape)
        if trusted or self.compiled:  # compilation happens at the first call
            with self._compiling(runner):
                first = run()
        with self.buffers.other_ids():
            self._keep(shape, self._captured(run, trusted or self.compiled))
        return first

    def replay(self, shape: Shape, runner: Runner) -> list[torch.Tensor]:
        # copied, because captured passes share memory and another replay may overwrite it
        return [output.clone() for output in self.passes[shape]()]

    def _captured(self, run: Pass, trusted: bool) -> Pass:
        assert self.buffers is not None
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return CudaReplay(run, self.buffers.device, self._pool, trusted)


class CompiledCode(Captures):
    """Compiled code for a CPU with dynamic sizes, shared by all shapes except one row, and one column of several rows.

    One column of low-bit weights has its own code, too: the compiler has a faster product where the number of columns is known.

    New code is compared with the eager forward pass. Weights that may be copied are its constants; if they change, it is
    compiled again. The compiler's guards detect other changes of the model in the first pass of each sort in every call.
    """

    takes_constants, runs = True, "compiled passes"
    most = 512  # they share code

    def __init__(self, compiled: bool = True, constants: bool = False):
        super().__init__(compiled, constants)
        self._grounds: dict[Hashable, tuple[Any, ...]] = {}  # what the checked passes of a sort depend on
        # by sort: the number of passes over one column, and `replays` before them
        self._filled_up: dict[Hashable, tuple[int, int]] = {}
        self._checked: set[Hashable] = set()  # sorts of which a pass was checked in this call

    def begin_call(self) -> None:
        super().begin_call()
        self._checked.clear()

    def sort(self, shape: Shape) -> Hashable:
        # the compiler makes separate code for size one
        return shape.kind, shape.tree, shape.rows == 1, shape.columns == 1

    def wants_eager(self, shape: Shape) -> bool:
        return not self.is_trusted(shape)

    def add(self, shape: Shape, runner: Runner) -> list[torch.Tensor] | None:
        replay = CodeReplay(self._function(runner, shape.tree), self._arguments(runner, shape))
        self._keep(shape, replay)
        if self.is_trusted(shape):  # the compiler may need separate code for this size
            self._check_pass(shape, runner, replay, replay.look)
            return None
        with self._compiling(runner):
            return replay()

    def replay(self, shape: Shape, runner: Runner) -> list[torch.Tensor]:
        replay = self.passes[shape]
        assert isinstance(replay, CodeReplay)
        if replay.checked and self.sort(shape) in self._checked:
            return replay()
        return self._check_pass(shape, runner, replay, replay.check)

    def _check_pass(self, shape: Shape, runner: Runner, replay: CodeReplay, see: Callable[[], _T]) -> _T:
        """Call `see`, which checks a pass. The result of the check holds for all passes of its sort."""
        sort, twin = self.sort(shape), self._twins[shape.kind, shape.tree]
        _renew(twin, runner, twin.cache)  # the model may be another of the same kind than in the last call
        with self._compiling(runner):
            seen = see()
        if not identical(replay.ground, self._grounds.get(sort, ())):
            for key, other in self.passes.items():
                alike = isinstance(key, Shape) and self.sort(key) == sort
                if alike and isinstance(other, CodeReplay) and other is not replay:
                    other.forget()
        self._grounds[sort] = replay.ground
        self._checked.add(sort)
        return seen

    def _rows(self, running: int, most: int) -> int:
        # never a single remaining row of a batch: the compiler makes separate code for size one
        return min(max(running, 2), most)

    def _columns(self, runner: Runner, rows: int, width: int, tree: bool) -> int | None:
        return 2 if width == 1 and self._fills_up(runner, rows, tree) else width

    def _slots(self, top: int) -> int:
        return slots_for(top, True)

    def _fills_up(self, runner: Runner, rows: int, tree: bool) -> bool:
        """Whether to run a one-column pass over two columns. With one row, always, at no extra cost; with several, and with
        low-bit weights, as long as code for more columns exists and such passes are few."""
        if rows == 1 and not runner.prepared.low_bit_bytes:
            return True
        one, two = (self.sort(Shape(runner.prepared.kind, rows, columns, 0, tree)) for columns in (1, 2))
        if one in self._trusted or two not in self._trusted:
            return False
        count, before = self._filled_up.get(one, (0, self.replays))
        self._filled_up[one] = count + 1, before
        return count < _FEW or count < _SELDOM * (self.replays - before)


def results(outputs: list[torch.Tensor], runner: Runner, buffers: StaticBuffers, width: int) -> torch.Tensor:
    """The logits of a replay, [B, n, V], zeros for rows that don't run. The runner's taps hold the tapped outputs."""
    cache, running = runner.cache, len(runner.cache.running)
    logits, *states = (output[:running, :width] for output in outputs)
    for tap, hidden in zip(runner.prepared.taps.values(), states, strict=True):
        tap.hidden = hidden
    if cache.running == list(range(cache.rows)):
        return logits
    spread = logits.new_zeros(cache.rows, *logits.shape[1:])
    return spread.index_copy_(0, buffers.numbers[:running, 2], logits)


def _renew(twin: Any, runner: Runner, slots: SlotCache) -> None:
    """Make `twin`, which runs over the buffers' slots, run the module of this runner."""
    vars(twin).update(vars(runner))
    twin.cache, twin.passes = slots, Passes()  # the buffers' lengths belong to no call
