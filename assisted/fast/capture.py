"""How a pass is captured, and what stands in the way: a CUDA graph, or compiled code, of a function over tensors that stay
where they are.

Knows torch; nothing of slots or drafts.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch._inductor.config
import torch.fx.experimental._config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

__all__ = [
    "CodeReplay",
    "CudaReplay",
    "HostRead",
    "NoHostReads",
    "Pass",
    "compiled",
    "compiling",
    "distance",
    "fingerprint",
    "wait",
]

Pass = Callable[[], list[torch.Tensor]]
"""Something that reads and writes tensors at fixed addresses, and returns others."""

_READS = {
    "_local_scalar_dense",
    "nonzero",
    "nonzero_numpy",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "is_nonzero",
    "item",
    "equal",
}
_MOVES = {"_to_copy", "copy_", "to"}


class CudaReplay:
    """A CUDA graph of what `run` does, with its results.

    run: tensors in, tensors out, all of them at fixed addresses of this device. pool: of `torch.cuda.graph_pool_handle`.
    tried: passes of its kind are known to read nothing of the device.

    Raises whatever `run` raises while it is captured; `HostRead` where it looks at numbers of the device.
    """

    def __init__(self, run: Pass, device: torch.device, pool: Any, tried: bool = False):
        if device in _BROKEN:
            raise RuntimeError("a capture broke off in this process before")
        stream, here = _stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            with nullcontext() if tried else NoHostReads():
                run()  # what is made once (workspaces, plans) is made before the capture
            torch.cuda.synchronize(device)
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
        here.wait_stream(stream)

    def __call__(self) -> list[torch.Tensor]:
        self.graph.replay()
        return self.outputs


@functools.cache
def _stream(device: torch.device) -> Any:
    """One stream for all captures of a device: each has workspaces of its own."""
    return torch.cuda.Stream(device)


_BROKEN: set[torch.device] = set()  # devices on which nothing is captured any more


def _tidy_up(device: torch.device, pool: Any) -> None:
    """After a capture that something ended before its time torch takes its generator for captured and its allocator the pool
    for in use. Both are put right, and nothing is captured on this device again.
    """
    _BROKEN.add(device)
    with suppress(Exception):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    with suppress(Exception):
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())  # the same numbers, in a state that no graph knows


class HostRead(RuntimeError):
    """A forward looked at numbers of the device, so what it does may depend on them."""


def _kind(tensor: Any) -> str | None:
    return tensor.device.type if isinstance(tensor, torch.Tensor) else None


class NoHostReads(TorchDispatchMode):
    """In here it is an error to read numbers of the device, which a capture could only do once and for all."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        masked = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in _READS or masked:
            raise HostRead(f"{name} waits for the device")
        result = func(*args, **(kwargs or {}))
        if name in _MOVES and _kind(args[0]) != _kind(args[1] if name == "copy_" else result):
            raise HostRead(f"{name} moves numbers between host and device")
        return result


_FROZEN: dict[str, Any] = {
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP,ATEN",
    "autotune_num_choices_displayed": 0,
    "max_autotune_report_choices_stats": False,
}


def compiled(run: Callable[..., list[torch.Tensor]], frozen: bool) -> Callable[..., list[torch.Tensor]]:
    """The same, compiled when it is first called within `compiling`, and again only for sizes that cannot be left open.

    frozen: take weights for constants, and measure which product is the fastest for each. For a CPU.
    """

    def compile_graph(graph: Any, inputs: Any) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx  # takes a second to import

        code: Any = compile_fx(graph, inputs, config_patches=dict(_FROZEN) if frozen else None)
        return _Code(code)

    made: Any = torch.compile(run, backend=compile_graph, dynamic=True)
    return made


class _Code:
    """Compiled code that tells what it is called with.

    Attributes:
        run: the code itself.
        meant: which of its outputs are results of the pass; None before that was seen.
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
    """The pass that is being checked: the codes that it consists of, what they read and what they returned.

    only_look: stop before the first of them is run.
    """

    only_look: bool
    calls: list[tuple[_Code, tuple[Any, ...], Any]]


class _Seen(Exception):
    """What was to be seen has been seen."""


_WATCHED: ContextVar[_Watched | None] = ContextVar("watched", default=None)


class CodeReplay:
    """Compiled code over tensors at fixed addresses.

    A compiler looks at everything that its code depends on whenever it is called, which takes as long as some layers of a small
    model. Here it does when it is told to; what its code read then, it is called with until then.

    run: what was compiled. arguments: the tensors that it is applied to.

    Attributes:
        checked: whether the compiler has seen to it, and nothing is known to have changed since.
        ground: the code and what else it read when it last was checked. While these are the same, so is every pass of it.
    """

    def __init__(self, run: Callable[..., list[torch.Tensor]], arguments: Sequence[torch.Tensor | None]):
        self._run, self._arguments = run, arguments
        self.checked = False
        self.ground: tuple[Any, ...] = ()
        self._call: tuple[_Code, tuple[Any, ...]] | None = None

    def look(self) -> None:
        """Let the compiler see to it, without running it where its code has been run before."""
        seen = _Watched(True, [])
        with _watching(seen), suppress(_Seen):
            self._run(*self._arguments)
        if seen.calls and seen.calls[0][0].meant is not None:
            self._rely_on(*seen.calls[0][:2])
        else:
            self.check()

    def check(self) -> list[torch.Tensor]:
        """A pass that the compiler sees to."""
        self.forget()
        seen = _Watched(False, [])
        with _watching(seen):
            results = self._run(*self._arguments)
        self.checked = True
        if len(seen.calls) == 1:  # else some of it is no compiled code
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
        """Something may have changed: let it be checked before it is run again."""
        self.checked, self.ground, self._call = False, (), None

    def __call__(self) -> list[torch.Tensor]:
        """The pass as it was when it last was checked."""
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
    """Meanwhile calls may turn out to need code that is not there. frozen: as `compiled` was told."""
    with (
        # every model is compiled on its own, which counts as compiling the same code again
        torch._dynamo.config.patch(recompile_limit=10_000, accumulated_recompile_limit=10_000),
        # numbers of a model are part of its code
        torch._dynamo.config.patch(specialize_float=True, specialize_int=True),
        torch._inductor.config.patch(freezing=frozen),  # asked for before the options are read
        # sizes that are equal now need not stay so
        torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)  # of the compiler's own making
        yield


def fingerprint(model: nn.Module, run: nn.Module) -> tuple[Any, ...]:
    """What a capture depends on: where the weights lie, and which modules compute."""
    tensors = (
        tensor
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    )
    leaves = (id(module) for module in run.modules() if not module._modules)
    config = model.config.get_text_config(decoder=True) if isinstance(model, PreTrainedModel) else None
    return (
        tuple((tensor.data_ptr(), tensor.dtype) for tensor in tensors),
        tuple(leaves),
        model.training,
        None if config is None else config._attn_implementation,
    )


def wait(device: torch.device) -> None:
    """Until all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def distance(logits: torch.Tensor, expected: torch.Tensor, rows: list[int]) -> float:
    """How far apart logits are, against their spread; not a number where either isn't one."""
    one, two = logits[rows].float(), expected[rows].float()
    return float((one - two).square().mean().sqrt() / two.std())
