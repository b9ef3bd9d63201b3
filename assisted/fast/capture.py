"""Captures functions over tensors at fixed addresses: as CUDA graphs, one for each shape, or as compiled code for a CPU, the
same for all shapes. Detects what prevents that.

Deals with tensors and shapes. graphs.py knows which forward passes are captured, and whether their replays can be trusted.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, ClassVar, NamedTuple

import torch

from ..engine.libraries import (
    HOST_COPIES,
    HOST_READS,
    DispatchMode,
    compile_graph,
    compiler_settings,
    end_pool,
    forget_workspaces,
)
from ..engine.passes import CHEAP, WIDTHS, columns_for, rows_for, slots_for
from .sources import identical

_REMEMBERED = 256  # sorts of functions that were requested once
_FEW = 16  # one-column passes over several rows before code for them is compiled, if code for more columns exists
_FILLED_UP = 8  # one-column passes in a graph of more columns before they get their own
_WIDE = 16  # columns beyond which chains are rare, such as what a draft has missed: they are captured
_OFTEN = 16  # from this request on
_SELDOM = 0.1  # their minimum share of all passes for that: compiling takes as long as thousands of them

Outputs = list[torch.Tensor]
Function = Callable[..., Outputs]
"""Reads tensors at fixed addresses, given or known to it, and returns others."""
Captured = Callable[[], Outputs]
Inputs = Sequence[torch.Tensor | None]
Others = Callable[[], AbstractContextManager[None]]


class Shape(NamedTuple):
    """The shape of a captured forward pass: kind of runner, rows, columns, slots read, and whether it reads trees."""

    kind: Hashable
    rows: int
    columns: int
    top: int
    tree: bool


class Captures:
    """The captured functions of a model in its current state.

    Rows, columns and slots are rounded up, so that few shapes occur; the padding is computed and discarded. Shapes are of one
    sort if verifying a capture of one of them is enough to trust the others.

    Args:
        compiled: compile functions before capturing them.
        constants: treat weights as constants of compiled code.

    Attributes:
        takes_constants: whether weights are compiled into code, if they may be copied.
        confirms: whether the first replay of every call is compared with the eager function.
        runs: what the functions run as, for `report.passes`.
        most: how many captures are kept; the least recently used one is dropped first.
        held: the captures, by shape or another key.
        trusted: sorts whose captures reproduced the eager function.
        replays: how many functions were replayed.
    """

    takes_constants: ClassVar[bool] = False
    confirms: ClassVar[bool] = False
    runs: ClassVar[str]
    most: ClassVar[int]

    def __init__(self, compiled: bool = False, constants: bool = False):
        self.compiled, self.constants = compiled, constants
        self.held: OrderedDict[Hashable, Captured] = OrderedDict()
        self.trusted: set[Hashable] = set()
        self.replays = 0
        self._asked: set[Hashable] = set()

    def begin_call(self) -> None:
        """Prepare for another `generate`."""

    def rows(self, running: int, most: int) -> int:
        """Rows of a capture for `running` rows out of `most`."""
        return rows_for(running, most)

    def shape(self, kind: Hashable, rows: int, width: int, last: int, tree: bool, in_low_bits: bool) -> Shape | None:
        """The shape that `width` columns after `last` slots are rounded up to; None if it is too large to capture."""
        columns = columns_for(width, rows)
        return None if columns is None else Shape(kind, rows, columns, slots_for(last + columns), tree)

    def sort(self, shape: Shape) -> Hashable:
        """A key that is equal for shapes of one sort."""
        return shape.kind, shape.tree

    def is_expected(self, shape: Shape) -> bool:
        """Whether shapes of this sort are captured, which begins at the second request."""
        sort = self.sort(shape)
        return sort in self.trusted or self.was_asked(sort)

    def was_asked(self, key: Hashable) -> bool:
        """Whether something was requested before, which is remembered from now on."""
        if key in self._asked:
            return True
        if len(self._asked) >= _REMEMBERED:
            self._asked.clear()
        self._asked.add(key)
        return False

    def compile(self, function: Function, frozen: bool) -> Function:
        """The function as it is captured. frozen: weights are constants of its code."""
        return function

    def is_checked(self, shape: Shape) -> bool:
        """Whether a replay does without looking at the model."""
        return True

    def capture(self, shape: Shape, function: Function, inputs: Inputs, frozen: bool, others: Others) -> Outputs | None:
        """Capture a function, made by `compile`, of these inputs. others: a context in which they have other values, so that a
        capture which kept what it computed from them differs when it is replayed. Returns the function's outputs from before
        the capture, or None if they need not be compared."""
        raise NotImplementedError

    def replay(self, shape: Shape) -> Outputs:
        """Replay a captured function."""
        raise NotImplementedError

    def keep(self, key: Hashable, captured: Captured) -> None:
        """Keep a capture."""
        self.held[key] = captured
        while len(self.held) > self.most:
            self.held.popitem(last=False)


class CudaGraphs(Captures):
    """CUDA graphs, one per shape. The first replay of every call is compared with the eager function. A new shape of a trusted
    sort is compared with the same function before its capture."""

    confirms, most, runs = True, 48, "CUDA graphs"
    _pool: Any = None  # the memory that all captures share

    def __init__(self, compiled: bool = False, constants: bool = False):
        super().__init__(compiled, constants)
        self._filled_up: Counter[Shape] = Counter()  # one-column passes in graphs of more columns
        self._wide: Counter[Shape] = Counter()  # requests of wide chains

    def shape(self, kind: Hashable, rows: int, width: int, last: int, tree: bool, in_low_bits: bool) -> Shape | None:
        found = super().shape(kind, rows, width, last, tree, in_low_bits)
        if found is None or width > 1 or found in self.held:
            return found
        wider = super().shape(kind, rows, 2, last, tree, in_low_bits)
        if wider is None or wider not in self.held or wider.columns * rows > CHEAP:
            return found
        if self._filled_up[found] >= _FILLED_UP:
            return found
        self._filled_up[found] += 1  # a capture takes longer than these passes lose
        return wider

    def is_expected(self, shape: Shape) -> bool:
        if shape.columns > _WIDE and not shape.tree and shape not in self.held:
            self._wide[shape] += 1
            if self._wide[shape] < _OFTEN:
                return False
        return super().is_expected(shape)

    def compile(self, function: Function, frozen: bool) -> Function:
        return (
            _compiled(function, lambda graph, inputs: compile_graph(graph, inputs, None)) if self.compiled else function
        )

    def capture(self, shape: Shape, function: Function, inputs: Inputs, frozen: bool, others: Others) -> Outputs | None:
        run = functools.partial(function, *inputs)
        first, trusted = None, self.sort(shape) in self.trusted
        if trusted or self.compiled:  # compilation happens at the first call
            with compiling(False) if self.compiled else nullcontext():
                first = run()
        device = next(tensor.device for tensor in inputs if tensor is not None)
        with others():
            self.keep(shape, self.record(run, device, trusted or self.compiled))
        return first

    def replay(self, shape: Shape) -> Outputs:
        # copied, because captures share memory and another replay may overwrite it
        return [output.clone() for output in self.held[shape]()]

    def record(self, run: Captured, device: torch.device, tried: bool) -> Captured:
        """A graph of a function. tried: the host is known to read no values from the device in functions of this sort."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return CudaReplay(run, device, self._pool, tried)


