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
from copy import deepcopy
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ... import zoo
from ...loading import gguf
from ...loading.expanded import grouped
from ...loading.files import UNLISTED, fields_of, files_by_tensor, headers, loading, local_folder, shapes_of, write_json
from ..eagle.formats import as_speculators
from ..shared.files import Checkpoint, Parts, find_folder, pieces, refuse
from .layouts import BUILT_AS, FAMILIES, GGUF, GGUF_KINDS, MARKS, REFUSED, SPECULATORS, MTPLayout

_NESTED = ("model.", "model.language_model.", "language_model.model.")  # where a vision model keeps its language model
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Fields of a config that tell how many MTP layers its checkpoint has."""
_MOST = 64  # layers that a config may announce
_ORIGINAL = (
    "Quantized and re-packed copies often lack them or pack them differently; name the original repository: "
    'draft="mtp:ORIGINAL_ID"'
)
Located = tuple[MTPLayout, int, list[str]]
"""A layout, the number of MTP layers, and the names of their tensors."""


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
    found, number, expected = _checked(path, config, hub)
    with loading("draft", found.folder):
        tensors = found.tensors(expected, config.dtype or torch.bfloat16)
    layers: list[dict[str, Tensor]] = [{} for _ in range(number)]
    for name, tensor in tensors.items():
        k, _, own = name.partition(".")
        layers[int(k)][own] = _embedding_first(found.layout, own, tensor)
    return layers


def stored_mtp(path: str | Path, config: PreTrainedConfig, **hub: Any) -> tuple[int, int]:
    """How many MTP layers a checkpoint has, and how many numbers are in them: from its headers, so that nothing large is
    downloaded.

    path, config, hub: as for `read_mtp`. Raises ValueError where that does because of names and shapes, and OSError for an
    unknown Hub id.
    """
    found, number, expected = _checked(path, config, hub, headers_only=True)
    return number, sum(map(prod, found.layout.all_parts(expected).values()))


def why_no_mtp(path: str | Path, config: PreTrainedConfig) -> str | None:
    """Why the MTP layers of a checkpoint cannot be used, from its index and headers: None if they can be, and "" if nothing
    points to any. path: a folder, a GGUF file, a `zoo:` name, or a Hub id, of which only the local copy is read. config: the
    target's text config."""
    given = gguf.file_of(path) or local_folder(zoo.resolve(str(path)))
    try:
        if given is not None:
            _checked(given, config, {})
        return None if given is not None else ""
    except NoMTPLayers:
        return ""
    except FileNotFoundError as error:  # what the Hub's cache lacks is downloaded
        return None if given and given.parent.name == "snapshots" else str(error).removeprefix("draft: ")
    except ValueError as error:
        return str(error).removeprefix("draft: ")


def write_mtp(layers: Sequence[Mapping[str, Tensor]], config: PreTrainedConfig, folder: str | Path) -> None:
    """Write MTP layers as config.json and model.safetensors, from which `read_mtp` gives the same tensors.

    Targets of a family with MTP layers get the names of that family, all others speculators' format "mtp". (speculators itself
    runs one layer, of few architectures.)

    layers: as `read_mtp` gives them. config: the target's text config.

    Raises ValueError for a tensor that the format has no name for, for one that it requires, and for different ones where the
    format has one for all layers.
    """
    layout, required, folder = _family(config), written_names(config), Path(folder)
    held: dict[str, Tensor] = {}
    for k, tensors in enumerate(layers):
        given = {name for name in tensors if not name.startswith("layer.")}
        if given != required:
            raise ValueError(
                f"tensors: the format of {config.model_type} has {', '.join(sorted(required))} and layer.*; got "
                f"{', '.join(sorted(given))} and layer.*"
            )
        own = {f"{k}.{name}": _embedding_first(layout, name, tensor) for name, tensor in tensors.items()}
        for part, piece in pieces(layout, own).items():
            piece = piece.cpu().clone(memory_format=torch.contiguous_format)
            if not torch.equal(held.setdefault(part, piece), piece):
                raise ValueError(
                    f"tensors: the format of {config.model_type} has one {part} for all MTP layers; layer {k + 1} has another"
                )
    fields = json.loads(config.to_json_string())
    fields |= dict.fromkeys(fields.keys() & {*COUNTS}, len(layers))
    for name in ("architectures", "auto_map", "quantization_config"):
        fields.pop(name, None)
    folder.mkdir(parents=True, exist_ok=True)
    if config.model_type not in FAMILIES:
        counted = {"num_nextn_predict_layers": len(layers), "tie_word_embeddings": False}
        verifier = {"name_or_path": None, "architectures": list(config.architectures or [])}
        fields = as_speculators("mtp", "MTPDraftModel", counted, fields, 3, verifier)
    write_json(folder / "config.json", fields)
    save_file(held, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})


def written_names(config: PreTrainedConfig) -> set[str]:
    """The tensors that `write_mtp` takes besides `layer.*`. config: the target's text config."""
    return {f"{name}.weight" for name in _family(config).fixed}


