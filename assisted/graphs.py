"""Captured passes: a forward is recorded once for a shape, over tensors that stay where they are, and then replayed.

Knows runners and slots. A replay costs one call whatever the model is made of; the eager path says what it has to compute,
and runs wherever a pass cannot be captured. A CPU has nothing to replay: there passes are compiled, once for all shapes.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import capture
from .arena import Arena
from .cache import SlotCache
from .capture import CudaReplay, Pass
from .drafts import Draft
from .parts import Inject
from .products import Weights, may_copy
from .runtime import Runner
from .shapes import WIDTHS, columns_for, rows_for, slots_for

__all__ = ["MODES", "Graphs", "Lease", "require_mode"]

MODES = ("auto", "eager", "graphs", "compile")
_AHEAD = 4096  # slots reserved at once where a call may need so many; more are reserved as they are needed
_REMEMBERED = 256  # shapes that were asked for once
_MOST = 48  # captured passes of a model, the least recently used one goes first
_TOLERANCE = {torch.float32: 3e-3, torch.float64: 3e-3}  # of logits, relative to their spread
_HALF_TOLERANCE = 0.1

_Run = Callable[..., list[torch.Tensor]]

_log = logging.getLogger(__name__)


@dataclass
class Lease:
    """One `generate`: how its passes are run, and whether it is over, so that the next one may have the captured passes.

    Args:
        mode: of `MODES`.
        once: seconds spent so far on what later passes will not need again, captures above all.
    """

    mode: str = "eager"
    over: bool = False
    once: float = 0.0

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

    Compiled for a CPU, a pass is the same code for all shapes, but for one row or one column, and is compared with the eager
    pass when that code is made. Weights are constants of it where they may be copied: when they have changed since, it is made
    anew. Whatever else changes in a model is the compiler's to notice.

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
        self._lease: Lease | None = None
        self._served: weakref.ref[SlotCache] | None = None  # the slots of the call that holds the lease
        self._made_for: Any = None
        self._arena: Arena | None = None
        self._captured: OrderedDict[Hashable, Pass] = OrderedDict()
        self._asked: set[Hashable] = set()
        self._proven: set[Hashable] = set()  # of runners, with chains or trees: captures that were as the eager pass
        self._confirmed = False
        self._mode = "eager"
        self._open = False  # whether sizes are left open: compiled, and not captured
        self._frozen: Weights | None = None  # what compiled code takes for constants
        self._compiled: dict[Hashable, tuple[_Run, Inject | None]] = {}

    def __reduce__(self) -> Any:
        return Graphs, ()  # a copy of a model captures its own

    @property
    def captured(self) -> int:
        """How many passes are captured."""
        return len(self._captured)

    def serve(self, runner: Runner, model: nn.Module, lease: Lease) -> None:
        """Run the passes of this runner, and of those that share its slots, where that is possible; otherwise do nothing.

        runner: of one call, its prompt not yet read. model: what it runs, as its owner knows it.
        """
        mode = lease.mode
        if mode == "eager" or (mode == "auto" and runner.device.type != "cuda"):
            return
        if not runner.has_places:
            return
        with self._lock:
            if self._lease is lease or (self._lease is not None and not self._lease.over):
                return
            self._lease, self._served = lease, weakref.ref(runner.cache)
        self.obstacle = capture.obstacle(model, runner.device)
        if self.obstacle is not None:
            return
        made_for = (mode, capture.fingerprint(model, runner.model))
        sizes_open = mode == "compile" and runner.device.type != "cuda"
        tensors = [*model.parameters(), *model.buffers()]
        frozen = Weights.of(tensors, True) if sizes_open and may_copy(model.parameters()) else None
        if made_for != self._made_for or not _same(frozen, self._frozen):
            self._drop()
            self._made_for, self.reason, self._mode = made_for, None, mode
            self._open, self._frozen = sizes_open, frozen
        self._confirmed = False
        if self._arena is not None:
            self._arena.shown = None
        runner.graphs = self

    def run(self, runner: Runner, ids: torch.Tensor, draft: Draft | None) -> torch.Tensor | None:
        """See `runtime.Replayer`."""
        cache, width = runner.cache, ids.shape[1]
        if not self._serves(cache):
            return None
        rows, last = _places(cache)
        columns = columns_for(width, rows)
        if columns is None or last + width > runner.context:
            return None
        columns = width if self._open else columns
        top = slots_for(last + columns)
        tree = draft is not None and draft.parents is not None
        key = runner.kind, rows, columns, top, tree
        sort: Hashable = runner.kind, tree
        if self._open:  # one is a size that a compiler makes code of its own for
            sort = (runner.kind, tree, rows == 1, columns == 1)
        if sort not in self._proven and not self._ask(sort):
            return None
        started = time.perf_counter()
        try:
            arena = self._hold(cache, top)
            proven = sort in self._proven
            fresh = self._open and proven and key not in self._captured
            if fresh:
                self._add(key, self._pass(runner, arena, rows, columns, top, tree))
            known = key in self._captured
            by_eager = not (self._confirmed or self._open if known else proven)
            expected = runner.eager(ids, draft) if by_eager else None
            arena.feed(cache, rows, columns, ids, draft)
            if runner.inject is not None:
                arena.feed_states(runner.kind, cache, rows, runner.inject.hidden)
            if not known:
                run = self._pass(runner, arena, rows, columns, top, tree)
                if expected is None or self._mode == "compile":  # a compiler works when it is first called
                    with self._compiling():
                        first = _results(run(), runner, arena, width)
                    expected = first if expected is None else expected
                with arena.other_ids():
                    self._add(key, run, tried=proven)
            self._captured.move_to_end(key)
            if fresh:  # the compiler may find that this size needs a code of its own
                with self._compiling():
                    self._captured[key]()
                self._spend(time.perf_counter() - started)
            if expected is None:
                self.replays += 1
                return _results(self._captured[key](), runner, arena, width)
            capture.wait(arena.device)
            replayed = time.perf_counter()
            logits = _results(self._captured[key](), runner, arena, width)
            capture.wait(arena.device)
        except Exception as error:  # a capture runs somebody's forward in a way that it may not be made for
            self._spend(time.perf_counter() - started)
            self._give_up(f"{type(error).__name__}: {error}")
            return None
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

    def gather(self, runner: Runner, path: torch.Tensor) -> bool:
        """See `runtime.Replayer`."""
        cache, arena = runner.cache, self._arena
        if arena is None or not self._serves(cache):
            return False
        rows, last = _places(cache)
        columns = columns_for(path.shape[1], rows)
        key = ("gather", rows, columns)
        if columns is None or not arena.holds(cache, last + columns):
            return False
        started = time.perf_counter()
        try:
            if key not in self._captured:
                arena.stay(rows, columns)  # what runs before a capture moves nothing
                self._add(key, lambda: arena.move(rows, columns))
                self._spend(time.perf_counter() - started)
            arena.follow(cache, rows, columns, path)
            self._captured[key]()
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
            return False
        self._captured.move_to_end(key)
        return True

    def _compiling(self) -> AbstractContextManager[None]:
        return capture.compiling(self._frozen is not None) if self._mode == "compile" else nullcontext()

    def _spend(self, seconds: float) -> None:
        """Seconds of the call that later passes will not need."""
        if self._lease is not None:
            self._lease.once += seconds

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

    def _hold(self, cache: SlotCache, top: int) -> Arena:
        """The call's slots, moved to where the captured passes look for them."""
        arena = self._arena
        if arena is not None and arena.holds(cache, top):
            return arena
        if arena is None or not arena.fits(cache, top):
            self._drop()
            arena = self._arena = Arena(cache, max(top, slots_for(min(cache.limit + WIDTHS[-1], _AHEAD))))
        arena.take(cache)
        return arena

    def _pass(self, runner: Runner, arena: Arena, rows: int, columns: int, top: int, tree: bool) -> Pass:
        """A pass of this shape over the arena."""
        run, inject = self._over(runner, arena, tree)
        ids, numbers, visible = arena.ids[:rows, :columns], arena.numbers[:rows], arena.visible[:rows, :top]
        parents = arena.parents[:rows, : columns - 1] if tree else None
        states = None if inject is None else arena.states[runner.kind][:rows, :columns]

        def over_these() -> list[torch.Tensor]:
            with _injected(inject, states):
                return run(ids, numbers, parents, visible)

        return over_these

    def _over(self, runner: Runner, arena: Arena, tree: bool) -> tuple[_Run, Inject | None]:
        """What a runner makes of its inputs over the arena's slots, and where it looks for the states that it goes on from."""
        known = self._compiled.get((runner.kind, tree))
        if known is not None:
            return known
        twin: Any = copy.copy(runner)
        twin.cache, twin.graphs = arena.slots, None  # the arena's lengths are none of this call

        def run(
            ids: torch.Tensor, numbers: torch.Tensor, parents: torch.Tensor | None, visible: torch.Tensor
        ) -> list[torch.Tensor]:
            logits = twin.with_places(ids, numbers[:, :1], numbers[:, 1:2], parents, visible)
            return [logits, *(tap.hidden for tap in twin.taps)]

        if self._mode != "compile":
            return run, twin.inject
        made = self._compiled[runner.kind, tree] = capture.compiled(run, self._frozen is not None), twin.inject
        return made

    def _add(self, key: Hashable, run: Pass, tried: bool = False) -> None:
        self._captured[key] = self._replay(run, tried or self._mode == "compile")
        while len(self._captured) > _MOST:
            self._captured.popitem(last=False)

    def _replay(self, run: Pass, tried: bool) -> Pass:
        assert self._arena is not None
        if self._arena.device.type != "cuda":
            return run
        if self._arena.pool is None:
            self._arena.pool = torch.cuda.graph_pool_handle()
        return CudaReplay(run, self._arena.device, self._arena.pool, tried)

    def _drop(self) -> None:
        """Forget all that was captured."""
        self._captured.clear()
        self._compiled.clear()
        self._asked.clear()
        self._proven.clear()
        self._arena = None
        self._confirmed = False

    def _give_up(self, reason: str) -> None:
        _log.debug("passes run eagerly from now on: %s", reason)
        self.reason = reason
        self._drop()


