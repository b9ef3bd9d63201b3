"""Reads and writes published formats of EAGLE heads: SafeAILab's EAGLE-1 and EAGLE-3, SpecForge's, and speculators'. Covers
files, tensor names and the index conventions of each format. Reading is strict.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.activations import ACT2FN

from ..loading.files import fields_of, loading, require_sizes, shapes_of
from .base import StateHead
from .eagle import EagleHead
from .eagle_config import LAYER_FIELDS, EagleConfig, default_taps
from .files import find_file, find_folder, public_name, read_tensors, require_tensors

__all__ = ["is_eagle", "load_eagle", "require_eagle", "save_eagle"]

_FILES = ("model.safetensors", "pytorch_model.bin")
_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_PARALLEL = ("mask_token_id", "parallel_tokens")
_KINDS = ("eagle3", "peagle")  # of speculators
_TAPS = "eagle_aux_hidden_state_layer_ids"
VERSION = "0.9.0"  # of speculators, for the format written here

Format = Literal["eagle", "speculators"]
Shapes = Mapping[str, tuple[int, ...]]


def load_eagle(path: str | Path, target: PreTrainedModel, **hub: Any) -> EagleHead:
    """Load a head from a path (a folder, a `zoo:` name or a Hub id), in its stored dtype, on the CPU.

    The tensor names distinguish EAGLE-1 from EAGLE-3; config.json gives the rest. If it does not list the tapped layers of the
    target, they are 2, L // 2 and L - 3. hub: download options.

    Raises ValueError for a head made for a target of other sizes, and for a missing, unknown or misshapen tensor, with its
    name.
    """
    folder = find_folder(path, **hub)
    with loading("draft", folder):
        weights, config, own = _checked(folder, target)
        head = EagleHead(config)
        tensors = {own(name): tensor for name, tensor in read_tensors(weights).items()}
        known = tensors.pop("t2d", None)
        if not tensors["fc.weight"].is_floating_point():
            raise ValueError(
                f"draft: {weights} holds fc.weight in {tensors['fc.weight'].dtype}; floating point is expected"
            )
        head.to(tensors["fc.weight"].dtype)
        head.load_state_dict(tensors)
        if known is not None and not torch.equal(known.bool(), draft_mask(head)):
            raise ValueError(f"draft: {folder} holds t2d and d2t that name different tokens")
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
    if "draft_vocab_size" in fields:
        return True
    file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    return fields.get("num_hidden_layers") == 1 and file is not None and "fc.weight" in shapes_of(file)


def _checked(folder: Path, target: PreTrainedModel) -> tuple[Path, EagleConfig, Callable[[str], str]]:
    """The file of the weights, the config, and the head's name for each stored tensor.

    Nothing is allocated, so the sizes in config.json are compared with those of the tensors first.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"draft: {folder} holds no config.json")
    fields = fields_of(folder / "config.json")
    weights, shapes = find_file(folder, _FILES)
    kind = fields.get("speculators_model_type")
    if kind not in (None, *_KINDS):
        raise ValueError(f"draft: {folder} is a speculator of kind {kind!r}; only {' and '.join(_KINDS)} can be read")
    if fields.get("mask_token_id") is None and ("mask_hidden" in shapes or kind == "peagle"):
        raise ValueError(f"draft: {folder / 'config.json'} lacks mask_token_id, the mask token of a P-EAGLE head")
    require_fields(fields, shapes, folder / "config.json")
    require_fields(fields.get("transformer_layer_config") or {}, shapes, folder / "config.json")
    config = _config_of(fields, shapes, target)
    wanted = target.config.get_text_config(decoder=True)
    if config.vocab_size != wanted.vocab_size:
        raise ValueError(
            f"draft: {folder} was made for a vocabulary of {config.vocab_size}; the target's has {wanted.vocab_size}"
        )
    width = getattr(wanted, "hidden_size", config.target_hidden_size)
    if config.target_hidden_size != width:
        raise ValueError(
            f"draft: {folder} was made for hidden states of width {config.target_hidden_size}; the target's have {width}"
        )
    if max(config.taps) > wanted.num_hidden_layers:
        raise ValueError(
            f"draft: {folder} reads the hidden states {config.taps}; the target has {wanted.num_hidden_layers} layers"
        )
    with torch.device("meta"):
        outline = EagleHead(config)
    expected: dict[str, Any] = {name: tensor.shape for name, tensor in outline.state_dict().items()}
    if outline.d2t is not None:
        expected["t2d"] = (config.vocab_size,)

    def own(name: str) -> str:
        return _renamed(name, "midlayer.", "layers.0.") if kind is None else name

    require_tensors({own(name): shape for name, shape in shapes.items()}, expected, folder)
    return weights, config, own