def common_names(config: PreTrainedConfig) -> set[str]:
    """The norms and the fusion, by their names here without `.weight`, that all MTP layers of the target's family share."""
    layout = _family(config)
    return {name for name in layout.fixed if layout.stored(f"0.{name}.weight") == layout.stored(f"1.{name}.weight")}


def is_mtp(fields: Mapping[str, Any], folder: Path) -> bool:
    """Whether a folder holds MTP layers alone, as `write_mtp` writes them. fields: of its config.json."""
    if "speculators_model_type" in fields:
        return bool(fields["speculators_model_type"] == "mtp")
    kind, layers = fields.get("model_type"), fields.get("num_hidden_layers", fields.get("num_layers"))
    if not isinstance(kind, str) or kind not in FAMILIES or not isinstance(layers, int):
        return False
    files = files_by_tensor(folder)
    found = _located(fields, files, FAMILIES[kind], layers)
    return found is not None and set(found[2]) == files.keys()


class NoMTPLayers(ValueError):
    """A checkpoint without any sign of MTP layers."""


def _family(config: PreTrainedConfig) -> MTPLayout:
    """The layout in which MTP layers of a target are written."""
    return replace(FAMILIES.get(config.model_type, SPECULATORS), layers=config.num_hidden_layers)


def _checked(path: str | Path, config: Any, hub: Any, headers_only: bool = False) -> tuple[Checkpoint, int, Parts]:
    """The checkpoint with the tensors of its MTP layers alone, their number, and our tensors, of the kind of decoder layer that
    fits best. headers_only: of a Hub id, no weights are downloaded. Raises ValueError where `read_mtp` does."""
    file = gguf.file_of(path)
    with loading("draft", path):
        found, number = _in_folder(path, config, hub, headers_only) if file is None else _in_gguf(file, config)
        family: Any = found.layout
        stored, kinds = grouped(found.shapes).keys(), _kinds_of_layers(config)
        expected, width = Parts(), config.hidden_size
        for k in range(number):
            sizes = dict.fromkeys(family.fixed, (width,)) | {"fuse": (width, 2 * width)}
            of_kinds = [{f"{k}.{name}": size for name, size in kind.items()} for kind in kinds]
            expected |= {f"{k}.{name}.weight": size for name, size in sizes.items()}
            expected |= min(of_kinds, key=lambda kind: len(family.all_parts(kind).keys() ^ stored))
        found.require(expected)
    return found, number, expected


def _in_folder(path: str | Path, config: Any, hub: Mapping[str, Any], headers_only: bool) -> tuple[Checkpoint, int]:
    """The MTP layers in safetensors files. Raises ValueError if there are none, FileNotFoundError for a missing file."""
    remote = headers_only and not Path(zoo.resolve(str(path))).is_dir()
    files: Mapping[str, Any]
    for more in (SAFE_WEIGHTS_INDEX_NAME,), UNLISTED, (SAFE_WEIGHTS_NAME,):
        folder = find_folder(path, ["config.json", *(() if remote else more)], **hub)
        files = headers(str(path), str(path), "draft", hub) if remote else files_by_tensor(folder)
        fields = fields_of(folder / "config.json") if (folder / "config.json").is_file() else {}
        if remote or _located(fields, files, _layout_of(fields, config), config.num_hidden_layers):
            break
    layout, number, names = _require_mtp(folder, fields, files, config)
    if remote:
        shapes = {name: tuple(files[name].shape) for name in names}
        return Checkpoint(Path(path), {}, shapes, {}, layout, advice=f". {_ORIGINAL}"), number
    needed = sorted({files[name] for name in names})
    find_folder(path, needed, **hub)
    if missing := [file for file in needed if not (folder / file).is_file()]:
        raise FileNotFoundError(f"draft: {missing[0]} is missing in {folder}")
    held = {file: shapes_of(folder / file) for file in needed}
    shapes = {name: held[files[name]][name] for name in names}
    places = {name: folder / files[name] for name in names}
    return Checkpoint(folder, fields, shapes, places, layout, advice=f". {_ORIGINAL}"), number


def _in_gguf(file: Path, config: PreTrainedConfig) -> tuple[Checkpoint, int]:
    """The MTP layers in a GGUF file. Raises ValueError if there are none, or none that are supported."""
    (kind, announced, held), layers = gguf.stored(file), config.num_hidden_layers
    layout, number, names = _require_mtp(file, {COUNTS[0]: announced}, held, config, GGUF)
    if GGUF_KINDS.get(kind) != config.model_type:
        raise ValueError(
            f"draft: {file}: MTP layers in GGUF files are read of {', '.join(GGUF_KINDS)}, for targets of the same kind, not "
            f"of {kind} for {config.model_type}. {_ORIGINAL}"
        )

    def read(name: str) -> Tensor:
        numbers = torch.from_numpy(held[name].numbers())
        if "norm" in name or name.endswith(".bias"):
            return numbers - int("norm" in name and kind.startswith("qwen"))  # 1 is added to Qwen's
        numbers = numbers.mT if name.endswith(".attn_k_b.weight") else numbers
        return numbers.to(config.dtype or torch.bfloat16)

    shapes = {name: held[name].shape for name in names}
    shapes |= {n: (s[0], s[2], s[1]) for n, s in shapes.items() if n.endswith(".attn_k_b.weight")}
    layout = replace(layout, named=gguf.naming(kind, layers + number), config=config)  # type: ignore[call-arg]
    return Checkpoint(file, {}, shapes, {}, layout, read, f". {_ORIGINAL}"), number


