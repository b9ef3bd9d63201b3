"""Reads and writes EAGLE heads as their trainers publish them. `LAYOUTS` lists how they name tensors; the rest says what a
config means, and which hidden states it names. Reading is strict.

No published checkpoint was available for a test: the layouts are those of the trainers' and the engines' sources.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.activations import ACT2FN

from ..loading.files import loading, require_sizes, shapes_of
from .base import StateHead
from .eagle import EagleHead
from .eagle_config import LAYER_FIELDS, SLIDING, EagleConfig, HeadConfig, default_taps
from .files import (
    FILES,
    Checkpoint,
    Layout,
    Shapes,
    agreed,
    best_fit,
    find_folder,
    is_copy,
    public_name,
    read_head,
    require_fitting,
    tensors_of,
    values_of,
    write_head,
)

__all__ = ["is_eagle", "load_eagle", "require_eagle", "save_eagle"]

_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "last_normed")
_KEYS = {
    "target_hidden_size": ("target_hidden_size",),
    "draft_vocab_size": ("draft_vocab_size",),
    **{name: (name,) for name in _SWITCHES},
    "mask_token_id": ("mask_token_id",),
    "parallel_tokens": ("parallel_tokens", "num_depths"),
}
"""The names in configs of what is in `EagleConfig`."""
_KINDS = ("eagle3", "peagle")  # of speculators
_TAPS = "eagle_aux_hidden_state_layer_ids"
VERSION = "0.9.0"  # of speculators, for the format written here

_SPECULATORS = Layout("an EAGLE-3 head of speculators", read_past=("verifier_norm.weight", "verifier_lm_head.weight"))
LAYOUTS = {
    1: (Layout("an EAGLE-1 head of its authors"),),
    3: (
        Layout("an EAGLE-3 head of ModelOpt, DeepSpec or SpecForge's P-EAGLE"),
        Layout("an EAGLE-3 head of its authors, SpecForge or TorchSpec", ((r"midlayer\.", "layers.0."),)),
        Layout("an EAGLE-3 head of NeMo Automodel", ((r"model\.", ""),)),
    ),
}
"""By version of EAGLE."""
_NAMES = {
    1: ("fc.weight", "fc.bias", "layers.0.mlp.up_proj.weight"),
    3: (
        *("fc.weight", "norm.weight", "lm_head.weight", "layers.0.mlp.up_proj.weight"),
        *("layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight"),
    ),
}
"""Tensors that tell the versions and the layouts apart."""
_OBJECT, _POSITIVE = "an object", "a positive number"
_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        ("rms_norm_eps", "rope_theta"), (_POSITIVE, lambda v: type(v) in (int, float) and 0 < v < math.inf)
    ),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "eagle_config"), (_OBJECT, lambda v: isinstance(v, dict))),
    "hidden_act": ("an activation that transformers knows", lambda v: str(v) in ACT2FN),
    "layer_types": ("a list", lambda v: isinstance(v, list)),
}
"""What values of a config have to be."""

Format = Literal["eagle", "speculators"]


def load_eagle(path: str | Path, target: PreTrainedModel, **hub: Any) -> EagleHead:
    """Load a head from a path (a folder, a `zoo:` name or a Hub id), in its stored dtype, on the CPU.

    The tensor names distinguish EAGLE-1 from EAGLE-3; config.json gives the rest. If it does not list the tapped layers of the
    target, they are 2, L // 2 and L - 3. A head with the target's vocabulary and without an output embedding gets a copy of the
    target's. hub: download options.

    Raises ValueError for a head made for a target of other sizes, and for a missing, unknown or misshapen tensor, with its
    name and the layout that fits best.
    """
    folder = find_folder(path, **hub)
    with loading("draft", folder):
        checkpoint, config = _checked(folder, target)
        tensors, output = read_head(checkpoint, config), target.get_output_embeddings()
        if config.version == 1:
            if (own := tensors.pop("lm_head.weight", None)) is not None and not is_copy(own, output):
                raise ValueError(
                    f"draft: {folder} holds lm_head.weight, which is not the target's; EAGLE-1 uses the target's"
                )
        elif "lm_head.weight" not in tensors:
            tensors["lm_head.weight"] = _output_of(output, config, folder)
        head = EagleHead(config).to(tensors["fc.weight"].dtype)
        head.load_state_dict(tensors)
        return head.eval()


def require_eagle(path: str | Path, target: PreTrainedModel, **hub: Any) -> None:
    """Check the head at a path, as `load_eagle` takes it, without reading its weights. target: may be on the meta device.
    hub: download options.

    Raises ValueError where `load_eagle` does, except for what only the weights show.
    """
    folder = find_folder(path, **hub)
    with loading("draft", folder):
        _checked(folder, target)


def is_eagle(fields: dict[str, Any], folder: Path) -> bool:
    """Whether a folder holds a head that `load_eagle` takes. fields: of its config.json.

    EAGLE-1 heads have the config of a one-layer Llama model and are recognized by their tensor names.
    """
    if "speculators_model_type" in fields:
        return fields["speculators_model_type"] in _KINDS
    if "Eagle" in str(fields.get("architectures")):
        return True
    if "dflash_config" in fields or "target_layer_ids" in fields:  # a block drafter
        return False
    if "draft_vocab_size" in fields or "eagle_config" in fields:
        return True
    file = next((folder / name for name in FILES if (folder / name).is_file()), None)
    return file is not None and {"fc.weight", "layers.0.mlp.up_proj.weight"} <= shapes_of(file).keys()


def _checked(folder: Path, target: PreTrainedModel) -> tuple[Checkpoint, EagleConfig]:
    """The checkpoint with our names, and the config.

    Nothing is allocated, so the sizes in config.json are compared with those of the tensors first.
    """
    found = Checkpoint.open(folder)
    fields, where, kind = found.fields, found.config_file, found.fields.get("speculators_model_type")
    if kind not in (None, *_KINDS):
        raise ValueError(f"draft: {folder} is a speculator of kind {kind!r}; only {' and '.join(_KINDS)} can be read")
    if fields.get("mask_token_id") is None and ("mask_hidden" in found.shapes or kind == "peagle"):
        raise ValueError(f"draft: {where} lacks mask_token_id, the mask token of a P-EAGLE head")
    wanted = target.config.get_text_config(decoder=True)
    require_fields(fields, found.shapes, where, wanted.num_hidden_layers)
    require_fields(fields.get("transformer_layer_config") or {}, found.shapes, where)
    layouts = (_SPECULATORS,) if kind else (*LAYOUTS[1], *LAYOUTS[3])
    found = found.under(best_fit(found.shapes, layouts, lambda layout: _NAMES[1 if layout in LAYOUTS[1] else 3]))
    config = _config_of(found, wanted)
    require_fitting(found, config, EagleHead, wanted)
    return found, config


def require_fields(fields: Mapping[str, Any], shapes: Shapes, where: Path, target_layers: int | None = None) -> None:
    """Check the values of a layer in config.json. target_layers: a number of layers that may be given in place of the head's.
    Raises ValueError with the file and the field."""
    if not isinstance(fields, dict):
        raise ValueError(f"draft: {where}: transformer_layer_config: {fields!r} is not an object")
    # a head may have no tensor of its vocabulary's size, which is compared with the target's
    size = fields.get("vocab_size")
    others = {name: value for name, value in fields.items() if name != "vocab_size"}
    for name, other in (("draft_vocab_size", size), ("num_hidden_layers", target_layers)):
        if others.get(name) == other:
            others.pop(name, None)
    require_sizes(others, dict(shapes), where, exact=True)  # type: ignore[arg-type]
    require_sizes({"vocab_size": size}, {}, where, exact=True)
    for name, (said, is_right) in _VALUES.items():
        if (value := fields.get(name)) is not None and not is_right(value):
            raise ValueError(f"draft: {where}: {name}: {value!r} is not {said}")
    for part in (fields, fields.get("eagle_config") or {}):
        for name in (_TAPS, "target_layer_ids"):
            taps = part.get(name)
            if taps is not None and not (isinstance(taps, list) and taps and all(type(tap) is int for tap in taps)):
                raise ValueError(f"draft: {where}: {name}: {taps!r} is not a list of layers")


def save_eagle(
    head: EagleHead, folder: str | Path, format: Format = "eagle", target: PreTrainedModel | None = None
) -> None:
    """Write config.json and model.safetensors into a folder; `load_eagle` restores the same head.

    format: "eagle", the format of EAGLE's authors, with the tapped layers as SpecForge and vLLM read them; or "speculators",
        which vLLM serves together with the target (EAGLE-3 only). The latter always contains an embedding.
    target: the head's target. "speculators" stores its name, unless that is a local folder, and its embedding if the head
        has none.

    Raises ValueError for a head that the format cannot represent.
    """
    tensors = tensors_of(head)
    if format == "eagle":
        fields = _as_eagle(head)
        if head.config.version == 3:
            tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in tensors.items()}
    elif format == "speculators":
        if head.config.version != 3:
            raise ValueError("format: 'speculators' supports only EAGLE-3 heads; write an EAGLE-1 head as 'eagle'")
        fields = _of_speculators(head, target)
        if "embed_tokens.weight" not in tensors:
            if target is None:
                raise ValueError("target: required, because this format contains an embedding and the head has none")
            with torch.no_grad():
                tensors["embed_tokens.weight"] = head.embed(torch.arange(head.config.vocab_size), target)
    else:
        raise ValueError(f"format: {format!r} is not known; 'eagle' or 'speculators'")
    write_head(folder, fields, tensors)


def _output_of(module: Any, config: EagleConfig, folder: Path) -> Tensor:
    """A copy of the target's output embedding, [V, H]. Raises ValueError for one that a head cannot have."""
    weight, shape = getattr(module, "weight", None), (config.vocab_size, config.hidden_size)
    plain = isinstance(weight, Tensor) and weight.is_floating_point() and getattr(module, "bias", None) is None
    if not plain or tuple(weight.shape) != shape:  # type: ignore[union-attr]
        raise ValueError(
            f"draft: {folder} lacks lm_head.weight, and the target's output embedding cannot stand for it: expected floating "
            f"point numbers of shape {list(shape)} without a bias"
        )
    return weight.detach().cpu()  # type: ignore[union-attr]


