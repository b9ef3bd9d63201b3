"""Captured forward passes of a model. Kernel launches are recorded once per input shape, over tensors at fixed addresses, and
then replayed in one call.

A runner has a forward pass in two forms: `eager` defines the correct result and runs where a pass cannot be captured, and
`static_forward` is captured. capture.py implements the two ways to capture, static_buffers.py holds what captures read.
"""

from __future__ import annotations

import copy
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.random import fork_rng
from transformers import PreTrainedModel

from ..core.drafts import Draft
from ..core.host import now
from ..engine.agreement import apart, rounding_of
from ..engine.cache import Paths, SlotCache, SlotLayer
from ..engine.hooks import obstacle
from ..engine.libraries import attention_of
from ..engine.passes import (
    WIDTHS,
    Chained,
    Inputs,
    Mover,
    Passes,
    Runner,
    Unfused,
    columns_among,
    columns_for,
    slots_for,
)
from ..engine.prepared import CallSettings
from .capture import Captured, Captures, CompiledCode, CudaGraphs, Function, HostRead, Outputs, Shape
from .products import may_copy, may_take
from .sources import Modules, Source, Weights
from .static_buffers import StaticBuffers

MODES = ("auto", "eager", "compile")
_CHAINS = (1, 2, 16)  # columns of the chains that are captured ahead, before they are rounded up
_AHEAD = 4096  # slots reserved at once, if a call may need as many; further ones are reserved on demand

_Runner = TypeVar("_Runner", bound=Runner)


def captures_for(mode: str, device: torch.device) -> type[Captures] | None:
    """How forward passes are captured on this device; None if they run eagerly."""
    if device.type == "cuda" and mode != "eager":
        return CudaGraphs
    return CompiledCode if mode == "compile" else None


class _Static(NamedTuple):
    """A runner's `static_forward` as a function of tensors. twin: the runner inside. frozen: weights are constants of it."""

    run: Function
    twin: Any
    frozen: bool


class _Computed:
    """A captured function, and the tensors that it reads."""

    def __init__(self, run: Captured, inputs: Sequence[torch.Tensor | None]):
        self.run, self.inputs = run, inputs

    def __call__(self) -> Outputs:
        return self.run()


