"""Reads and writes the multi-token prediction (MTP) layers that published checkpoints ship beside their model
(DeepSeek-V3, arXiv 2412.19437): the names, column order and storage of each family, all brought to one set of names. Reading is
strict and opens only the files that hold MTP tensors, also one beside a quantized model's or a GGUF file; norm weights stay
as transformers stores them, also where a family multiplies by 1 + w. Knows nothing of how the layers are run.

No published checkpoint was available for a test: the layouts are those that vLLM, speculators and transformers read, tested on
synthetic files, which transformers' loader (glm4_moe, deepseek_v3) and speculators (Qwen) read the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .. import zoo
from ..loading import gguf
from ..loading.expanded import Group, expand, grouped, is_as_it_is, is_known
from ..loading.files import UNLISTED, fields_of, files_by_tensor, headers, loading, local_folder, stored_in, write_json
from .files import find_folder, require_tensors
from .mtp_layouts import BUILT_AS, FAMILIES, GGUF_COPIES, GGUF_KINDS, GGUF_NAMES, REFUSED, SPECULATORS, Layout

__all__ = ["common_names", "is_mtp", "read_mtp", "stored_mtp", "why_no_mtp", "write_mtp", "written_names"]

_PACKED = re.compile(r"packed|qweight|qzeros|g_idx|absmax|scale|\.biases$")
_NESTED = ("model.", "model.language_model.", "language_model.model.")  # where a vision model keeps its language model
_FIXED = ("embed_norm", "hidden_norm", "fuse", "end_norm")
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Fields of a config that tell how many MTP layers its checkpoint has."""
_MOST = 64  # layers that a config may announce
_ORIGINAL = (
    "Quantized and re-packed copies often lack them or pack them differently; name the original repository: "
    'draft="mtp:ORIGINAL_ID"'
)

Shapes = dict[str, tuple[int, ...]]
Wanted = dict[str, tuple[tuple[int, ...], Shapes]]
"""Of each of our tensors: its shape, and the parts of it that a checkpoint stores."""


@dataclass(frozen=True)
class _Found:
    """The MTP layers of a checkpoint: their layout and number, and of each of their tensors its shape."""

    where: str | Path
    layout: Layout
    number: int
    shapes: Shapes
    method: Mapping[str, Any] = field(default_factory=dict)  # the quantization_config
    read: Any = None  # gives a tensor by its name; None where only headers are read


def read_mtp(path: str | Path, config: PreTrainedConfig, **hub: Any) -> list[dict[str, Tensor]]:
    """The MTP layers of a checkpoint, in their order, on the CPU.

    Of each layer: `embed_norm.weight` and `hidden_norm.weight` [H], `fuse.weight` [H, 2H] with the columns of the embedding
    first, `end_norm.weight` [H] where the family has one, and `layer.*` with the names that the decoder layer of transformers
    has, experts stacked. Quantized weights are expanded, in the config's dtype, else bfloat16; all others are as stored. Copies
    of the target's embedding and head are left out. Norms and `fuse` that a family has once are in each layer's dict.

    path: a folder, a GGUF file, a `zoo:` name or a Hub id, of which only the files that hold MTP tensors are downloaded.
    config: the target's text config. hub: download options.

    Raises ValueError for a checkpoint without MTP tensors or with some that are not supported, and for a missing, unknown or
    misshapen tensor, with its name.
    """
    with ExitStack() as stack:
        file = gguf.file_of(path)
        found = _in_folder(path, config, stack, hub) if file is None else _in_gguf(file, config)
        stack.enter_context(loading("draft", found.where))
        wanted, groups = _checked(found, config)

        def read(name: str, shape: tuple[int, ...]) -> Tensor:
            parts = {role: found.read(stored) for role, stored in groups[name].items()}
            try:
                return expand(name, parts, shape, found.method, config.dtype or torch.bfloat16)
            except ValueError as error:
                raise ValueError(f"draft: {found.where}: {error}. {_ORIGINAL}") from error

        layers = [
            {name: _joined([read(*part) for part in parts.items()], shape) for name, (shape, parts) in ours.items()}
            for ours in wanted
        ]
    for layer in layers:
        layer["fuse.weight"] = _embedding_first(found.layout, layer["fuse.weight"])
    return layers


