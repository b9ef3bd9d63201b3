"""Captured passes: a forward is recorded once for a shape, over tensors that stay where they are, and then replayed.

Knows runners and slots. A replay costs one call whatever the model is made of; the eager path says what it has to compute,
and runs wherever a pass cannot be captured. A CPU has nothing to replay: there passes are compiled, once for all shapes.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from ..drafts import Draft
from ..engine.cache import Paths, SlotCache
from ..engine.hooks import obstacle
from ..engine.runner import Runner
from ..engine.shapes import WIDTHS, columns_for, rows_for, slots_for
from . import capture
from .capture import CodeReplay, CudaReplay, Pass
from .products import may_copy
from .sources import Modules, Weights
from .static_buffers import StaticBuffers

__all__ = ["MODES", "CallSettings", "Graphs", "require_mode"]

MODES = ("auto", "eager", "graphs", "compile")
_AHEAD = 4096  # slots reserved at once where a call may need so many; more are reserved as they are needed
_REMEMBERED = 256  # shapes that were asked for once
_MOST = 48  # captured passes of a model, the least recently used one goes first
_MOST_OPEN = 512  # the same where they share one code
_FEW = 16  # passes over one column of several rows before a code of their own is compiled, where there is one for more,
_SELDOM = 0.1  # and what share of all passes they must be: compiling takes as long as thousands of them
_TOLERANCE = {torch.float32: 3e-3, torch.float64: 3e-3}  # of logits, relative to their spread
_HALF_TOLERANCE = 0.1

_Run = Callable[..., list[torch.Tensor]]
_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class _Shape(NamedTuple):
    """A captured pass: of which runner, places, columns, slots that are looked at, whether over trees."""

    kind: Hashable
    rows: int
    columns: int
    top: int
    tree: bool

    def sort(self, sizes_open: bool) -> Hashable:
        """What is the same for passes that are alike: where sizes are open, those that share one code."""
        # one is a size that a compiler makes code of its own for
        return (self.kind, self.tree, self.rows == 1, self.columns == 1) if sizes_open else (self.kind, self.tree)


@dataclass
class CallSettings:
    """One `generate`: how its passes are run, and whether it is over, so that the next one may have the captured passes.

    Args:
        mode: of `MODES`.
        spent_once: seconds spent so far on what later passes will not need again, captures above all.
    """

    mode: str = "eager"
    over: bool = False
    spent_once: float = 0.0

    @property
    def fuses(self) -> bool:
        """Whether models run in fewer operations, or from copies of their weights."""
        return self.mode != "eager"


class Graphs:
    """The captured passes of one model and the slots that they run over, kept from call to call.

    Rows, columns and slots are rounded up, so that few shapes occur; what fills a pass up is computed and never kept. The
    second pass of a model, or of a part, is captured and compared with the eager pass. From then on every new shape is
    captured when it comes, and compared with the same pass before its capture. The first replay of every call is compared with
    the eager pass again. Where something fails, the model runs eagerly from then on, and `reason` says why.

    Compiled for a CPU, a pass is the same code for all shapes, but for one row, or one column of several, and is compared with
    the eager pass when that code is made. Weights are constants of it where they may be copied: when they have changed since,
    it is made anew. Whatever else changes in a model is the compiler's to notice, in the first pass of a sort in every call.

    One call at a time replays; another one in another thread runs eagerly meanwhile.

    Attributes:
        reason: why the model runs eagerly as long as it is as it is, None where nothing speaks against replaying.
        obstacle: the same, of the last call alone: hooks, an adapter, parts on several devices.
        replays: how many passes were replayed.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.obstacle: str | None = None
        self.replays = 0
        self._lock = threading.Lock()
        self._settings: CallSettings | None = None
        self._served: weakref.ref[SlotCache] | None = None  # the slots of the call that holds the settings
        self._made_for: Any = None
        self._inner: Modules | None = None
        self._buffers: StaticBuffers | None = None
        self._captured: OrderedDict[Hashable, Pass] = OrderedDict()
        self._asked: set[Hashable] = set()
        self._proven: set[Hashable] = set()  # of runners, with chains or trees: captures that were as the eager pass
        self._confirmed = False
        self._mode = "eager"
        self._open = False  # whether sizes are left open: compiled, and not captured
        self._frozen: Weights | None = None  # what compiled code takes for constants
        self._compiled: dict[Hashable, _Run] = {}
        self._twins: dict[Hashable, Any] = {}  # the runners that compiled code is made of
        self._grounds: dict[Hashable, tuple[Any, ...]] = {}  # what the checked passes of a sort stand on
        # by sort: passes over one column, and `replays` before them
        self._filled_up: dict[Hashable, tuple[int, int]] = {}
        self._sound: set[Hashable] = set()  # sorts of which this call has had a pass checked

    def __reduce__(self) -> Any:
        return Graphs, ()  # a copy of a model captures its own

    @property
    def captured(self) -> int:
        """How many passes are captured."""
        return len(self._captured)

    def serve(self, runner: Runner, model: nn.Module, settings: CallSettings) -> None:
        """Run the passes of this runner, and of those that share its slots, where that is possible; otherwise do nothing.

        runner: of one call, its prompt not yet read. model: what it runs, as its owner knows it.
        """
        mode = settings.mode
        if mode == "eager" or (mode == "auto" and runner.device.type != "cuda"):
            return
        if not runner.is_capturable:
            return
        with self._lock:
            if self._settings is settings or (self._settings is not None and not self._settings.over):
                return
            self._settings, self._served = settings, weakref.ref(runner.cache)
        self.obstacle = obstacle(model, runner.device)
        if self.obstacle is not None:
            return
        made_for = (mode, capture.fingerprint(model, runner.model))
        inner = Modules.of([module for module in model.modules() if module is not model], (type(model),))
        sizes_open = mode == "compile" and runner.device.type != "cuda"
        watched = set(map(id, getattr(runner.model, "watched", ())))  # by those who made the modules that compute
        tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in watched]
        frozen = Weights.of(tensors, True) if sizes_open and may_copy(model.parameters()) else None
        same = made_for == self._made_for and self._inner is not None and self._inner.same(inner)
        if not same or not _same(frozen, self._frozen):
            self._drop()
            self._made_for, self._inner, self.reason, self._mode = made_for, inner, None, mode
            self._open, self._frozen = sizes_open, frozen
        self._confirmed = False
        self._sound.clear()
        if self._buffers is not None:
            self._buffers.shown = None
        runner.graphs = self

    def run(self, runner: Runner, ids: torch.Tensor, draft: Draft | None) -> torch.Tensor | None:
        """See `runtime.Replayer`."""
        cache, width = runner.cache, ids.shape[1]
        if not self._serves(cache):
            return None
        rows, last = _places(cache, self._open)
        columns = width if self._open else columns_for(width, rows)
        if columns is None or columns > WIDTHS[-1] or last + width > runner.context:
            return None
        tree = draft is not None and draft.parents is not None
        if self._open and width == 1 and self._fills_up(runner, rows, tree):
            columns = 2
        shape = _Shape(runner.kind, rows, columns, slots_for(last + columns, self._open), tree)
        sort = shape.sort(self._open)
        if sort not in self._proven and not self._ask(sort):
            return None
        started = time.perf_counter()
        going_on = None if runner.inject is None else runner.inject.hidden
        try:
            buffers = self._hold(cache, shape.top)
            proven = sort in self._proven
            fresh = self._open and proven and shape not in self._captured
            if fresh:
                self._add(shape, self._pass(runner, buffers, shape))
            known = shape in self._captured
            by_eager = not (self._confirmed or self._open if known else proven)
            expected = runner.eager(ids, draft) if by_eager else None
            buffers.feed(cache, rows, columns, ids, draft)
            if going_on is not None:
                buffers.feed_states(runner.kind, cache, rows, going_on)
            if not known:
                run = self._pass(runner, buffers, shape)
                if expected is None or self._mode == "compile":  # a compiler works when it is first called
                    with self._compiling():
                        first = _results(run(), runner, buffers, width)
                    expected = first if expected is None else expected
                with buffers.other_ids():
                    self._add(shape, run, tried=proven)
            self._captured.move_to_end(shape)
            if fresh:  # the compiler may find that this size needs a code of its own
                replay = self._captured[shape]
                assert isinstance(replay, CodeReplay)
                self._seen_to(shape, runner, replay, replay.look)
                self._spend(time.perf_counter() - started)
            if expected is None:
                self.replays += 1
                return _results(self._replayed(shape, runner), runner, buffers, width)
            capture.wait(buffers.device)
            replayed = time.perf_counter()
            logits = _results(self._replayed(shape, runner), runner, buffers, width)
            capture.wait(buffers.device)
        except Exception as error:  # a capture runs somebody's forward in a way that it may not be made for
            self._spend(time.perf_counter() - started)
            self._give_up(f"{type(error).__name__}: {error}")
            return None
        finally:
            if runner.inject is not None and going_on is not None:  # a capture goes on from others
                runner.inject.hidden = going_on
        done = time.perf_counter()
        apart = capture.distance(logits, expected, cache.running)
        self._spend(time.perf_counter() - started - (done - replayed))
        if apart <= _TOLERANCE.get(logits.dtype, _HALF_TOLERANCE):
            self.replays += 1
            self._proven.add(sort)
            self._confirmed = self._confirmed or by_eager
            return logits
        if known:  # something about the model has changed since the capture
            self._drop()
        else:
            self._give_up(f"a replay differs from the same pass by {apart:.2g} of the spread of its logits")
        return None  # the eager pass writes once more what the replay has written

    def gather(self, runner: Runner, path: Paths) -> bool:
        """See `runtime.Replayer`."""
        cache, buffers = runner.cache, self._buffers
        if buffers is None or not self._serves(cache):
            return False
        rows, last = _places(cache, self._open)
        columns = columns_for(max(map(len, path)), rows)
        key = ("gather", rows, columns)
        if columns is None or not buffers.holds(cache, last + columns):
            return False
        started = time.perf_counter()
        try:
            if key not in self._captured:
                buffers.stay(rows, columns)  # what runs before a capture moves nothing
                self._add(key, lambda: buffers.move(rows, columns))
                self._spend(time.perf_counter() - started)
            buffers.follow(cache, rows, columns, path)
            self._captured[key]()
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
            return False
        self._captured.move_to_end(key)
        return True

    def _fills_up(self, runner: Runner, rows: int, tree: bool) -> bool:
        """Whether a pass over one column is run over two: for one row always, which takes as long; for several where there is
        code for more columns, and few such passes."""
        if rows == 1:
            return True
        one, two = (_Shape(runner.kind, rows, columns, 0, tree).sort(self._open) for columns in (1, 2))
        if one in self._proven or two not in self._proven:
            return False
        count, before = self._filled_up.get(one, (0, self.replays))
        self._filled_up[one] = count + 1, before
        return count < _FEW or count < _SELDOM * (self.replays - before)

    def _replayed(self, shape: _Shape, runner: Runner) -> list[torch.Tensor]:
        """What a captured pass returns."""
        replay = self._captured[shape]
        if not isinstance(replay, CodeReplay):
            # copies: another replay may write over them, since captured passes share their memory
            return [output.clone() for output in replay()]
        if replay.checked and shape.sort(self._open) in self._sound:
            return replay()
        return self._seen_to(shape, runner, replay, replay.check)

    def _seen_to(self, shape: _Shape, runner: Runner, replay: CodeReplay, see: Callable[[], _T]) -> _T:
        """What `see` makes of a compiled pass. What the compiler finds goes for all passes of its sort."""
        sort, twin = shape.sort(self._open), self._twins[runner.kind, shape.tree]
        _renew(twin, runner, twin.cache)  # the model may have become another one of the same kind since the last call
        with self._compiling():
            seen = see()
        if not _identical(replay.ground, self._grounds.get(sort, ())):
            for key, other in self._captured.items():
                if (
                    isinstance(other, CodeReplay)
                    and isinstance(key, _Shape)
                    and key.sort(self._open) == sort
                    and other is not replay
                ):
                    other.forget()
        self._grounds[sort] = replay.ground
        self._sound.add(sort)
        return seen

    def _compiling(self) -> AbstractContextManager[None]:
        return capture.compiling(self._frozen is not None) if self._mode == "compile" else nullcontext()

    def _spend(self, seconds: float) -> None:
        """Seconds of the call that later passes will not need."""
        if self._settings is not None:
            self._settings.spent_once += seconds

    def _serves(self, cache: SlotCache) -> bool:
        return self.reason is None and self._served is not None and cache is self._served()

    def _ask(self, key: Hashable) -> bool:
        """Whether a shape has been asked for before."""
        if key in self._asked:
            return True
        if len(self._asked) >= _REMEMBERED:
            self._asked.clear()
        self._asked.add(key)
        return False

    def _hold(self, cache: SlotCache, top: int) -> StaticBuffers:
        """The call's slots, moved to where the captured passes look for them."""
        buffers = self._buffers
        if buffers is not None and buffers.holds(cache, top):
            return buffers
        if buffers is None or not buffers.fits(cache, top):
            self._drop()
            buffers = self._buffers = StaticBuffers(cache, max(top, slots_for(min(cache.limit + WIDTHS[-1], _AHEAD))))
        buffers.take(cache)
        return buffers

    def _pass(self, runner: Runner, buffers: StaticBuffers, shape: _Shape) -> Pass:
        """A pass of this shape over the buffers: compiled for a CPU it still has to be checked."""
        kind, rows, columns, top, tree = shape
        run = self._over(runner, buffers, tree)
        arguments = (
            buffers.ids[:rows, :columns],
            buffers.numbers[:rows],
            buffers.parents[:rows, : columns - 1] if tree else None,
            buffers.visible[:rows, :top],
            None if runner.inject is None else buffers.states[kind][:rows, :columns],
        )
        return CodeReplay(run, arguments) if self._open else functools.partial(run, *arguments)

    def _over(self, runner: Runner, buffers: StaticBuffers, tree: bool) -> _Run:
        """What a runner makes of its inputs over the buffers's slots."""
        known = self._compiled.get((runner.kind, tree))
        if known is not None:
            return known
        twin: Any = copy.copy(runner)
        _renew(twin, runner, buffers.slots)
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

        if self._mode != "compile":
            return run
        made = self._compiled[runner.kind, tree] = capture.compiled(run, self._frozen is not None)
        return made

    def _add(self, key: Hashable, run: Pass, tried: bool = False) -> None:
        self._captured[key] = self._replay(run, tried or self._mode == "compile")
        while len(self._captured) > (_MOST_OPEN if self._open else _MOST):
            self._captured.popitem(last=False)

    def _replay(self, run: Pass, tried: bool) -> Pass:
        assert self._buffers is not None
        if self._buffers.device.type != "cuda":
            return run
        if self._buffers.pool is None:
            self._buffers.pool = torch.cuda.graph_pool_handle()
        return CudaReplay(run, self._buffers.device, self._buffers.pool, tried)

    def _drop(self) -> None:
        """Forget all that was captured."""
        self._captured.clear()
        self._compiled.clear()
        self._twins.clear()
        self._asked.clear()
        self._proven.clear()
        self._sound.clear()
        self._grounds.clear()
        self._filled_up.clear()
        self._buffers = None
        self._confirmed = False

    def _give_up(self, reason: str) -> None:
        _log.debug("passes run eagerly from now on: %s", reason)
        self.reason = reason
        self._drop()


