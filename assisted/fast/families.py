"""What the layers of transformers' architectures compute, as data, and which models have them.

A layer runs in few operations or in C as its `Form` says (layers.py, kernels/layer.h). Classes are compared by identity:
another one may compute something else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..engine.delta import outputs_of
from ..engine.libraries import attention_of
from ..engine.traits import Traits
from .norms import LAYER, RMS, RMS_PLUS_ONE, WIDE_RMS, Norm, NormKind

_LAYERS = ("DecoderLayer", "LinearAttentionDecoderLayer", "AttentionDecoderLayer")


@dataclass(frozen=True)
class Form:
    """What the layers of an architecture compute. The defaults are Llama's.

    Attributes:
        base: how the class of the model around the layers ends.
        norm: what all norms compute.
        norms: the modules before and after attention, before and after the MLP; None for no norm.
        beside: whether a layer's MLP reads what its attention reads.
        heads: the linear modules for queries, keys and values; one name if they are joined.
        head_norms: the norms of queries and keys, where a layer has them: of each head, or of all at once.
        norms_turned: they come after the angles.
        turns: whether a layer's attention has angles.
        pairs: neighbours turn together; otherwise numbers half a head apart do.
        angles_of_pairs: the rotary module gives the angles of pairs in their order; otherwise those of halves.
        angles_once: it gives the angles of one half, which are those of the other one.
        turns_in_floats: numbers that have turned are rounded at the end alone.
        cap: the attribute of attention with the soft cap of its scores.
        sinks: the attribute with a score for each query head that takes part in softmax and has no value.
        into, down: the linear modules of the MLP: gate and up, apart or joined, or one without a gate; and the last one.
        activation: its activation.
        experts: how the class of an MLP with experts ends.
        plain: settings of the config with which layers compute something else.
        enter, finish: what the model's forward does to embeddings and logits, given the model.
    """

    base: str = "Model"
    norm: NormKind = RMS
    norms: tuple[str | None, ...] = ("input_layernorm", None, "post_attention_layernorm", None)
    beside: Callable[[Any], bool] = lambda layer: False
    heads: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    norms_turned: bool = False
    turns: Callable[[Any], bool] = lambda attention: True
    pairs: bool = False
    angles_of_pairs: bool = False
    angles_once: bool = False
    turns_in_floats: bool = False
    cap: str = ""
    sinks: str = ""
    into: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    activation: str = "act_fn"
    experts: str = "SparseMoeBlock"
    plain: tuple[str, ...] = ()
    enter: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    finish: Callable[[Any, torch.Tensor], torch.Tensor] | None = None

    @property
    def is_gated(self) -> bool:
        """Whether the MLP multiplies by a gate."""
        return len(self.into) > 1 or self.into == ("gate_up_proj",)

    def norm_of(self, norm: Any) -> Norm:
        """The faster form of one of its norms."""
        return Norm(norm, self.norm)

    def norms_in(self, layer: Any) -> list[Any]:
        """The norms of a layer in the order of `norms`, None for those that it does not have."""
        return [None if name is None else layer._modules.get(name) for name in self.norms]

    def fits(self, layer: Any) -> bool:
        """Whether a layer has the norms of this form."""
        wanted = [name is not None for name in self.norms]
        wanted[2] = wanted[2] and not self.beside(layer)
        return [norm is not None for norm in self.norms_in(layer)] == wanted

    def of_mixer(self, layer: Any) -> list[list[Any]]:
        """The linear modules of a layer's attention: those for its input together, and the one at its end."""
        attention = layer.self_attn
        return [[getattr(attention, name) for name in self.heads], [attention.o_proj]]

    def of_mlp(self, layer: Any) -> list[list[Any]]:
        """The same of its MLP; none if that has experts."""
        mlp = layer.mlp
        return (
            [[getattr(mlp, name) for name in self.into], [getattr(mlp, self.down)]] if hasattr(mlp, self.down) else []
        )

    def of_heads(self, attention: Any) -> list[Any]:
        """The norms of queries and keys, None without them."""
        return [attention._modules.get(name) for name in self.head_norms]