def stored_mtp(path: str | Path, config: PreTrainedConfig, **hub: Any) -> tuple[int, int]:
    """How many MTP layers a checkpoint has, and how many numbers are in them: from its headers, so that nothing large is
    downloaded.

    path, config, hub: as for `read_mtp`. Raises ValueError where that does because of names and shapes, and OSError for an
    unknown Hub id.
    """
    file = gguf.file_of(path)
    if file is not None:
        found = _in_gguf(file, config)
    else:
        folder, given = find_folder(path, ["config.json"], **hub), zoo.resolve(str(path))
        tensors = headers(given, str(path), "draft", hub)
        with loading("draft", given):
            layout, number, names = _require_mtp(folder, _fields(folder), tensors, config)
        found = _Found(given, layout, number, {name: tuple(tensors[name].shape) for name in names})
    with loading("draft", found.where):
        wanted, _ = _checked(found, config)
    parts = {name: prod(shape) for ours in wanted for _, parts in ours.values() for name, shape in parts.items()}
    return found.number, sum(parts.values())


def why_no_mtp(path: str | Path, config: PreTrainedConfig) -> str | None:
    """Why the MTP layers of a checkpoint cannot be used, from its index and headers: None if they can be, and "" if nothing
    points to any. path: a folder, a GGUF file, a `zoo:` name, or a Hub id, of which only the local copy is read. config: the
    target's text config."""
    file, folder = gguf.file_of(path), local_folder(zoo.resolve(str(path)))
    try:
        if file is not None:
            return None if _checked(_in_gguf(file, config), config) else ""
        if folder is None:
            return ""
        files = files_by_tensor(folder)
        layout, number, names = _require_mtp(folder, _fields(folder), files, config)
        wanted = {folder / files[name] for name in names}
        if missing := sorted(place.name for place in wanted if not place.is_file()):
            return None if folder.parent.name == "snapshots" else f"{missing[0]} is missing in {folder}"
        stored = {name: tuple(t.shape) for place in wanted for name, t in stored_in(place).items() if name in names}
        _checked(_Found(folder, layout, number, stored), config)
    except NoMTPLayers:
        return ""
    except ValueError as error:
        return str(error).removeprefix("draft: ")
    return None


def write_mtp(layers: Sequence[Mapping[str, Tensor]], config: PreTrainedConfig, folder: str | Path) -> None:
    """Write MTP layers as config.json and model.safetensors, from which `read_mtp` gives the same tensors.

    Targets of a family with MTP layers get the names of that family, all others speculators' format "mtp". (speculators itself
    runs one layer, of few architectures.)

    layers: as `read_mtp` gives them. config: the target's text config.

    Raises ValueError for a tensor that the format has no name for, for one that it requires, and for different ones where the
    format has one for all layers.
    """
    layout, folder = FAMILIES.get(config.model_type, SPECULATORS), Path(folder)
    required = written_names(config)
    held: dict[str, Tensor] = {}
    for k, tensors in enumerate(layers):
        given = {name for name in tensors if not name.startswith("layer.")}
        if given != required:
            raise ValueError(
                f"tensors: the format of {config.model_type} has {', '.join(sorted(required))} and layer.*; got "
                f"{', '.join(sorted(given))} and layer.*"
            )
        for name, tensor in tensors.items():
            if name == "fuse.weight":
                tensor = _embedding_first(layout, tensor)
            parts = layout.parts(name, tuple(tensor.shape), k, config.num_hidden_layers, layout.stacked)
            pieces = tensor.detach().cpu().reshape(len(parts), *next(iter(parts.values()))).unbind()
            for part, piece in zip(parts, pieces, strict=True):
                if not torch.equal(held.setdefault(part, piece.clone(memory_format=torch.contiguous_format)), piece):
                    raise ValueError(
                        f"tensors: the format of {config.model_type} has one {part} for all MTP layers; layer {k + 1} has "
                        "another"
                    )
    fields = json.loads(config.to_json_string())
    fields |= dict.fromkeys(fields.keys() & {*COUNTS}, len(layers))
    for name in ("architectures", "auto_map", "quantization_config"):
        fields.pop(name, None)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        folder / "config.json", _as_speculators(fields, config, len(layers)) if layout is SPECULATORS else fields
    )
    save_file(held, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})


