"""Recurrent layers over several columns at once, one column after the other: exact for every kind of layer, since each column
runs as it does in autoregressive decoding. Products with weights are computed for all columns together.

Runs transformers' own layers over copies of their states, of which the cache keeps one for each column. `delta.py` needs no
copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .delta import DeltaMixer, delta_mixer
from .masks import Columns
from .parts import with_children


@dataclass(frozen=True)
class Steps:
    """A layer's states after each column of the last forward pass.

    after: [n, R, ...] for each of the layer's states.
    """

    after: list[torch.Tensor]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of it."""
        return self.after

    def states_after(
        self, last: torch.Tensor | int, states: list[torch.Tensor], columns: Columns
    ) -> list[torch.Tensor]:
        """The states [R, ...] after one column of each row. last: [R] int64, or a column of every row."""
        if isinstance(last, int):
            return [state[last] for state in self.after]
        rows = torch.arange(len(last), device=last.device)
        return [state[last, rows] for state in self.after]


class StepMixer(nn.Module):
    """Runs a layer of transformers' over several columns after its states. Prompts run as the layer itself does.

    Args:
        own: the layer, not changed.
    """

    def __init__(self, own: Any):
        super().__init__()
        self.own = own
        self.layer_idx: int = own.layer_idx
        self.ahead = self.behind = None
        self.inner = own
        if isinstance(getattr(own, "in_proj", None), nn.Linear) and isinstance(
            getattr(own, "out_proj", None), nn.Linear
        ):
            self.ahead, self.behind = _Ahead(own.in_proj), _Behind(own.out_proj)
            self.inner = with_children(own, {("in_proj",): self.ahead, ("out_proj",): self.behind})

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        cache: Any = next((value for value in kwargs.values() if hasattr(value, "columns")), None)
        if cache is None or cache.columns is None:
            mixed: torch.Tensor = self.own(hidden_states, *args, **kwargs)
            return mixed
        columns: Columns = cache.columns
        kwargs = {name: value for name, value in kwargs.items() if name != "attention_mask"}  # padding is behind
        rows = len(hidden_states)
        before = [state[:rows] for state in cache.states_of(self.layer_idx)]
        if self.ahead is not None and self.behind is not None:
            self.ahead.read(hidden_states)
            self.behind.begin()
        after: list[list[torch.Tensor]] = []
        made = []
        with cache.lent(self.layer_idx, before) as current:
            for column in range(columns.width):
                if column and columns.parents is not None:
                    _go_on(current(), after, columns.parents[:, column - 1])
                made.append(self.inner(hidden_states[:, column : column + 1], *args, **kwargs))
                after.append([state.clone() for state in current()])
        cache.note(self.layer_idx, Steps([torch.stack(states) for states in zip(*after, strict=True)]))
        return torch.cat(made, 1) if self.behind is None else self.behind.made()


def _go_on(states: list[torch.Tensor], after: list[list[torch.Tensor]], parents: torch.Tensor) -> None:
    """Let a column go on from the states after its parent. after: by column. parents: [R] int64."""
    rows = torch.arange(len(parents), device=parents.device)
    for number, state in enumerate(states):
        state.copy_(torch.stack([of_column[number] for of_column in after])[parents, rows])


class _Product(nn.Module):
    """A product that runs for all columns together."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear
        self.weight, self.bias = linear.weight, linear.bias  # code looks at their devices and dtypes


class _Ahead(_Product):
    """Hands out the product of all columns, one column after the other."""

    def read(self, hidden_states: torch.Tensor) -> None:
        self._made, self._next = self.linear(hidden_states), 0

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self._next += 1
        made: torch.Tensor = self._made[:, self._next - 1 : self._next]
        return made


class _Behind(_Product):
    """Collects what the product is applied to, until all columns are there."""

    def begin(self) -> None:
        """Forget what a forward pass that failed has left."""
        self._given: list[torch.Tensor] = []

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self._given.append(hidden_states)
        return hidden_states

    def made(self) -> torch.Tensor:
        given, self._given = self._given, []
        made: torch.Tensor = self.linear(torch.cat(given, 1))
        return made


def by_position(model: nn.Module) -> dict[tuple[str, ...], nn.Module]:
    """The modules that run a model's recurrent layers over columns, by path. Recurrent layers are recognized by their
    convolution and by an index into the cache."""
    found: dict[tuple[str, ...], nn.Module] = {}
    inside: tuple[str, ...] = ()  # of modules that run so already
    for name, module in model.named_modules():
        if isinstance(module, (DeltaMixer, StepMixer)):
            inside = (*inside, f"{name}.")
            found[tuple(name.split("."))] = module
        elif not name.startswith(inside) and hasattr(module, "layer_idx") and _convolves(module):
            found[tuple(name.split("."))] = delta_mixer(module) or StepMixer(module)
    return found


def _convolves(module: nn.Module) -> bool:
    return any(isinstance(child, nn.Conv1d) for child in module.children())