def _capped(model: Any, logits: torch.Tensor) -> torch.Tensor:
    cap = model.config.final_logit_softcapping
    return logits if cap is None else torch.tanh(logits / cap) * cap


LLAMA = Form()
_AFTER: dict[str, Any] = {"norms": (None, "post_attention_layernorm", None, "post_feedforward_layernorm")}
_AROUND: dict[str, Any] = {
    "norms": (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    )
}
_JOINED: dict[str, Any] = {"into": ("gate_up_proj",), "activation": "activation_fn"}
_COHERE: dict[str, Any] = {
    **{"norm": NormKind("LayerNorm", centers=True), "norms": ("input_layernorm", None, None, None)},
    **{"beside": lambda layer: True, "pairs": True, "angles_of_pairs": True, "turns_in_floats": True},
    "finish": lambda model, logits: logits * model.logit_scale,
}
_OF_TEXT = Form(base="TextModel", norm=RMS_PLUS_ONE)

FORMS: dict[str, Form] = {
    **dict.fromkeys(("Llama", "Mistral", "Ministral", "Qwen2", "Qwen3", "SeedOss"), LLAMA),
    **dict.fromkeys(("Mixtral", "Qwen2Moe", "Qwen3Moe"), LLAMA),
    "SmolLM3": Form(turns=lambda attention: bool(attention.use_rope)),
    "Granite": Form(
        enter=lambda model, hidden: hidden * model.model.embedding_multiplier,
        finish=lambda model, logits: logits / model.config.logits_scaling,
    ),
    "Phi3": Form(heads=("qkv_proj",), **_JOINED),
    "Gemma": Form(norm=RMS_PLUS_ONE, plain=("use_bidirectional_attention",)),
    "Gemma2": Form(
        norm=RMS_PLUS_ONE,
        cap="attn_logit_softcapping",
        plain=("use_bidirectional_attention",),
        finish=_capped,
        **_AROUND,
    ),
    "Gemma3": Form(
        base="TextModel", norm=RMS_PLUS_ONE, plain=("use_bidirectional_attention",), finish=_capped, **_AROUND
    ),
    "Olmo": Form(
        norm=NormKind("LayerNorm", centers=True),
        turns_in_floats=True,
        plain=("clip_qkv",),
    ),
    **dict.fromkeys(("Olmo2", "Olmo3"), Form(norm=WIDE_RMS, turns_in_floats=True, **_AFTER)),
    "Cohere": Form(**_COHERE),
    "Cohere2": Form(**_COHERE, turns=lambda attention: attention.sliding_window is not None),
    "Glm": Form(pairs=True, **_JOINED),
    "Glm4": Form(
        pairs=True,
        norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        **_JOINED,
    ),
    "Exaone4": Form(turns=lambda attention: attention.sliding_window is None or attention.is_sliding, **_AFTER),
    "Helium": Form(norm=WIDE_RMS, pairs=True),
    "HunYuanDenseV1": Form(head_norms=("query_layernorm", "key_layernorm"), norms_turned=True),
    "Ernie4_5": Form(pairs=True, turns_in_floats=True),
    "Arcee": Form(into=("up_proj",)),
    "Apertus": Form(norms=("attention_layernorm", None, "feedforward_layernorm", None), into=("up_proj",)),
    "GptOss": Form(norm=WIDE_RMS, angles_once=True, sinks="sinks", experts="MLP"),
    "Starcoder2": Form(norm=LAYER, into=("c_fc",), down="c_proj", activation="act"),
    "StableLm": Form(norm=LAYER, beside=lambda layer: layer.use_parallel_residual, plain=("qk_layernorm",)),
    "Nemotron": Form(norm=NormKind("LayerNorm1P", centers=True, adds_one=True, rounds_weight=True), into=("up_proj",)),
    # hybrids with the gated delta rule
    "Qwen3Next": Form(norm=RMS_PLUS_ONE),
    **dict.fromkeys(("Qwen3_5", "Qwen3_5Moe"), _OF_TEXT),
    "OlmoHybrid": Form(norm=WIDE_RMS),
}
"""The forms of layers, by how the names of their classes begin."""


