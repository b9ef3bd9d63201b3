"""Llama-like models in fewer operations: another object of the model's class whose layers run from the same parameters.

A pass of a small model, or over few tokens, takes as long as calling its operations takes. A layer here is some twenty
of them instead of fifty, and wide products of a CPU use oneDNN, which is several times faster over a few tokens than
the default. Knows the layers of one family; whether a model's are of that kind is tried before it is relied on.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from .cache import SlotCache
from .parts import few_ids, with_children
from .runtime import CachedModel, Masks, is_untouched

__all__ = ["TOLERANCE", "Angles", "FusedLayer", "Norm", "Shared", "fused", "fused_product", "is_touched", "may_copy"]

_FAMILY = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
_WIDE = 2**17  # entries of a matrix from which oneDNN's layout pays at any number of rows
_MANY = 32  # rows from which it pays for every matrix
_TABLE = 2**13  # positions whose angles are looked up
_COPIED = 2**30  # bytes of parameters; a model that has more runs from its own alone, nothing joined or repacked
TOLERANCE = 1e-3  # of logits, relative to their spread: another model differs by far more


def fused(model: PreTrainedModel) -> PreTrainedModel:
    """The same model in fewer operations where it is known how, otherwise the model itself.

    Its logits differ from the model's by rounding alone, as those of passes of different widths do. What is copied of the
    weights is kept from call to call, and made anew when the model's own have changed.
    """
    layers = _layers(model)
    if layers is None:
        return model
    weights = _Weights.of(model, layers)
    made = _MADE.get(layers)
    if made is None or not made.weights.same(weights):
        children: _Children = {
            ("model", "layers"): nn.ModuleList(_fused_layers(layers, weights.copied)),
            ("model", "rotary_emb"): Angles(model.model.rotary_emb, model.config),
            ("lm_head",): _FusedHead(model.lm_head, weights.copied),
        }
        same = _agree(model, _with(model, children))
        made = _MADE[layers] = _Made(weights, children if same else None)
    return model if made.children is None else _with(model, made.children)


def _with(model: PreTrainedModel, children: _Children) -> PreTrainedModel:
    other = with_children(model, children)
    other.is_sum_of_parts = True  # for `CachedModel`
    return other


def fused_product(module: nn.Linear) -> nn.Module:
    """The same product in the form that is fastest over a few columns, with the weight as it is now: repacked for a CPU where
    that pays, otherwise the module itself."""
    return _FusedHead(module, True) if may_copy(module) else module


def may_copy(module: nn.Module) -> bool:
    """Whether a module may run from copies of its parameters: float32 on a CPU, not too large, and nobody hangs on to it."""
    parameters = list(module.parameters())
    plain = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in parameters)
    small = sum(p.numel() * p.element_size() for p in parameters) <= _COPIED
    return plain and small and not any(map(is_touched, module.modules()))


_Children = dict[tuple[str, ...], nn.Module]


@dataclass(frozen=True)
class _Weights:
    """The parameters that a fused model was made from; and the sum of each, where they were copied."""

    parameters: tuple[torch.Tensor, ...]
    sums: torch.Tensor | None

    @staticmethod
    def of(model: PreTrainedModel, layers: nn.ModuleList) -> _Weights:
        parameters = (*layers.parameters(), *model.lm_head.parameters())
        bytes_of_all = sum(p.numel() * p.element_size() for p in parameters)
        on_cpu = all(p.device.type == "cpu" for p in parameters)
        copied = on_cpu and bytes_of_all <= _COPIED
        return _Weights(parameters, torch.stack([p.detach().sum().double() for p in parameters]) if copied else None)

    @property
    def copied(self) -> bool:
        return self.sums is not None

    def same(self, other: _Weights) -> bool:
        """Whether what was made of one serves for the other: what was written into a tensor shows in its sum."""
        if len(self.parameters) != len(other.parameters) or self.copied != other.copied:
            return False
        if any(one is not two for one, two in zip(self.parameters, other.parameters, strict=True)):
            return False
        return self.sums is None or other.sums is None or torch.equal(self.sums, other.sums)


@dataclass(frozen=True)
class _Made:
    """What takes the place of a model's modules; None where it did not turn out to be the same."""

    weights: _Weights
    children: _Children | None


