"""Finds the checkpoint files of heads and reads their tensors strictly."""

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
from ..loading.files import shapes_of, stored_in

_SNAPSHOT = ("cache_dir", "force_download", "local_files_only", "revision", "token")


def find_folder(path: str | Path, files: list[str] | None = None, **hub: Any) -> Path:
    """The folder of a path, a `zoo:` name or a Hub id; that is downloaded, with `hub` options of `snapshot_download`. files:
    what is downloaded, by default everything."""
    found = Path(zoo.resolve(str(path)))
    if found.is_dir():
        return found
    if found.is_absolute() or str(path).startswith((".", "~")):
        raise FileNotFoundError(f"draft: there is no folder at {str(path)!r}")
    options = {name: hub[name] for name in _SNAPSHOT if name in hub} | ({"allow_patterns": files} if files else {})
    return Path(snapshot_download(str(path), **options))


def public_name(target: PreTrainedModel | None) -> str | None:
    """The target's name for a checkpoint: a Hub id or a `zoo:` name. None for a folder, whose path is meaningless on another
    machine and reveals details of this one."""
    name = "" if target is None else target.name_or_path or ""
    try:
        validate_repo_id(name.removeprefix("zoo:"))
    except HFValidationError:
        return None
    return None if Path(name).exists() else name


def find_file(folder: Path, names: Sequence[str]) -> tuple[Path, dict[str, tuple[int, ...]]]:
    """The first of these files that exists, and the shapes of its tensors, without reading the tensors.

    Raises ValueError if none exists or the file is broken.
    """
    for name in names:
        if (folder / name).is_file():
            try:
                return folder / name, shapes_of(folder / name)
            except ValueError as error:
                raise ValueError(f"draft: {error}") from error
    raise ValueError(f"draft: {folder} holds none of {', '.join(names)}")


def stored_numbers(path: str | Path) -> int:
    """How many numbers the heads at a path have, from the header of their file."""
    file, _ = find_file(find_folder(path), ("model.safetensors", "medusa_lm_head.safetensors"))
    return sum(tensor.parameter_count for tensor in stored_in(file).values())


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file. Pickled files are read with `weights_only=True`."""
    if file.suffix == ".safetensors":
        return load_file(file)
    return torch.load(file, map_location="cpu", weights_only=True)


def require_tensors(
    found: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]], where: str | Path
) -> None:
    """Check that a checkpoint has exactly these tensors with these shapes. found, expected: shapes by name.

    Raises ValueError with the name of the first tensor that is missing, unknown or misshapen.
    """
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
