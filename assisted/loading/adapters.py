"""PEFT adapters: finding the base model of an adapter, checking that the loop supports it, and saving it. Knows peft's
files and the names of its classes, but never imports it. Knows nothing of drafting."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn
from transformers.utils import find_adapter_config_file, is_peft_available

from ..engine.parts import unwrapped
from .files import copy_files, fields_of, of_hub, write_json

_CONFIG = "adapter_config.json"
_AROUND = ("POLY", "SHADOW", "XLORA")  # adapter types whose wrapper takes part in every forward pass
MADE_BY_PEFT = ".ranknum.default"
"""The end of the names of what AdaLoRA's files leave out."""
_REMEDY = "merge it (merge_and_unload()) and use the merged model"


def base_path(path: str, role: str, **hub: Any) -> str:
    """The path of the model's config: `path` itself or, if it holds only an adapter, the path of the adapter's base model.

    `AutoModelForCausalLM` decides in the same way. role: "target" or "draft", for the message. hub: Hub arguments.

    Raises ImportError if there is an adapter and peft is missing, ValueError if the adapter does not name its base model.
    """
    file = find_adapter_config_file(path, **of_hub(hub))
    if file is None:
        return path
    if not is_peft_available():
        raise ImportError(f"{role}: {path!r} is a PEFT adapter, and loading it needs peft: pip install peft")
    if (Path(path) / "config.json").is_file():
        return path
    base = fields_of(Path(file)).get("base_model_name_or_path")
    if base and not isinstance(base, str):
        raise ValueError(f"{role}: {file}: base_model_name_or_path: {base!r} is not a path")
    if not base:
        raise ValueError(
            f"{role}: the adapter at {path!r} does not name its base model; load both with peft and pass the result"
        )
    return base


def trusting(path: str, base: str, **kwargs: Any) -> dict[str, Any]:
    """Loading arguments that do not extend `trust_remote_code` to the base model that an adapter at `path` names."""
    return kwargs if base == path else {**kwargs, "trust_remote_code": False}


def has_adapter(model: nn.Module) -> bool:
    """Whether a model contains modules of an adapter, enabled or not."""
    return any(type(module).__module__.startswith("peft.") for module in model.modules())


def mixes_adapters(model: nn.Module) -> bool:
    """Whether each row of the current batch selects its own adapter (`adapter_names`, which PEFT passes by hooks)."""
    if "peft" not in sys.modules:
        return False
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return any("adapter_names" in getattr(hook, "keywords", ()) for hook in hooks)


def outside_layers(model: nn.Module) -> str | None:
    """Which adapter does more than change layers; the loop runs the wrapped model, and would ignore it.

    None without prompt or prefix tuning, adapters that tokens of the prompt activate, and mixtures of adapters.
    """
    if unwrapped(model) is model:
        return None
    for name, config in getattr(model, "peft_config", {}).items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if config.is_prompt_learning or getattr(config, "alora_invocation_tokens", None) or kind in _AROUND:
            return f"its adapter {name!r} ({type(config).__name__}) works outside the model's layers"
    return None


def restore_magnitudes(model: nn.Module, path: str, role: str, **hub: Any) -> set[str]:
    """Read the magnitudes of a DoRA adapter that `from_pretrained` of a model has read from its path. Their names in peft's
    files lack `.weight`, so that transformers (5.23, 5.24) leaves them as they were made, with a table in the log.

    role, hub: as for `base_path`. Returns the names of the parameters. Raises ValueError if the model has others.
    """
    config = find_adapter_config_file(path, **of_hub(hub)) if has_adapter(model) else None
    if config is None or not fields_of(Path(config)).get("use_dora"):
        return set()
    own, found = dict(model.named_parameters()), set[str]()
    for name, magnitudes in load_file(Path(config).with_name("adapter_model.safetensors")).items():
        if name.endswith("lora_magnitude_vector"):
            place = f"{name.removeprefix('base_model.model.')}.default.weight"
            if place not in own or own[place].is_meta:
                raise ValueError(
                    f"{role}: the magnitudes of the DoRA adapter at {path!r} ({name}) are not read by transformers; load both "
                    "with peft and pass the result to from_models"
                )
            own[place].data.copy_(magnitudes)
            found.add(place)
    return found


def require_in_layers(model: nn.Module, role: str) -> None:
    """Raise ValueError for adapters that do more than change layers."""
    reason = outside_layers(model)
    if reason is not None:
        raise ValueError(
            f"{role}: {reason} and cannot be assisted; call generate of the model itself, or use an adapter such as LoRA"
        )


def save_adapter(model: Any, folder: str | Path, role: str, **kwargs: Any) -> None:
    """Write a model's adapter together with the path of its base model, so that `AutoModelForCausalLM` reads both.

    role: "target" or "draft", for the message. kwargs: for `save_pretrained`.

    Raises ValueError if the path of the base model is unknown, or if loading would not restore the same model.
    """
    base, names = unwrapped(model), list(model.peft_config)
    if not base.name_or_path:
        raise ValueError(
            f"{role}: its adapter cannot be saved, because its base model was created in memory and has no path; {_REMEDY}"
        )
    if len(names) > 1 or (base is not model and names != ["default"]):  # peft writes others into subfolders
        raise ValueError(f"{role}: with adapters named {names}, loading would not restore the same model; {_REMEDY}")
    model.save_pretrained(folder, **kwargs)
    _name_base(Path(folder), base.name_or_path)


def copy_adapter(path: str, folder: str | Path) -> None:
    """Copy the adapter at `path`, for models whose quantization backend cannot save it."""
    if Path(path).resolve() != Path(folder).resolve():
        copy_files(path, Path(folder), _CONFIG, "adapter_model.*")
        _name_base(Path(folder), base_path(path, "draft"))


def _name_base(folder: Path, path: str) -> None:
    """Set the base model of a saved adapter to the model that it was used with, not the one that it was trained with."""
    write_json(folder / _CONFIG, fields_of(folder / _CONFIG) | {"base_model_name_or_path": path})
