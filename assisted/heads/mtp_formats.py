"""Reads and writes the multi-token prediction (MTP) layers that published checkpoints ship beside their model
(DeepSeek-V3, arXiv 2412.19437): the names, column order and storage of each family, all brought to one set of names. Reading is
strict and opens only the files that hold MTP tensors; norm weights stay as they are stored, also where a family multiplies by
1 + w. Knows nothing of how the layers are run.

No published checkpoint was available for a test: the layouts are those that vLLM, speculators and transformers read, tested on
synthetic files, which transformers' loader (glm4_moe, deepseek_v3) and speculators (Qwen) read the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .. import zoo
from ..loading.files import fields_of, files_by_tensor, headers, loading, local_folder, write_json
from .files import find_folder, require_tensors

__all__ = ["common_names", "has_mtp", "is_mtp", "read_mtp", "stored_mtp", "write_mtp", "written_names"]

_BLOCK = 128  # the side of the squares of an FP8 weight that share a scale
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
class _Layout:
    """How a family names an MTP layer. {k} counts the MTP layers from 0, {n} goes on from the target's layers."""

    root: str  # the beginning of all names
    layer: str  # all others follow the root
    embed_norm: str
    hidden_norm: str
    fuse: str
    end_norm: str  # "" if there is none
    hidden_first: bool = False  # the order of the columns of `fuse`
    stacked: bool = False  # whether experts are written as one tensor
    copies: tuple[str, ...] = ()  # of the target's embedding and head
    renamed: tuple[tuple[str, str], ...] = ()  # beginnings of names in transformers' layer and in the checkpoint

    def stored(self, name: str, k: int, layers: int) -> str:
        """The name in the checkpoint. layers: of the target."""
        part, dot, rest = name.partition(".")
        if part == "layer":
            rest = next((new + rest.removeprefix(old) for old, new in self.renamed if rest.startswith(old)), rest)
            rest = self.layer + rest
        else:
            rest = getattr(self, part) + dot + rest
        return (self.root + rest).format(k=k, n=layers + k)

    def parts(
        self, name: str, shape: tuple[int, ...], k: int, layers: int, stacked: bool
    ) -> dict[str, tuple[int, ...]]:
        """The tensors of a checkpoint that make one of ours: itself, or those of each expert, in the order of their rows."""
        experts = re.fullmatch(r"layer\.mlp\.experts\.(gate_up|down)_proj", name)
        if stacked or experts is None:
            return {self.stored(name, k, layers): shape}
        kinds = experts[1].split("_")
        names = (f"layer.mlp.experts.{e}.{kind}_proj.weight" for e in range(shape[0]) for kind in kinds)
        return dict.fromkeys((self.stored(part, k, layers) for part in names), (shape[1] // len(kinds), shape[2]))


_NEXTN = _Layout(
    *("model.layers.{n}.", "", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    copies=("embed_tokens.weight", "shared_head.head.weight"),
)
_QWEN = _Layout("mtp.", "layers.{k}.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_SPECULATORS = _Layout(
    *("mtp_layers.{k}.", "", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), stacked=True
)
_ERNIE = _Layout("model.mtp_", "block.{k}.", "emb_norm.{k}", "hidden_norm.{k}", "linear_proj.{k}", "")
_FAMILIES = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), _NEXTN),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "exaone4"), _QWEN),
    "qwen3_5_moe_text": replace(_QWEN, stacked=True),
    "exaone_moe": replace(_QWEN, renamed=(("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"),)),
    "hy_v3": replace(
        _NEXTN,
        end_norm="final_layernorm",
        copies=(*_NEXTN.copies, "shared_head.weight"),
        renamed=(
            ("mlp.gate.", "mlp.router.gate."),
            ("mlp.e_score_correction_bias", "mlp.expert_bias"),
            ("mlp.shared_experts.", "mlp.shared_mlp."),
        ),
    ),
    "mimo": replace(_SPECULATORS, root="model.mtp_layers.{k}.", hidden_first=True, stacked=False),
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": replace(_ERNIE, renamed=(("mlp.gate.moe_statics.", "mlp.moe_statics."),)),
    "longcat_flash": _Layout(
        *("model.mtp.", "layers.{k}.", "layers.{k}.enorm.m", "layers.{k}.hnorm.m", "layers.{k}.eh_proj", "norm"),
        copies=("embed_tokens.weight",),
        renamed=(("mlp.", "transformer_layer.mlp."),),
    ),
}
"""By the model_type of the text config."""
_BUILT_AS = {"mimo": "qwen2", "longcat_flash": "deepseek_v3"}
"""Families whose MTP layer is a layer of another class: transformers has none for MiMo, and LongCat's is a dense one."""
_REFUSED = (
    ("mimo_v2", r"model\.mtp\.", "the MTP layers of MiMo-V2 (model.mtp.*) are not supported"),
    ("nemotron_h", r"mtp\.layers\.", "the MTP layers of Nemotron-H (mtp_layers_block_type) are not supported"),
    ("deepseek_v4", r"mtp\.\d+\.[eh]_proj\.", "the MTP layers of DeepSeek-V4 (mtp.0.e_proj, h_proj) are not supported"),
    ("deepseek_v4", r"mtp\.", "mtp.* without enorm is a DSpark drafter and not an MTP layer"),
)
"""The beginning of a model_type, the tensors, and what to say of them."""


