"""Runs a model without some of its attention and MLP sublayers.

Assumes the common structure of decoder layers and checks it. A layer whose sublayers can't be told apart is skipped as a
whole or not at all. The model is not changed. The drafter chooses which sublayers to skip.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .parts import Form, Layers, Pass, Recorder, dressed, hidden_of, try_out, with_children
from .traits import experts_of

Path = tuple[str, ...]
UNCHANGED = 0.05  # relative to the norm of the hidden states: how much a layer without its sublayers may change them


@dataclass(frozen=True)
class Sublayer:
    """A part of a model that can be skipped."""

    layer: int  # index of its layer
    # its modules, by their path in the layer, and what each returns. Empty for the whole layer.
    modules: tuple[tuple[Path, Form], ...]
    share: float  # its share of the weights that a forward pass over one token reads
    # what its layer raised without attention and MLP, so that it can be skipped as a whole only; None otherwise
    error: str | None = None


def without(
    model: PreTrainedModel, layers: Layers, sublayers: Collection[Sublayer], skipped: Collection[int]
) -> PreTrainedModel:
    """The model without the sublayers of these indices. A layer without any sublayers left is not run at all."""
    own = layers.of(model)
    for place, layer in enumerate(own):
        of_layer = [(index, sublayer) for index, sublayer in enumerate(sublayers) if sublayer.layer == place]
        gone = [sublayer for index, sublayer in of_layer if index in skipped]
        if gone and len(gone) == len(of_layer):
            own[place] = Pass(layers.forms[place], own[place])
        elif gone:
            own[place] = _without(layer, [entry for sublayer in gone for entry in sublayer.modules])
    return layers.replaced(model, own)


class Skippable(nn.Module):
    """A layer that can leave out its sublayers by itself, so it need not have them as modules."""

    def without(self, paths: Collection[Path]) -> nn.Module:
        """The same layer as another object, without the sublayers at these paths of the original layer."""
        raise NotImplementedError


class Nothing(nn.Module):
    """Replaces a skipped sublayer so that the residual stream does not change.

    It returns zeros of the sublayer's width. If the sublayer adds the residual itself, it returns the residual.

    Args:
        sublayer: the sublayer replaced; no reference is kept.
        form: what it returns.
    """

    def __init__(self, sublayer: nn.Module, form: Form):
        super().__init__()
        self.form = form
        self.width = sublayer.out_features if isinstance(sublayer, nn.Linear) else None
        names = list(inspect.signature(sublayer.forward).parameters)
        self.residual = names.index("residual") if "residual" in names else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.residual is not None:
            return dressed(kwargs["residual"] if "residual" in kwargs else args[self.residual], self.form)
        hidden = hidden_of(args, kwargs)
        zeros = torch.zeros_like(hidden) if self.width is None else hidden.new_zeros(*hidden.shape[:-1], self.width)
        return dressed(zeros, self.form)


def _without(layer: nn.Module, modules: Collection[tuple[Path, Form]]) -> nn.Module:
    if isinstance(layer, Skippable):
        return layer.without([path for path, _ in modules])
    return with_children(layer, {path: Nothing(layer.get_submodule(".".join(path)), form) for path, form in modules})


@torch.no_grad()
def find_sublayers(model: PreTrainedModel, layers: Layers) -> list[Sublayer]:
    """What can be skipped, in order: attention and MLP of each layer, or the layer if they can't be told apart."""
    own = layers.of(model)
    guesses = [(_attention(layer), _mlp(layer)) for layer in own]
    forms = _forms(model, layers, guesses)
    pairs = [
        [tuple((path, forms[place, path]) for path in paths if (place, path) in forms) for paths in guess]
        for place, guess in enumerate(guesses)
    ]
    trials = _tried_without(model, layers, [[entry for modules in pair for entry in modules] for pair in pairs])
    experts = experts_of(model.config.get_text_config(decoder=True))
    active = experts[1] / experts[0] if experts else 1.0
    head = model.get_output_embeddings()
    total = sum(_weights(layer, active) for layer in own) + (0 if head is None else _weights(head, active))
    found = []
    for place, (layer, pair, trial) in enumerate(zip(own, pairs, trials, strict=True)):
        if all(pair) and trial.moved <= UNCHANGED:
            for modules in pair:
                weights = sum(_weights(layer.get_submodule(".".join(path)), active) for path, _ in modules)
                found.append(Sublayer(place, modules, weights / total))
        else:
            found.append(Sublayer(place, (), _weights(layer, active) / total, trial.error))
    return found


def _attention(layer: nn.Module) -> list[Path]:
    """The innermost module whose class name contains "attention"."""
    named = [name for name, module in layer.named_modules() if name and "attention" in type(module).__name__.lower()]
    return [tuple(name.split(".")) for name in named if not any(other.startswith(f"{name}.") for other in named)][:1]


def _mlp(layer: nn.Module) -> list[Path]:
    """The child with most weights among those without attention; if that is a linear layer (OPT), all linear children."""
    children = {
        name: child
        for name, child in layer.named_children()
        if not any("attention" in type(module).__name__.lower() for module in child.modules())
    }
    heaviest = max(children, key=lambda name: _weights(children[name], 1.0), default=None)
    if heaviest is None:
        return []
    if isinstance(children[heaviest], nn.Linear):
        return [(name,) for name, child in children.items() if isinstance(child, nn.Linear)]
    return [(heaviest,)]


def _forms(
    model: PreTrainedModel, layers: Layers, guesses: list[tuple[list[Path], list[Path]]]
) -> dict[tuple[int, Path], Form]:
    """What these modules return, for those that were called."""
    seen: list[tuple[tuple[int, Path], Form]] = []
    recorded = []
    for place, (layer, guess) in enumerate(zip(layers.of(model), guesses, strict=True)):
        paths = [path for part in guess for path in part]
        children = {path: Recorder(layer.get_submodule(".".join(path)), (place, path), seen) for path in paths}
        recorded.append(with_children(layer, children) if children else layer)
    try_out(layers.replaced(model, recorded))
    return dict(seen)


def _tried_without(model: PreTrainedModel, layers: Layers, modules: list[list[tuple[Path, Form]]]) -> list[_Trial]:
    """A trial of each layer without these modules, which should leave the hidden states unchanged."""
    trials = [
        _Trial(_without(layer, entries), form)
        for layer, entries, form in zip(layers.of(model), modules, layers.forms, strict=True)
    ]
    try_out(layers.replaced(model, trials))
    return trials


class _Trial(Pass):
    """Skips a layer, and measures how much the given one would change the hidden states, relative to their norm."""

    moved = float("inf")
    error: str | None = None

    def __init__(self, layer: nn.Module, form: Form):
        super().__init__(form)
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = hidden_of(args, kwargs).float()
        try:
            output = self.layer(*args, **kwargs)
            after = (output[0] if isinstance(output, tuple) else output).float()
            self.moved = float((after.to(before.device) - before).norm() / before.norm())
        except Exception as error:  # an unusual structure: the layer is skipped as a whole or not at all
            self.moved, self.error = float("inf"), f"{type(error).__name__}: {error}"
        return super().forward(*args, **kwargs)


def _weights(module: nn.Module, active: float) -> float:
    """How many weights one token uses; of experts, only the active share."""
    return sum(
        weight.numel() * (active if "experts" in name.split(".") else 1.0) for name, weight in module.named_parameters()
    )