class Graphs(Passes):
    """The captured forward passes of one model, kept between calls.

    The second forward pass of a model, or of a part of it, is captured and compared with the eager one. After that, the first
    replay of each sort is compared, or of each call (`Captures.confirms`). If a capture fails or differs, the model runs
    eagerly from then on, for the given `reason`. When the model changes, it is captured again.

    Only one call at a time replays; concurrent calls in other threads run eagerly.

    Attributes:
        reason: why the model runs eagerly until it changes; None if nothing prevents replaying.
        obstacle: the same for the last call only: hooks, an adapter, parts on several devices.
        replays: how many passes were replayed.
        captures: the captured passes, of the model in its current state; None before the first call that may capture.
        buffers: the slots and inputs that they read.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.obstacle: str | None = None
        self.replays = 0
        self.captures: Captures | None = None
        self.buffers: StaticBuffers | None = None
        self._functions: dict[tuple[Hashable, bool], _Static] = {}  # by kind of runner, with chains or trees
        self._frozen: dict[Hashable, bool] = {}  # whether weights are constants of code, by kind of runner
        self._uncapturable: set[Hashable] = set()  # functions of `compute`
        self._made_from: tuple[Any, Source] | None = None
        self._lock, self._turn = threading.Lock(), threading.RLock()
        self._settings: CallSettings | None = None  # of the call that replays
        self._name = ""  # of the model, for its report
        self._device = torch.device("cpu")  # of that call
        self._served: weakref.ref[SlotCache] | None = None  # the slots of that call
        self._confirmed = False  # whether a replay of that call was compared with the eager forward pass

    def __reduce__(self) -> Any:
        return Graphs, ()  # a copy of a model captures its own passes

    @property
    def captured(self) -> int:
        """The number of captured passes."""
        return 0 if self.captures is None else len(self.captures.held)

    def rounding(self, most: int) -> Callable[[int, int], int | None] | None:
        return functools.partial(columns_among, most) if isinstance(self.captures, CudaGraphs) else None

    def release(self, reason: str) -> None:
        self._forget()
        self.reason = reason

    def _forget(self) -> None:
        if self.captures is not None:
            self.captures = type(self.captures)(self.captures.compiled, self.captures.constants)
        self.buffers, self._functions, self._frozen, self._uncapturable = None, {}, {}, set()

    def serve(self, runner: _Runner, model: nn.Module, settings: CallSettings) -> _Runner:
        """Let a call's settings hold for a runner, and replay its forward passes, and those of runners that share its slots,
        where possible. Returns the runner.

        runner: a new one, before its prompt. model: the original model, even if the runner runs another form of it.
        """
        runner.settings, runner.cache.outlives = settings, settings.outlives
        kind = captures_for(settings.mode, runner.device)
        if kind is None or not runner.is_capturable:
            return runner
        with self._lock:
            if self._settings is settings or (self._settings is not None and not self._settings.over):
                return runner
            self._settings, self._served = settings, weakref.ref(runner.cache)
            self._device = runner.device
        self._name = type(model).__name__
        trusted = settings.trust_in(model)
        self.obstacle = trusted.forward or trusted.between or obstacle(model, runner.device)
        if self.obstacle is not None:
            if not trusted.forward:  # which the report gives as the reason for everything that it costs
                self._note(self.obstacle)
            return runner
        made_for = (settings.mode, kind, _fingerprint(model, runner.prepared.module))
        inner = Modules.of([module for module in model.modules() if module is not model], trusted.code)
        constants = kind.takes_constants and may_copy(model.parameters())
        weights, copied = itertools.chain(model.parameters(), model.buffers()), set(map(id, runner.prepared.copied))
        compared = (weight for weight in weights if id(weight) not in copied) if constants else ()
        source = Source(inner, Weights.of(compared, constants), Weights((), None))
        known = self._made_from
        if self.captures is None or known is None or known[0] != made_for or not known[1].same(source):
            self.captures = kind(settings.mode == "compile", constants)
            self._forget()
            self._made_from, self.reason = (made_for, source), None
        elif self.reason is not None:
            self._note(self.reason)
        self._confirmed = not kind.confirms
        self.captures.begin_call()
        self.runs = kind.runs
        runner.passes = self
        if self.reason is None:
            runner.cache.lender = self._lend
        return runner

    def run(self, runner: Runner, ids: torch.Tensor, draft: Draft | None, used: list[int] | None) -> torch.Tensor:
        logits = self._replay(runner, ids, draft) if self._serves(runner.cache) else None
        return super().run(runner, ids, draft, used) if logits is None else logits

    def _replay(self, runner: Runner, ids: torch.Tensor, draft: Draft | None) -> torch.Tensor | None:
        """The verified output of a captured pass; None if this pass must run eagerly."""
        captures, cache, prepared, width = self.captures, runner.cache, runner.prepared, ids.shape[1]
        assert captures is not None
        tree = draft is not None and draft.parents is not None
        rows = captures.rows(len(cache.running), cache.rows)
        last = self._last(cache, rows)
        shape = captures.shape(prepared.kind, rows, width, last, tree, prepared.low_bit_bytes > 0)
        if shape is None or last + width > runner.context or not captures.is_expected(shape):
            return None
        started = now()
        states = None if prepared.inject is None else prepared.inject.hidden
        try:
            buffers, captures = self._hold(cache, shape.top)
            known = shape in captures.held
            by_eager = not (self._confirmed if known else captures.sort(shape) in captures.trusted)
            expected = runner.eager(ids, draft) if by_eager else None
            buffers.feed(cache, rows, shape.columns, ids, draft)
            if states is not None:
                buffers.put(shape.kind, cache, rows, states)
            if not known or not captures.is_checked(shape):
                static = self._static(runner, shape.tree)
            if not known:
                first = captures.capture(
                    shape, static.run, self._inputs(runner, shape), static.frozen, buffers.other_ids
                )
                expected = _results(first, runner, buffers, width) if first is not None and not by_eager else expected
                self._spend(now() - started)
                started = now()
            captures.held.move_to_end(shape)
            if expected is None:
                return self._counted(_results(captures.replay(shape), runner, buffers, width), runner, shape)
            replayed = now(buffers.device)
            logits = _results(captures.replay(shape), runner, buffers, width)
            done = now(buffers.device)
        except Exception as error:  # third-party forwards may not support being captured
            self._spend(now() - started)
            self._give_up(f"{type(error).__name__}: {error}")
            return None
        finally:
            if prepared.inject is not None and states is not None:  # a capture replaces them
                prepared.inject.hidden = states
        difference = apart(logits[cache.running], expected[cache.running])
        self._spend(now() - started - (done - replayed))
        rounded = torch.bfloat16 if prepared.low_bit_bytes else logits.dtype
        if difference <= (0 if prepared.keeps_bits else rounding_of(rounded)):
            captures.trusted.add(captures.sort(shape))
            self._confirmed = self._confirmed or by_eager
            return self._counted(logits, runner, shape)
        if known:  # the model has changed since the capture
            self._forget()
        else:
            self._give_up(f"replay and forward pass differ by {difference:.2g} standard deviations of the logits")
        return None  # the eager pass overwrites what the replay has written

    def _static(self, runner: Runner, tree: bool) -> _Static:
        """The runner's forward pass as a function of `_inputs`, over the slots of the buffers."""
        key, captures, buffers = (runner.prepared.kind, tree), self.captures, self.buffers
        assert captures is not None and buffers is not None
        if key not in self._functions:
            twin: Any = copy.copy(runner)

            def run(ids: Any, numbers: Any, parents: Any, visible: Any, states: Any) -> Outputs:
                if states is not None:
                    twin.prepared.inject.hidden = states
                logits = twin.static_forward(Inputs(ids, numbers[:, :1], numbers[:, 1:2], parents, visible))
                return [logits, *(tap.hidden for tap in twin.prepared.taps.values())]

            frozen = captures.constants and may_take(runner.prepared.low_bit_bytes)
            frozen = self._frozen.setdefault(runner.prepared.kind, frozen)
            self._functions[key] = _Static(captures.compile(run, frozen), twin, frozen)
        static = self._functions[key]
        # the model may be another of the same kind than in the last call; the buffers' lengths belong to no call
        vars(static.twin).update(vars(runner))
        static.twin.cache, static.twin.passes = buffers.slots, Passes()
        return static

    def _inputs(self, runner: Runner, shape: Shape, states: Hashable = None) -> tuple[torch.Tensor | None, ...]:
        """What a forward pass of this shape reads. states: the name of theirs, if it is another."""
        (kind, rows, columns, top, tree), buffers = shape, self.buffers
        assert buffers is not None
        return (
            buffers.input("ids", rows, columns),
            buffers.numbers[:rows],
            buffers.input("parents", rows, columns - 1) if tree else None,
            buffers.visible[:rows, :top],
            None if runner.prepared.inject is None else buffers.input(states or kind, rows, columns),
        )

    def _lend(self, layer: SlotLayer, top: int, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Let a call that begins read its prompt into the buffers, so that its slots need neither be moved nor exist twice; see
        `SlotCache.lender`."""
        cache = layer.slots
        room = slots_for(min(cache.limit, max(top, _AHEAD - WIDTHS[-1])) + WIDTHS[-1])
        return self._fitting(cache, room, room).lend(layer, key_states, value_states)

    def _hold(self, cache: SlotCache, top: int) -> tuple[StaticBuffers, Captures]:
        """The buffers with the call's slots moved there, and the captured passes that read them."""
        if self.buffers is None or not self.buffers.holds(cache, top):
            room = max(top, slots_for(min(cache.limit + WIDTHS[-1], _AHEAD)))
            self._fitting(cache, top, room).take(cache)
        assert self.buffers is not None and self.captures is not None
        return self.buffers, self.captures

    def _fitting(self, cache: SlotCache, top: int, room: int) -> StaticBuffers:
        """Buffers into which a call's slots fit, and at least `top` of a row; new ones have `room` for a row."""
        if self.buffers is None or not self.buffers.fits(cache, top):
            self._forget()
            self.buffers = StaticBuffers(cache.empty(), room, self._device)
        return self.buffers

    @staticmethod
    def may_capture(mode: str, device: torch.device) -> bool:
        """Whether forward passes are captured on this device; see `captures_for`, which tests replace."""
        return captures_for(mode, device) is not None

    @contextmanager
    def turn(self, mode: str, device: torch.device, recorder: Any) -> Iterator[None]:
        """A context in which no `generate` of another thread replays captured passes. The recorder does not count the wait.

        Only one call can replay them. A second one would run eagerly, later than if it had waited.
        """
        asked = now()
        with self._turn if self.may_capture(mode, device) else nullcontext():
            recorder.started += now() - asked
            yield

    @torch.no_grad()
    def ahead(self, rows: int, longest: int) -> None:
        """Capture the chains that calls with so many rows replay, for texts of up to `longest` tokens: one column, those of a
        short draft, and those of a long one. Only of what an earlier call has captured and verified."""
        captures, buffers = self.captures, self.buffers
        if not isinstance(captures, CudaGraphs) or buffers is None or rows > buffers.rows:
            return
        rows = captures.rows(rows, buffers.rows)
        tops = [slots_for(1)]
        while tops[-1] < min(longest, buffers.capacity):
            tops.append(slots_for(tops[-1] + 1))
        columns = sorted({columns_for(width, rows) or 1 for width in _CHAINS})
        kinds = [kind for kind, tree in self._functions if not tree]
        for shape in itertools.starmap(Shape, itertools.product(kinds, [rows], columns, tops, [False])):
            known = shape in captures.held or len(captures.held) >= captures.most
            if known or shape.top > buffers.capacity or captures.sort(shape) not in captures.trusted:
                continue
            static, chain = self._functions[shape.kind, False], torch.tensor([[1, 1, row, 1] for row in range(rows)])
            buffers.numbers[:rows] = chain.to(buffers.device)
            try:
                inputs = self._inputs(static.twin, shape)
                first = captures.capture(shape, static.run, inputs, static.frozen, buffers.other_ids)
                found = captures.replay(shape)
            except Exception as error:
                return self._give_up(f"{type(error).__name__}: {error}")
            assert first is not None  # sorts that are trusted run before they are captured
            if apart(found[0], first[0]) > (0 if static.twin.prepared.keeps_bits else rounding_of(found[0].dtype)):
                return self._give_up("the replay of a pass that was captured ahead differs from it")

    def gather(self, runner: Runner, path: Paths) -> bool:
        if not self._serves(runner.cache) or not isinstance(self.captures, CudaGraphs) or self.buffers is None:
            return False
        captures, buffers, cache = self.captures, self.buffers, runner.cache
        rows = captures.rows(len(cache.running), cache.rows)
        columns = columns_for(max(map(len, path)), rows)
        if columns is None or not buffers.holds(cache, self._last(cache, rows) + columns):
            return False
        key, started = ("gather", rows, columns), now()
        try:
            if key not in captures.held:
                buffers.follow(cache, rows, columns, None)  # the run before the capture moves nothing
                move = functools.partial(buffers.move, buffers.input("path", rows, columns))
                captures.keep(key, captures.record(move, buffers.device, False))
                self._spend(now() - started)
            buffers.follow(cache, rows, columns, path)
            captures.held[key]()
            captures.held.move_to_end(key)
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
            return False
        return True

    def mover(self, runner: Runner, columns: int) -> Mover | None:
        captures, buffers, cache, rows = self.captures, self.buffers, runner.cache, runner.cache.rows
        if not self._serves(cache) or not isinstance(captures, CudaGraphs) or buffers is None:
            return None
        if cache.running != list(range(rows)) or not buffers.holds(cache, self._last(cache, rows) + columns):
            return None
        buffers.count(cache, rows)
        return buffers.move

    def compute(
        self,
        runner: Runner,
        key: Hashable,
        function: Callable[..., Outputs],
        inputs: Sequence[torch.Tensor | None],
        moves: bool = False,
    ) -> Outputs | None:
        captures = self.captures
        if not self._serves(runner.cache) or not isinstance(captures, CudaGraphs):
            return None
        key = ("compute", key, *(None if given is None else (given.shape, given.dtype) for given in inputs))
        if key in self._uncapturable or not (key in captures.held or captures.was_asked(key)):
            return None
        started = now()
        if key not in captures.held:
            with torch.inference_mode(False):
                held = [None if given is None else torch.zeros_like(given) for given in inputs]
            if not moves:
                _fill(held, inputs)
            try:
                with _same_draws(runner.device):
                    run = captures.record(lambda: function(*held), runner.device, False)
            except Exception:  # it runs eagerly; somebody's version of a processor may read values on the host
                self._uncapturable.add(key)
                return None
            finally:
                self._spend(now() - started)
            captures.keep(key, _Computed(run, held))
        captured = captures.held[key]
        assert isinstance(captured, _Computed)
        _fill(captured.inputs, inputs)
        captures.held.move_to_end(key)
        return captured()

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
        captures, buffers, cache, rows = self.captures, self.buffers, runner.cache, runner.cache.rows
        columns, inject = columns_for(ids.shape[1], rows), runner.prepared.inject
        # a forward pass of this call has been compared: a chain consists of such passes
        if not (self._serves(cache) and self._confirmed and isinstance(captures, CudaGraphs)) or captures.compiled:
            return None
        if columns is None or buffers is None or cache.running != list(range(rows)) or not cache.can_rewind:
            return None
        last = self._last(cache, rows) + columns + steps
        shape = Shape(runner.prepared.kind, rows, columns, slots_for(last), False)
        key = ("chain", shape, steps, key)
        fits = last <= runner.context and buffers.holds(cache, shape.top) and captures.sort(shape) in captures.trusted
        if not fits or key in self._uncapturable or not (key in captures.held or captures.was_asked(key)):
            return None
        started, before = now(), None if inject is None else inject.hidden
        name = shape.kind if states is None else ("unfused", shape.kind)
        given, fuse = (before, None) if states is None else states
        try:
            buffers.feed(cache, rows, columns, ids, None, counts)
            if given is not None:
                buffers.put(name, cache, rows, given)
            if key not in captures.held:
                static, inputs = self._static(runner, False), self._inputs(runner, shape, name)
                run = functools.partial(_chained, static.run, static.twin, inputs, fuse, function)
                with buffers.other_ids(), _same_draws(runner.device):
                    captures.keep(key, captures.record(run, runner.device, False))
                self._spend(now() - started)
            captures.held.move_to_end(key)
            outputs = [output.clone() for output in captures.held[key]()]
        except HostRead:  # somebody's version of a processor
            self._uncapturable.add(key)
            return None
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
            return None
        finally:
            if inject is not None and before is not None:  # a capture replaces them
                inject.hidden = before
        self.replays += 1
        captures.replays += 1
        for tap in runner.prepared.taps.values():
            tap.hidden = outputs.pop(0)
        return outputs

    def _last(self, cache: SlotCache, rows: int) -> int:
        """The most valid slots in any of the first rows, in storage order."""
        return max(cache.lengths[row] for row in cache.order[:rows])

    def _counted(self, logits: torch.Tensor, runner: Runner, shape: Shape) -> torch.Tensor:
        assert self.captures is not None and self.buffers is not None
        runner.replayed(self.buffers.slots, shape)
        self.replays += 1
        self.captures.replays += 1
        return logits

    def _spend(self, seconds: float) -> None:
        """Count seconds that the call spends on one-time work."""
        if self._settings is not None:
            self._settings.spent_once += seconds

    def _serves(self, cache: SlotCache) -> bool:
        return self.reason is None and self._served is not None and cache is self._served()

    def _note(self, reason: str) -> None:
        if self._settings is not None:
            self._settings.note(f"forward passes of {self._name} are not captured: {reason}")

    def _give_up(self, reason: str) -> None:
        self._note(reason)
        self.release(reason)


def _chained(run: Function, twin: Any, inputs: Sequence[torch.Tensor | None], fuse: Any, function: Chained) -> Outputs:
    """A function of `Passes.chain`. run, inputs: as those of a pass over the first columns. twin: as `_Static`. fuse: of
    `Unfused`, or None."""
    ids, numbers, _, visible, states = inputs
    assert numbers is not None
    states = states if fuse is None or states is None else fuse(states)
    level = None
    counts = numbers[:, 3:4]
    after, steps, hands_on = numbers[:, :2] + counts, itertools.count(), states is not None
    made, *tapped = run(ids, numbers, None, visible, states)
    taps = [[hidden] for hidden in tapped]
    first = made.gather(1, (counts - 1)[:, :, None].expand(-1, -1, made.shape[-1]))[:, 0]
    last = first

    def read(tokens: torch.Tensor, parents: torch.Tensor | None = None) -> torch.Tensor:
        nonlocal last, level
        if parents is not None:
            level = level or twin.root_at(first, after, visible)
            level = twin.next_level(tokens, parents, level)
            return level.states
        made, *tapped = run(tokens, after + next(steps), None, visible, last[:, None] if hands_on else None)
        for all_columns, hidden in zip(taps, tapped, strict=True):
            all_columns.append(hidden)
        last = made[:, -1]
        return last

    found = [*function(first, read), *([first] if hands_on else [])]
    return [*(torch.cat(all_columns, 1) for all_columns in taps), *found]


def _same_draws(device: torch.device) -> AbstractContextManager[None]:
    """A context after which random numbers go on as if nothing had been drawn in it."""
    return fork_rng([device] if device.type == "cuda" else [])


def _fill(held: Sequence[torch.Tensor | None], given: Sequence[torch.Tensor | None]) -> None:
    for own, new in zip(held, given, strict=True):
        if own is not None and new is not None:
            own.copy_(new)


def _results(outputs: Outputs, runner: Runner, buffers: StaticBuffers, width: int) -> torch.Tensor:
    """The logits of a replay, [B, n, V], zeros for rows that don't run. The runner's taps hold the tapped outputs."""
    cache, running = runner.cache, len(runner.cache.running)
    logits, *states = (output[:running, :width] for output in outputs)
    for tap, hidden in zip(runner.prepared.taps.values(), states, strict=True):
        tap.hidden = hidden
    if cache.running == list(range(cache.rows)):
        return logits
    spread = logits.new_zeros(cache.rows, *logits.shape[1:])
    return spread.index_copy_(0, buffers.numbers[:running, 2], logits)


def _fingerprint(model: nn.Module, run: nn.Module) -> tuple[Any, ...]:
    """What a capture depends on: the addresses of the weights, and the modules that compute."""
    tensors = (*model.parameters(), *model.buffers())
    config = model.config.get_text_config(decoder=True) if isinstance(model, PreTrainedModel) else None
    return (
        tuple((tensor.data_ptr(), tensor.dtype) for tensor in tensors),
        tuple(id(module) for module in run.modules() if not module._modules),
        model.training,
        None if config is None else attention_of(config),
    )


def require_mode(fast: str, exact: str | None = None) -> str:
    """Return `fast`, a caller's argument. Raises ValueError unless it is one of `MODES`, and `exact` is possible with it."""
    if exact not in (None, "bits"):
        raise ValueError(f"exact: {exact!r} is not known; give 'bits' or None")
    if exact is not None and fast != "auto":
        raise ValueError(f"exact: {exact!r} needs fast='auto', and fast is {fast!r}")
    if fast not in MODES:
        raise ValueError(f"fast: {fast!r} is not known; give one of {', '.join(map(repr, MODES))}")
    return fast
