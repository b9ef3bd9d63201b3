"""Running a model without some of its attention and MLP sublayers.

Knows how decoder layers are commonly put together, and checks it: a layer whose sublayers cannot be told apart is left out as
a whole or not at all. Nothing of the model is changed. Which sublayers to leave out is the drafter's.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .parts import Form, Layers, Pass, Recorder, dressed, few_ids, hidden_of, with_children

__all__ = ["Sublayer", "find_sublayers", "try_out", "without"]

Path = tuple[str, ...]
UNCHANGED = 0.05  # of the norm of the hidden states: how far a layer without its sublayers may move them


@dataclass(frozen=True)
class Sublayer:
    """What can be left out of a model.

    Args:
        layer: which layer it is part of.
        modules: its modules, by their path in the layer, and what each returns. Empty: the layer as a whole.
        share: of the weights that a pass over one token reads.
    """

    layer: int
    modules: tuple[tuple[Path, Form], ...]
    share: float


def without(
    model: PreTrainedModel, layers: Layers, sublayers: Collection[Sublayer], skipped: Collection[int]
) -> PreTrainedModel:
    """The model without the sublayers of these indices. A layer that loses all of its own is not run at all."""
    own = layers.of(model)
    for place, layer in enumerate(own):
        of_layer = [(index, sublayer) for index, sublayer in enumerate(sublayers) if sublayer.layer == place]
        gone = [sublayer for index, sublayer in of_layer if index in skipped]
        if gone and len(gone) == len(of_layer):
            own[place] = Pass(layers.forms[place])
        elif gone:
            own[place] = _without(layer, [entry for sublayer in gone for entry in sublayer.modules])
    return layers.replaced(model, own)


class Nothing(nn.Module):
    """Stands for a sublayer that is left out: returns what leaves the residual stream as it is.

    That is zeros of the sublayer's own width; of a sublayer that adds the residual itself, the residual it is given.

    Args:
        sublayer: what it stands for. Not kept.
        form: what that returns.
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
    return with_children(layer, {path: Nothing(layer.get_submodule(".".join(path)), form) for path, form in modules})


@torch.no_grad()
def find_sublayers(model: PreTrainedModel, layers: Layers) -> list[Sublayer]:
    """What can be left out, in order: attention and MLP of each layer, or the layer where they cannot be told apart."""
    own = layers.of(model)
    guesses = [(_attention(layer), _mlp(layer)) for layer in own]
    forms = _forms(model, layers, guesses)
    pairs = [
        [tuple((path, forms[place, path]) for path in paths if (place, path) in forms) for paths in guess]
        for place, guess in enumerate(guesses)
    ]
    known = _residual(model, layers, [[entry for modules in pair for entry in modules] for pair in pairs])
    active = _active_experts(model)
    head = model.get_output_embeddings()
    total = sum(_weights(layer, active) for layer in own) + (0 if head is None else _weights(head, active))
    found = []
    for place, (layer, pair) in enumerate(zip(own, pairs, strict=True)):
        if all(pair) and known[place]:
            for modules in pair:
                weights = sum(_weights(layer.get_submodule(".".join(path)), active) for path, _ in modules)
                found.append(Sublayer(place, modules, weights / total))
        else:
            found.append(Sublayer(place, (), _weights(layer, active) / total))
    return found


@torch.no_grad()
def try_out(model: PreTrainedModel) -> None:
    """Run a model on a few tokens. Raises what its forward raises."""
    ids = few_ids(model)
    model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, return_dict=True)


def _attention(layer: nn.Module) -> list[Path]:
    """The innermost module that is called an attention."""
    named = [name for name, module in layer.named_modules() if name and "attention" in type(module).__name__.lower()]
    return [tuple(name.split(".")) for name in named if not any(other.startswith(f"{name}.") for other in named)][:1]


def _mlp(layer: nn.Module) -> list[Path]:
    """Of the children without attention the heaviest one; of linear children (OPT) all."""
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
    """What the modules return that were called with hidden states."""
    seen: list[tuple[tuple[int, Path], Form]] = []
    recorded = []
    for place, (layer, guess) in enumerate(zip(layers.of(model), guesses, strict=True)):
        paths = [path for part in guess for path in part]
        children = {path: Recorder(layer.get_submodule(".".join(path)), (place, path), seen) for path in paths}
        recorded.append(with_children(layer, children) if children else layer)
    try_out(layers.replaced(model, recorded))
    return dict(seen)


def _residual(model: PreTrainedModel, layers: Layers, modules: list[list[tuple[Path, Form]]]) -> list[bool]:
    """Which layers leave the hidden states as they are without these modules of theirs."""
    trials = [
        _Trial(_without(layer, entries), form)
        for layer, entries, form in zip(layers.of(model), modules, layers.forms, strict=True)
    ]
    try_out(layers.replaced(model, trials))
    return [trial.moved <= UNCHANGED for trial in trials]


class _Trial(Pass):
    """A layer left out; and how far the one given would have moved the hidden states: difference over norm."""

    moved = float("inf")

    def __init__(self, layer: nn.Module, form: Form):
        super().__init__(form)
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = hidden_of(args, kwargs).float()
        try:
            output = self.layer(*args, **kwargs)
            after = (output[0] if isinstance(output, tuple) else output).float()
            self.moved = float((after.to(before.device) - before).norm() / before.norm())
        except Exception:  # put together in a way of its own: the layer is left out as a whole, or not at all
            self.moved = float("inf")
        return super().forward(*args, **kwargs)


def _weights(module: nn.Module, active: float) -> float:
    """How many weights a token reads: of experts, those that are active."""
    return sum(
        weight.numel() * (active if "experts" in name.split(".") else 1.0) for name, weight in module.named_parameters()
    )


def _active_experts(model: PreTrainedModel) -> float:
    config = model.config.get_text_config(decoder=True)
    counts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    count = next((number for number in counts if number), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return chosen / count if count and chosen else 1.0
