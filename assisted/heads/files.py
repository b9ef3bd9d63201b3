"""The files of trained heads: finds them, brings the names of a layout to ours, and reads strictly. What a layout is called and
how it names tensors is in the tables of each method; nothing here knows a method.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .. import zoo
from ..loading.files import fields_of, files_by_tensor, shapes_of, write_json

_SNAPSHOT = ("cache_dir", "force_download", "local_files_only", "revision", "token")
FILES = (SAFE_WEIGHTS_NAME, "pytorch_model.bin")
_BUFFER = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")  # computed from the config

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Layout:
    """How one producer writes a head.

    Args:
        title: what is written and by whom, for messages.
        names: what its names begin with, as regular expressions, and what stands for that in ours; applied in this order.
        read_past: regular expressions of stored names that the head does not use.
    """

    title: str
    names: tuple[tuple[str, str], ...] = ()
    read_past: tuple[str, ...] = ()

    def own(self, name: str) -> str:
        """Our name of a stored tensor; empty for one that is read past."""
        if _BUFFER.fullmatch(name) or any(re.fullmatch(pattern, name) for pattern in self.read_past):
            return ""
        for begins, ours in self.names:
            name = re.sub(f"^(?:{begins})", ours, name)
        return name


@dataclass(frozen=True)
class Checkpoint:
    """The config and the tensors of a folder. No tensor is read before `tensors`.

    Args:
        folder: with all files.
        fields: of its config.json.
        shapes: of the tensors.
        stored: the file and the stored name of each of them.
        layout: what the names have been brought from; None for stored names.
    """

    folder: Path
    fields: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    stored: dict[str, tuple[Path, str]]
    layout: Layout | None = None

    @property
    def config_file(self) -> Path:
        return self.folder / "config.json"

    @classmethod
    def open(cls, folder: Path, names: Sequence[str] = FILES, needs_config: bool = True) -> Checkpoint:
        """The first of these files that exists, or all files of an index. Raises ValueError for a missing or broken one."""
        has_config = (folder / "config.json").is_file()
        if needs_config and not has_config:
            raise ValueError(f"draft: {folder} holds no config.json")
        try:
            fields = fields_of(folder / "config.json") if has_config else {}
            found = [folder / name for name in names if (folder / name).is_file()][:1]
            if not found and (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
                found = [folder / name for name in sorted(set(files_by_tensor(folder).values()))]
            if missing := [file.name for file in found if not file.is_file()]:
                raise ValueError(f"{folder / SAFE_WEIGHTS_INDEX_NAME}: weight_map: {missing[0]} is missing in {folder}")
            shapes = {file: shapes_of(file) for file in found}
        except ValueError as error:
            raise ValueError(f"draft: {error}") from error
        if not found:
            raise ValueError(f"draft: {folder} holds none of {', '.join(names)}")
        stored = {name: (file, name) for file in found for name in shapes[file]}
        return cls(folder, fields, {name: shapes[file][name] for name, (file, _) in stored.items()}, stored)

    @property
    def file(self) -> Path:
        """Of the first tensor."""
        return next((file for file, _ in self.stored.values()), self.folder)

    @property
    def numbers(self) -> int:
        """How many there are in all tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def under(self, layout: Layout) -> Checkpoint:
        """The same with our names. Raises ValueError for two tensors with one name."""
        own: dict[str, str] = {}
        for name in self.shapes:
            if (ours := layout.own(name)) and (other := own.setdefault(ours, name)) != name:
                raise ValueError(f"draft: {self.folder} holds both {other} and {name}, which are the same tensor")
        return replace(
            self,
            shapes={ours: self.shapes[name] for ours, name in own.items()},
            stored={ours: self.stored[name] for ours, name in own.items()},
            layout=layout,
        )

    def require(self, expected: Shapes, optional: Shapes) -> None:
        """Check that it has the expected tensors, perhaps the optional ones, and no others. Raises ValueError with the layout
        and the first name that is missing, unknown or misshapen."""
        where = f"{self.folder}, read as {self.layout.title}," if self.layout else self.folder
        found = {name for name in optional if name in self.shapes}
        require_tensors(self.shapes, {**expected, **{name: optional[name] for name in found}}, where)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors. Pickled files are read with `weights_only=True`."""
        made: dict[str, Tensor] = {}
        for file in dict.fromkeys(file for file, _ in self.stored.values()):
            own = {ours: name for ours, (place, name) in self.stored.items() if place == file}
            if file.suffix == ".safetensors":
                with safe_open(file, "pt") as opened:
                    made |= {ours: opened.get_tensor(name) for ours, name in own.items()}
            else:
                held = torch.load(file, map_location="cpu", weights_only=True)
                made |= {ours: held[name] for ours, name in own.items()}
        return made


def best_fit(names: Iterable[str], layouts: Sequence[Layout], expected: Callable[[Layout], Iterable[str]]) -> Layout:
    """The layout whose names differ least from those that a checkpoint stores; of equals, the first."""
    stored = list(names)

    def misfit(layout: Layout) -> int:
        return len({*map(layout.own, stored)} - {""} ^ {*expected(layout)})

    return min(layouts, key=misfit)


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


def stored_numbers(path: str | Path) -> int:
    """How many numbers the heads at a path have, from the headers of their files."""
    return Checkpoint.open(find_folder(path)).numbers


def require_tensors(found: Shapes, expected: Shapes, where: str | Path) -> None:
    """Check that a checkpoint has exactly these tensors with these shapes. found, expected: shapes by name.

    Raises ValueError with the name of the first tensor that is missing, and of the first that is unknown or misshapen.
    """
    problems = [
        f"{problem} tensor {min(names)}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
        for problem, names in (
            ("lacks", expected.keys() - found.keys()),
            ("has an unknown", found.keys() - expected.keys()),
        )
        if names
    ]
    if problems:
        raise ValueError(f"draft: {where} {' and '.join(problems)}")
    for name, shape in expected.items():
        if tuple(found[name]) != tuple(shape):
            raise ValueError(f"draft: {where} holds {name} of shape {list(found[name])}; expected {list(shape)}")


def values_of(fields: Mapping[str, Any], *inner: str) -> dict[str, Any]:
    """All fields of a config that are given, those of the objects `inner` beside those at the top, which they replace. Raises
    ValueError for an inner one that is no object."""
    found = {name: value for name, value in fields.items() if value is not None}
    for name in inner:
        part = fields.get(name) or {}
        if not isinstance(part, dict):
            raise ValueError(f"draft: {name}: {part!r} is not an object")
        found |= {key: value for key, value in part.items() if value is not None}
    return found


def agreed(values: Mapping[str, Any], keys: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Our fields that a config has. keys: the names of each, of which writers use the first. Raises ValueError for two names of
    one field with different values."""
    found: dict[str, Any] = {}
    for field, names in keys.items():
        for name in (given := [name for name in names if name in values]):
            if values[name] != (value := found.setdefault(field, values[name])):
                raise ValueError(f"draft: {given[0]}, {name}: {value!r} and {values[name]!r} contradict each other")
    return found


