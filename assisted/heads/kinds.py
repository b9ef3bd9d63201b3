"""What kind of trained heads a checkpoint's folder holds, if any: its config.json tells, and the names of its tensors.

Knows files; reads no weights into memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open

from .. import zoo

__all__ = ["kind_of"]


def kind_of(path: str | Path) -> Literal["eagle", "medusa"] | None:
    """The method of the heads at a path; None for anything else, and where nothing is found.

    path: a folder, a `zoo:` name, or a Hub id, of which only what was downloaded before is looked at.

    EAGLE-1 heads come with the config of a Llama model of one layer: of such a model the names of the tensors are looked
    at. Raises ValueError for a speculator of a kind that is not known.
    """
    folder = _local(str(path))
    if folder is None:
        return None
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(fields, dict):
        return None
    if "medusa_num_heads" in fields or fields.get("model_type") == "medusa":
        return "medusa"
    speculator = fields.get("speculators_model_type")
    if speculator is not None:
        if speculator != "eagle3":
            raise ValueError(f"draft: {folder} is a speculator of kind {speculator!r}; only 'eagle3' can be read")
        return "eagle"
    if "draft_vocab_size" in fields or any("Eagle" in name for name in fields.get("architectures") or ()):
        return "eagle"
    return "eagle" if fields.get("num_hidden_layers") == 1 and "fc.weight" in _names(folder) else None


def _local(path: str) -> Path | None:
    folder = Path(zoo.resolve(path))
    if folder.is_dir():
        return folder
    try:
        config = try_to_load_from_cache(path, "config.json")
    except ValueError:  # no Hub id
        return None
    return Path(config).parent if isinstance(config, str) else None


def _names(folder: Path) -> set[str]:
    """The names of a checkpoint's tensors, where they lie in one file."""
    if (folder / "model.safetensors").is_file():
        with safe_open(folder / "model.safetensors", "pt") as file:
            return set(file.keys())
    if (folder / "pytorch_model.bin").is_file():
        return set(torch.load(folder / "pytorch_model.bin", map_location="meta", weights_only=True))
    return set()
