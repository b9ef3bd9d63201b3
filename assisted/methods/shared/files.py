"""The files of trained heads: one strict reader, and a writer. What a layout calls the tensors is in the tables of each method;
nothing here knows a method.
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

from ... import zoo
from ...loading.expanded import expand, grouped, is_as_it_is, is_known
from ...loading.files import fields_of, files_by_tensor, loading, shapes_of, write_json

_SNAPSHOT = ("cache_dir", "force_download", "local_files_only", "revision", "token")
FILES = (SAFE_WEIGHTS_NAME, "pytorch_model.bin")
_BUFFER = r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)"  # computed from the config
_NO_NUMBERS = re.compile(r"d2t|t2d|token_map|.*token_ordering")  # ids of tokens and the like
_PACKED = re.compile(r"absmax|quant_state|\.biases$")  # of quantizations that `expand` does not know
_OWN = {"embed_tokens.weight": "own_embedding", "lm_head.weight": "own_output"}  # fields of configs

Shapes = Mapping[str, Sequence[int]]
Parts = dict[str, tuple[int, ...]]
"""Stored tensors with their shapes, in the order of the rows of the tensor that they make together."""


@dataclass(frozen=True)
class Layout:
    """How one producer writes a head."""

    title: str = ""  # what is written and by whom, for messages
    # what our names begin with, as regular expressions, and what stands for that in the files; the first one counts
    names: tuple[tuple[str, str], ...] = ()
    read_past: tuple[str, ...] = ()  # regular expressions of stored names that the head does not use
    # the parts, under our names, in which a tensor of some name and shape is stored; None for whole tensors
    split: Callable[[str, tuple[int, ...]], Parts] | None = None

    def stored(self, name: str) -> str:
        """The name in the files of one of our tensors."""
        found = (re.sub(f"^(?:{ours})", theirs, name) for ours, theirs in self.names if re.match(ours, name))
        return next(found, name)

    def parts(self, name: str, shape: Sequence[int]) -> Parts:
        """What is stored of one of our tensors."""
        parts = self.split(name, tuple(shape)) if self.split else {name: tuple(shape)}
        return {self.stored(part): size for part, size in parts.items()}

    def all_parts(self, shapes: Shapes) -> Parts:
        """What is stored of all these tensors of ours."""
        return {part: size for name, shape in shapes.items() for part, size in self.parts(name, shape).items()}

    def used(self, names: Iterable[str]) -> set[str]:
        """The stored names that are not read past."""
        past = re.compile("|".join((_BUFFER, *self.read_past)))
        return {name for name in names if not past.fullmatch(name)}


@dataclass(frozen=True)
class Checkpoint:
    """The config and the tensors of a folder. No tensor is read before `tensors`."""

    folder: Path  # with all files; or the one file
    fields: dict[str, Any]  # of its config.json
    shapes: dict[str, tuple[int, ...]]  # of the tensors, by their stored names
    files: dict[str, Path]  # of each of them
    layout: Layout = Layout()  # by which our names lead to stored ones
    read: Callable[[str], Tensor] | None = None  # gives a stored tensor by its name; None reads the files
    advice: str = ""  # what to do about quantized weights that cannot be read, for messages

    @classmethod
    def open(cls, folder: Path, names: Sequence[str] = FILES, needs_config: bool = True) -> Checkpoint:
        """The first of these files that exists, or all files of an index. Raises ValueError for a missing or broken one."""
        config = folder / "config.json"
        if needs_config and not config.is_file():
            raise ValueError(f"draft: {folder} holds no config.json")
        try:
            fields = fields_of(config) if config.is_file() else {}
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
        files = {name: file for file in found for name in shapes[file]}
        return cls(folder, fields, {name: shapes[file][name] for name, file in files.items()}, files)

    @property
    def file(self) -> Path:
        """Of the first tensor."""
        return next(iter(self.files.values()), self.folder)

    @property
    def numbers(self) -> int:
        """How many there are in all tensors."""
        return sum(map(math.prod, self.shapes.values()))

    def under(self, *layouts: Layout, marks: Callable[[Layout], Iterable[str]] = lambda layout: ()) -> Checkpoint:
        """The same in the layout that fits best, of equals the first; without what that reads past. marks: our names of some
        tensors of each layout."""
        layout = min(layouts, key=lambda one: len(one.used(self.shapes) ^ {*map(one.stored, marks(one))}))
        used = layout.used(self.shapes)
        return replace(self, layout=layout, shapes={name: size for name, size in self.shapes.items() if name in used})

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of one of our tensors; None if it is not there."""
        return self.shapes.get(self.layout.stored(name))

    def require(self, expected: Shapes, optional: Shapes | None = None) -> None:
        """Check that it has the expected tensors, perhaps the optional ones, and no others; shapes by our names.

        Raises ValueError with the layout and the first stored name that is missing, unknown, misshapen or of a quantization
        that cannot be read.
        """
        groups, wanted = grouped(self.shapes), self.layout.all_parts(expected)
        wanted |= {part: size for part, size in self.layout.all_parts(optional or {}).items() if part in groups}
        unread = (
            group for name, group in groups.items() if (not is_known(group) if name in wanted else _PACKED.search(name))
        )
        if odd := [stored for group in unread for stored in group.values()]:
            raise ValueError(
                f"draft: {self.folder} holds {min(odd)}, of a quantization that cannot be read{self.advice}"
            )
        found = {n: self.shapes[group[""]] if is_as_it_is(group) else wanted.get(n, ()) for n, group in groups.items()}
        title = f", read as {self.layout.title}," if self.layout.title else ""
        require_tensors(found, wanted, f"{self.folder}{title}")

    def tensors(self, expected: Shapes | None = None, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        """Those of our tensors that it has. Quantized weights are expanded, in `dtype`; all others are as stored.

        expected: the shapes by our names, after `require`; None reads all tensors by their stored names. Pickled files are read
        with `weights_only=True`. Raises ValueError for numbers without their scales, and for scales that do not fit.
        """
        groups, read = grouped(self.shapes), self.read or self._reader()
        layout, method = (self.layout if expected else Layout()), self.fields.get("quantization_config") or {}

        def weight(part: str, size: tuple[int, ...]) -> Tensor:
            held = {role: read(stored) for role, stored in groups[part].items()}
            if _NO_NUMBERS.fullmatch(part.rpartition(".")[2]):
                return held[""]
            try:
                return expand(part, held, size, method, dtype)
            except ValueError as error:
                raise ValueError(f"draft: {self.folder}: {error}{self.advice}") from error

        made = {}
        for name, shape in (expected or self.shapes).items():
            if groups.keys() >= (parts := layout.parts(name, shape)).keys():
                rows = [weight(*part) for part in parts.items()]
                whole = torch.cat(rows, -2 if rows[0].dim() > 1 else 0) if len(rows) > 1 else rows[0]
                made[name] = whole.reshape(tuple(shape))
        return made

    def _reader(self) -> Callable[[str], Tensor]:
        opened = {
            file: safe_open(file, "pt").get_tensor
            if file.suffix == ".safetensors"
            else torch.load(file, map_location="cpu", weights_only=True).__getitem__
            for file in {self.files[name] for name in self.shapes}
        }
        return lambda name: opened[self.files[name]](name)


def pieces(layout: Layout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is stored of these tensors of ours, by stored names."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = layout.parts(name, tensor.shape)
        found |= zip(parts, tensor.detach().reshape(len(parts), *next(iter(parts.values()))).unbind(), strict=True)
    return found


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


def shapes_by_name(tensors: Mapping[str, Tensor]) -> Parts:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def refuse(where: str | Path, marks: Iterable[Any], refused: Mapping[str, str]) -> None:
    """Raise ValueError for a checkpoint of a kind that cannot be read. marks: its names of tensors, architectures and so on.
    refused: what to say of those in which one matches a regular expression."""
    for pattern, said in refused.items():
        if any(re.match(pattern, str(mark)) for mark in marks):
            raise ValueError(f"draft: {where}: {said}")


def require_tensors(found: Shapes, expected: Shapes, where: str | Path) -> None:
    """Check that a checkpoint has exactly these tensors with these shapes. found, expected: shapes by name.

    Raises ValueError with the name of the first tensor that is missing, and of the first that is unknown or misshapen.
    """
    differing = {"lacks": expected.keys() - found.keys(), "has an unknown": found.keys() - expected.keys()}
    if problems := [
        f"{problem} tensor {min(names)}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
        for problem, names in differing.items()
        if names
    ]:
        raise ValueError(f"draft: {where} {' and '.join(problems)}")
    for name, shape in expected.items():
        if tuple(found[name]) != tuple(shape):
            raise ValueError(f"draft: {where} holds {name} of shape {list(found[name])}; expected {list(shape)}")


def agreed(values: Mapping[str, Any], keys: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Our fields that a config has. keys: the names of each, of which writers use the first. Raises ValueError for two names of
    one field with different values."""
    found: dict[str, Any] = {}
    for field, names in keys.items():
        for name in (given := [name for name in names if name in values]):
            if values[name] != (value := found.setdefault(field, values[name])):
                raise ValueError(f"draft: {given[0]}, {name}: {value!r} and {values[name]!r} contradict each other")
    return found


def settle_vocabulary(tensors: dict[str, Tensor], draft_size: int, size: int, where: str | Path) -> None:
    """Check `d2t` and `t2d`, and keep only the `d2t` of a reduced vocabulary. draft_size, size: Vd and V.

    Raises ValueError for offsets that are not whole, that lead to no tokens or to one token twice, or that a full vocabulary
    cannot have, and for a `t2d` that names other tokens.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    tokens, wrong = torch.arange(draft_size), ""
    if d2t is not None:
        offsets = d2t.to(torch.int64)
        tokens = tokens + offsets
        if not torch.equal(offsets.to(d2t.dtype), d2t):
            wrong = "it holds fractions, which are no offsets of token ids; write the checkpoint again in int64"
        elif int(tokens.min()) < 0 or int(tokens.max()) >= size or len(tokens.unique()) != draft_size:
            wrong = (
                f"its ids are not {draft_size} different tokens of the target's {size}; each of its numbers has to be the "
                "offset from a token of the draft to the target's"
            )
        elif draft_size == size and bool(offsets.any()):
            wrong = "its offsets exchange tokens of a full vocabulary; expected zeros"
        if wrong:
            raise ValueError(f"draft: {where}: d2t: {wrong}")
        if draft_size != size:
            tensors["d2t"] = offsets
    if t2d is not None and not torch.equal(t2d.bool(), _named(tokens, size)):
        raise ValueError(f"draft: {where} holds t2d and d2t that name different tokens")


Opened = Callable[[Path, PreTrainedModel], tuple[Checkpoint, Any]]
"""Reads the config of a folder with heads for a target: the checkpoint in its layout, and the `HeadConfig`."""


def require_head(path: str | Path, target: PreTrainedModel, kind: Any, opened: Opened, hub: Any) -> Any:
    """The config of a head at a path, after `_fitting`. kind: makes the head of a config. hub: download options."""
    folder = find_folder(path, **hub)
    with loading("draft", folder):
        return _fitting(folder, target, kind, opened)[1]


def load_head(path: str | Path, target: PreTrainedModel, kind: Any, opened: Opened, hub: Any, copies: Any) -> Any:
    """The head at a path, in the dtype of its `fc`. copies: tensors that are left out if they are the target's own, of its
    embeddings. An output embedding that the head needs and the files lack is the target's. Otherwise as `require_head`.

    Raises ValueError where `_fitting` and `settle_vocabulary` do, and for an output embedding that the head cannot have.
    """
    folder = find_folder(path, **hub)
    with loading("draft", folder):
        found, config, expected = _fitting(folder, target, kind, opened)
        tensors, modules = found.tensors(expected), (target.get_input_embeddings(), target.get_output_embeddings())
        settle_vocabulary(tensors, config.draft_vocab_size, config.vocab_size, folder)
        for (name, field), module in zip(_OWN.items(), modules, strict=True):
            if name in copies and name in tensors and _is_copy(tensors[name], module):
                del tensors[name]
                config = replace(config, **({field: False} if hasattr(config, field) else {}))
        head = kind(config).to(tensors["fc.weight"].dtype)
        output, own = "lm_head.weight", head.state_dict()
        if output in tensors.keys() - own.keys():
            raise ValueError(
                f"draft: {folder} holds {output}, which is not the target's; an {head.title} uses the target's"
            )
        if output in own.keys() - tensors.keys():
            tensors[output] = _output_of(modules[1], own[output].shape, folder)
        head.load_state_dict(tensors)
        return head.eval()


def _fitting(folder: Path, target: PreTrainedModel, kind: Any, opened: Opened) -> tuple[Checkpoint, Any, Any]:
    """What `opened` gives, and the shapes of the head's tensors; of what is there, too, of the maps of a reduced vocabulary and
    the output embedding, which a head with the whole one may have. Nothing is allocated.

    Raises ValueError for a config that does not fit the target, and for tensors that do not fit the config.
    """
    found, config = opened(folder, target)
    wanted, size, width = target.config.get_text_config(decoder=True), config.vocab_size, config.target_hidden_size
    if size != wanted.vocab_size:
        raise ValueError(f"draft: {folder} was made for a vocabulary of {size}; the target's has {wanted.vocab_size}")
    if width != (own := wanted.hidden_size):
        raise ValueError(f"draft: {folder} was made for hidden states of width {width}; the target's have {own}")
    if min(config.taps) < 1 or max(config.taps) > wanted.num_hidden_layers:
        raise ValueError(
            f"draft: {folder} reads the hidden states {config.taps}; those of the target are 1 .. {wanted.num_hidden_layers}"
        )
    with torch.device("meta"):
        outline = kind(config)
    expected, optional = shapes_by_name(outline.state_dict()), Parts(t2d=(size,))
    if outline.d2t is None:
        optional |= {"d2t": (size,), "lm_head.weight": (size, config.hidden_size)}
        expected.pop("lm_head.weight", None)
    found.require(expected, optional)
    return found, config, expected | optional


def _is_copy(tensor: Tensor, module: Any) -> bool:
    """Whether a stored tensor is the weight of the target's module."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.is_meta or weight.shape != tensor.shape or not weight.is_floating_point():
        return False
    return torch.equal(weight.detach().cpu().to(tensor.dtype), tensor)


def _output_of(module: Any, shape: Sequence[int], folder: Path) -> Tensor:
    """A copy of the target's output embedding, [V, H]. Raises ValueError for one that a head cannot have."""
    weight: Any = getattr(module, "weight", None)
    plain = isinstance(weight, Tensor) and weight.is_floating_point() and getattr(module, "bias", None) is None
    if not plain or weight.shape != shape:
        raise ValueError(
            f"draft: {folder} lacks lm_head.weight, and the target's output embedding cannot stand for it: expected floating "
            f"point numbers of shape {list(shape)} without a bias"
        )
    return weight.detach().cpu()  # type: ignore[no-any-return]


def tensors_of(head: Any) -> dict[str, Tensor]:
    """What is stored of a head: its tensors, and the `t2d` of a reduced vocabulary."""
    named = {} if head.d2t is None else {"t2d": _named(head.draft_tokens, head.config.vocab_size)}
    return {**head.state_dict(), **named}


def _named(tokens: Tensor, size: int) -> Tensor:
    """[V] bool: which of the target's tokens are among these."""
    return torch.zeros(size, dtype=torch.bool).index_fill(0, tokens.cpu(), True)


def write_head(folder: str | Path, fields: Any, tensors: Mapping[str, Tensor], file: str = FILES[0]) -> None:
    """Write config.json and the tensors; a file that is not safetensors is pickled."""
    path = Path(folder) / file
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path.with_name("config.json"), fields)
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    if path.suffix == ".safetensors":
        save_file(held, path, metadata={"format": "pt"})
    else:
        torch.save(held, path)
