"""PEFT adapters: which model lies behind one, in a folder or in memory, and what of them the loop can run.

Knows peft's files and the names of its parts, and never imports it; nothing of drafting.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from torch import nn
from transformers.utils import find_adapter_config_file, is_peft_available

from ..engine.parts import unwrapped
from .files import fields_of

__all__ = [
    "base_path",
    "copy_adapter",
    "has_adapter",
    "mixes_adapters",
    "require_in_layers",
    "save_adapter",
    "trusting",
]

_CONFIG = "adapter_config.json"
_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
_AROUND = ("POLY", "SHADOW", "XLORA")  # whose wrapper computes something at every forward
_REMEDY = "merge it (merge_and_unload()) and take the merged model"


def base_path(path: str, role: str, **hub: Any) -> str:
    """Where the model of a path has its config: at the path itself, or, where only an adapter lies there, at its base model.

    The same choice as that of `AutoModelForCausalLM`. role: "target" or "draft", for the message. hub: how to look.

    Raises ImportError where an adapter lies there and peft is missing, ValueError where it does not say its base model.
    """
    file = find_adapter_config_file(path, **{name: hub[name] for name in _HUB_ARGUMENTS if name in hub})
    if file is None:
        return path
    if not is_peft_available():
        raise ImportError(f"{role}: a PEFT adapter lies at {path!r}; loading it needs peft: pip install peft")
    if (Path(path) / "config.json").is_file():
        return path
    base = fields_of(Path(file)).get("base_model_name_or_path")
    if base and not isinstance(base, str):
        raise ValueError(f"{role}: {file}: base_model_name_or_path: {base!r} is no path")
    if not base:
        raise ValueError(
            f"{role}: the adapter at {path!r} does not say which model it belongs to; load both with peft and pass the model"
        )
    return base


def trusting(path: str, base: str, **kwargs: Any) -> dict[str, Any]:
    """Keyword arguments for loading what a path leads to: code comes from where the caller said, never from the base model that
    an adapter at `path` names."""
    return kwargs if base == path else {**kwargs, "trust_remote_code": False}


def has_adapter(model: nn.Module) -> bool:
    """Whether some module of a model is an adapter's, switched on or off."""
    return any(type(module).__module__.startswith("peft.") for module in model.modules())


def mixes_adapters(model: nn.Module) -> bool:
    """Whether each row of a batch has an adapter of its own (`adapter_names`), which PEFT tells the layers by their hooks."""
    if "peft" not in sys.modules:
        return False
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return any("adapter_names" in getattr(hook, "keywords", ()) for hook in hooks)


def require_in_layers(model: nn.Module, role: str) -> None:
    """Refuse an adapter that is more than changed layers: running the model that it is put around would leave it out.

    Raises ValueError: prompt and prefix tuning, adapters that are switched on by tokens of the prompt, mixtures of adapters.
    """
    if unwrapped(model) is model:
        return
    for name, config in getattr(model, "peft_config", {}).items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if config.is_prompt_learning or getattr(config, "alora_invocation_tokens", None) or kind in _AROUND:
            raise ValueError(
                f"{role}: its adapter {name!r} ({type(config).__name__}) works around the model, not in its layers alone, "
                "and cannot be assisted; generate with the model itself, or take an adapter such as LoRA"
            )


def save_adapter(model: Any, folder: str | Path, role: str, **kwargs: Any) -> None:
    """Write the adapter of a model, which names its base model: `AutoModelForCausalLM` reads both.

    role: "target" or "draft", for the message. kwargs: of its `save_pretrained`.

    Raises ValueError where nothing says where the base model lies, or where it would not be read back with this adapter.
    """
    base, names = unwrapped(model), list(model.peft_config)
    if not base.name_or_path:
        raise ValueError(
            f"{role}: the base model of its adapter was made in memory, and no path leads to it; {_REMEDY}"
        )
    if len(names) > 1 or (base is not model and names != ["default"]):  # peft has a folder for each of another name
        raise ValueError(f"{role}: with adapters named {names} it would not be read back as it is; {_REMEDY}")
    model.save_pretrained(folder, **kwargs)
    _name_base(Path(folder), base.name_or_path)


def copy_adapter(path: str, folder: str | Path) -> None:
    """Write the adapter that lies at a path, for models of which the backend can no longer give it back."""
    files = (_CONFIG, "adapter_model.*")
    lies = Path(path) if Path(path).is_dir() else Path(snapshot_download(path, allow_patterns=[*files]))
    if lies.resolve() == Path(folder).resolve():
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    for file in (file for pattern in files for file in lies.glob(pattern)):
        shutil.copyfile(file, Path(folder) / file.name)
    _name_base(Path(folder), base_path(path, "draft"))


def _name_base(folder: Path, path: str) -> None:
    """Let a saved adapter name the model that it was at work in, not the one that it was trained with."""
    file = folder / _CONFIG
    fields = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(fields | {"base_model_name_or_path": path}, indent=2) + "\n", encoding="utf-8")