class CudaReplay:
    """A CUDA graph of `run`, with its results.

    run: reads and returns tensors at fixed addresses on this device. pool: from `torch.cuda.graph_pool_handle`. tried: the
    host is known to read no values from the device in functions of this kind.

    Raises what `run` raises during capture, and `HostRead` if the host reads values from the device.
    """

    def __init__(self, run: Captured, device: torch.device, pool: Any, tried: bool = False):
        if device in _BROKEN:
            raise RuntimeError("an earlier capture in this process was interrupted")
        stream, here = _stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            with nullcontext() if tried else NoHostReads():
                run()  # one-time allocations (workspaces, plans) happen before the capture
            torch.cuda.synchronize(device)
            # A graph keeps the address of the workspace. Whoever frees workspaces, as compiled models do, would let it write
            # into other tensors; so it gets one from its own pool, which lives as long as the graph does.
            forget_workspaces()
            self.graph = torch.cuda.CUDAGraph()
            self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self.outputs = run()
            finally:
                try:
                    self.graph.capture_end()
                except BaseException:
                    _tidy_up(device, pool)
                    raise
            forget_workspaces()  # it goes back to the pool
        here.wait_stream(stream)

    def __call__(self) -> Outputs:
        self.graph.replay()
        return self.outputs


@functools.cache
def _stream(device: torch.device) -> Any:
    """One stream for all captures of a device, because each stream has its own workspaces."""
    return torch.cuda.Stream(device)