def is_copy(tensor: Tensor, module: Any) -> bool:
    """Whether a stored tensor is the weight of the target's module."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.is_meta or weight.shape != tensor.shape or not weight.is_floating_point():
        return False
    return torch.equal(weight.detach().cpu().to(tensor.dtype), tensor)


def settle_vocabulary(tensors: dict[str, Tensor], draft_size: int, size: int, where: str | Path) -> None:
    """Check `d2t` and `t2d`, and keep only the `d2t` of a reduced vocabulary. draft_size, size: Vd and V.

    Raises ValueError for offsets that are not whole, that lead to no tokens or to one token twice, or that a full vocabulary
    cannot have, and for a `t2d` that names other tokens.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    tokens = torch.arange(draft_size)
    if d2t is not None:
        offsets = d2t.to(torch.int64)
        if not torch.equal(offsets.to(d2t.dtype), d2t):
            raise ValueError(
                f"draft: {where}: d2t: it holds fractions, which are no offsets of token ids; write the checkpoint again in "
                "int64"
            )
        tokens = tokens + offsets
        if int(tokens.min()) < 0 or int(tokens.max()) >= size or len(tokens.unique()) != draft_size:
            raise ValueError(
                f"draft: {where}: d2t: its ids are not {draft_size} different tokens of the target's {size}; each of its "
                "numbers has to be the offset from a token of the draft to the target's"
            )
        if draft_size == size and bool(offsets.any()):
            raise ValueError(f"draft: {where}: d2t: its offsets exchange tokens of a full vocabulary; expected zeros")
        if draft_size != size:
            tensors["d2t"] = offsets
    if t2d is not None and not torch.equal(t2d.bool(), _named(tokens, size)):
        raise ValueError(f"draft: {where} holds t2d and d2t that name different tokens")