def written_names(config: PreTrainedConfig) -> set[str]:
    """The tensors that `write_mtp` takes besides `layer.*`. config: the target's text config."""
    layout = FAMILIES.get(config.model_type, SPECULATORS)
    return {f"{name}.weight" for name in _FIXED if getattr(layout, name)}


def common_names(config: PreTrainedConfig) -> set[str]:
    """The norms and the fusion, by their names here without `.weight`, that all MTP layers of the target's family share."""
    layout = FAMILIES.get(config.model_type, SPECULATORS)
    parts = [name for name in _FIXED if getattr(layout, name)]
    return {name for name in parts if layout.stored(f"{name}.weight", 0, 1) == layout.stored(f"{name}.weight", 1, 1)}


def is_mtp(fields: Mapping[str, Any], folder: Path) -> bool:
    """Whether a folder holds MTP layers alone, as `write_mtp` writes them. fields: of its config.json."""
    if "speculators_model_type" in fields:
        return bool(fields["speculators_model_type"] == "mtp")
    kind, layers = fields.get("model_type"), fields.get("num_hidden_layers", fields.get("num_layers"))
    if not isinstance(kind, str) or kind not in FAMILIES or not isinstance(layers, int):
        return False
    files = files_by_tensor(folder)
    own = _located(fields, files, kind, layers)[2]
    return bool(own) and set(own) == files.keys()


class NoMTPLayers(ValueError):
    """A checkpoint without any sign of MTP layers."""


def _in_folder(path: str | Path, config: PreTrainedConfig, stack: ExitStack, hub: Mapping[str, Any]) -> _Found:
    """The MTP layers in safetensors files, which the stack opens. Raises ValueError if there are none."""
    for patterns in (["config.json", SAFE_WEIGHTS_INDEX_NAME], [*UNLISTED], ["config.json", SAFE_WEIGHTS_NAME]):
        folder = find_folder(path, patterns, **hub)
        with loading("draft", folder):
            fields, files = _fields(folder), files_by_tensor(folder)
            if _located(fields, files, config.model_type, config.num_hidden_layers)[2]:
                break
    with loading("draft", folder):
        layout, number, names = _require_mtp(folder, fields, files, config)
    needed = sorted({files[name] for name in names})
    find_folder(path, needed, **hub)
    with loading("draft", folder):
        opened = {file: stack.enter_context(safe_open(folder / file, "pt")) for file in needed}
        shapes = {name: tuple(opened[files[name]].get_slice(name).get_shape()) for name in names}
    method = fields.get("quantization_config") or {}
    return _Found(folder, layout, number, shapes, method, lambda name: opened[files[name]].get_tensor(name))


def _in_gguf(file: Path, config: PreTrainedConfig) -> _Found:
    """The MTP layers in a GGUF file, under Qwen's names. Raises ValueError if there are none, or none that are supported."""
    kind, announced, held = gguf.stored(file)
    places: dict[str, list[gguf.Stored]] = {}
    for leaf in (*GGUF_NAMES, None):  # gates before what is up; then tensors without a name here
        for name, tensor in held.items():
            match = re.fullmatch(r"blk\.(\d+)\.(.+?)(\.weight)?", name)
            if match and (leaf == match[2] if leaf else match[2] not in (*GGUF_NAMES, *GGUF_COPIES)):
                ours = GGUF_NAMES.get(match[2], "layers.{k}." + match[2])
                ours += "" if ".experts." in ours else ".weight"
                if (k := int(match[1]) - config.num_hidden_layers) >= 0:
                    places.setdefault(f"mtp.{ours}".format(k=k), []).append(tensor)
    if places and (kind not in GGUF_KINDS or config.model_type not in GGUF_KINDS.values()):
        raise ValueError(
            f"draft: {file}: MTP layers in GGUF files are read of {', '.join(GGUF_KINDS)}, not of {kind}. {_ORIGINAL}"
        )
    layout, number, names = _require_mtp(file, {COUNTS[0]: announced}, places, config)

    def shape(name: str) -> tuple[int, ...]:
        first = places[name][0].shape
        if len(first) == 1:
            return first if "norm" in name else (1, *first)
        return (*first[:-2], first[-2] * len(places[name]), first[-1])

    def read(name: str) -> Tensor:
        parts = [torch.from_numpy(tensor.numbers()) for tensor in places[name]]
        if "norm" in name:
            return parts[0] - 1
        return torch.cat(parts, -2 if len(parts) > 1 else 0).reshape(shape(name)).to(config.dtype or torch.bfloat16)

    return _Found(file, layout, number, {name: shape(name) for name in names}, {}, read)


