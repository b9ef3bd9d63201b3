"""Finds a model's recurrent layers, and how each of them runs over columns."""

from __future__ import annotations

from torch import nn

from .delta import DeltaMixer, delta_mixer
from .stepped import StepMixer


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
