"""Checkpoints, from which an interrupted training resumes. Each is one file, replaced atomically. Knows modules, optimizers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn


def save(
    path: Path,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    step: int,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write the trained parameters, the optimizers' states and the number of steps done. about: the run's settings."""
    state = {
        "step": step,
        "model": {name: p.detach() for name, p in _trained(model).items()},
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "about": dict(about or {}),
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)  # an interrupted save must not cost the last good one


def settings_in(path: Path) -> dict[str, Any]:
    """The settings of the run that wrote a checkpoint; none if there is no checkpoint."""
    if not path.exists():
        return {}
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)["about"]


def resume(
    path: Path,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    about: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> int:
    """Load a checkpoint, if there is one. Returns the number of steps done. about, defaults: see `require_same`.

    Raises ValueError for the checkpoint of a run with other settings, naming the setting.
    """
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    require_same(state["about"], about or {}, f"the checkpoint {path}", defaults or {})
    trained = _trained(model)
    if trained.keys() != state["model"].keys():
        odd = sorted(trained.keys() ^ state["model"].keys())
        raise ValueError(f"out: the checkpoint {path} is of another model; {', '.join(odd[:3])} is only in one of them")
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(state["model"][name])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return int(state["step"])


def require_same(before: Mapping[str, Any], now: Mapping[str, Any], what: str, defaults: Mapping[str, Any]) -> None:
    """Raise ValueError if a run had other settings than this one, naming the setting. what: was written by that run. defaults:
    of settings that may not have existed then."""
    for name, value in now.items():
        if (written := before.get(name, defaults.get(name))) != value:
            raise ValueError(
                f"{name}: {what} was written with {written!r}, this run has {value!r}; give the same or another folder"
            )


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