_MADE: weakref.WeakKeyDictionary[nn.ModuleList, _Made] = weakref.WeakKeyDictionary()


class FusedLayer(nn.Module):
    """RMSNorm, rotary attention, RMSNorm, gated MLP, as the layers of the family have them.

    Everything it uses is a plain attribute: looking up a submodule takes as long as a small operation.
    """

    def __init__(self, layer: Any, shared: Shared, copied: bool):
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.index: int = attention.layer_idx
        self.head_size: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.key_heads = attention.k_proj.out_features // self.head_size
        self.query_heads = attention.q_proj.out_features // self.head_size
        self.shared = shared
        self.activation = mlp.act_fn.forward
        self.before_attention = Norm(layer.input_layernorm)
        self.query_norm = Norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.key_norm = Norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.before_mlp = Norm(layer.post_attention_layernorm)
        self.heads = _Product([attention.q_proj, attention.k_proj, attention.v_proj], copied)
        self.output = _Product([attention.o_proj], copied)
        self.gate_up = _Product([mlp.gate_proj, mlp.up_proj], copied)
        self.down = _Product([mlp.down_proj], copied)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """hidden_states: [B, n, D]. attention_mask: as sdpa takes it, None for causal attention. position_embeddings: what
        `Angles` returns. Returns [B, n, D].
        """
        return self.run(
            hidden_states, self.before_attention(hidden_states), attention_mask, position_embeddings, past_key_values
        )

    def run(
        self,
        hidden_states: torch.Tensor,
        normed: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        past_key_values: Any = None,
    ) -> torch.Tensor:
        """The layer of what attention reads, [B, n, any], beside the states that it adds to, [B, n, D]."""
        rows, width, _ = hidden_states.shape
        heads = self.heads(normed).view(rows, width, -1, self.head_size)
        # shape: [B, n, query heads + 2 key heads, head size]
        turning, value = heads[:, :, : -self.key_heads], heads[:, :, -self.key_heads :]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = turning[:, :, : self.query_heads], turning[:, :, self.query_heads :]
            turning = torch.cat([self.query_norm(query), self.key_norm(key)], 2)
        cos, sin = position_embeddings
        turned = torch.addcmul(turning * cos, turning.roll(self.head_size // 2, -1), sin).transpose(1, 2)
        query, key, value = turned[:, : self.query_heads], turned[:, self.query_heads :], value.transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.index)
        seen = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=self.shared.additive(attention_mask, query.dtype),
            is_causal=attention_mask is None and width > 1,
            scale=self.scaling,
            enable_gqa=self.query_heads != self.key_heads,
        )
        hidden_states = hidden_states + self.output(seen.transpose(1, 2).reshape(rows, width, -1))
        gate, up = self.gate_up(self.before_mlp(hidden_states)).chunk(2, -1)
        return hidden_states + self.down(self.activation(gate).mul_(up))