def _announced(fields: Mapping[str, Any]) -> tuple[str, int]:
    """How many MTP layers a config announces, and where; ("", 0) for none."""
    parts = [part for part in (fields, fields.get("text_config")) if isinstance(part, dict)]
    found = [(name, n) for part in parts for name in COUNTS if type(n := part.get(name)) is int and 0 < n <= _MOST]
    return max(found, key=lambda at: at[1], default=("", 0))


def _layout_of(fields: Mapping[str, Any], config: PreTrainedConfig) -> MTPLayout | None:
    return SPECULATORS if fields.get("speculators_model_type") == "mtp" else FAMILIES.get(config.model_type)


def _require_mtp(where: Path, fields: Any, names: Iterable[str], config: Any, layout: Any = None) -> Located:
    """`_located`; by default in the layout of the family. Raises ValueError if there are no MTP layers, or none that are
    supported."""
    refuse(where, [f"{config.model_type} {name}" for name in names], REFUSED)
    if getattr(config, "mtp_use_dedicated_embeddings", False):
        raise ValueError(f"draft: {where}: MTP layers with an embedding of their own are not supported")
    layout = layout or _layout_of(fields, config)
    if found := _located(fields, names, layout, config.num_hidden_layers):
        return found
    if marks := sorted(name for name in names if re.fullmatch(MARKS, name)):
        raise ValueError(
            f"draft: {where} holds {marks[0]} and {len(marks) - 1} more tensors of MTP layers, in a layout that is not known "
            f"for a model of type {config.model_type}"
        )
    key, count = _announced(fields)
    if layout and count:
        raise ValueError(
            f"draft: {where} announces {count} MTP layer{'s' * (count > 1)} ({key}), but none of its files holds their "
            f"tensors. {_ORIGINAL}"
        )
    raise NoMTPLayers(f"draft: {where} holds no MTP layers for a model of type {config.model_type}. {_ORIGINAL}")


def _located(fields: Mapping[str, Any], files: Iterable[str], layout: MTPLayout | None, layers: int) -> Located | None:
    """The layout with the checkpoint's root, the number of MTP layers, at least one, and their tensors; None if there are none.

    fields: of config.json. files: the names of all tensors. layers: of the target.
    """
    layout = layout or MTPLayout()
    for start in _NESTED:
        found = replace(layout, layers=layers, root=re.sub(r"^model\.", start, layout.root))
        marks = tuple(found.placed(f"{name}.", 0) for name in found.places[:3])
        if any(name.startswith(marks) for name in files):  # not layers of a deeper model that has the same names
            break
    else:
        return None
    pattern = re.compile(re.sub(r"\\{[kn]\\}", r"(\\d+)", re.escape(found.root + found.layer)))
    first = layers if "{n}" in found.root else 0
    numbers = [int(match[1]) - first for name in files if (match := pattern.match(name))]
    number = max([0, *numbers, _announced(fields)[1] - 1]) + 1
    begins = tuple(found.placed("", k) for k in range(number))
    copies = {found.placed(name, k) for k in range(number) for name in found.copies}
    own = [n for n in files if n.startswith(begins) and n not in copies and not n.endswith(".inv_freq")]
    return replace(found, stacked=any(re.search(r"\.experts\.(gate_up|down)_proj", n) for n in own)), number, own


def _kinds_of_layers(config: PreTrainedConfig) -> list[Parts]:
    """The shapes of the tensors, as `layer.NAME`, of each kind of decoder layer of a model; nothing is allocated."""
    config = deepcopy(config)
    if config.model_type in BUILT_AS:
        kind = BUILT_AS[config.model_type]
        names = AutoConfig.for_model(kind).to_dict().keys() - {"model_type"}
        config = AutoConfig.for_model(kind, **{name: getattr(config, name) for name in names if hasattr(config, name)})
    try:
        with torch.device("meta"):
            layers = AutoModel.from_config(config, trust_remote_code=False).layers
    except (ValueError, AttributeError) as error:
        raise ValueError(f"draft: transformers has no decoder layers of type {config.model_type}") from error
    kinds = [{f"layer.{name}": tuple(t.shape) for name, t in layer.state_dict().items()} for layer in layers]
    return [kind for place, kind in enumerate(kinds) if kind not in kinds[:place]]


def _embedding_first(layout: Any, name: str, tensor: Tensor) -> Tensor:
    """The columns of the embedding first in `fuse.weight`, [H, 2H], or back in the order of the layout; others as they are."""
    return tensor.roll(len(tensor), 1) if layout.hidden_first and name == "fuse.weight" else tensor