def _results(outputs: list[torch.Tensor], runner: Runner, buffers: StaticBuffers, width: int) -> torch.Tensor:
    """The logits of a replay, [B, n, V], zeros for rows that don't run; the runner's taps hold what they would hold."""
    cache, running = runner.cache, len(runner.cache.running)
    logits, *states = (output[:running, :width] for output in outputs)
    for tap, hidden in zip(runner.taps, states, strict=True):
        tap.hidden = hidden
    if cache.running == list(range(cache.rows)):
        return logits
    spread = logits.new_zeros(cache.rows, *logits.shape[1:])
    return spread.index_copy_(0, buffers.numbers[:running, 2], logits)


def _renew(twin: Any, runner: Runner, slots: SlotCache) -> None:
    """Let a runner over the buffers's slots run what this one runs."""
    vars(twin).update(vars(runner))
    twin.cache, twin.graphs = slots, None  # the buffers's lengths are none of this call


def _identical(one: tuple[Any, ...], two: tuple[Any, ...]) -> bool:
    return len(one) == len(two) and all(a is b for a, b in zip(one, two, strict=True))


def _same(one: Weights | None, other: Weights | None) -> bool:
    return one is other or (one is not None and other is not None and one.same(other))


def require_mode(fast: str) -> str:
    """`fast`, as a caller wrote it. Raises ValueError for anything but `MODES`."""
    if fast not in MODES:
        raise ValueError(f"fast: {fast!r} is not known; give one of {', '.join(map(repr, MODES))}")
    return fast


def _places(cache: SlotCache, sizes_open: bool) -> tuple[int, int]:
    """How many places a captured pass is over, and the most slots that count in one of them."""
    running = len(cache.running)
    # what is left of a batch does not become a single row, which is a size of its own to a compiler
    rows = min(max(running, 2), cache.rows) if sizes_open else rows_for(running, cache.rows)
    return rows, max(cache.lengths[row] for row in cache.order[:rows])
