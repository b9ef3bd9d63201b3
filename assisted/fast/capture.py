"""Captures a function over tensors at fixed addresses as a CUDA graph or as compiled code, and detects what prevents that.

Depends on torch only, not on caches or drafts.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..engine.libraries import (
    HOST_COPIES,
    HOST_READS,
    DispatchMode,
    attention_of,
    compile_graph,
    compiler_settings,
    end_pool,
    forget_workspaces,
)

Pass = Callable[[], list[torch.Tensor]]
"""A function that reads and writes tensors at fixed addresses, and returns others."""


class CudaReplay:
    """A CUDA graph of `run`, with its results.

    run: reads and returns tensors at fixed addresses on this device. pool: from `torch.cuda.graph_pool_handle`. tried: the
    host is known to read no values from the device in forward passes of this kind.

    Raises what `run` raises during capture, and `HostRead` if the host reads values from the device.
    """

    def __init__(self, run: Pass, device: torch.device, pool: Any, tried: bool = False):
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

    def __call__(self) -> list[torch.Tensor]:
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


_FROZEN: dict[str, Any] = {
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP,ATEN",
    "autotune_num_choices_displayed": 0,
    "max_autotune_report_choices_stats": False,
}


def compiled(run: Callable[..., list[torch.Tensor]], frozen: bool) -> Callable[..., list[torch.Tensor]]:
    """The same function, compiled at its first call inside `compiling`. Only sizes that cannot be dynamic are recompiled.

    frozen: for a CPU, treat weights as constants and choose the fastest matrix product for each by measurement.
    """

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        return _Code(compile_graph(graph, inputs, _FROZEN if frozen else None))

    made: Any = torch.compile(run, backend=backend, dynamic=True)
    return made


class _Code:
    """Compiled code that can record its inputs.

    Attributes:
        run: the code itself.
        meant: which of its outputs are results of the forward pass; None until recorded.
    """

    def __init__(self, run: Callable[..., Any]):
        self.run = run
        self.meant: list[int] | None = None

    def __call__(self, *inputs: Any) -> Any:
        watched = _WATCHED.get()
        if watched is None:
            return self.run(*inputs)
        if watched.only_look:
            watched.calls.append((self, inputs, ()))
            raise _Seen
        outputs = self.run(*inputs)
        watched.calls.append((self, inputs, outputs))
        return outputs


class _Watched(NamedTuple):
    """A forward pass being checked: the compiled codes that it calls, with their inputs and outputs.

    only_look: stop before running the first of them.
    """

    only_look: bool
    calls: list[tuple[_Code, tuple[Any, ...], Any]]


class _Seen(Exception):
    """Stops a forward pass once its inputs are recorded."""


_WATCHED: ContextVar[_Watched | None] = ContextVar("watched", default=None)


class CodeReplay:
    """Compiled code over tensors at fixed addresses.

    Compiled functions check all their guards at every call, which takes as long as several layers of a small model. Here the
    guards are checked only on request. Between checks, the code is called with the inputs of the last check.

    run: the compiled function. arguments: its arguments.

    Attributes:
        checked: whether the guards were checked and no change is known since.
        ground: the code and its other inputs at the last check. While these are the same, all its forward passes are valid.
    """

    def __init__(self, run: Callable[..., list[torch.Tensor]], arguments: Sequence[torch.Tensor | None]):
        self._run, self._arguments = run, arguments
        self.checked = False
        self.ground: tuple[Any, ...] = ()
        self._call: tuple[_Code, tuple[Any, ...]] | None = None

    def look(self) -> None:
        """Check the guards, without running the code if it has run before."""
        seen = _Watched(True, [])
        with _watching(seen), suppress(_Seen):
            self._run(*self._arguments)
        if seen.calls and seen.calls[0][0].meant is not None:
            self._rely_on(*seen.calls[0][:2])
        else:
            self.check()

    def check(self) -> list[torch.Tensor]:
        """Run a forward pass with its guards checked."""
        self.forget()
        seen = _Watched(False, [])
        with _watching(seen):
            results = self._run(*self._arguments)
        self.checked = True
        if len(seen.calls) == 1:  # otherwise part of it is not compiled
            ((code, inputs, outputs),) = seen.calls
            places = {id(output): place for place, output in enumerate(outputs)}
            if all(id(result) in places for result in results):
                code.meant = [places[id(result)] for result in results]
                self._rely_on(code, inputs)
        return results

    def _rely_on(self, code: _Code, inputs: tuple[Any, ...]) -> None:
        own = {id(argument) for argument in self._arguments}
        read = (tensor for tensor in inputs if not isinstance(tensor, int) and id(tensor) not in own)
        self.checked, self.ground, self._call = True, (code, *read), (code, inputs)

    def forget(self) -> None:
        """Require a check before the next run, because something may have changed."""
        self.checked, self.ground, self._call = False, (), None

    def __call__(self) -> list[torch.Tensor]:
        """Run the forward pass as it was last checked."""
        if self._call is None:
            return self._run(*self._arguments)
        code, inputs = self._call
        assert code.meant is not None
        outputs = code.run(*inputs)
        return [outputs[place] for place in code.meant]


@contextmanager
def _watching(watched: _Watched) -> Iterator[None]:
    token = _WATCHED.set(watched)
    try:
        yield
    finally:
        _WATCHED.reset(token)


@contextmanager
def compiling(frozen: bool) -> Iterator[None]:
    """A context in which calls may compile. frozen: as given to `compiled`."""
    with compiler_settings(frozen), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)  # caused by the compiler itself
        yield


def fingerprint(model: nn.Module, run: nn.Module) -> tuple[Any, ...]:
    """What a capture depends on: the addresses of the weights, and the modules that compute."""
    tensors = (*model.parameters(), *model.buffers())
    config = model.config.get_text_config(decoder=True) if isinstance(model, PreTrainedModel) else None
    return (
        tuple((tensor.data_ptr(), tensor.dtype) for tensor in tensors),
        tuple(id(module) for module in run.modules() if not module._modules),
        model.training,
        None if config is None else attention_of(config),
    )
