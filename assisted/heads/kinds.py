"""What kind of trained heads a checkpoint's folder holds, if any: its config.json tells, and the names of its tensors.

Knows files; reads no weights into memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from .. import zoo
from ..loading.files import fields_of, local_folder, shapes_of

__all__ = ["kind_of"]


def kind_of(path: str | Path) -> Literal["eagle", "medusa"] | None:
    """The method of the heads at a path; None for anything else, and where nothing is found.

    path: a folder, a `zoo:` name, or a Hub id, of which only what was downloaded before is looked at.

    EAGLE-1 heads come with the config of a Llama model of one layer: of such a model the names of the tensors are looked
    at. Raises ValueError for a speculator of a kind that is not known.
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
    """The names of a checkpoint's tensors, where they lie in one file. Raises ValueError for a broken one."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return set(shapes_of(folder / name))
    return set()