def read_mtp(path: str | Path, config: PreTrainedConfig, **hub: Any) -> list[dict[str, Tensor]]:
    """The MTP layers of a checkpoint, in their order, on the CPU.

    Of each layer: `embed_norm.weight` and `hidden_norm.weight` [H], `fuse.weight` [H, 2H] with the columns of the embedding
    first, `end_norm.weight` [H] where the family has one, and `layer.*` with the names that the decoder layer of transformers
    has, experts stacked. FP8 weights are returned in the config's dtype, else bfloat16; all others as stored. Copies of the
    target's embedding and head are left out. Norms and `fuse` that a family has once are in each layer's dict.

    path: a folder, a `zoo:` name or a Hub id, of which only the files that hold MTP tensors are downloaded. config: the
    target's text config. hub: download options.

    Raises ValueError for a checkpoint without MTP tensors or with some that are not supported, and for a missing, unknown or
    misshapen tensor, with its name.
    """
    folder = find_folder(path, ["config.json", SAFE_WEIGHTS_INDEX_NAME], **hub)
    if not (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        folder = find_folder(path, ["config.json", SAFE_WEIGHTS_NAME], **hub)
    with loading("draft", folder):
        layout, number, files = _found(folder, files_by_tensor(folder), config)
    find_folder(path, sorted(set(files.values())), **hub)
    with loading("draft", folder), ExitStack() as stack:
        opened = {file: stack.enter_context(safe_open(folder / file, "pt")) for file in sorted(set(files.values()))}
        found = {name: tuple(opened[file].get_slice(name).get_shape()) for name, file in files.items()}
        wanted, scales = _checked(folder, layout, number, config, found)

        def read(name: str) -> Tensor:
            tensor: Tensor = opened[files[name]].get_tensor(name)
            if (scaled := _scale(name)) in scales:
                scale = opened[files[scaled]].get_tensor(scaled)
                return _dequantized(tensor, scale, config.dtype or torch.bfloat16)
            if not tensor.is_floating_point() or tensor.element_size() == 1:
                raise ValueError(f"draft: {folder} holds {name} in {tensor.dtype} without its scales. {_ORIGINAL}")
            return tensor

        layers = [
            {name: _joined([read(part) for part in parts], shape) for name, (shape, parts) in ours.items()}
            for ours in wanted
        ]
    for layer in layers:
        layer["fuse.weight"] = _embedding_first(layout, layer["fuse.weight"])
    return layers


def stored_mtp(path: str | Path, config: PreTrainedConfig, **hub: Any) -> tuple[int, int]:
    """How many MTP layers a checkpoint has, and how many numbers are in them: from its headers, so that nothing large is
    downloaded.

    path, config, hub: as for `read_mtp`. Raises ValueError where that does because of names and shapes, and OSError for an
    unknown Hub id.
    """
    folder = find_folder(path, ["config.json"], **hub)
    given = zoo.resolve(str(path))
    tensors = headers(given, str(path), "draft", hub)
    with loading("draft", given):
        layout, number, files = _found(folder, dict.fromkeys(tensors, ""), config)
        wanted, _ = _checked(given, layout, number, config, {name: tuple(tensors[name].shape) for name in files})
    names = {part for ours in wanted for _, parts in ours.values() for part in parts}
    return number, sum(tensors[name].parameter_count for name in names)


def write_mtp(layers: Sequence[Mapping[str, Tensor]], config: PreTrainedConfig, folder: str | Path) -> None:
    """Write MTP layers as config.json and model.safetensors, from which `read_mtp` gives the same tensors.

    Targets of a family with MTP layers get the names of that family, all others speculators' format "mtp". (speculators itself
    runs one layer, of few architectures.)

    layers: as `read_mtp` gives them. config: the target's text config.

    Raises ValueError for a tensor that the format has no name for, for one that it requires, and for different ones where the
    format has one for all layers.
    """
    layout, folder = _FAMILIES.get(config.model_type, _SPECULATORS), Path(folder)
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
        folder / "config.json", _as_speculators(fields, config, len(layers)) if layout is _SPECULATORS else fields
    )
    save_file(held, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})