class _FusedHead(nn.Module):
    """The language-model head."""

    def __init__(self, head: nn.Module, copied: bool):
        super().__init__()
        self.product = _Product([head], copied)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., V]."""
        return self.product(hidden_states)


class Angles(nn.Module):
    """The rotary embedding, laid out for heads: cosines and signed sines, looked up on a CPU where they depend on the position
    alone.
    """

    def __init__(self, rotary: nn.Module, config: Any):
        super().__init__()
        self.rotary = [rotary]  # in a list: it is the model's
        kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        known = min(config.max_position_embeddings, _TABLE) if kind in ("default", "linear", "llama3") else 0
        self.table = None if known == 0 else self._angles(torch.zeros(1), torch.arange(known)[None])

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden: any tensor of the model's kind. position_ids: [B or 1, n] int64. Returns two, [B or 1, n, 1, D]."""
        table = self.table
        if table is None or hidden.device.type != "cpu" or int(position_ids.max()) >= table[0].shape[1]:
            return self._angles(hidden, position_ids)
        cos, sin = table
        return cos[0, position_ids], sin[0, position_ids]

    def _angles(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = (part[:, :, None] for part in self.rotary[0](hidden, position_ids=position_ids))
        half = sin.shape[-1] // 2
        return cos, torch.cat([-sin[..., :half], sin[..., half:]], -1)


class Shared:
    """What the layers of a model would each make of the same inputs, made once a pass."""

    def __init__(self) -> None:
        self.mask: tuple[Any, torch.Tensor] | None = None

    def additive(self, mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        """A boolean mask as sdpa would turn it into numbers in every layer."""
        if mask is None or mask.dtype != torch.bool:
            return mask
        known = self.mask
        if known is None or known[0] is not mask:
            numbers = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
            known = self.mask = mask, numbers
        return known[1]


class Norm:
    """RMSNorm."""

    def __init__(self, norm: Any):
        self.weight, self.epsilon = norm.weight, norm.variance_epsilon

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.device.type != "cpu" or hidden.dtype != torch.float32:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)
        # on a CPU that is seven operations, this is six cheaper ones
        norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        scale = norm.square_().div_(hidden.shape[-1]).add_(self.epsilon).rsqrt_()
        return (hidden * scale).mul_(self.weight)


class _Product:
    """What several linear modules make of one input, side by side: in one product, where their weights may be copied."""

    def __init__(self, modules: Sequence[nn.Module], copied: bool):
        self.modules = modules
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.packed: torch.Tensor | None = None
        linear = [module for module in modules if type(module) is nn.Linear]
        biases = [module.bias for module in linear if module.bias is not None]
        if not copied or len(linear) < len(modules) or len(biases) not in (0, len(linear)):
            return
        # a single weight is the model's own, not a copy, unless it is repacked
        weight = linear[0].weight if len(linear) == 1 else torch.cat([module.weight.detach() for module in linear])
        if biases:
            self.bias = biases[0] if len(biases) == 1 else torch.cat([bias.detach() for bias in biases])
        self.wide = weight.numel() >= _WIDE
        if torch.backends.mkldnn.is_available():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)
        self.weight = weight

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., sum of the modules' outputs]."""
        if self.packed is not None and (self.wide or inputs.shape[:-1].numel() >= _MANY):
            return torch.ops.mkldnn._linear_pointwise.default(inputs, self.packed, self.bias, "none", [], "")
        if self.weight is not None:
            return F.linear(inputs, self.weight, self.bias)
        if len(self.modules) == 1:
            return self.modules[0](inputs)
        return torch.cat([module(inputs) for module in self.modules], -1)


def _layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """The layers of a model of the family, if running them otherwise would leave nothing out.

    In half precision another order of operations rounds otherwise, which near-ties would show.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not hasattr(model, "lm_head"):
        return None
    if model.training or model.dtype != torch.float32:
        return None
    masks = Masks.of(model)
    if not masks.trees or masks.additive or len(masks.windows) > 1 or not is_untouched(model):
        return None
    kinds = {type(layer) for layer in layers}
    known = all(kind.__module__.startswith("transformers.models.") and kind.__name__ in _FAMILY for kind in kinds)
    touched = any(map(is_touched, [*layers.modules(), *model.lm_head.modules()]))
    return layers if known and not touched else None


def is_touched(module: nn.Module) -> bool:
    """Somebody hangs on to the calls of this module: hooks, a forward of its own, a compiled one, a weight that is more than
    numbers (torchao's)."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    replaced = "forward" in module.__dict__ or module._compiled_call_impl is not None
    return bool(hooks) or replaced or (type(module) is nn.Linear and is_traceable_wrapper_subclass(module.weight))


def _fused_layers(layers: nn.ModuleList, copied: bool) -> list[nn.Module]:
    shared = Shared()
    return [FusedLayer(layer, shared, copied) for layer in layers]


@torch.no_grad()
def _agree(model: PreTrainedModel, other: PreTrainedModel) -> bool:
    """Whether two models say the same of a few tokens, but for rounding: a prompt and a pass behind it."""
    ids, masks = few_ids(model, 8), Masks.of(model)
    logits = []
    for run in (CachedModel(m, SlotCache(1, 8), masks) for m in (model, other)):
        logits.append(torch.cat([run.prefill(ids[:, :4], None), run(ids[:, 4:])], 1).float())
    one, two = logits
    return bool((one - two).abs().max() <= TOLERANCE * one.std())
