"""The form in which a call runs a model: unchanged, or with fused layers and packed products.

The same for target, draft models and heads. Independent of drafting; `Graphs.serve` captures forward passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..engine.prepared import CallSettings, Runnable
from ..engine.trust import Trust
from .fused import fused


def form(model: Any, settings: CallSettings, fuse: Callable[[Any, Trust], Runnable] | None = None) -> Runnable:
    """The form in which a call runs a model. Building or checking it is one-time work of the call.

    fuse: creates the `Runnable` if the settings allow fused models, given whose code the model runs; `fused` by default.
    """
    began = time.perf_counter()
    trusted = settings.trust_in(model)
    if settings.fuses and trusted.is_own:
        made = (fuse or fused)(model, trusted)
    else:
        made = Runnable(model, is_own=trusted.is_own)
    if made.warning is not None:
        settings.note(made.warning)
    settings.spent_once += time.perf_counter() - began
    return made