def written_names(config: PreTrainedConfig) -> set[str]:
    """The tensors that `write_mtp` takes besides `layer.*`. config: the target's text config."""
    layout = _FAMILIES.get(config.model_type, _SPECULATORS)
    return {f"{name}.weight" for name in _FIXED if getattr(layout, name)}


def common_names(config: PreTrainedConfig) -> set[str]:
    """The norms and the fusion, by their names here without `.weight`, that all MTP layers of the target's family share."""
    layout = _FAMILIES.get(config.model_type, _SPECULATORS)
    parts = [name for name in _FIXED if getattr(layout, name)]
    return {name for name in parts if layout.stored(f"{name}.weight", 0, 1) == layout.stored(f"{name}.weight", 1, 1)}


def is_mtp(fields: Mapping[str, Any], folder: Path) -> bool:
    """Whether a folder holds MTP layers alone, as `write_mtp` writes them. fields: of its config.json."""
    if "speculators_model_type" in fields:
        return bool(fields["speculators_model_type"] == "mtp")
    kind, layers = fields.get("model_type"), fields.get("num_hidden_layers", fields.get("num_layers"))
    if not isinstance(kind, str) or kind not in _FAMILIES or not isinstance(layers, int):
        return False
    files = files_by_tensor(folder)
    own = _located(folder, files, kind, layers)[2]
    return bool(own) and own.keys() == files.keys()


def has_mtp(path: str | Path, config: PreTrainedConfig) -> bool:
    """Whether a checkpoint holds MTP layers that are supported, from its index or header. path: a folder, a `zoo:` name, or a
    Hub id, of which only the local copy is read. config: the target's text config."""
    folder = local_folder(zoo.resolve(str(path)))
    if folder is None:
        return False
    return bool(_located(folder, files_by_tensor(folder), config.model_type, config.num_hidden_layers)[2])


def _found(folder: Path, files: Mapping[str, str], config: PreTrainedConfig) -> tuple[_Layout, int, dict[str, str]]:
    """`_located`. Raises ValueError if there are no MTP layers, or none that are supported."""
    _require_supported(folder, files, config)
    layout, number, own = _located(folder, files, config.model_type, config.num_hidden_layers)
    if layout is None or not own:
        raise ValueError(f"draft: {folder} holds no MTP layers for a model of type {config.model_type}. {_ORIGINAL}")
    return layout, number, own


def _checked(
    where: str | Path, layout: _Layout, number: int, config: PreTrainedConfig, found: Shapes
) -> tuple[list[Wanted], Shapes]:
    """What each MTP layer needs of the tensors found, and the scales among these. Raises ValueError with the name of a tensor
    that is missing, unknown, misshapen or packed."""
    kinds = _kinds_of_layers(config)
    wanted = [_wanted(layout, k, config, kinds, found) for k in range(number)]
    expected = {part: shape for ours in wanted for _, parts in ours.values() for part, shape in parts.items()}
    scales = {_scale(name): _blocks(shape) for name, shape in expected.items() if _scale(name) in found}
    if packed := sorted(name for name in found.keys() - expected.keys() - scales.keys() if _PACKED.search(name)):
        raise ValueError(f"draft: {where} holds {packed[0]}, of a quantization that cannot be read. {_ORIGINAL}")
    require_tensors(found, expected | scales, where)
    return wanted, scales