def layers_of(model: Any) -> nn.ModuleList | None:
    """The layers of a model whose form is known; None if `FusedLayer` can't replace them."""
    base: Any = getattr(model, "model", None)
    base = getattr(base, "language_model", base)
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not layers or not hasattr(model, "lm_head"):
        return None
    if not Traits.of(model).masks.trees:
        return None
    return layers if len(layers) == base.config.num_hidden_layers and _is_family(base, layers) else None


def path_of(model: Any) -> tuple[str, ...]:
    """Where the text model with the layers is."""
    return ("model", "language_model") if hasattr(model.model, "language_model") else ("model",)


def _is_family(base: Any, layers: Any) -> bool:
    """Whether all modules whose code is replaced are of the classes that fused layers stand for. Linear modules and activations
    are called, whatever they are."""
    family = _Family.of(layers[0])
    return (
        family is not None
        and family.are(base, family.form.base)
        and family.is_norm(base.norm)
        and any(map(is_fusible, layers))
        and all(map(family.has, layers))
    )


def width_of(linear: Any) -> int | None:
    """How many numbers a linear module gives; None if it does not say. AutoRound's modules name it without an underscore."""
    return getattr(linear, "out_features", None) or getattr(linear, "outfeatures", None)


def form_of(layer: nn.Module) -> Form:
    """The form of a layer; Llama's for layers that are not transformers', such as a head's."""
    family = _Family.of(layer)
    return LLAMA if family is None else family.form


def is_known(layer: nn.Module) -> bool:
    """Whether `fused_layer` has a faster form of a layer, which need not be a model's."""
    family = _Family.of(layer)
    return family is not None and is_fusible(layer) and family.has(layer)


def is_fusible(layer: nn.Module) -> bool:
    """Whether a layer of a known family has a faster form. Some have their norms at other places."""
    return form_of(layer).fits(layer)


@dataclass(frozen=True)
class _Family:
    """A known family, by its name and its module in transformers."""

    name: str
    home: ModuleType

    @staticmethod
    def of(layer: nn.Module) -> _Family | None:
        kind = type(layer)
        name = next((kind.__name__[: -len(end)] for end in _LAYERS if kind.__name__.removesuffix(end) in FORMS), None)
        home = sys.modules.get(kind.__module__)
        own = home is not None and home.__name__.startswith("transformers.models.")
        return _Family(name, home) if name is not None and home is not None and own else None

    @property
    def form(self) -> Form:
        return FORMS[self.name]

    def are(self, module: Any, *kinds: str) -> bool:
        """Whether a module is of one of these classes, and not of one derived from it."""
        return any(type(module) is getattr(self.home, self.name + kind, None) for kind in kinds)

    def is_norm(self, module: Any) -> bool:
        """Whether a module is of the class of the family's norms."""
        name = self.form.norm.name
        return type(module) is nn.LayerNorm if name is None else self.are(module, name)

    def has(self, layer: nn.Module) -> bool:
        """Whether a layer is of the family, with all of its parts if it has a faster form."""
        if not self.are(layer, *_LAYERS) or not is_fusible(layer):
            return self.are(layer, *_LAYERS)
        form, parts = self.form, layer._modules
        mixer: Any = parts.get("self_attn", parts.get("linear_attn"))
        mlp: Any = parts.get("mlp")
        norms = form.norms_in(layer)
        if "self_attn" in parts:
            into = [getattr(mixer, name, None) for name in form.heads]
            mixes = self.are(mixer, "Attention") and None not in map(width_of, into)
            mixes = mixes and not any(getattr(mixer.config, name, None) for name in form.plain)
            mixes = mixes and (not form.sinks or attention_of(mixer.config) == "eager")  # others take no sinks
            norms += form.of_heads(mixer)
        else:
            mixes = self.are(mixer, "GatedDeltaNet") and self.are(outputs_of(mixer)[0], "RMSNormGated")
            mixes = mixes and type(mixer.conv1d) is nn.Conv1d
        whole = self.are(mlp, form.experts)
        known = whole or (self.are(mlp, "MLP") and isinstance(getattr(mlp, form.activation, None), nn.Module))
        return mixes and known and all(map(self.is_norm, (norm for norm in norms if norm is not None)))