def _config_of(found: Checkpoint, wanted: Any) -> EagleConfig:
    """The config of any layout. wanted: the target's text config."""
    fields, names, layers = found.fields, found.shapes.keys(), wanted.num_hidden_layers
    of_speculators = "speculators_model_type" in fields
    inner = (fields.get("transformer_layer_config") or {}) if of_speculators else fields
    normed = any(name.endswith(".q_norm.weight") for name in names)
    layer = _of_layer(inner, inner.get("model_type", "llama") if of_speculators else "qwen3" if normed else "llama")
    if layer["num_hidden_layers"] == layers:  # some configs have the target's
        layer["num_hidden_layers"] = len({name.split(".")[1] for name in names if name.startswith("layers.")}) or 1
    for field, part in (("qkv_bias", "self_attn.q_proj"), ("o_bias", "self_attn.o_proj"), ("mlp_bias", "mlp.up_proj")):
        layer[field] |= field not in fields and f"layers.0.{part}.bias" in names
    embedding = "embed_tokens.weight" in names
    if found.layout in LAYOUTS[1]:
        return EagleConfig(1, taps=(layers,), fc_bias=fields.get("bias", True), own_embedding=embedding, **layer)
    taps, normed_last = _taps_of(fields, layers)
    said = {"last_normed": normed_last} | agreed(values_of(fields, "eagle_config"), _KEYS)
    if of_speculators:
        said.setdefault("draft_vocab_size", 32000)
        methods = (fields.get("speculators_config") or {}).get("proposal_methods") or [{}]
        if (tokens := methods[0].get("speculative_tokens")) is not None and "mask_token_id" in said:
            said.setdefault("parallel_tokens", tokens)
    said |= {name: bool(said.get(name, False)) for name in _SWITCHES}
    return EagleConfig(3, taps=taps, fc_bias="fc.bias" in names, own_embedding=embedding, **said, **layer)