def require_fitting(found: Checkpoint, config: Any, kind: Callable[[Any], Any], wanted: Any) -> None:
    """Check that a head's config fits the target, and its tensors the config; nothing is allocated. A head with the whole
    vocabulary may have an output embedding and the maps of a reduced one.

    config: a `HeadConfig`. kind: makes the head. wanted: the target's text config. Raises ValueError for what differs.
    """
    folder, layers, size = found.folder, wanted.num_hidden_layers, config.vocab_size
    for name, given, own in (
        ("a vocabulary of", size, f"has {wanted.vocab_size}"),
        ("hidden states of width", config.target_hidden_size, f"have {wanted.hidden_size}"),
    ):
        if str(given) != own.split()[1]:
            raise ValueError(f"draft: {folder} was made for {name} {given}; the target's {own}")
    if min(config.taps) < 1 or max(config.taps) > layers:
        raise ValueError(
            f"draft: {folder} reads the hidden states {config.taps}; those of the target are 1 .. {layers}"
        )
    with torch.device("meta"):
        outline = kind(config)
    expected = {name: tuple(tensor.shape) for name, tensor in outline.state_dict().items()}
    optional: dict[str, Sequence[int]] = {"t2d": (size,)}
    if outline.d2t is None:
        optional |= {"d2t": (size,), "lm_head.weight": (size, config.hidden_size)}
        expected.pop("lm_head.weight", None)
    found.require(expected, optional)


def read_head(found: Checkpoint, config: Any) -> dict[str, Tensor]:
    """The tensors of a head, in the dtype of its `fc`. config: a `HeadConfig`. Raises ValueError where `settle_vocabulary`
    does."""
    tensors = found.tensors()
    if not (dtype := tensors["fc.weight"].dtype).is_floating_point:
        raise ValueError(f"draft: {found.folder} holds fc.weight in {dtype}; floating point is expected")
    settle_vocabulary(tensors, config.draft_vocab_size, config.vocab_size, found.folder)
    return {name: tensor if name == "d2t" else tensor.to(dtype) for name, tensor in tensors.items()}


def tensors_of(head: Any) -> dict[str, Tensor]:
    """What is stored of a head: its tensors, and the `t2d` of a reduced vocabulary."""
    named = {} if head.d2t is None else {"t2d": _named(head.draft_tokens, head.config.vocab_size)}
    return {**head.state_dict(), **named}


def _named(tokens: Tensor, size: int) -> Tensor:
    """[V] bool: which of the target's tokens are among these."""
    return torch.zeros(size, dtype=torch.bool).index_fill(0, tokens.cpu(), True)


def write_head(
    folder: str | Path, fields: Mapping[str, Any], tensors: Mapping[str, Tensor], file: str = FILES[0]
) -> None:
    """Write config.json and the tensors; a file that is not safetensors is pickled."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", fields)
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    if file.endswith(".safetensors"):
        save_file(held, folder / file, metadata={"format": "pt"})
    else:
        torch.save(held, folder / file)
