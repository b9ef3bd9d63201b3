"""Captured forward passes: kernel launches are recorded once per input shape, over tensors that stay where they are, and are
then replayed in one call.

Knows runners and slots. The eager forward pass defines the result; it also runs wherever a pass cannot be captured. captures.py
has the two ways to capture.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Any

import torch
from torch import nn

from ..drafts import Draft
from ..engine.cache import Paths, SlotCache
from ..engine.hooks import obstacle
from ..engine.runner import CallSettings, Passes, Runner
from . import capture
from .captures import Captures, CompiledCode, CudaGraphs, results
from .products import may_copy
from .sources import Modules, Weights

__all__ = ["MODES", "Graphs", "require_mode"]

MODES = ("auto", "eager", "compile")
_TOLERANCE = {torch.float32: 3e-3, torch.float64: 3e-3}  # of logits, relative to their spread
_HALF_TOLERANCE = 0.1

_log = logging.getLogger(__name__)


def captures_for(mode: str, device: torch.device) -> type[Captures] | None:
    """How passes are captured on this device; None where they run eagerly."""
    if device.type == "cuda" and mode != "eager":
        return CudaGraphs
    return CompiledCode if mode == "compile" else None


class Graphs(Passes):
    """The captured forward passes of one model, kept from call to call.

    The second pass of a model, or of a part of it, is captured and compared with the eager pass; after that its shapes are
    trusted as `Captures.wants_eager` says. If a capture fails or differs, the model runs eagerly from then on, and `reason`
    says why. Captures are made anew whenever the model has changed.

    One call at a time replays; a call in another thread runs eagerly meanwhile.

    Attributes:
        reason: why the model runs eagerly while it stays as it is; None if nothing prevents replaying.
        obstacle: the same, for the last call alone: hooks, an adapter, parts on several devices.
        replays: how many passes were replayed.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.obstacle: str | None = None
        self.replays = 0
        self._lock = threading.Lock()
        self._settings: CallSettings | None = None  # of the call that replays
        self._served: weakref.ref[SlotCache] | None = None  # the slots of that call
        self._made_for: Any = None
        self._inner: Modules | None = None
        self._constants: Weights | None = None  # what compiled code takes for constants
        self._captures: Captures | None = None

    def __reduce__(self) -> Any:
        return Graphs, ()  # a copy of a model captures its own passes

    @property
    def captured(self) -> int:
        """How many passes are captured."""
        return 0 if self._captures is None else len(self._captures.passes)

    def serve(self, runner: Runner, model: nn.Module, settings: CallSettings) -> None:
        """Replay the passes of this runner, and of those that share its slots, where that is possible.

        runner: of one call, its prompt not yet read. model: the model itself, whatever form of it the runner runs.
        """
        kind = captures_for(settings.mode, runner.device)
        if kind is None or not runner.is_capturable:
            return
        with self._lock:
            if self._settings is settings or (self._settings is not None and not self._settings.over):
                return
            self._settings, self._served = settings, weakref.ref(runner.cache)
        self.obstacle = obstacle(model, runner.device)
        if self.obstacle is not None:
            return
        made_for = (settings.mode, kind, capture.fingerprint(model, runner.runnable.module))
        inner = Modules.of([module for module in model.modules() if module is not model], (type(model),))
        constants = None
        if kind.takes_constants and may_copy(model.parameters()):
            copied = set(map(id, runner.runnable.copied))
            tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in copied]
            constants = Weights.of(tensors, True)
        same = made_for == self._made_for and self._inner is not None and self._inner.same(inner)
        if self._captures is None or not same or not _same(constants, self._constants):
            self._captures = kind(settings.mode == "compile", constants is not None)
            self._made_for, self._inner, self._constants, self.reason = made_for, inner, constants, None
        self._captures.begin_call()
        runner.passes = self

    def run(self, runner: Runner, ids: torch.Tensor, draft: Draft | None, used: list[int] | None) -> torch.Tensor:
        logits = self._replay(runner, ids, draft) if self._serves(runner.cache) else None
        return super().run(runner, ids, draft, used) if logits is None else logits

    def _replay(self, runner: Runner, ids: torch.Tensor, draft: Draft | None) -> torch.Tensor | None:
        """The verified output of a captured pass; None where this pass has to run eagerly."""
        captures, cache, width = self._captures, runner.cache, ids.shape[1]
        assert captures is not None
        shape = captures.shape(runner, width, draft is not None and draft.parents is not None)
        if shape is None or not captures.is_expected(shape):
            return None
        started = time.perf_counter()
        states = None if runner.inject is None else runner.inject.hidden
        try:
            buffers = captures.hold(cache, shape.top)
            trusted, known = captures.is_trusted(shape), shape in captures.passes
            by_eager = captures.wants_eager(trusted, known)
            expected = runner.eager(ids, draft) if by_eager else None
            buffers.feed(cache, shape.rows, shape.columns, ids, draft)
            if states is not None:
                buffers.feed_states(runner.kind, cache, shape.rows, states)
            if not known:
                first = captures.add(shape, runner, trusted)
                expected = (
                    results(first, runner, buffers, width) if expected is None and first is not None else expected
                )
                self._spend(time.perf_counter() - started)
                started = time.perf_counter()
            captures.passes.move_to_end(shape)
            if expected is None:
                return self._counted(results(captures.replay(shape, runner), runner, buffers, width))
            capture.wait(buffers.device)
            replayed = time.perf_counter()
            logits = results(captures.replay(shape, runner), runner, buffers, width)
            capture.wait(buffers.device)
        except Exception as error:  # a capture runs somebody's forward in a way that it may not be made for
            self._spend(time.perf_counter() - started)
            self._give_up(f"{type(error).__name__}: {error}")
            return None
        finally:
            if runner.inject is not None and states is not None:  # a capture goes on from others
                runner.inject.hidden = states
        done = time.perf_counter()
        difference = capture.distance(logits, expected, cache.running)
        self._spend(time.perf_counter() - started - (done - replayed))
        if difference <= _TOLERANCE.get(logits.dtype, _HALF_TOLERANCE):
            captures.trust(shape, by_eager)
            return self._counted(logits)
        if known:  # something about the model has changed since the capture
            captures.clear()
        else:
            self._give_up(f"a replay differs from the same pass by {difference:.2g} of the spread of its logits")
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
        """Count seconds of the call that later passes will not need."""
        if self._settings is not None:
            self._settings.spent_once += seconds

    def _serves(self, cache: SlotCache) -> bool:
        return self.reason is None and self._served is not None and cache is self._served()

    def _give_up(self, reason: str) -> None:
        _log.debug("forward passes run eagerly from now on: %s", reason)
        self.reason = reason
        if self._captures is not None:
            self._captures.clear()


def _same(one: Weights | None, other: Weights | None) -> bool:
    return one is other or (one is not None and other is not None and one.same(other))


def require_mode(fast: str) -> str:
    """`fast`, as a caller wrote it. Raises ValueError for anything but `MODES`."""
    if fast not in MODES:
        raise ValueError(f"fast: {fast!r} is not known; give one of {', '.join(map(repr, MODES))}")
    return fast