def _taps_of(fields: Mapping[str, Any], layers: int) -> tuple[tuple[int, ...], bool]:
    """The tapped hidden states, and whether the last of the target's is normed, where a config does not say it itself.

    Ids at the top are those of hidden states, as vLLM counts them. Ids in `eagle_config` count layers if they begin with 0 or
    1, and hidden states otherwise, as SGLang decides since its pull request 25454 (2026-05-16) and as NVIDIA's ids for gpt-oss
    need it, which name the last state (its pull request 32334, 2026-07-24). Both engines, and the hooks of ModelOpt and NeMo
    Automodel, give the last layer's output before the final norm. DeepSpec counts layers and takes transformers' states.
    """
    top, nested = fields.get(_TAPS), (fields.get("eagle_config") or {}).get(_TAPS)
    if top is not None:
        return tuple(top), False
    if (ids := fields.get("target_layer_ids")) is not None:
        return tuple(tap + 1 for tap in ids), True
    if nested is None:
        return default_taps(layers), False
    # before it wrote both lists, this package wrote the second alone, with layers
    counts_layers = layers not in nested and (min(nested) <= 1 or "qkv_bias" in fields)
    return tuple(tap + 1 if counts_layers else tap for tap in nested), False


def _of_layer(fields: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The fields of an EagleConfig for its decoder layer; missing values get the default of the kind.

    Raises ValueError for a kind of layer that a head cannot have.
    """
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"draft: heads with layers of kind {kind!r} are not known; 'llama' or 'qwen3'")
    defaults: Any = LlamaConfig() if kind == "llama" else Qwen3Config()
    given = values_of(fields)
    values = {name: given.get(name, getattr(defaults, name)) for name in LAYER_FIELDS}
    size, heads = values["hidden_size"], values["num_attention_heads"]
    attention_bias, types = bool(given.get("attention_bias", False)), given.get("layer_types", [])
    return {
        **values,
        "layer": kind,
        "head_dim": given.get("head_dim") or (size // heads if kind == "llama" else defaults.head_dim),
        "num_key_value_heads": given.get("num_key_value_heads")
        or (heads if kind == "llama" else defaults.num_key_value_heads),
        "qkv_bias": bool(given.get("qkv_bias", attention_bias)),
        "o_bias": attention_bias,
        "mlp_bias": bool(given.get("mlp_bias", False)),
        "num_hidden_layers": given.get("num_hidden_layers", 1),
        "rope": rope_of(fields),
        **({"layer_types": tuple(types), "sliding_window": given.get("sliding_window")} if SLIDING in types else {}),
    }


def rope_of(fields: Mapping[str, Any], default: float = 10000.0) -> dict[str, Any]:
    """Rotary parameters in transformers' nested form, from either form. default: a missing theta."""
    values = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    kind = values.pop("type", "default")
    theta = values.get("rope_theta", fields.get("rope_theta"))
    return {"rope_type": kind, **values, "rope_theta": default if theta is None else float(theta)}


def _as_eagle(head: EagleHead) -> dict[str, Any]:
    config = head.config
    scaling = {name: value for name, value in config.rope.items() if name != "rope_theta"}
    fields = {
        "architectures": ["LlamaForCausalLM" if config.version == 1 else "LlamaForCausalLMEagle3"],
        "model_type": config.layer,
        **_layer_fields(config),
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        "qkv_bias": config.qkv_bias,
        # flat, for EAGLE's own code; transformers reads both forms
        "rope_theta": config.rope["rope_theta"],
        "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
        "torch_dtype": str(head.dtype).removeprefix("torch."),
    }
    if config.version == 1:
        return {**fields, "bias": config.fc_bias}
    counted = [tap - (min(config.taps) <= 2) for tap in config.taps]  # as SGLang tells layers from states: see _taps_of
    return {
        **fields,
        **_values(config),
        _TAPS: list(config.taps),
        "eagle_config": {"use_aux_hidden_state": True, _TAPS: counted},
    }


def _values(config: EagleConfig) -> dict[str, Any]:
    parallel = ("mask_token_id", "parallel_tokens") if config.mask_token_id is None else ()
    return {names[0]: getattr(config, field) for field, names in _KEYS.items() if field not in parallel}


def _of_speculators(head: EagleHead, target: PreTrainedModel | None) -> dict[str, Any]:
    config = head.config
    if config.qkv_bias != config.o_bias or config.fc_bias:
        raise ValueError(
            "format: 'speculators' supports no biases for queries, keys and values only, and none of fc; use 'eagle'"
        )
    parallel = config.mask_token_id is not None
    fields = {
        **_values(config),
        _TAPS: list(config.taps),
        "embed_requires_grad": parallel,
        "tie_word_embeddings": False,
    }
    layer = {"model_type": config.layer, "attention_bias": config.o_bias, "mlp_bias": config.mlp_bias}
    kind, architecture = ("peagle", "PEagleSpeculator") if parallel else ("eagle3", "Eagle3DraftModel")
    tokens = config.parallel_tokens if parallel else 3
    return as_speculators(head, kind, architecture, fields, layer, tokens, target)


def as_speculators(
    head: StateHead,
    kind: str,
    architecture: str,
    fields: Mapping[str, Any],
    layer: Mapping[str, Any],
    tokens: int,
    target: PreTrainedModel | None,
) -> dict[str, Any]:
    """config.json of speculators' format. kind, architecture: there. fields, layer: what is written besides, of the head and of
    its layers. tokens: of a draft. target: whose name is stored, and with it how engines are to draft."""
    config = head.config
    verifier: dict[str, Any] = {"name_or_path": None, "architectures": []}
    if target is not None:
        architectures = target.config.architectures or [type(target).__name__]
        verifier = {"name_or_path": public_name(target), "architectures": list(architectures)}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "dtype": str(head.dtype).removeprefix("torch."),
        **fields,
        "transformer_layer_config": {
            **_layer_fields(config),
            **layer,
            "rope_parameters": dict(config.rope),
            "tie_word_embeddings": False,
        },
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
    }


def _layer_fields(config: HeadConfig) -> dict[str, Any]:
    window = {"layer_types": list(config.kinds), "sliding_window": config.sliding_window} if config.slides else {}
    return {name: getattr(config, name) for name in LAYER_FIELDS} | window