def require_fields(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: Path) -> None:
    """Check the values of a layer in config.json. Raises ValueError with the file and the field."""

    def refuse(name: str, expected: str) -> None:
        raise ValueError(f"draft: {where}: {name}: {fields[name]!r} is not {expected}")

    if not isinstance(fields, dict):
        raise ValueError(f"draft: {where}: transformer_layer_config: {fields!r} is not an object")
    # an EAGLE-1 head may have no tensor of its vocabulary's size, which is compared with the target's
    others = {name: value for name, value in fields.items() if name != "vocab_size"}
    require_sizes(others, shapes, where, exact=True)
    require_sizes({"vocab_size": fields.get("vocab_size")}, {}, where, exact=True)
    for name in ("rms_norm_eps", "rope_theta"):
        value = fields.get(name)
        if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
            refuse(name, "a positive number")
    for name in ("rope_scaling", "rope_parameters", "eagle_config"):
        if not isinstance(fields.get(name) or {}, dict):
            refuse(name, "an object")
    if fields.get("hidden_act") is not None and str(fields["hidden_act"]) not in ACT2FN:
        refuse("hidden_act", "an activation that transformers knows")
    if not isinstance(fields.get("layer_types") or [], list):
        refuse("layer_types", "a list")
    for part in (fields, fields.get("eagle_config") or {}):
        taps = part.get(_TAPS)
        if taps is not None and not (isinstance(taps, list) and taps and all(type(tap) is int for tap in taps)):
            raise ValueError(f"draft: {where}: {_TAPS}: {taps!r} is not a list of layers")


def save_eagle(
    head: EagleHead, folder: str | Path, format: Format = "eagle", target: PreTrainedModel | None = None
) -> None:
    """Write config.json and model.safetensors into a folder; `load_eagle` restores the same head.

    format: "eagle", the format of EAGLE's authors, with the tapped layers as SpecForge writes them; or "speculators", which
        vLLM serves together with the target (EAGLE-3 only). The latter always contains an embedding.
    target: the head's target. "speculators" stores its name, unless that is a local folder, and its embedding if the head
        has none.

    Raises ValueError for a head that the format cannot represent.
    """
    folder = Path(folder)
    tensors = dict(head.state_dict())
    if head.d2t is not None:
        tensors["t2d"] = draft_mask(head)
    if format == "eagle":
        fields = _as_eagle(head)
        if head.config.version == 3:
            tensors = {_renamed(name, "layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    elif format == "speculators":
        if head.config.version != 3:
            raise ValueError("format: 'speculators' supports only EAGLE-3 heads; write an EAGLE-1 head as 'eagle'")
        fields = _as_speculators(head, target)
        if "embed_tokens.weight" not in tensors:
            if target is None:
                raise ValueError("target: required, because this format contains an embedding and the head has none")
            with torch.no_grad():
                tensors["embed_tokens.weight"] = head.embed(torch.arange(head.config.vocab_size), target)
    else:
        raise ValueError(f"format: {format!r} is not known; 'eagle' or 'speculators'")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})


def _config_of(fields: Mapping[str, Any], tensors: Shapes, target: PreTrainedModel) -> EagleConfig:
    """The config from the config.json of SafeAILab, of SpecForge or of speculators."""
    of_speculators = fields.get("speculators_model_type") is not None
    layers = target.config.get_text_config(decoder=True).num_hidden_layers
    embedding = "embed_tokens.weight" in tensors
    if of_speculators:
        inner = fields.get("transformer_layer_config") or {}
        layer = _of_layer(inner, inner.get("model_type", "llama"))
    else:
        layer = _of_layer(fields, "qwen3" if any(name.endswith(".q_norm.weight") for name in tensors) else "llama")
        if not any(name.startswith("midlayer.") for name in tensors):
            return EagleConfig(1, taps=(layers,), fc_bias=fields.get("bias", True), own_embedding=embedding, **layer)
    taps, counted = fields.get(_TAPS), (fields.get("eagle_config") or {}).get(_TAPS)
    if counted is not None and not of_speculators:
        taps = [place + 1 for place in counted]
    switches: dict[str, Any] = {name: bool(fields.get(name, False)) for name in _SWITCHES}
    return EagleConfig(
        version=3,
        taps=tuple(default_taps(layers) if taps is None else taps),
        target_hidden_size=fields.get("target_hidden_size"),
        draft_vocab_size=fields.get("draft_vocab_size", 32000 if of_speculators else None),
        own_embedding=embedding,
        **_parallel_fields(fields),
        **switches,
        **layer,
    )


