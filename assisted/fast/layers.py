"""Layers with the forms of families.py, and those with the gated delta rule, in fewer operations or in C.

A layer takes about twenty operations here instead of fifty. In C, it is one call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import GELUActivation, GELUTanh, ReLUSquaredActivation, SiLUActivation, XIELUActivation

from ..engine.cache import SlotCache
from ..engine.delta import inputs_of, outputs_of
from ..engine.libraries import CACHE, attention_of
from ..engine.parts import with_children
from ..engine.states import ColumnCache
from ..engine.sublayers import Path, Skippable
from . import delta, native
from .delta import NativeMixer
from .families import form_of, is_fusible, width_of
from .fixed_width import FixedColumns
from .norms import Called, GatedNorm, Norm, plus_product
from .products import PackedLinear, Product, reads_in_place
from .shared import Shared, slots_of_layer

_SEEN = 2**22  # entries of a prompt's mask that become lists of slots
_ACTIVATIONS: dict[type, int] = {
    nn.SiLU: 0,
    SiLUActivation: 0,
    GELUTanh: 1,
    GELUActivation: 2,
    ReLUSquaredActivation: 3,
    XIELUActivation: 4,
}
"""The classes of activations, and where `native.ACTIVATIONS` has them."""


def fused_layer(layer: Any, shared: Shared, copied: bool) -> nn.Module:
    """The faster form of a layer of a known family. copied: weights may be copied."""
    if not is_fusible(layer):
        return packed_inside(layer, copied)
    return (FusedLayer if "self_attn" in layer._modules else DeltaLayer)(layer, shared, copied)


def activation_in_c(activation: Any) -> int | None:
    """Where `native.ACTIVATIONS` has an activation; None if C has not."""
    # a variant in Python rounds each step
    own = getattr(activation, "act", None)
    in_python = getattr(own, "__self__", None) is activation
    return None if in_python else _ACTIVATIONS.get(type(activation))


def learned_by(activation: Any) -> list[torch.Tensor]:
    """The numbers of `native.Shape.learned`, in the dtype that an activation has them in; none if it has learned nothing."""
    if type(activation) is not XIELUActivation:
        return []
    above, below, beta = (part.detach() for part in (activation.alpha_p, activation.alpha_n, activation.beta))
    return [F.softplus(above), beta + F.softplus(below), beta, activation.eps.detach()]


class FusedMLP(Skippable):
    """What fused layers share: norms, something, and an MLP.

    It uses plain attributes only, because looking up a submodule takes as long as a small operation. in_8_bits: see `Product`.
    """

    whole_mlp: Callable[[torch.Tensor], Any] | None = None  # one that is not fused
    learned: Sequence[torch.Tensor] = ()  # by the activation of one that is

    def __init__(self, layer: Any, copied: bool, in_8_bits: bool = False):
        super().__init__()
        self.form = form = form_of(layer)
        norms = [None if norm is None else form.norm_of(norm) for norm in form.norms_in(layer)]
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = norms
        self.is_beside = form.beside(layer)
        self.multiplier: float | None = getattr(layer, "residual_multiplier", None)  # of what is added
        if parts := form.of_mlp(layer):
            own = getattr(layer.mlp, form.activation)
            self.activation, self.activation_in_c = own.forward, activation_in_c(own)
            self.learned = learned_by(own)
            self.gate_up, self.down = [Product(modules, copied, in_8_bits) for modules in parts]
        else:
            self.whole_mlp = packed_inside(layer.mlp, copied).forward

    def without(self, paths: Collection[Path]) -> nn.Module:
        return Called(self._attention_alone if ("mlp",) in paths else self._mlp_alone)

    def transform(self, hidden_states: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        """Add the MLP's output to the residual stream, [B, n, D]. beside: what it reads, if that is not the norm of it."""
        normed = hidden_states if beside is None else beside
        if beside is None and self.before_mlp is not None:
            normed = self.before_mlp(hidden_states)
        if self.whole_mlp is not None:
            found = self.whole_mlp(normed)
            made = found[0] if isinstance(found, tuple) else found
            return self._added(hidden_states, made, self.after_mlp)
        made = self.gate_up.raw(normed)
        if self.form.is_gated:
            gate, up = made.chunk(2, -1)
            made = self.activation(gate).mul_(up)
        else:
            made = self.activation(made)
        # sums and activations take low-bit products in the dtype they are computed in, which spares conversions
        made = self.down.raw(made) if self.after_mlp is None and self.multiplier is None else self.down(made)
        return self._added(hidden_states, made, self.after_mlp)

    def _added(self, hidden_states: torch.Tensor, made: torch.Tensor, after: Norm | None) -> torch.Tensor:
        """The residual stream plus what was made, after its norm and times the multiplier."""
        made = made if after is None else after(made)
        return hidden_states + (made if self.multiplier is None else made * self.multiplier)

    def before(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What attention reads, [B, n, D]."""
        return hidden_states if self.before_attention is None else self.before_attention(hidden_states)

    def _in_c(
        self,
        of_mixer: list[Product],
        shape: native.Shape,
        of_heads: Sequence[Norm | None] = (None, None),
        sinks: Sequence[torch.Tensor] = (),
        rule: native.Rule | None = None,
    ) -> native.NativeLayer | None:
        """The layer in C; None if it has not the shapes or the dtype for that. shape: of its mixer. of_heads: the norms of
        queries and keys. sinks: one tensor, or none."""
        is_whole = self.whole_mlp is None
        products = [*of_mixer, *([self.gate_up, self.down] if is_whole else [])]
        found = [product.native for product in products if product.native is not None]
        if len(found) < len(products) or len({product.dtype for product in found}) > 1:
            return None
        # what follows the first product does not read the outputs that it is filled up with
        exact = all(p.outputs == n.outputs for p, n in zip(products[1:], found[1:], strict=True))
        if not exact or found[0].inputs % native.GROUP or (is_whole and self.activation_in_c is None):
            return None
        if any(part.dtype != found[0].dtype for part in (*self.learned, *sinks)):
            return None
        of_mlp = [self.before_mlp, self.after_mlp] if is_whole else [None, None]
        norms = [self.before_attention, self.after_attention, *of_mlp, *of_heads]
        made = [None if norm is None else norm.in_c(found[0].dtype) for norm in norms]
        if any(norm is not None and one is None for norm, one in zip(norms, made, strict=True)):
            return None
        shape = replace(
            shape,
            beside=self.is_beside,
            activation=(self.activation_in_c or 0) if is_whole else 0,
            is_gated=self.form.is_gated,
            multiplier=1.0 if self.multiplier is None else self.multiplier,
            learned=tuple(map(float, self.learned)),
        )
        return native.NativeLayer(found, made, shape, sinks[0] if sinks else None, rule)

    def _attention_alone(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError

    def _mlp_alone(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.transform(hidden_states, self.before(hidden_states) if self.is_beside else None)


class DeltaLayer(FusedMLP):
    """RMSNorm, the gated delta rule, RMSNorm and an MLP, as in hybrids' layers."""

    def __init__(self, layer: Any, shared: Shared, copied: bool):
        super().__init__(layer, copied)
        own = layer.linear_attn
        products = [Product(modules, copied) for modules in of_mixer(layer)]
        self.linear_attn = NativeMixer(own, products[0], GatedNorm(outputs_of(own)[0]), products[1])
        self.mix, rule = self.linear_attn.forward, self.linear_attn.rule
        if rule is not None and products[0].order is not None:
            rule = delta.rule_of(self.linear_attn, products[0].order)
        self.native = None if rule is None else self._in_c(products, native.Shape(), rule=rule)
        if self.native is not None and self.native.dtype != own.conv1d.weight.dtype:
            self.native = None
        self.alone = None if self.native is None else native.NativeLayers([self.native])

    def stores(self, cache: Any) -> Sequence[torch.Tensor] | None:
        """The states for a pass over columns; None for others."""
        if getattr(cache, "columns", None) is None:
            return None
        found: list[torch.Tensor] = cache.states_of(self.linear_attn.layer_idx)
        return found if len(found) == 2 and found[0].shape[-1] == self.linear_attn.own.conv1d.weight.shape[-1] else None

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> torch.Tensor:
        """hidden_states: [B, n, D]. attention_mask: of a prompt with padding, [B, n]. kwargs: the cache, under the name of
        `CACHE`. Returns [B, n, D]."""
        cache: Any = kwargs.get(CACHE)
        attention_mask = None if isinstance(attention_mask, dict) else attention_mask  # of a pass over columns
        found = None
        if self.alone is not None and (stores := self.stores(cache)) and delta.fits(hidden_states, stores):
            made, read = delta.run(self.alone, hidden_states, stores, {}, cache.columns)
            cache.note_together(read)
            found = made[0]
        elif attention_mask is None:
            found = self._of_text(hidden_states, cache)
        if found is None:
            return self.transform(self._attention_alone(hidden_states, attention_mask, **kwargs))
        return found if self.whole_mlp is None else self.transform(found)

    def _of_text(self, hidden: torch.Tensor, cache: Any) -> torch.Tensor | None:
        """The layer in C over a short prompt; None where that is not possible."""
        mixer, own, width = self.linear_attn, self.alone, hidden.shape[:-1].numel()
        if own is None or cache is None or getattr(cache, "columns", None) is not None:
            return None
        states = mixer.states_for(hidden, cache)
        if states is None or width > own.layers[0].most or not delta.fits(hidden, states):
            return None
        made = own.one(hidden.contiguous(), *states, native.NativePass.without_slots(*hidden.shape[:-1]), None)
        mixer.keep(cache, *states)
        return made

    def _attention_alone(self, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        if isinstance(attention_mask, dict):
            attention_mask = None
        return hidden_states + self.mix(self.before(hidden_states), kwargs.get(CACHE), attention_mask)


class FusedLayer(FusedMLP):
    """Norms, rotary attention and an MLP, as the layer's form says; attention may have a gate at its output."""

    ungated: torch.Tensor | None = None  # the indices of query and key heads if there are gates among them

    def __init__(self, layer: Any, shared: Shared, copied: bool, in_8_bits: bool = False):
        super().__init__(layer, copied, in_8_bits)
        attention, form = layer.self_attn, self.form
        self.index: int = attention.layer_idx
        self.is_last = False  # among the model's layers
        self.kind = kind_of(attention.config, self.index)
        self.head_size: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.is_eager = attention_of(attention.config) == "eager"
        # in a list, because it is the model's parameter
        self.sinks: list[torch.Tensor] = [getattr(attention, form.sinks)] if form.sinks else []
        self.cap: float | None = getattr(attention, form.cap) if form.cap else None
        self.turns = form.turns(attention)
        into, group = form.of_mixer(layer)[0], attention.num_key_value_groups
        widths = [int(width_of(module) or 0) for module in into]
        self.key_heads = (widths[1] if len(widths) > 1 else widths[0] // (group + 2)) // self.head_size
        self.query_heads = self.key_heads * group
        self.shared = shared
        norms = [None if norm is None else form.norm_of(norm) for norm in form.of_heads(attention)]
        self.query_norm, self.key_norm = norms
        self.heads, self.output = [Product(modules, copied, in_8_bits) for modules in form.of_mixer(layer)]
        if (
            sum(widths) > (self.query_heads + 2 * self.key_heads) * self.head_size
        ):  # each query head has a gate after it
            ends = torch.arange(2 * self.query_heads, 2 * self.query_heads + self.key_heads)
            self.ungated = torch.cat([torch.arange(0, 2 * self.query_heads, 2), ends]).to(
                next(layer.parameters()).device
            )
        self.native = self._native()
        self.alone = None if self.native is None else native.NativeLayers([self.native])

    def stores(self, cache: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values for a pass over columns; None for others."""
        return slots_of_layer(cache, self.index)

    def _native(self) -> native.NativeLayer | None:
        """The layer in C, up to an MLP that is not fused; None if it has not the shapes or the dtype for that."""
        if self.head_size % 32 or self.head_size > native.WIDEST or (self.cap and not self.is_eager):
            return None
        form, shared = self.form, self.shared
        shape = native.Shape(
            *(self.key_heads, self.head_size, self.scaling),
            turned=shared.turned if self.turns else 0,
            turning=1 + form.pairs + 4 * form.turns_in_floats,
            norms_turned=form.norms_turned,
            has_gates=self.ungated is not None,
            is_eager=self.is_eager,
            cap=self.cap or 0.0,
            kind=self.kind,
        )
        return self._in_c([self.heads, self.output], shape, (self.query_norm, self.key_norm), self.sinks)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any,
        position_embeddings: Any,
        last_only: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """hidden_states: [B, n, D]. attention_mask: as the layer takes it, None for causal attention. position_embeddings: from
        `Angles`. Both may be those of all kinds of layers, by name.
        last_only: only the last column of the model's output is used, so the last layer computes just keys and values of the
        others. kwargs: the cache, under the name of `CACHE`. Returns [B, n, D], or [B, 1, D] without the other columns.
        """
        if isinstance(attention_mask, dict):
            attention_mask = attention_mask[self.kind or "full_attention"]
        if isinstance(position_embeddings, dict):
            position_embeddings = position_embeddings[self.kind]
        if (made := self.in_c(hidden_states, attention_mask, position_embeddings, last_only, **kwargs)) is not None:
            return made
        normed = self.before(hidden_states)
        attended = self.attend(hidden_states, normed, attention_mask, position_embeddings, last_only, **kwargs)
        return self.transform(attended, normed[:, -attended.shape[1] :] if self.is_beside else None)

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
        if self.alone is None or hidden_states.dtype != self.alone.dtype:
            return None
        slots = slots_of_layer(cache, self.index) or self.slots_to_read(hidden_states, attention_mask, cache)
        if slots is None:
            return None
        hidden, mask, angles = hidden_states.contiguous(), attention_mask, position_embeddings
        around = self.shared.around(hidden, mask, angles, cache, self.index, self.kind)
        if last_only and self.is_last:
            self.alone.run(hidden, slots, {self.kind: around}, beside)
            hidden, mask = hidden[:, -1:].contiguous(), None if mask is None else mask[:, :, -1:]
            beside = None if beside is None else beside[:, -1:].contiguous()
            angles = angles[0][:, -1:], angles[1][:, -1:]
            around = self.shared.around(hidden, mask, angles, cache, self.index, self.kind)
        made = self.alone.one(hidden, *slots, around, beside)
        if self.whole_mlp is None:
            return made
        # what the MLP reads beside attention is gone
        return self.transform(made, self.before(hidden) if self.is_beside else None)

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
            or (mask is not None and ((mask.dtype != torch.bool and not self.is_eager) or mask.numel() > _SEEN))
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
        if not self.form.norms_turned:
            turning = self._normed(turning)
        if self.turns:
            cos, sin = position_embeddings
            turn, dtype = self.shared.turn, turning.dtype
            turning = turning.float() if self.form.turns_in_floats else turning
            beside = turning.roll(self.head_size // 2, -1) if turn is None else turning.index_select(-1, turn)
            turning = plus_product(turning * cos, beside, sin).to(dtype)
        if self.form.norms_turned:
            turning = self._normed(turning)
        turned = turning.transpose(1, 2)
        query, key, value = turned[:, : self.query_heads], turned[:, self.query_heads :], value.transpose(1, 2)
        cache = kwargs.get(CACHE)
        if isinstance(cache, FixedColumns):
            return self._output(
                hidden_states, cache.attend(self.index, query, key, value, self.scaling).transpose(1, 2)
            )
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        if last_only and self.is_last:
            query, hidden_states, width = query[:, :, -1:], hidden_states[:, -1:], 1
            attention_mask = None if attention_mask is None else attention_mask[:, :, -1:]
        causal, group = attention_mask is None and width > 1, self.query_heads // self.key_heads
        if self.is_eager:
            seen = _eagerly(query, key, value, attention_mask, self.scaling, self.cap, *self.sinks)
            return self._output(hidden_states, seen.transpose(1, 2))
        # on a CPU, sdpa reads the keys once per query head, so the heads of a group are joined into one
        together = group if query.device.type == "cpu" and not causal else 1
        seen = F.scaled_dot_product_attention(
            query.reshape(rows, self.query_heads // together, together * width, self.head_size),
            key,
            value,
            attn_mask=self.shared.additive(attention_mask, query.dtype, together, self.kind),
            is_causal=causal,
            scale=self.scaling,
            enable_gqa=group != together,
        )
        seen = seen.reshape(rows, self.query_heads, width, self.head_size).transpose(1, 2)
        if self.ungated is not None:
            seen = seen * heads[:, -width:, 1 : 2 * self.query_heads : 2].sigmoid()
        return self._output(hidden_states, seen)

    def _output(self, hidden_states: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Add what attention has seen, [B, n, H, D], to the residual stream."""
        seen, after = seen.reshape(*hidden_states.shape[:2], -1), self.after_attention
        made = self.output.raw(seen) if after is None and self.multiplier is None else self.output(seen)
        return self._added(hidden_states, made, after)

    def _normed(self, heads: torch.Tensor) -> torch.Tensor:
        """Query heads and key heads, [B, n, H, D], after their norms."""
        query_norm, key_norm = self.query_norm, self.key_norm
        if query_norm is None or key_norm is None:
            return heads
        rms = not query_norm.kind.centers and query_norm.size == self.head_size
        if rms and query_norm.epsilon == key_norm.epsilon:  # as one norm
            query, key = query_norm.weight, key_norm.weight
            weight = torch.cat([query.expand(self.query_heads, -1), key.expand(self.key_heads, -1)])
            return query_norm(heads, weight)
        made = []
        for norm, part in zip((query_norm, key_norm), heads.split([self.query_heads, self.key_heads], 2), strict=True):
            whole = norm.size > self.head_size
            made.append(norm(part.flatten(2)).view_as(part) if whole else norm(part))
        return torch.cat(made, 2)

    def _attention_alone(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for name in ("attention_mask", "position_embeddings"):
            if isinstance(kwargs.get(name), dict):
                kwargs[name] = kwargs[name][self.kind or "full_attention"]
        return self.attend(hidden_states, self.before(hidden_states), **kwargs)


def _eagerly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    cap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention with the operations of transformers' eager one. query: [B, H, n, D]. key, value: [B, G, m, D]. mask: added.
    sinks: [H], see `Form`."""
    group = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(group, 1) if group > 1 else part for part in (key, value))
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        scores = scores - scores.max(-1, keepdim=True).values
        return torch.matmul(F.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1].to(value.dtype), value)
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype), value)


def kind_of(config: Any, index: int) -> str | None:
    """The kind of a model's layer, if its layers have masks of several kinds; else None."""
    kinds = getattr(config, "layer_types", None) or ()
    return kinds[index] if len({*kinds} - {"linear_attention"}) > 1 and index < len(kinds) else None


def of_mixer(layer: Any) -> list[list[Any]]:
    """The linear modules of a layer's attention or delta rule: those for its input together, and the one at its end."""
    if "linear_attn" in layer._modules:
        return [inputs_of(layer.linear_attn), [outputs_of(layer.linear_attn)[1]]]
    return form_of(layer).of_mixer(layer)


def of_mlp(layer: Any) -> list[list[Any]]:
    """The same of its MLP; none if that has experts."""
    return form_of(layer).of_mlp(layer)


def packed_inside(module: nn.Module, copied: bool) -> nn.Module:
    """The same module with faster products in it."""
    wide: dict[tuple[str, ...], Any] = {
        tuple(name.split(".")): own
        for name, own in module.named_modules()
        if name and PackedLinear.gains(own) and (copied or reads_in_place([own]))
    }
    return with_children(module, {path: PackedLinear.of(own, copied) for path, own in wide.items()})
