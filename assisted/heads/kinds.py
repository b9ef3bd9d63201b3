"""Detects the kind of trained heads in a checkpoint folder from config.json and tensor names.

Reads no weights into memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from .. import zoo
from ..loading.files import fields_of, local_folder, shapes_of

__all__ = ["kind_of"]


def kind_of(path: str | Path) -> Literal["eagle", "medusa"] | None:
    """The method of the heads at a path; None for anything else, or if nothing is found.

    path: a folder, a `zoo:` name, or a Hub id, of which only the local copy is read.

    EAGLE-1 heads have the config of a one-layer Llama model and are recognized by their tensor names. Raises ValueError for
    an unknown kind of speculator.
    """
    folder = local_folder(zoo.resolve(str(path)))
    if folder is None:
        return None
    try:
        fields = fields_of(folder / "config.json")
    except (OSError, ValueError):
        return None
    if "medusa_num_heads" in fields or fields.get("model_type") == "medusa":
        return "medusa"
    speculator = fields.get("speculators_model_type")
    if speculator is not None:
        if speculator != "eagle3":
            raise ValueError(f"draft: {folder} is a speculator of kind {speculator!r}; only 'eagle3' can be read")
        return "eagle"
    if "draft_vocab_size" in fields or "Eagle" in str(fields.get("architectures")):
        return "eagle"
    return "eagle" if fields.get("num_hidden_layers") == 1 and "fc.weight" in _names(folder) else None


def _names(folder: Path) -> set[str]:
    """The tensor names of a single-file checkpoint. Raises ValueError if it is broken."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return set(shapes_of(folder / name))
    return set()
