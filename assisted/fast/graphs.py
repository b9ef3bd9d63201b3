"""Captured forward passes. Kernel launches are recorded once per input shape, over tensors at fixed addresses, and then
replayed in one call.

The eager forward pass defines the correct result and runs where a pass cannot be captured. captures.py implements the two
ways to capture.
"""

from __future__ import annotations

import threading
import time
import weakref
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn

from ..drafts import Draft
from ..engine.agreement import apart, rounding_of
from ..engine.cache import Paths, SlotCache
from ..engine.hooks import obstacle
from ..engine.host import wait
from ..engine.passes import Passes, Runner
from ..engine.prepared import CallSettings
from . import capture
from .captures import Captures, CompiledCode, CudaGraphs, results
from .products import may_copy
from .sources import Modules, Source, Weights

MODES = ("auto", "eager", "compile")

_Runner = TypeVar("_Runner", bound=Runner)


def captures_for(mode: str, device: torch.device) -> type[Captures] | None:
    """How forward passes are captured on this device; None if they run eagerly."""
    if device.type == "cuda" and mode != "eager":
        return CudaGraphs
    return CompiledCode if mode == "compile" else None


class Graphs(Passes):
    """The captured forward passes of one model, kept between calls.

    The second forward pass of a model, or of a part of it, is captured and compared with the eager one. After that,
    `Captures.wants_eager` decides which replays are compared. If a capture fails or differs, the model runs eagerly from then
    on, for the given `reason`. When the model changes, it is captured again.

    Only one call at a time replays; concurrent calls in other threads run eagerly.

    Attributes:
        reason: why the model runs eagerly until it changes; None if nothing prevents replaying.
        obstacle: the same for the last call only: hooks, an adapter, parts on several devices.
        replays: how many passes were replayed.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.obstacle: str | None = None
        self.replays = 0
        self._lock = threading.Lock()
        self._settings: CallSettings | None = None  # of the call that replays
        self._name = ""  # of the model, for its report
        self._served: weakref.ref[SlotCache] | None = None  # the slots of that call
        self._made_from: tuple[Any, Source] | None = None
        self._captures: Captures | None = None

    def __reduce__(self) -> Any:
        return Graphs, ()  # a copy of a model captures its own passes

    @property
    def captured(self) -> int:
        """The number of captured passes."""
        return 0 if self._captures is None else len(self._captures.passes)

    def release(self, reason: str) -> None:
        if self._captures is not None:
            self._captures.clear()
        self.reason = reason

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
        self._name = type(model).__name__
        trusted = settings.trust_in(model)
        self.obstacle = trusted.forward or trusted.between or obstacle(model, runner.device)
        if self.obstacle is not None:
            if not trusted.forward:  # which the report gives as the reason for everything that it costs
                self._note(self.obstacle)
            return runner
        made_for = (settings.mode, kind, capture.fingerprint(model, runner.prepared.module))
        inner = Modules.of([module for module in model.modules() if module is not model], trusted.code)
        constants = kind.takes_constants and may_copy(model.parameters())
        weights, copied = chain(model.parameters(), model.buffers()), set(map(id, runner.prepared.copied))
        compared = (weight for weight in weights if id(weight) not in copied) if constants else ()
        source = Source(inner, Weights.of(compared, constants), Weights((), None))
        known = self._made_from
        if self._captures is None or known is None or known[0] != made_for or not known[1].same(source):
            self._captures = kind(settings.mode == "compile", constants)
            self._made_from, self.reason = (made_for, source), None
        elif self.reason is not None:
            self._note(self.reason)
        self._captures.begin_call()
        self.runs = kind.runs
        runner.passes = self
        if self.reason is None:
            runner.cache.lender = self._captures.lend
        return runner

    def run(self, runner: Runner, ids: torch.Tensor, draft: Draft | None, used: list[int] | None) -> torch.Tensor:
        logits = self._replay(runner, ids, draft) if self._serves(runner.cache) else None
        return super().run(runner, ids, draft, used) if logits is None else logits

    def _replay(self, runner: Runner, ids: torch.Tensor, draft: Draft | None) -> torch.Tensor | None:
        """The verified output of a captured pass; None if this pass must run eagerly."""
        captures, cache, width = self._captures, runner.cache, ids.shape[1]
        assert captures is not None
        shape = captures.shape(runner, width, draft is not None and draft.parents is not None)
        if shape is None or not captures.is_expected(shape):
            return None
        started = time.perf_counter()
        inject = runner.prepared.inject
        states = None if inject is None else inject.hidden
        try:
            buffers = captures.hold(cache, shape.top)
            known, by_eager = shape in captures.passes, captures.wants_eager(shape)
            expected = runner.eager(ids, draft) if by_eager else None
            buffers.feed(cache, shape.rows, shape.columns, ids, draft)
            if states is not None:
                buffers.feed_states(shape.kind, cache, shape.rows, states)
            if not known:
                first = captures.add(shape, runner)
                expected = (
                    results(first, runner, buffers, width) if expected is None and first is not None else expected
                )
                self._spend(time.perf_counter() - started)
                started = time.perf_counter()
            captures.passes.move_to_end(shape)
            if expected is None:
                return self._counted(results(captures.replay(shape, runner), runner, buffers, width))
            wait(buffers.device)
            replayed = time.perf_counter()
            logits = results(captures.replay(shape, runner), runner, buffers, width)
            wait(buffers.device)
        except Exception as error:  # third-party forwards may not support being captured
            self._spend(time.perf_counter() - started)
            self._give_up(f"{type(error).__name__}: {error}")
            return None
        finally:
            if inject is not None and states is not None:  # a capture replaces them
                inject.hidden = states
        done = time.perf_counter()
        difference = apart(logits[cache.running], expected[cache.running])
        self._spend(time.perf_counter() - started - (done - replayed))
        rounded = torch.bfloat16 if runner.prepared.low_bit_bytes else logits.dtype
        if difference <= (0 if runner.prepared.keeps_bits else rounding_of(rounded)):
            captures.trust(shape, by_eager)
            return self._counted(logits)
        if known:  # the model has changed since the capture
            captures.clear()
        else:
            self._give_up(f"replay and forward pass differ by {difference:.2g} standard deviations of the logits")
        return None  # the eager pass overwrites what the replay has written

    def gather(self, runner: Runner, path: Paths) -> bool:
        if not self._serves(runner.cache):
            return False
        assert self._captures is not None
        try:
            moved, seconds = self._captures.gather(runner.cache, path)
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
            return False
        self._spend(seconds)
        return moved

    def _counted(self, logits: torch.Tensor) -> torch.Tensor:
        assert self._captures is not None
        self.replays += 1
        self._captures.replays += 1
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
        self.reason = reason
        if self._captures is not None:
            self._captures.clear()


def require_mode(fast: str, exact: str | None = None) -> str:
    """Return `fast`, a caller's argument. Raises ValueError unless it is one of `MODES`, and `exact` is possible with it."""
    if exact not in (None, "bits"):
        raise ValueError(f"exact: {exact!r} is not known; give 'bits' or None")
    if exact is not None and fast != "auto":
        raise ValueError(f"exact: {exact!r} needs fast='auto', and fast is {fast!r}")
    if fast not in MODES:
        raise ValueError(f"fast: {fast!r} is not known; give one of {', '.join(map(repr, MODES))}")
    return fast