def _of_layer(fields: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The fields of an EagleConfig for its decoder layer; missing values get the default of the kind.

    Raises ValueError for a kind of layer or a sliding window that a head cannot have.
    """
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"draft: heads with layers of kind {kind!r} are not known; 'llama' or 'qwen3'")
    if "sliding_attention" in (fields.get("layer_types") or ()):
        raise ValueError("draft: layer_types: heads with a sliding window are not known")
    defaults: Any = LlamaConfig() if kind == "llama" else Qwen3Config()

    def value(name: str) -> Any:
        found = fields.get(name)
        return getattr(defaults, name) if found is None else found

    size, heads = value("hidden_size"), value("num_attention_heads")
    few = fields.get("num_key_value_heads") or (heads if kind == "llama" else defaults.num_key_value_heads)
    attention_bias = bool(fields.get("attention_bias", False))
    return {
        **{name: value(name) for name in LAYER_FIELDS},
        "layer": kind,
        "head_dim": fields.get("head_dim") or (size // heads if kind == "llama" else defaults.head_dim),
        "num_key_value_heads": few,
        "qkv_bias": bool(fields.get("qkv_bias", attention_bias)),
        "o_bias": attention_bias,
        "mlp_bias": bool(fields.get("mlp_bias", False)),
        "num_hidden_layers": fields.get("num_hidden_layers", 1),
        "rope": rope_of(fields),
    }


def rope_of(fields: Mapping[str, Any], default: float = 10000.0) -> dict[str, Any]:
    """Rotary parameters in transformers' nested form, from either form. default: a missing theta."""
    values = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    kind = values.pop("type", "default")
    theta = values.get("rope_theta", fields.get("rope_theta"))
    return {"rope_type": kind, **values, "rope_theta": default if theta is None else float(theta)}


def _layer_fields(config: EagleConfig) -> dict[str, Any]:
    return {
        "model_type": config.layer,
        **{name: getattr(config, name) for name in LAYER_FIELDS},
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
    }


def _as_eagle(head: EagleHead) -> dict[str, Any]:
    config = head.config
    scaling = {name: value for name, value in config.rope.items() if name != "rope_theta"}
    fields = {
        "architectures": ["LlamaForCausalLM" if config.version == 1 else "LlamaForCausalLMEagle3"],
        **_layer_fields(config),
        "qkv_bias": config.qkv_bias,
        # flat, for EAGLE's own code; transformers reads both forms
        "rope_theta": config.rope["rope_theta"],
        "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
        "torch_dtype": str(head.dtype).removeprefix("torch."),
    }
    if config.version == 1:
        return {**fields, "bias": config.fc_bias}
    return {
        **fields,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_config": {"use_aux_hidden_state": True, _TAPS: [tap - 1 for tap in config.taps]},
        **{name: True for name in _SWITCHES if getattr(config, name)},
        **({} if config.mask_token_id is None else {name: getattr(config, name) for name in _PARALLEL}),
    }


def _as_speculators(head: EagleHead, target: PreTrainedModel | None) -> dict[str, Any]:
    config = head.config
    if config.qkv_bias != config.o_bias:
        raise ValueError("format: 'speculators' supports no biases for queries, keys and values only; use 'eagle'")
    parallel = config.mask_token_id is not None
    kind = "peagle" if parallel else "eagle3"
    return {
        "architectures": ["PEagleSpeculator" if parallel else "Eagle3DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "draft_vocab_size": config.draft_vocab_size,
        **{name: getattr(config, name) for name in _SWITCHES},
        "target_hidden_size": config.target_hidden_size,
        _TAPS: list(config.taps),
        "embed_requires_grad": parallel,
        "tie_word_embeddings": False,
        "dtype": str(head.dtype).removeprefix("torch."),
        **({"mask_token_id": config.mask_token_id} if parallel else {}),
        "transformer_layer_config": {**_layer_fields(config), "rope_parameters": dict(config.rope)},
        "speculators_config": speculators_config(kind, config.parallel_tokens if parallel else 3, target),
    }


def _parallel_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a P-EAGLE head has besides. Speculators write the number of tokens with the proposal method."""
    if fields.get("mask_token_id") is None:
        return {}
    methods = (fields.get("speculators_config") or {}).get("proposal_methods") or [{}]
    tokens = fields.get("parallel_tokens", methods[0].get("speculative_tokens"))
    return {"mask_token_id": fields["mask_token_id"]} | ({} if tokens is None else {"parallel_tokens": tokens})


def speculators_config(algorithm: str, tokens: int, target: PreTrainedModel | None) -> dict[str, Any]:
    """How engines that read speculators' format are to draft. tokens: of a draft. target: whose name is stored."""
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
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": verifier,
    }


def draft_mask(head: StateHead) -> torch.Tensor:
    """[V] bool: which of the target's tokens the head can draft. Raises ValueError for a d2t with ids out of range."""
    tokens, size = head.draft_tokens.cpu(), head.config.vocab_size
    if int(tokens.min()) < 0 or int(tokens.max()) >= size or len(tokens.unique()) != len(tokens):
        raise ValueError(f"d2t: its ids are not {len(tokens)} different tokens of the target's {size}")
    return torch.zeros(size, dtype=torch.bool).index_fill(0, tokens, True)


def _renamed(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name
