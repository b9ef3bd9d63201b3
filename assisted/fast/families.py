"""The architectures of transformers whose layers have a faster form, recognised by their classes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn

from ..engine.delta import outputs_of
from ..engine.traits import Traits

_FAMILY = dict.fromkeys(("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Next", "OlmoHybrid"), "Model")
_FAMILY |= dict.fromkeys(("Qwen3_5", "Qwen3_5Moe"), "TextModel")
"""The names of layers that are fused, without their ends, and how the name of the model around them ends."""
_LAYERS = ("DecoderLayer", "LinearAttentionDecoderLayer", "AttentionDecoderLayer")


def layers_of(model: Any) -> nn.ModuleList | None:
    """The layers of a model of the family; None if `FusedLayer` can't replace them."""
    base: Any = getattr(model, "model", None)
    base = getattr(base, "language_model", base)
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not layers or not hasattr(model, "lm_head"):
        return None
    masks = Traits.of(model).masks
    if not masks.trees or masks.additive or len({*masks.windows.values()}) > 1:
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
        and family.are(base, _FAMILY[family.name])
        and family.are(base.norm, "RMSNorm")
        and any(map(is_fusible, layers))
        and all(map(family.has, layers))
    )


def width_of(linear: Any) -> int | None:
    """How many numbers a linear module gives; None if it does not say. AutoRound's modules name it without an underscore."""
    return getattr(linear, "out_features", None) or getattr(linear, "outfeatures", None)


def is_known(layer: nn.Module) -> bool:
    """Whether `fused_layer` has a faster form of a layer, which need not be a model's."""
    family = _Family.of(layer)
    return family is not None and is_fusible(layer) and family.has(layer)


def is_fusible(layer: nn.Module) -> bool:
    """Whether a layer of a known family has a faster form. Some have their norms at other places."""
    return "input_layernorm" in layer._modules


@dataclass(frozen=True)
class _Family:
    """A known family, by its name and its module in transformers."""

    name: str
    home: ModuleType

    @staticmethod
    def of(layer: nn.Module) -> _Family | None:
        kind = type(layer)
        name = next((name for name in _FAMILY for end in _LAYERS if kind.__name__ == name + end), None)
        home = sys.modules.get(kind.__module__)
        own = home is not None and home.__name__.startswith("transformers.models.")
        return _Family(name, home) if name is not None and home is not None and own else None

    def are(self, module: Any, *kinds: str) -> bool:
        """Whether a module is of one of these classes, and not of one derived from it."""
        return any(type(module) is getattr(self.home, self.name + kind, None) for kind in kinds)

    def has(self, layer: nn.Module) -> bool:
        """Whether a layer is of the family, with all of its parts if it has a faster form."""
        if not self.are(layer, *_LAYERS) or not is_fusible(layer):
            return self.are(layer, *_LAYERS)
        parts: Any = layer._modules
        mixer: Any = parts.get("self_attn", parts.get("linear_attn"))
        norms = [parts["input_layernorm"], parts.get("post_attention_layernorm")]
        if "self_attn" in parts:
            mixes = self.are(mixer, "Attention") and None not in (width_of(mixer.q_proj), width_of(mixer.k_proj))
            norms += [mixer._modules[part] for part in ("q_norm", "k_norm") if part in mixer._modules]
        else:
            mixes = self.are(mixer, "GatedDeltaNet") and self.are(outputs_of(mixer)[0], "RMSNormGated")
            mixes = mixes and type(mixer.conv1d) is nn.Conv1d
        whole = self.are(parts.get("mlp"), "SparseMoeBlock")
        known = whole or (self.are(parts.get("mlp"), "MLP") and isinstance(parts["mlp"].act_fn, nn.Module))
        return mixes and known and all(self.are(norm, "RMSNorm") for norm in norms)
