"""Reads and writes EAGLE heads as their trainers publish them, by tables: how layouts name tensors, and what configs call the
values. The rest says which hidden states a config means. Reading is strict.

No published checkpoint was available for a test: the layouts are those of the trainers' and the engines' sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from ...loading.files import require_sizes, shapes_of
from ..shared import files
from ..shared.files import Checkpoint, Layout
from ..shared.heads import StateHead
from .config import CONFIGS, LAYER_FIELDS, SLIDING, EagleConfig, HeadConfig, default_taps
from .head import EagleHead

__all__ = ["is_eagle", "load_eagle", "require_eagle", "save_eagle"]

_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "last_normed")
_KEYS = {
    **{name: (name,) for name in ("target_hidden_size", "draft_vocab_size", *_SWITCHES, "mask_token_id")},
    "parallel_tokens": ("parallel_tokens", "num_depths"),
}
"""The names in configs of what is in `EagleConfig`."""
_BIASES = {"qkv_bias": "self_attn.q_proj", "o_bias": "self_attn.o_proj", "mlp_bias": "mlp.up_proj"}
_KINDS = ("eagle3", "peagle")  # of speculators
TAPS = "eagle_aux_hidden_state_layer_ids"
_COUNTED = ("target_layer_ids", "aux_hidden_states_layer_ids")  # of DeepSpec and AngelSlim
_ANGELSLIM = "Eagle3LlamaForCausalLM"
VERSION = "0.9.0"  # of speculators, for the format written here
PAST = (r"verifier_norm\.weight", r"verifier_lm_head\.weight")  # the target's, for speculators' training

_AUTHORS = Layout("an EAGLE-3 head of its authors, SpecForge or TorchSpec", ((r"layers\.0\.", "midlayer."),))
_SPECULATORS = Layout("an EAGLE-3 head of speculators", read_past=PAST)
LAYOUTS = {
    1: (Layout("an EAGLE-1 head of its authors"),),
    3: (
        Layout("an EAGLE-3 head of ModelOpt, DeepSpec or SpecForge's P-EAGLE"),
        _AUTHORS,
        Layout("an EAGLE-3 head of NeMo Automodel", ((r"(?!lm_head\.|d2t|t2d|mask_hidden)", "model."),)),
    ),
}
"""By version of EAGLE."""
_MARKS = {
    1: ("fc.weight", "fc.bias", "layers.0.mlp.up_proj.weight"),
    3: (
        *("fc.weight", "norm.weight", "lm_head.weight", "layers.0.mlp.up_proj.weight"),
        *("layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight"),
    ),
}
"""Tensors that tell the versions and the layouts apart."""
_REFUSED = {
    "LlamaEagleDraftModel": "an EAGLE-1 head of NeMo Automodel cannot be read: unlike its authors' heads, it has an "
    "input_layernorm in its first layer and a norm after its last one",
    r".*\.kv_a_proj_with_mqa\.": "an EAGLE-3 head with latent attention (MLA, for Kimi and DeepSeek) cannot be read; heads "
    "with layers of Llama and Qwen3 can",
}
_VALUES: dict[tuple[str, ...], tuple[str, Callable[[Any], bool]]] = {
    ("rms_norm_eps", "rope_theta"): ("a positive number", lambda v: type(v) in (int, float) and 0 < v < math.inf),
    ("rope_scaling", "rope_parameters"): ("an object", lambda v: isinstance(v, dict)),
    ("hidden_act",): ("an activation that transformers knows", lambda v: str(v) in ACT2FN),
    ("layer_types",): ("a list", lambda v: isinstance(v, list)),
    (TAPS, *_COUNTED, "aux_hidden_state_layer_ids"): (
        "a list of layers",
        lambda v: isinstance(v, list) and bool(v) and all(type(tap) is int for tap in v),
    ),
}
"""What values of a config have to be."""

Format = Literal["eagle", "speculators"]


def load_eagle(path: str | Path, target: PreTrainedModel, **hub: Any) -> EagleHead:
    """Load a head from a path (a folder, a `zoo:` name or a Hub id), in its stored dtype, on the CPU.

    The tensor names distinguish EAGLE-1 from EAGLE-3; config.json gives the rest. If it does not list the tapped layers of the
    target, they are 2, L // 2 and L - 3. A head with the target's vocabulary and without an output embedding gets a copy of the
    target's. Quantized weights are expanded. hub: download options.

    Raises ValueError for a head made for a target of other sizes, and for a missing, unknown or misshapen tensor, with its
    name and the layout that fits best.
    """
    return files.load_head(path, target, EagleHead, _opened, hub, ("lm_head.weight",))


def require_eagle(path: str | Path, target: PreTrainedModel, **hub: Any) -> None:
    """Check the head at a path, as `load_eagle` takes it, without reading its weights. target: may be on the meta device.
    hub: download options.

    Raises ValueError where `load_eagle` does, except for what only the weights show.
    """
    files.require_head(path, target, EagleHead, _opened, hub)


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
    file = next((folder / name for name in files.FILES if (folder / name).is_file()), None)
    return file is not None and {"fc.weight", "layers.0.mlp.up_proj.weight"} <= shapes_of(file).keys()


def checked_values(found: Checkpoint, target_layers: int, *inner: str) -> dict[str, Any]:
    """All fields of a config that are given, those of the objects `inner` beside those at the top, which they replace.

    target_layers: a number of layers that may be given in place of the head's. Raises ValueError with the file and the field
    for an inner one that is no object, and for values that are not what they have to be.
    """
    where = found.folder / "config.json"
    given: dict[str, Any] = {}
    for name, part in {"": found.fields, **{name: found.fields.get(name) or {} for name in inner}}.items():
        if not isinstance(part, dict):
            raise ValueError(f"draft: {where}: {name}: {part!r} is not an object")
        given |= {key: value for key, value in part.items() if value is not None}
        for keys, (said, is_right) in _VALUES.items():
            if wrong := [key for key in keys if part.get(key) is not None and not is_right(part[key])]:
                raise ValueError(f"draft: {where}: {wrong[0]}: {part[wrong[0]]!r} is not {said}")
    # a head may have no tensor of its vocabulary's size, which is compared with the target's
    size = given.get("vocab_size")
    others = {"vocab_size": size, "draft_vocab_size": size, "num_hidden_layers": target_layers}
    own = {name: value for name, value in given.items() if name not in others or value != others[name]}
    require_sizes(own, found.shapes, where, exact=True)
    require_sizes({"vocab_size": size}, {}, where, exact=True)
    return given


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
    config, tensors = head.config, files.tensors_of(head)
    if format not in get_args(Format):
        raise ValueError(f"format: {format!r} is not known; 'eagle' or 'speculators'")
    if format == "eagle":
        layout = LAYOUTS[1][0] if config.version == 1 else _AUTHORS
        files.write_head(folder, _as_eagle(head), {layout.stored(name): tensor for name, tensor in tensors.items()})
        return
    if config.version != 3:
        raise ValueError("format: 'speculators' supports only EAGLE-3 heads; write an EAGLE-1 head as 'eagle'")
    if config.qkv_bias != config.o_bias or config.fc_bias:
        raise ValueError(
            "format: 'speculators' supports no biases for queries, keys and values only, and none of fc; use 'eagle'"
        )
    if not config.own_embedding:
        if target is None:
            raise ValueError("target: required, because this format contains an embedding and the head has none")
        with torch.no_grad():
            tensors["embed_tokens.weight"] = head.embed(torch.arange(config.vocab_size), target)
    kind, architecture, tokens = "eagle3", "Eagle3DraftModel", 3
    if config.mask_token_id is not None:
        kind, architecture, tokens = "peagle", "PEagleSpeculator", config.parallel_tokens
    fields = {**_values(config), "embed_requires_grad": kind == "peagle", "tie_word_embeddings": False}
    layer = {"model_type": config.layer, "attention_bias": config.o_bias, "mlp_bias": config.mlp_bias}
    files.write_head(folder, head_as_speculators(head, target, kind, architecture, fields, tokens, layer), tensors)


def _opened(folder: Path, target: PreTrainedModel) -> tuple[Checkpoint, EagleConfig]:
    """The checkpoint in its layout, and its config; the sizes in it are compared with the tensors."""
    found = Checkpoint.open(folder)
    fields, layers = found.fields, target.config.get_text_config(decoder=True).num_hidden_layers
    kind = fields.get("speculators_model_type")
    if kind not in (None, *_KINDS):
        raise ValueError(f"draft: {folder} is a speculator of kind {kind!r}; only {' and '.join(_KINDS)} can be read")
    files.refuse(folder, (*found.shapes, *(fields.get("architectures") or ())), _REFUSED)
    given = checked_values(found, layers, "transformer_layer_config", "eagle_config")
    if "mask_token_id" not in given and ("mask_hidden" in found.shapes or kind == "peagle"):
        raise ValueError(f"draft: {folder / 'config.json'} lacks mask_token_id, the mask token of a P-EAGLE head")
    layouts = (_SPECULATORS,) if kind else (*LAYOUTS[1], *LAYOUTS[3])
    found = found.under(*layouts, marks=lambda layout: _MARKS[1 if layout in LAYOUTS[1] else 3])
    if _ANGELSLIM in (fields.get("architectures") or ()):
        given |= _trained_rope(given)
    if given.get("num_hidden_layers") == layers:  # some configs have the target's
        count = (n for n in range(layers + 1) if not found.shape(f"layers.{n}.mlp.up_proj.weight"))
        given["num_hidden_layers"] = next(count) or 1
    normed = found.shape("layers.0.self_attn.q_norm.weight")
    of_layer = given.get("model_type", "llama") if kind else "qwen3" if normed else "llama"
    layer = layer_of(given, of_layer) | {"layer": of_layer, "own_embedding": bool(found.shape("embed_tokens.weight"))}
    for field, part in _BIASES.items():
        has_bias = found.shape(f"layers.0.{part}.bias") or (field != "mlp_bias" and given.get("attention_bias"))
        layer[field] = bool(given.get(field, has_bias))
    if found.layout in LAYOUTS[1]:
        return found, EagleConfig(1, taps=(layers,), fc_bias=given.get("bias", True), **layer)
    taps, normed_last = _taps_of(fields, layers)
    said = {"last_normed": normed_last} | files.agreed(given, _KEYS)
    if kind:
        said.setdefault("draft_vocab_size", 32000)
        methods = (fields.get("speculators_config") or {}).get("proposal_methods") or [{}]
        if (tokens := methods[0].get("speculative_tokens")) is not None and "mask_token_id" in said:
            said.setdefault("parallel_tokens", tokens)
    said |= {name: bool(said.get(name, False)) for name in _SWITCHES}
    return found, EagleConfig(3, taps=taps, fc_bias=bool(found.shape("fc.bias")), **said, **layer)


def _taps_of(fields: Mapping[str, Any], layers: int) -> tuple[tuple[int, ...], bool]:
    """The tapped hidden states, and whether the last of the target's is normed, where a config does not say it itself.

    Ids at the top are those of hidden states, as vLLM counts them. Ids in `eagle_config` count layers if they begin with 0 or
    1, and hidden states otherwise, as SGLang decides since its pull request 25454 (2026-05-16) and as NVIDIA's ids for gpt-oss
    need it, which name the last state (its pull request 32334, 2026-07-24). Both engines, and the hooks of ModelOpt and NeMo
    Automodel, give the last layer's output before the final norm. DeepSpec and AngelSlim count layers and take transformers'
    states.
    """
    top, counted = fields.get(TAPS), next((fields[name] for name in _COUNTED if fields.get(name) is not None), None)
    nested = (fields.get("eagle_config") or {}).get(TAPS)
    if top is not None:
        return tuple(top), False
    if counted is not None:
        return tuple(tap + 1 for tap in counted), True
    if nested is None:
        return default_taps(layers), False
    # before it wrote both lists, this package wrote the second alone, with layers
    counts_layers = layers not in nested and (min(nested) <= 1 or "qkv_bias" in fields)
    return tuple(tap + 1 if counts_layers else tap for tap in nested), False


def _trained_rope(given: Mapping[str, Any]) -> dict[str, Any]:
    """What AngelSlim's trainer (0.5.0) made of a config's rope: outside of mrope, the base is 10000, whatever the config says.

    Its configs say 1000000 for Qwen3; with 10000, published heads were accepted more often (wejoncy/sfllm, pull request 32).
    """
    rope = {**given.get("rope_scaling", {}), **given.get("rope_parameters", {})}
    is_mrope = rope.get("mrope_interleaved") or "mrope" in (rope.get("type"), rope.get("rope_type"))
    return {} if is_mrope else {"rope_parameters": rope | {"rope_theta": 10000.0}}


def layer_of(given: Mapping[str, Any], kind: str, theta: float = 10000.0) -> dict[str, Any]:
    """The fields of a HeadConfig for its layers, where missing ones get transformers' defaults for that kind of layer.

    given: the values of a config. theta: a missing one. Raises ValueError for a kind of layer that a head cannot have.
    """
    if kind not in CONFIGS:
        raise ValueError(f"draft: heads with layers of kind {kind!r} are not known; 'llama' or 'qwen3'")
    made = CONFIGS[kind](**{name: given[name] for name in LAYER_FIELDS if name in given})
    types = given.get("layer_types", [])
    rope = {**given.get("rope_scaling", {}), **given.get("rope_parameters", {})}
    theta = float(rope.get("rope_theta", given.get("rope_theta", theta)))
    kind_of_rope = rope.pop("rope_type", rope.pop("type", "default"))
    return {
        **{name: getattr(made, name) for name in LAYER_FIELDS},
        # for text, mrope, which tells apart the positions of images, is the default
        "rope": {**rope, "rope_type": "default" if kind_of_rope == "mrope" else kind_of_rope, "rope_theta": theta},
        **({"layer_types": tuple(types), "sliding_window": given.get("sliding_window")} if SLIDING in types else {}),
    }


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
        "torch_dtype": _dtype_of(head),
    }
    if config.version == 1:
        return {**fields, "bias": config.fc_bias}
    counted = [tap - (min(config.taps) <= 2) for tap in config.taps]  # as SGLang tells layers from states: see _taps_of
    return {**fields, **_values(config), "eagle_config": {"use_aux_hidden_state": True, TAPS: counted}}


def _values(config: EagleConfig) -> dict[str, Any]:
    parallel = ("mask_token_id", "parallel_tokens") if config.mask_token_id is None else ()
    values = {names[0]: getattr(config, field) for field, names in _KEYS.items() if field not in parallel}
    return {**values, TAPS: list(config.taps)}


def head_as_speculators(
    head: StateHead, target: PreTrainedModel | None, kind: str, architecture: str, fields: Any, tokens: int, layer: Any
) -> dict[str, Any]:
    """`as_speculators` of a head with layers of its own. layer: what is said of them besides the fields of `HeadConfig`."""
    own = {**_layer_fields(head.config), **layer, "rope_parameters": head.config.rope, "tie_word_embeddings": False}
    architectures = [] if target is None else target.config.architectures or [type(target).__name__]
    verifier = {"name_or_path": files.public_name(target), "architectures": list(architectures)}
    return as_speculators(kind, architecture, {**fields, "dtype": _dtype_of(head)}, own, tokens, verifier)


def as_speculators(
    kind: str, architecture: str, fields: Any, layer: Mapping[str, Any], tokens: int, verifier: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json of speculators' format. kind, architecture: there. fields: of the head. layer: the config of its layers.
    tokens: of a draft. verifier: the target."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    drafting = {"algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [proposal]}
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        **fields,
        "transformer_layer_config": layer,
        "speculators_config": {**drafting, "verifier": verifier},
    }


def _dtype_of(head: StateHead) -> str:
    return str(head.dtype).removeprefix("torch.")


def _layer_fields(config: HeadConfig) -> dict[str, Any]:
    window = {"layer_types": list(config.kinds), "sliding_window": config.sliding_window} if config.slides else {}
    return {name: getattr(config, name) for name in LAYER_FIELDS} | window
