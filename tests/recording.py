"""A CUDA graph without CUDA: the operations of a function are written down once and then done again, on the same tensors.

What Python decided while they were written down is decided for good, as in a graph; reading a number of a tensor is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from assisted.engine.prepared import PreparedModule
from assisted.fast import fused, graphs
from assisted.fast.capture import Captured, CudaGraphs, HostRead, NoHostReads
from assisted.methods.eagle import draft as eagle
from assisted.methods.shared import model_drafter


def record_captures(patch: Any) -> None:
    """Capture on a CPU, too, and replay what was recorded. patch: pytest's MonkeyPatch, which ends it."""
    patch.setattr(CudaGraphs, "record", lambda self, run, device, tried: Recording(run))
    patch.setattr(graphs, "captures_for", lambda mode, device: None if mode == "eager" else CudaGraphs)
    # on a CPU, fused models look positions up, which no capture may
    for module in (fused, model_drafter):
        patch.setattr(module, "fused", lambda model, trusted, **read: PreparedModule(model))
    patch.setattr(eagle, "fused_head", PreparedModule)


class Recording:
    """What `assisted.capture.CudaReplay` is, on a CPU."""

    def __init__(self, run: Captured):
        with NoHostReads(), _NoLists():
            run()
        self.steps: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        with _Recorder(self.steps), NoHostReads():
            self.outputs = run()
        for output in self.outputs:  # nothing of the capture itself may be taken for a result
            output.fill_(float("nan") if output.is_floating_point() else -1)

    def __call__(self) -> list[torch.Tensor]:
        for func, args, kwargs, written in self.steps:
            results = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            for place, result in zip(written, results, strict=True) if written else ():
                place.copy_(result)
        return self.outputs


class _NoLists(TorchFunctionMode):
    """On a CPU these read numbers without an operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("tolist", "numpy"):
            raise HostRead(f"{func.__name__} waits for the device")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self, steps: list[Any]):
        super().__init__()
        self.steps = steps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        aliases = any(t.untyped_storage().data_ptr() in inputs for t in made if t.numel())
        if func._schema.is_mutable:
            self.steps.append((func, args, kwargs, []))
        elif not aliases:
            self.steps.append((func, args, kwargs, made))
        return result  # a view needs nothing: what it looks at stays where it is