def _fields(folder: Path) -> dict[str, Any]:
    return fields_of(folder / "config.json") if (folder / "config.json").is_file() else {}


def _announced(fields: Mapping[str, Any]) -> tuple[str, int]:
    """How many MTP layers a config announces, and where; ("", 0) for none."""
    text = fields.get("text_config")
    parts = [fields, text if isinstance(text, dict) else {}]
    found = [(name, part.get(name)) for part in parts for name in COUNTS]
    return max(
        ((name, n) for name, n in found if type(n) is int and 0 < n <= _MOST), key=lambda at: at[1], default=("", 0)
    )


def _require_mtp(
    where: Path, fields: Mapping[str, Any], names: Iterable[str], config: PreTrainedConfig
) -> tuple[Layout, int, list[str]]:
    """`_located`. Raises ValueError if there are no MTP layers, or none that are supported."""
    for kind, pattern, said in REFUSED:
        if config.model_type.startswith(kind) and any(re.match(pattern, name) for name in names):
            raise ValueError(f"draft: {where}: {said}")
    if getattr(config, "mtp_use_dedicated_embeddings", False):
        raise ValueError(f"draft: {where}: MTP layers with an embedding of their own are not supported")
    layout, number, own = _located(fields, names, config.model_type, config.num_hidden_layers)
    if layout is not None and own:
        return layout, number, own
    key, count = _announced(fields)
    if layout is not None and count:
        raise ValueError(
            f"draft: {where} announces {count} MTP layer{'s' * (count > 1)} ({key}), but none of its files holds their "
            f"tensors. {_ORIGINAL}"
        )
    raise NoMTPLayers(f"draft: {where} holds no MTP layers for a model of type {config.model_type}. {_ORIGINAL}")


def _checked(found: _Found, config: PreTrainedConfig) -> tuple[list[Wanted], dict[str, Group]]:
    """What each MTP layer needs, and the tensors that store each weight. Raises ValueError with the name of a tensor that is
    missing, unknown, misshapen or of an unknown quantization."""
    groups, kinds = grouped(found.shapes), _kinds_of_layers(config)
    wanted = [_wanted(found.layout, k, config, kinds, groups) for k in range(found.number)]
    expected = {part: shape for ours in wanted for _, parts in ours.values() for part, shape in parts.items()}
    odd = [group for name, group in groups.items() if name in expected and not is_known(group)]
    odd += [{"": name} for name in groups.keys() - expected.keys() if _PACKED.search(name)]
    if odd:
        names = sorted(name for group in odd for name in group.values())
        raise ValueError(f"draft: {found.where} holds {names[0]}, of a quantization that cannot be read. {_ORIGINAL}")
    as_they_are = {
        n: found.shapes[group[""]] if is_as_it_is(group) else expected.get(n, ()) for n, group in groups.items()
    }
    require_tensors(as_they_are, expected, found.where)
    return wanted, groups


