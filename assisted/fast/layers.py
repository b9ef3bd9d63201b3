"""Layers of the Llama family and of hybrids with the gated delta rule, in fewer operations or in C.

A layer takes about twenty operations here instead of fifty. In C, it is one call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import SiLUActivation

from ..engine.cache import SlotCache
from ..engine.delta import DeltaMixer, inputs_of, outputs_of
from ..engine.libraries import CACHE
from ..engine.parts import with_children
from ..engine.states import ColumnCache
from ..engine.sublayers import Path, Skippable
from . import delta, native
from .delta import NativeMixer
from .families import is_fusible, width_of
from .fixed_width import FixedColumns
from .norms import Called, GatedNorm, Norm, norm_of, plus_product
from .products import PackedLinear, Product, reads_in_place
from .shared import Shared, slots_of_layer

_SEEN = 2**22  # entries of a prompt's mask that become lists of slots


def fused_layer(layer: Any, shared: Shared, copied: bool, in_floats: bool = False) -> nn.Module:
    """The faster form of a layer of a known family. copied: weights may be copied. in_floats: in C if it is of float32."""
    if not is_fusible(layer):
        return packed_inside(layer, copied)
    # what runs in C has copies of its own
    in_floats = in_floats and copied and _fits_floats(layer)
    made: Any = (FusedLayer if "self_attn" in layer._modules else DeltaLayer)(layer, shared, copied and not in_floats)
    if in_floats:
        products = [*of_mixer(layer), *of_mlp(layer)]
        made.floats = made.of_floats(products, [norm.factor() for norm in (made.before_attention, made.before_mlp)])
    return made


def _fits_floats(layer: Any) -> bool:
    """Whether a layer runs in C in float32, by its parts alone."""
    products = [*of_mixer(layer), *of_mlp(layer)]
    linear: list[Any] = [module for modules in products for module in modules]
    biases = [{module.bias is None for module in modules} for modules in products]
    return (
        len(products) == len(biases) == 4
        and all(map(is_float, linear))
        and all(len(kinds) == 1 for kinds in biases)
        and isinstance(layer.mlp.act_fn, nn.SiLU | SiLUActivation)
        and {part.dtype for part in layer.parameters()} == {torch.float32}
        and delta.loaded()[0] is not None
    )


def is_float(module: Any) -> bool:
    """Whether a module is a plain product in float32."""
    return type(module) is nn.Linear and module.weight.dtype == torch.float32


class FusedMLP(Skippable):
    """What fused layers share: RMSNorm, something, RMSNorm and an MLP.

    It uses plain attributes only, because looking up a submodule takes as long as a small operation. in_8_bits: see `Product`.
    """

    whole_mlp: Callable[[torch.Tensor], Any] | None = None  # one that is not fused
    floats: delta.FloatLayer | None = None  # the layer in C, of float32

    def __init__(self, layer: Any, copied: bool, in_8_bits: bool = False):
        super().__init__()
        self.before_attention, self.before_mlp = norm_of(layer.input_layernorm), norm_of(layer.post_attention_layernorm)
        if parts := of_mlp(layer):
            self.activation = layer.mlp.act_fn.forward
            self.gate_up, self.down = [Product(modules, copied, in_8_bits) for modules in parts]
        else:
            self.whole_mlp = packed_inside(layer.mlp, copied).forward

    def without(self, paths: Collection[Path]) -> nn.Module:
        return Called(self._attention_alone if ("mlp",) in paths else self._mlp_alone)

    def transform(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Add the MLP's output to the residual stream, [B, n, D]."""
        normed = self.before_mlp(hidden_states)
        if self.whole_mlp is not None:
            made = self.whole_mlp(normed)
            return hidden_states + (made[0] if isinstance(made, tuple) else made)
        gate, up = self.gate_up.raw(normed).chunk(2, -1)
        return hidden_states + self.down.raw(self.activation(gate).mul_(up))

    def _attention_alone(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError

    def _mlp_alone(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.transform(hidden_states)


class DeltaLayer(FusedMLP):
    """RMSNorm, the gated delta rule, RMSNorm and an MLP, as in hybrids' layers. Prompts run through the layer's own mixer."""

    def __init__(self, layer: Any, shared: Shared, copied: bool):
        super().__init__(layer, copied)
        own = layer.linear_attn
        (inputs, out), norm = of_mixer(layer), outputs_of(own)[0]
        in_c = own.conv1d.weight.dtype in (torch.float32, torch.bfloat16) and delta.loaded()[0] is not None
        kind = NativeMixer if in_c else DeltaMixer
        self.linear_attn = kind(own, Product(inputs, copied), GatedNorm(norm), Product(out, copied))
        self.mix = self.linear_attn.forward

    def of_floats(self, products: list[list[Any]], norms: list[tuple[torch.Tensor, float]]) -> delta.FloatLayer:
        """The layer in C. products, norms: see `FloatLayer`."""
        assert isinstance(self.linear_attn, NativeMixer)
        return delta.delta_layer(products, norms, self.linear_attn)

    def stores(self, cache: Any) -> Sequence[torch.Tensor] | None:
        """The states for a pass over columns; None for others."""
        columns = getattr(cache, "columns", None)
        if columns is None or columns.width * self.linear_attn.own.head_v_dim > delta.MOST:
            return None
        found: list[torch.Tensor] = cache.states_of(self.linear_attn.layer_idx)
        return found if len(found) == 2 and found[0].shape[-1] == self.linear_attn.own.conv1d.weight.shape[-1] else None

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> torch.Tensor:
        """hidden_states: [B, n, D]. attention_mask: of a prompt with padding, [B, n]. kwargs: the cache, under the name of
        `CACHE`. Returns [B, n, D]."""
        cache: Any = kwargs.get(CACHE)
        if self.floats is not None and (stores := self.stores(cache)) and delta.fits(hidden_states, stores):
            made, read = delta.run([self.floats], hidden_states, stores, None, cache.columns)
            cache.note_together(read)
            return made[0]
        found = self._of_text(hidden_states, cache) if attention_mask is None else None
        if found is not None:
            return found
        return self.transform(self._attention_alone(hidden_states, attention_mask, **kwargs))

    def _of_text(self, hidden: torch.Tensor, cache: Any) -> torch.Tensor | None:
        """`forward` of a short prompt in C; None where that is not possible."""
        mixer: Any = self.linear_attn
        if self.floats is None or cache is None or not delta.fits(hidden, ()):
            return None
        if (states := mixer.states_for(hidden, cache)) is None:
            return None
        made = delta.read_text(self.floats, hidden, states, None)
        mixer.keep(cache, *states)
        return made

    def _attention_alone(self, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        return hidden_states + self.mix(self.before_attention(hidden_states), kwargs.get(CACHE), attention_mask)


class FusedLayer(FusedMLP):
    """RMSNorm, rotary attention, RMSNorm and MLP, as in the family's layers; attention may have a gate at its output."""

    ungated: torch.Tensor | None = None  # the indices of query and key heads if there are gates among them

    def __init__(self, layer: Any, shared: Shared, copied: bool, in_8_bits: bool = False):
        super().__init__(layer, copied, in_8_bits)
        attention, mlp = layer.self_attn, layer.mlp
        self.index: int = attention.layer_idx
        self.is_last = False  # among the model's layers
        self.head_size: int = attention.head_dim
        self.scaling: float = attention.scaling
        of_queries, of_keys = (int(width_of(module) or 0) for module in (attention.q_proj, attention.k_proj))
        self.key_heads = of_keys // self.head_size
        self.query_heads = self.key_heads * attention.num_key_value_groups
        self.shared = shared
        self.query_norm = norm_of(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.key_norm = norm_of(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.heads, self.output = [Product(modules, copied, in_8_bits) for modules in of_mixer(layer)]
        if of_queries > self.query_heads * self.head_size:  # each query head has a gate after it
            ends = torch.arange(2 * self.query_heads, 2 * self.query_heads + self.key_heads)
            self.ungated = torch.cat([torch.arange(0, 2 * self.query_heads, 2), ends]).to(
                layer.input_layernorm.weight.device
            )
        is_plain = self.ungated is None and self.shared.turn is None and type(self.before_attention) is Norm
        is_known = is_plain and self.whole_mlp is None and isinstance(mlp.act_fn, nn.SiLU | SiLUActivation)
        self.native = self._native([self.heads, self.output, self.gate_up, self.down]) if is_known else None

    def of_floats(self, products: list[list[Any]], norms: list[tuple[torch.Tensor, float]]) -> delta.FloatLayer:
        """The layer in C. products, norms: see `FloatLayer`."""
        of_heads = [norm.factor() for norm in (self.query_norm, self.key_norm) if norm is not None]
        turn, size = self.shared.turn, self.head_size
        turned = size if turn is None else int((turn != torch.arange(size)).sum())
        sizes = self.query_heads, self.key_heads, size
        return delta.attention_layer(products, norms, of_heads, sizes, turned, self.ungated is not None, self.scaling)

    def stores(self, cache: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values for a pass over columns; None for others."""
        return slots_of_layer(cache, self.index)

    def _native(self, products: list[Product]) -> native.NativeLayer | None:
        """The layer in C; None if it has not the shapes or the dtype for that."""
        found = [product.native for product in products if product.native is not None]
        norms = (self.before_attention, self.before_mlp, self.query_norm, self.key_norm)
        weights = [None if norm is None else norm.weight for norm in norms]
        fits = len(found) == len(products) and all(p.outputs == n.outputs for p, n in zip(products, found, strict=True))
        kinds = {weight.dtype for weight in weights if weight is not None} | {product.dtype for product in found}
        fits = fits and len(kinds) == 1 and self.head_size % 32 == 0 and self.head_size <= native.WIDEST
        if not fits or found[1].outputs != self.before_attention.weight.shape[0]:
            return None
        epsilons = [0.0 if norm is None else norm.epsilon for norm in norms]
        return native.NativeLayer(found, weights, epsilons, self.key_heads, self.head_size, self.scaling)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        last_only: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """hidden_states: [B, n, D]. attention_mask: as for sdpa, None for causal attention. position_embeddings: from `Angles`.
        last_only: only the last column of the model's output is used, so the last layer computes just keys and values of the
        others. kwargs: the cache, under the name of `CACHE`. Returns [B, n, D], or [B, 1, D] without the other columns.
        """
        if (made := self.in_c(hidden_states, attention_mask, position_embeddings, last_only, **kwargs)) is not None:
            return made
        normed = self.before_attention(hidden_states)
        attended = self.attend(hidden_states, normed, attention_mask, position_embeddings, last_only, **kwargs)
        return self.transform(attended)

    def in_c(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        last_only: bool = False,
        beside: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        """`forward` in C; None if that cannot run this pass. beside: see `NativeLayer`."""
        cache: Any = kwargs.get(CACHE)
        if self.floats is not None and delta.fits(hidden_states, ()):
            stores = self.stores(cache) or self.slots_to_read(hidden_states, attention_mask, cache)
            if stores is not None and delta.fits(hidden_states, stores):
                around = self.shared.around(hidden_states, attention_mask, position_embeddings, cache, self.index)
                made = delta.read_text(self.floats, hidden_states, stores, around)
                return made[:, -1:] if last_only and self.is_last else made
        if self.native is None or hidden_states.dtype != self.native.dtype:
            return None
        slots = slots_of_layer(cache, self.index) or self.slots_to_read(hidden_states, attention_mask, cache)
        if slots is None:
            return None
        hidden, mask, angles = hidden_states.contiguous(), attention_mask, position_embeddings
        around = self.shared.around(hidden, mask, angles, kwargs[CACHE], self.index)
        if last_only and self.is_last:
            native.NativeLayers([self.native]).run(hidden, slots, around, beside)
            hidden, mask = hidden[:, -1:].contiguous(), None if mask is None else mask[:, :, -1:]
            beside = None if beside is None else beside[:, -1:].contiguous()
            angles = angles[0][:, -1:], angles[1][:, -1:]
            around = self.shared.around(hidden, mask, angles, kwargs[CACHE], self.index)
        return self.native(hidden, *slots, around, beside)

    def slots_to_read(
        self, hidden_states: torch.Tensor, mask: torch.Tensor | None, cache: Any
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The slots for a prompt's columns, which are counted; None if the layer in C cannot read them, or not faster."""
        rows, width, _ = hidden_states.shape
        if (
            torch.compiler.is_compiling()
            or type(cache) not in (SlotCache, ColumnCache)
            or cache.start is not None
            or not isinstance(cache.places, slice)
            or (mask is not None and (mask.dtype != torch.bool or mask.numel() > _SEEN))
            or (self.native is not None and rows * width > self.native.most and not cache.alike)
        ):
            return None
        layer, like = cache.layer(self.index), hidden_states.new_empty(rows, self.key_heads, 0, self.head_size)
        layer.count(width, like, like)
        return layer.keys[cache.places], layer.values[cache.places]

    def attend(
        self,
        hidden_states: torch.Tensor,
        normed: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        last_only: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Add the attention's output for the input `normed`, [B, n, any], to the residual stream, [B, n, D]."""
        rows, width, _ = hidden_states.shape
        heads = self.heads(normed).view(rows, width, -1, self.head_size)
        # shape: [B, n, query heads + 2 key heads, head size], with gates between query heads
        turning, value = heads[:, :, : -self.key_heads], heads[:, :, -self.key_heads :]
        if self.ungated is not None:
            turning = heads.index_select(2, self.ungated)
        if self.query_norm is not None and self.key_norm is not None:
            if self.query_norm.epsilon == self.key_norm.epsilon:  # as one norm
                query, key = self.query_norm.weight, self.key_norm.weight
                weight = torch.cat([query.expand(self.query_heads, -1), key.expand(self.key_heads, -1)])
                turning = self.query_norm(turning, weight)
            else:
                queries, keys = turning.split([self.query_heads, self.key_heads], 2)
                turning = torch.cat([self.query_norm(queries), self.key_norm(keys)], 2)
        cos, sin = position_embeddings
        turn = self.shared.turn
        beside = turning.roll(self.head_size // 2, -1) if turn is None else turning.index_select(-1, turn)
        turned = plus_product(turning * cos, beside, sin).transpose(1, 2)
        query, key, value = turned[:, : self.query_heads], turned[:, self.query_heads :], value.transpose(1, 2)
        cache = kwargs.get(CACHE)
        if isinstance(cache, FixedColumns):
            seen = cache.attend(self.index, query, key, value, self.scaling)
            return hidden_states + self.output.raw(seen.transpose(1, 2).reshape(rows, width, -1))
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        if last_only and self.is_last:
            query, hidden_states, width = query[:, :, -1:], hidden_states[:, -1:], 1
            attention_mask = None if attention_mask is None else attention_mask[:, :, -1:]
        causal, group = attention_mask is None and width > 1, self.query_heads // self.key_heads
        # on a CPU, sdpa reads the keys once per query head, so the heads of a group are joined into one
        together = group if query.device.type == "cpu" and not causal else 1
        seen = F.scaled_dot_product_attention(
            query.reshape(rows, self.query_heads // together, together * width, self.head_size),
            key,
            value,
            attn_mask=self.shared.additive(attention_mask, query.dtype, together),
            is_causal=causal,
            scale=self.scaling,
            enable_gqa=group != together,
        )
        seen = seen.reshape(rows, self.query_heads, width, self.head_size).transpose(1, 2)
        if self.ungated is not None:
            seen = seen * heads[:, -width:, 1 : 2 * self.query_heads : 2].sigmoid()
        # sums and activations take low-bit products in the dtype they are computed in, which spares conversions
        return hidden_states + self.output.raw(seen.reshape(rows, width, -1))

    def _attention_alone(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.attend(hidden_states, self.before_attention(hidden_states), **kwargs)


def of_mixer(layer: Any) -> list[list[Any]]:
    """The linear modules of a layer's attention or delta rule: those for its input together, and the one at its end."""
    if "linear_attn" in layer._modules:
        return [inputs_of(layer.linear_attn), [outputs_of(layer.linear_attn)[1]]]
    attention = layer.self_attn
    return [[attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj]]


def of_mlp(layer: Any) -> list[list[Any]]:
    """The same of its MLP; none if that has experts."""
    mlp = layer.mlp
    return [[mlp.gate_proj, mlp.up_proj], [mlp.down_proj]] if hasattr(mlp, "down_proj") else []


def packed_inside(module: nn.Module, copied: bool) -> nn.Module:
    """The same module with faster products in it."""
    wide: dict[tuple[str, ...], Any] = {
        tuple(name.split(".")): own
        for name, own in module.named_modules()
        if name and PackedLinear.gains(own) and (copied or reads_in_place([own]))
    }
    return with_children(module, {path: PackedLinear.of(own, copied) for path, own in wide.items()})
