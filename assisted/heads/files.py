"""Checkpoint files of heads: where they lie, and reading their tensors strictly.

Knows folders, names on the Hub and safetensors; nothing of what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors.torch import load_file
from transformers import PreTrainedModel

from .. import zoo
from ..loading.files import shapes_of

__all__ = ["find_file", "find_folder", "public_name", "read_tensors", "require_tensors"]

_SNAPSHOT = ("cache_dir", "force_download", "local_files_only", "revision", "token")


def find_folder(path: str | Path, **hub: Any) -> Path:
    """The folder behind a path, a `zoo:` name or a Hub id (downloaded, with what `snapshot_download` knows of `hub`)."""
    found = Path(zoo.resolve(str(path)))
    if found.is_dir():
        return found
    if found.is_absolute() or str(path).startswith((".", "~")):
        raise FileNotFoundError(f"draft: there is no folder at {str(path)!r}")
    return Path(snapshot_download(str(path), **{name: hub[name] for name in _SNAPSHOT if name in hub}))


def public_name(target: PreTrainedModel | None) -> str | None:
    """What a checkpoint may call its target: a Hub id or a `zoo:` name. A folder's path means nothing on another machine, and
    tells of this one."""
    name = "" if target is None else target.name_or_path or ""
    try:
        validate_repo_id(name.removeprefix("zoo:"))
    except HFValidationError:
        return None
    return None if Path(name).exists() else name


def find_file(folder: Path, names: Sequence[str]) -> tuple[Path, dict[str, tuple[int, ...]]]:
    """The first of these files that is there, and the shapes of its tensors, of which none is read.

    Raises ValueError where the folder has none of them, and for a broken one.
    """
    for name in names:
        if (folder / name).is_file():
            try:
                return folder / name, shapes_of(folder / name)
            except ValueError as error:
                raise ValueError(f"draft: {error}") from error
    raise ValueError(f"draft: {folder} holds none of {', '.join(names)}")


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file. Pickled files are read with `weights_only=True`."""
    if file.suffix == ".safetensors":
        return load_file(file)
    return torch.load(file, map_location="cpu", weights_only=True)


def require_tensors(
    found: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]], where: str | Path
) -> None:
    """Refuse a checkpoint that has not exactly these tensors, in these shapes, with a ValueError that names the first that
    is missing, too many or misshapen. found, expected: shapes by name."""
    for problem, names in (
        ("lacks", expected.keys() - found.keys()),
        ("has an unknown", found.keys() - expected.keys()),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"draft: {where} {problem} tensor {min(names)}{more}")
    for name, shape in expected.items():
        if tuple(found[name]) != tuple(shape):
            raise ValueError(f"draft: {where} holds {name} of shape {list(found[name])}; expected {list(shape)}")
