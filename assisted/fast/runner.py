"""The single entry point for running a model in a call, with fused layers, packed products and captured forward passes.

Target, draft models and heads are opened in the same way. Independent of drafting.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from ..engine.runner import CallSettings, Runnable, Runner
from ..engine.trust import Trust
from .fused import fused
from .graphs import Graphs

__all__ = ["form", "open_runner"]

_Runner = TypeVar("_Runner", bound=Runner)


def open_runner(
    model: nn.Module,
    run: Callable[[Runnable], _Runner],
    settings: CallSettings,
    graphs: Graphs,
    fuse: Callable[[Any, Trust], Runnable] | None = None,
) -> _Runner:
    """A model over its slots, in the fastest way that the settings of the call allow.

    Args:
        model: a causal LM or a head; it is not changed.
        run: creates the runner from the `Runnable`.
        settings: those of the call.
        graphs: the model's captured passes.
        fuse: creates the `Runnable` if the settings allow fused models, given whose code the model runs; `fused` by default.
    """
    runner = run(form(model, settings, fuse))
    runner.settings, runner.cache.outlives = settings, settings.outlives
    graphs.serve(runner, model, settings)
    return runner


def form(model: Any, settings: CallSettings, fuse: Callable[[Any, Trust], Runnable] | None = None) -> Runnable:
    """The form in which a call runs a model. Building or checking it is one-time work of the call."""
    began = time.perf_counter()
    trusted = settings.trust_in(model)
    if settings.fuses and trusted.is_own:
        made = (fuse or fused)(model, trusted)
    else:
        made = Runnable(model, is_own=trusted.is_own)
    settings.spent_once += time.perf_counter() - began
    return made
