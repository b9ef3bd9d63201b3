"""The one way to run a model in a call: fused layers, packed products, captured forward passes, over its slots.

Knows how each of these is made; nothing of drafting. Target, draft models and heads are opened alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from ..engine.runner import CallSettings, Runnable, Runner
from .fused import fused
from .graphs import Graphs

__all__ = ["open_runner"]

_Runner = TypeVar("_Runner", bound=Runner)


def open_runner(
    model: nn.Module,
    run: Callable[[Runnable], _Runner],
    settings: CallSettings,
    graphs: Graphs,
    fuse: Callable[[Any], Runnable] | None = None,
) -> _Runner:
    """A model over its slots, in the fastest way that the settings of the call allow.

    Args:
        model: a causal LM or a head; it is not changed.
        run: makes the runner from the form in which the model is to be run.
        settings: of the call.
        graphs: the model's captured passes.
        fuse: makes that form, where the settings allow another than the model itself; `fused` by default.
    """
    runner = run((fuse or fused)(model) if settings.fuses else Runnable(model))
    runner.settings = settings
    graphs.serve(runner, model, settings)
    return runner
