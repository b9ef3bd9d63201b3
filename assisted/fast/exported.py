"""The program that compiles a layer: `python -m assisted.fast.exported FORM FILE PARENT [patient]`, started by `regional`.

FORM: a `regional.Form` as JSON. FILE: where the code goes. PARENT: the process to end with. patient: with low priority.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import torch
from torch import nn

from ..engine.libraries import compile_exported
from .layers import FusedLayer
from .regional import BLOCK, Form

_OPTIONS = {"max_autotune": True, "max_autotune_gemm_backends": "CPP"}  # one way for each product: nothing is timed


class _Blocked:
    """A `Product` from a blocked weight, an argument of the code."""

    native = None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, outputs: int):
        self.weight, self.bias, self.outputs = weight, bias, outputs

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        rows, width, size = inputs.shape
        columns = inputs.reshape(1, rows * width, size).expand(len(self.weight), -1, -1)
        made = torch.bmm(columns, self.weight).transpose(0, 1).reshape(rows, width, -1)[:, :, : self.outputs]
        return made + self.bias if len(self.bias) else made

    raw = __call__


class _Slots:
    """The slots of a layer, as `FusedLayer` uses a cache."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor, top: int):
        self.stores, self.places, self.top = (keys, values), places, top

    def update(self, keys: torch.Tensor, values: torch.Tensor, index: int) -> list[torch.Tensor]:
        rows = torch.arange(len(self.places))[:, None]
        for store, states in zip(self.stores, (keys, values), strict=True):
            store[rows, :, self.places] = states.transpose(1, 2)
        return [store[:, :, : self.top] for store in self.stores]


class Code(nn.Module):
    """A layer as a function of tensors."""

    def __init__(self, form: Form):
        super().__init__()
        self.form = form

    def forward(
        self, hidden: torch.Tensor, mask: torch.Tensor, cos: Any, sin: Any, places: torch.Tensor, *rest: Any
    ) -> Any:
        keys, values, *weights = rest
        sizes = [outputs for outputs, _ in self.form.products]
        products = [_Blocked(*one) for one in zip(weights[:4], weights[4:8], sizes, strict=True)]
        layer = FusedLayer.of_form(self.form, products, weights[8:])
        slots = _Slots(keys, values, places, mask.shape[-1])
        return layer.run(hidden, mask, (cos, sin), slots)


def arguments(form: Form, width: int = 3, top: int = 40, capacity: int = 64) -> tuple[torch.Tensor, ...]:
    """Some arguments of the code, zeros."""
    beside = form.query_heads // form.key_heads
    angles, slots = (1, width, 1, form.head_size), (1, form.key_heads, capacity, form.head_size)
    shapes = [(1, width, form.hidden), (1, 1, beside * width, top), angles, angles]
    after = [slots, slots, *((-(-out // BLOCK), into, BLOCK) for out, into in form.products)]
    after += [(out if has else 0,) for (out, _), has in zip(form.products, form.biases, strict=True)]
    after += [(form.hidden,), (form.hidden,), *[(form.head_size,)] * (2 * form.norms)]
    return (*map(torch.zeros, shapes), torch.arange(width)[None], *map(torch.zeros, after))


def compile_layer(form: Form, file: str) -> None:
    """Write the code of a form to a file."""
    auto = torch.export.Dim.AUTO
    given = arguments(form)
    moving: list[Any] = [{1: auto}, {2: auto, 3: auto}, *[{1: auto}] * 3, *[{2: auto}] * 2]
    dynamic = {
        **dict(zip(("hidden", "mask", "cos", "sin", "places"), moving, strict=False)),
        "rest": (*moving[5:], *[None] * (len(given) - len(moving))),
    }
    with torch.no_grad():
        program = torch.export.export(Code(form), given, dynamic_shapes=dynamic, strict=False)
        compile_exported(program, file, {**_OPTIONS, "cpp.threads": form.threads})


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, 9) if hasattr(os, "killpg") else os.kill(os.getpid(), 9)


def main() -> None:
    form, file, parent, *patient = sys.argv[1:]
    if patient and hasattr(os, "nice"):
        os.nice(19)
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    fields = json.loads(form)
    compile_layer(Form(**{**fields, "biases": tuple(fields["biases"])}), file)


if __name__ == "__main__":
    main()