def _located(
    fields: Mapping[str, Any], files: Iterable[str], kind: str, layers: int
) -> tuple[Layout | None, int, list[str]]:
    """The layout of a checkpoint, the number of its MTP layers, and their tensors.

    fields: of its config.json. files: the names of all its tensors. kind, layers: the target's model_type and number of layers.
    """
    layout = SPECULATORS if fields.get("speculators_model_type") == "mtp" else FAMILIES.get(kind)
    if layout is None:
        return None, 0, []

    def begins(text: str, k: int) -> list[str]:
        return [name for name in files if name.startswith(text.format(k=k, n=layers + k))]

    roots = (re.sub(r"^model\.", start, layout.root) for start in _NESTED)
    layout = replace(layout, root=next((root for root in roots if begins(root, 0)), layout.root))
    number = _number(layout.root + layout.layer, layers, files, fields)
    copies = {(layout.root + name).format(k=k, n=layers + k) for k in range(number) for name in layout.copies}
    own = [name for k in range(number) for name in begins(layout.root, k)]
    marks = tuple(layout.stored(f"{name}.", 0, layers) for name in _FIXED[:3])
    if not any(name.startswith(marks) for name in own):  # layers of a deeper model that has the same names
        return layout, 0, []
    return (
        layout,
        number,
        [name for name in dict.fromkeys(own) if name not in copies and not name.endswith(".inv_freq")],
    )


def _number(start: str, layers: int, names: Iterable[str], fields: Mapping[str, Any]) -> int:
    """How many MTP layers a checkpoint has or should have, at least one. start: of their names. layers: of the target. fields:
    of its config.json."""
    pattern = re.compile(re.sub(r"\\{[kn]\\}", r"(\\d+)", re.escape(start)))
    first = layers if "{n}" in start else 0
    found = [int(match[1]) - first for name in names if (match := pattern.match(name))]
    return max([0, *found, _announced(fields)[1] - 1]) + 1


def _wanted(layout: Layout, k: int, config: PreTrainedConfig, kinds: Iterable[Shapes], found: Iterable[str]) -> Wanted:
    """What MTP layer k needs, with the kind of decoder layer that fits the tensors in the checkpoint best."""
    layers, width, names = config.num_hidden_layers, config.hidden_size, set(found)
    fixed: Shapes = {f"{name}.weight": (width,) for name in _FIXED if getattr(layout, name)}
    fixed["fuse.weight"] = (width, 2 * width)

    def with_layer(kind: Shapes) -> Wanted:
        return {
            name: (shape, layout.parts(name, shape, k, layers, stacked=layout.stored(name, k, layers) in names))
            for name, shape in (fixed | kind).items()
        }

    def misfit(wanted: Wanted) -> int:
        return len({part for _, parts in wanted.values() for part in parts} ^ names)

    return min(map(with_layer, kinds), key=misfit)


def _kinds_of_layers(config: PreTrainedConfig) -> list[Shapes]:
    """The shapes of the tensors, as `layer.NAME`, of each kind of decoder layer of a model; nothing is allocated."""
    config = deepcopy(config)
    if config.model_type in BUILT_AS:
        kind = AutoConfig.for_model(BUILT_AS[config.model_type])
        given = {
            name: getattr(config, name) for name in kind.to_dict() if name != "model_type" and hasattr(config, name)
        }
        config = AutoConfig.for_model(kind.model_type, **given)
    try:
        with torch.device("meta"):
            layers = AutoModel.from_config(config, trust_remote_code=False).layers
    except (ValueError, AttributeError) as error:
        raise ValueError(f"draft: transformers has no decoder layers of type {config.model_type}") from error
    kinds = [{f"layer.{name}": tuple(t.shape) for name, t in layer.state_dict().items()} for layer in layers]
    return [kind for place, kind in enumerate(kinds) if kind not in kinds[:place]]


def _joined(parts: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    return torch.stack(parts).reshape(shape) if len(parts) > 1 else parts[0].reshape(shape)


def _embedding_first(layout: Layout, fuse: Tensor) -> Tensor:
    """[H, 2H]: the columns of the embedding first, or back in the order of the layout."""
    return fuse.roll(fuse.shape[0], 1) if layout.hidden_first else fuse


def _as_speculators(layer: dict[str, Any], config: PreTrainedConfig, number: int) -> dict[str, Any]:
    """config.json of speculators' format, with `layer` as the config of the decoder layer. number: of MTP layers."""
    return {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": "0.9.0",
        "num_nextn_predict_layers": number,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": None, "architectures": list(config.architectures or [])},
        },
    }