_BROKEN: set[torch.device] = set()  # devices on which captures are disabled


def _tidy_up(device: torch.device, pool: Any) -> None:
    """Clean up after an interrupted capture, and disable captures on this device.

    Without this, torch still treats its generator as captured, and its allocator treats the pool as in use.
    """
    _BROKEN.add(device)
    with suppress(Exception):
        end_pool(pool)
    with suppress(Exception):
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())  # the same values, in a state unknown to any graph


class HostRead(RuntimeError):
    """The host read values from the device during a forward pass, which may therefore depend on them."""


def _kind(tensor: Any) -> str | None:
    return tensor.device.type if isinstance(tensor, torch.Tensor) else None


class NoHostReads(DispatchMode):
    """A mode in which the host must not read values from the device: a graph would replay with the values at capture."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        masked = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in HOST_READS or masked:
            raise HostRead(f"{name} waits for the device")
        result = func(*args, **(kwargs or {}))
        if name in HOST_COPIES and _kind(args[0]) != _kind(args[1] if name == "copy_" else result):
            raise HostRead(f"{name} copies values between host and device")
        return result


FROZEN: dict[str, Any] = {
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP,ATEN",
    "autotune_num_choices_displayed": 0,
    "max_autotune_report_choices_stats": False,
}
"""How code with weights as constants is compiled: the fastest matrix product for each is chosen by measurement."""


class CompiledCode(Captures):
    """Compiled code for a CPU with dynamic sizes, shared by all shapes except one row, and one column of several rows.

    One column of low-bit weights has its own code, too: the compiler has a faster product where the number of columns is known.

    New code is compared with the eager function. Weights that may be copied are its constants; if they change, it is compiled
    again. The compiler's guards detect other changes of the model. Checking all of them takes as long as several layers of a
    small model, so this is done in the first pass of each sort in every call, and once for a new shape. Other passes call the
    code with the inputs of the last check, which are valid as long as all of them are the same objects in every check.
    """

    takes_constants, most, runs = True, 512, "compiled passes"

    def __init__(self, compiled: bool = True, constants: bool = False):
        super().__init__(compiled, constants)
        self._grounds: dict[Hashable, tuple[Any, ...]] = {}  # by sort: its code and the inputs that are not its buffers
        # by sort: the number of passes over one column, and `replays` before them
        self._filled_up: dict[Hashable, tuple[int, int]] = {}
        self._checked: set[Hashable] = set()  # sorts of which a pass was checked in this call
        self.seen: list[tuple[_Code, Sequence[Any], Sequence[Any]]] | None = None  # calls of code in a check
        self.only_looks = False  # whether this check stops before the code runs

    def begin_call(self) -> None:
        self._checked.clear()

    def rows(self, running: int, most: int) -> int:
        # never a single remaining row of a batch: the compiler makes separate code for size one
        return min(max(running, 2), most)

    def shape(self, kind: Hashable, rows: int, width: int, last: int, tree: bool, in_low_bits: bool) -> Shape | None:
        columns = 2 if width == 1 and self.fills_up(kind, rows, tree, in_low_bits) else width
        return None if columns > WIDTHS[-1] else Shape(kind, rows, columns, slots_for(last + columns, True), tree)

    def fills_up(self, kind: Hashable, rows: int, tree: bool, in_low_bits: bool) -> bool:
        """Whether to run a one-column pass over two columns. With one row, always, at no extra cost; with several, and with
        low-bit weights, as long as code for more columns exists and such passes are few."""
        if rows == 1 and not in_low_bits:
            return True
        one, two = (self.sort(Shape(kind, rows, columns, 0, tree)) for columns in (1, 2))
        if one in self.trusted or two not in self.trusted:
            return False
        count, before = self._filled_up.get(one, (0, self.replays))
        self._filled_up[one] = count + 1, before
        return count < _FEW or count < _SELDOM * (self.replays - before)

    def sort(self, shape: Shape) -> Hashable:
        # the compiler makes separate code for size one
        return shape.kind, shape.tree, shape.rows == 1, shape.columns == 1

    def compile(self, function: Function, frozen: bool) -> Function:
        def backend(graph: Any, inputs: Any) -> _Code:
            return _Code(self, compile_graph(graph, inputs, FROZEN if frozen else None))

        return _compiled(function, backend)

    def is_checked(self, shape: Shape) -> bool:
        sort = self.sort(shape)
        return sort in self._checked and self._code(shape).ground is self._grounds.get(sort)

    def capture(self, shape: Shape, function: Function, inputs: Inputs, frozen: bool, others: Others) -> Outputs | None:
        code = _Replay(function, inputs, frozen)
        self.keep(shape, code)
        if self.sort(shape) in self.trusted:  # the compiler may need separate code for this size
            self.check(shape, only_look=True)
            return None
        with compiling(frozen):
            return code()

    def replay(self, shape: Shape) -> Outputs:
        return self._code(shape)() if self.is_checked(shape) else self.check(shape)

    def _code(self, shape: Shape) -> _Replay:
        code = self.held[shape]
        assert isinstance(code, _Replay)
        return code

    def check(self, shape: Shape, only_look: bool = False) -> Outputs:
        """Run a function with its guards checked, which holds for all functions of its sort. only_look: just check the guards,
        if it runs as code that has run before; there are no outputs then."""
        replay, sort = self._code(shape), self.sort(shape)
        results: Outputs = []
        self.seen, self.only_looks, replay.call = [], only_look, None
        try:
            with compiling(replay.frozen), suppress(_Seen):
                results = replay()
            seen = self.seen
        finally:
            self.seen, self.only_looks = None, False
        if only_look and seen and seen[0][0].meant is None:
            return self.check(shape)
        ground: tuple[Any, ...] = ()
        if len(seen) == 1:  # otherwise part of it is not compiled
            ((code, inputs, outputs),) = seen
            if not only_look:
                places = {id(output): place for place, output in enumerate(outputs)}
                known = all(id(result) in places for result in results)
                code.meant = [places[id(result)] for result in results] if known else None
            if code.meant is not None:
                own = set(map(id, replay.inputs))
                ground = code, *(one for one in inputs if not isinstance(one, int) and id(one) not in own)
                replay.call = code, inputs
        if not identical(ground, self._grounds.get(sort, ())):
            self._grounds[sort] = ground
        replay.ground = self._grounds.setdefault(sort, ground)
        self._checked.add(sort)
        return results


class _Code:
    """Compiled code that can record its inputs.

    Attributes:
        meant: which of its outputs are results of the function; None until recorded.
    """

    def __init__(self, captures: CompiledCode, run: Callable[..., Any]):
        self.captures, self.run = captures, run
        self.meant: list[int] | None = None

    def __call__(self, *inputs: Any) -> Any:
        seen = self.captures.seen
        if seen is None:
            return self.run(*inputs)
        outputs = () if self.captures.only_looks else self.run(*inputs)
        seen.append((self, inputs, outputs))
        if self.captures.only_looks:
            raise _Seen
        return outputs


class _Seen(Exception):
    """Stops a function once the inputs of its code are recorded."""


class _Replay:
    """A compiled function with its inputs.

    Attributes:
        call: its code and the inputs of that, if they are known since the last check.
        ground: those of them that all functions of its sort have in common.
    """

    def __init__(self, function: Function, inputs: Inputs, frozen: bool):
        self.function, self.inputs, self.frozen = function, inputs, frozen
        self.call: tuple[_Code, Sequence[Any]] | None = None
        self.ground: tuple[Any, ...] | None = None

    def __call__(self) -> Outputs:
        if self.call is None:
            return self.function(*self.inputs)
        code, inputs = self.call
        assert code.meant is not None
        outputs = code.run(*inputs)
        return [outputs[place] for place in code.meant]


def _compiled(function: Function, backend: Callable[[Any, Any], Any]) -> Function:
    """The same function, compiled at its first call inside `compiling`. Only sizes that cannot be dynamic are recompiled."""
    made: Any = torch.compile(function, backend=backend, dynamic=True)
    return made


@contextmanager
def compiling(frozen: bool) -> Iterator[None]:
    """A context in which calls may compile. frozen: weights are constants."""
    with compiler_settings(frozen), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)  # caused by the compiler itself
        yield