@contextmanager
def _injected(inject: Inject | None, hidden: torch.Tensor | None) -> Iterator[None]:
    """Meanwhile a part goes on from other states."""
    if inject is None or hidden is None:
        yield
        return
    before, inject.hidden = inject.hidden, hidden
    try:
        yield
    finally:
        inject.hidden = before


def _results(outputs: list[torch.Tensor], runner: Runner, arena: Arena, width: int) -> torch.Tensor:
    """The logits of a replay, [B, n, V], zeros for rows that don't run; the runner's taps hold what they would hold."""
    cache, running = runner.cache, len(runner.cache.running)
    # copies: another replay may write over them, since captured passes share their memory
    logits, *states = (output[:running, :width].clone() for output in outputs)
    for tap, hidden in zip(runner.taps, states, strict=True):
        tap.hidden = hidden
    if cache.running == list(range(cache.rows)):
        return logits
    spread = logits.new_zeros(cache.rows, *logits.shape[1:])
    return spread.index_copy_(0, arena.numbers[:running, 2], logits)


def _same(one: Weights | None, other: Weights | None) -> bool:
    return one is other or (one is not None and other is not None and one.same(other))


def require_mode(fast: str) -> str:
    """`fast`, as a caller wrote it. Raises ValueError for anything but `MODES`."""
    if fast not in MODES:
        raise ValueError(f"fast: {fast!r} is not known; give one of {', '.join(map(repr, MODES))}")
    return fast


def _places(cache: SlotCache) -> tuple[int, int]:
    """How many places a captured pass is over, and the most slots that count in one of them."""
    rows = rows_for(len(cache.running), cache.rows)
    return rows, max(cache.lengths[row] for row in cache.order[:rows])