def _located(
    folder: Path, files: Mapping[str, str], kind: str, layers: int
) -> tuple[_Layout | None, int, dict[str, str]]:
    """The layout of a checkpoint, the number of its MTP layers, and the file of each of their tensors.

    folder: with its config.json. files: of all its tensors. kind, layers: the target's model_type and number of layers.
    """
    layout = _FAMILIES.get(kind)
    fields = fields_of(folder / "config.json") if (folder / "config.json").is_file() else {}
    if fields.get("speculators_model_type") == "mtp":
        layout = _SPECULATORS
    if layout is None:
        return None, 0, {}

    def begins(text: str, k: int) -> list[str]:
        return [name for name in files if name.startswith(text.format(k=k, n=layers + k))]

    roots = (re.sub(r"^model\.", start, layout.root) for start in _NESTED)
    layout = replace(layout, root=next((root for root in roots if begins(root, 0)), layout.root))
    number = _number(layout.root + layout.layer, layers, files, fields)
    copies = {(layout.root + name).format(k=k, n=layers + k) for k in range(number) for name in layout.copies}
    own = {name: files[name] for k in range(number) for name in begins(layout.root, k)}
    marks = tuple(layout.stored(f"{name}.", 0, layers) for name in _FIXED[:3])
    if not any(name.startswith(marks) for name in own):  # layers of a deeper model that has the same names
        return layout, 0, {}
    return layout, number, {n: file for n, file in own.items() if n not in copies and not n.endswith(".inv_freq")}


def _number(start: str, layers: int, names: Iterable[str], fields: Mapping[str, Any]) -> int:
    """How many MTP layers a checkpoint has or should have, at least one. start: of their names. layers: of the target. fields:
    of its config.json."""
    pattern = re.compile(re.sub(r"\\{[kn]\\}", r"(\\d+)", re.escape(start)))
    first = layers if "{n}" in start else 0
    found = [int(match[1]) - first for name in names if (match := pattern.match(name))]
    for part in (fields, fields.get("text_config")):
        said = [part.get(name) for name in COUNTS] if isinstance(part, dict) else []
        found += [count - 1 for count in said if isinstance(count, int) and count <= _MOST]
    return max([0, *found]) + 1


def _require_supported(folder: Path, names: Iterable[str], config: PreTrainedConfig) -> None:
    """Raises ValueError for MTP layers that are known to be different."""
    for kind, pattern, said in _REFUSED:
        if config.model_type.startswith(kind) and any(re.match(pattern, name) for name in names):
            raise ValueError(f"draft: {folder}: {said}")
    if getattr(config, "mtp_use_dedicated_embeddings", False):
        raise ValueError(f"draft: {folder}: MTP layers with an embedding of their own are not supported")


def _wanted(layout: _Layout, k: int, config: PreTrainedConfig, kinds: Iterable[Shapes], found: Iterable[str]) -> Wanted:
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
    if config.model_type in _BUILT_AS:
        kind = AutoConfig.for_model(_BUILT_AS[config.model_type])
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


def _embedding_first(layout: _Layout, fuse: Tensor) -> Tensor:
    """[H, 2H]: the columns of the embedding first, or back in the order of the layout."""
    return fuse.roll(fuse.shape[0], 1) if layout.hidden_first else fuse


def _scale(name: str) -> str:
    """The name of the scales of an FP8 weight."""
    return f"{name}_scale_inv"


def _blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of an FP8 weight."""
    return (*shape[:-2], *(-(-size // _BLOCK) for size in shape[-2:]))


def _dequantized(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """weight: [..., n, m]. scale: [..., ceil(n / 128), ceil(m / 128)], one for each square of it."""
    scale = scale.float()
    for axis in (-2, -1):
        scale = scale.repeat_interleave(_BLOCK, axis).narrow(axis, 0, weight.shape[axis])
    return (weight.float() * scale).to(dtype)


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
