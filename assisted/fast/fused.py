"""Runs models with fewer operations or faster matrix products, as another object of the model's class with its parameters.

In small models, or over few tokens, launching operations takes most of the time of a forward pass. A layer of the Llama
family takes about twenty operations here instead of fifty, and so do layers of hybrids with the gated delta rule. Other models
keep their layers, and their wide products use a layout that is fast over few tokens. The output is compared with the original
model's before use.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from ..engine.agreement import agree
from ..engine.cache import SlotCache, SlotLayer
from ..engine.delta import DeltaMixer, inputs_of, outputs_of
from ..engine.hooks import any_touched, is_touched, is_untouched, looked_over
from ..engine.libraries import CACHE, is_wrapper_subclass, rotary_angles
from ..engine.parts import Tap, few_ids, with_children
from ..engine.prepared import CallSettings, PreparedModule, one_by_one, through_all
from ..engine.recurrent import slots_for, target_runner
from ..engine.runner import CachedModel
from ..engine.states import ColumnCache
from ..engine.sublayers import Path, Skippable
from ..engine.traits import Traits
from ..engine.trust import Trust, trust
from . import delta, fixed_width, native, regional
from .delta import NativeMixer
from .fixed_width import FixedColumns
from .low_bit import LOW_BIT_DTYPE, LowBitLinear
from .products import PackedLinear, Product, copied_in, may_copy, may_take, packs, size_of_copies
from .regional import CompiledLayer, CompiledPass, Form, Takeover
from .sources import Modules, Source, Weights

_FAMILY = dict.fromkeys(("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Next", "OlmoHybrid"), "Model")
_FAMILY |= dict.fromkeys(("Qwen3_5", "Qwen3_5Moe"), "TextModel")
"""The names of layers that are fused, without their ends, and how the name of the model around them ends."""
_KNOWN = ("transformers.", "assisted.")  # packages whose rotary embeddings follow their `rope_type`
_TABLE = 2**13  # positions with tabulated angles
_SEEN = 2**22  # entries of a prompt's mask that become lists of slots


def fused(
    model: PreTrainedModel, trusted: Trust | None = None, read: Weights | None = None, bits: bool = False
) -> PreparedModule:
    """The same model with fewer operations if its family is known, or with faster products if it has wide ones; else unchanged.

    trusted: whose code it runs, if that is known already. Only transformers' own code is replaced.
    read: weights whose checksums this call has just computed.
    bits: the layers of a known family are fused in every dtype, for `with_same_bits`.

    Its logits differ from the model's only by rounding, as those of forward passes of different widths do. Copies are kept
    between calls. Every call compares their source (weights, attributes, code) with the model and rebuilds them after a change.
    """
    trusted = trust(model) if trusted is None else trusted
    fusion = _fusion(model, trusted, read, bits)
    if fusion is None:
        return PreparedModule(model, low_bit_bytes=_low_bit_bytes(model))
    source, children = _MADE.get(fusion.key, (None, None))
    if source is None or not source.same(fusion.source):
        made = fusion.make()
        fusion = _fusion(model, trusted, read, bits) or fusion  # joined low-bit weights are other tensors now
        agree_on = _agree_in_rounds if fusion.is_family else _agree_at_once
        children = made if agree_on(model, fusion.prepared(model, made)) else None
        _MADE[fusion.key] = fusion.source, children
    if children is None:
        warning = f"{type(model).__name__} runs as it is: the logits of its faster form differ by more than rounding"
        return PreparedModule(model, low_bit_bytes=_low_bit_bytes(model), warning=warning)
    return fusion.prepared(model, children)


def prepare(
    model: Any, settings: CallSettings, fuse: Callable[[Any, Trust], PreparedModule] | None = None
) -> PreparedModule:
    """The model as a call runs it: unchanged, or fused. Building or checking it is one-time work of the call.

    fuse: creates the `PreparedModule` if the settings allow fused models, given whose code the model runs; `fused` by default.
    """
    began = time.perf_counter()
    trusted = settings.trust_in(model)
    if settings.fuses and trusted.is_own:
        fuse = fuse or functools.partial(fused, read=settings.read, bits=settings.bits)
        made = _taken_over(fuse(model, trusted), model, settings)
    else:
        made = PreparedModule(model, is_own=trusted.is_own)
    settings.read = None  # whatever runs from here on may change weights
    if made.warning is not None:
        settings.note(made.warning)
    settings.spent_once += time.perf_counter() - began
    return made


def compile_layers(model: PreTrainedModel) -> None:
    """Compile the layers of a model now, and wait for it; calls with `fast="auto"` then take them. Nothing happens to models
    whose layers can't be compiled by themselves."""
    made = fused(model)
    takeover = _takeover(made)
    if takeover is not None:
        takeover.begin(
            made.module.model.layers, lambda found: _agree_in_rounds(model, _with_layers(made, found)), False
        )


def _taken_over(made: PreparedModule, model: PreTrainedModel, settings: CallSettings) -> PreparedModule:
    """The model with compiled layers if they are ready. They are begun once they pay off, and a later call takes them. With
    `fast="compile"` whole passes are compiled instead, which takes longer and makes them faster."""
    takeover = None if settings.bits or settings.mode == "compile" else _takeover(made)
    if takeover is None:
        return made
    layers = made.module.model.layers
    if takeover.layers is None and takeover.reason is None and regional.pays(layers[0].shared.seconds, layers[0].form):
        takeover.begin(layers, lambda found: _agree_in_rounds(model, _with_layers(made, found)), True)
    if takeover.reason is not None:
        settings.note(f"layers of {type(model).__name__} are not compiled one by one: {takeover.reason}")
    return made if takeover.layers is None else _with_layers(made, takeover.layers)


def _takeover(made: PreparedModule) -> Takeover | None:
    """How far the compiled layers of a model are; None if its layers can't be compiled by themselves."""
    layers = getattr(getattr(made.module, "model", None), "layers", ())
    if not layers or not all(isinstance(layer, FusedLayer) and layer.native is None for layer in layers):
        return None
    known, form = TAKEOVERS.setdefault(layers, {}), layers[0].form
    if (threads := torch.get_num_threads()) not in known:
        if (
            not regional.fits(form)
            or any(layer.form != form for layer in layers)
            or not may_take(len(layers) * form.entries * torch.float32.itemsize)
        ):
            return None
        known[threads] = Takeover()
    return known[threads]


def _with_layers(made: PreparedModule, layers: nn.ModuleList) -> PreparedModule:
    return replace(made, module=with_children(made.module, {("model", "layers"): layers}), runs="compiled layers")


def with_same_bits(prepared: PreparedModule) -> PreparedModule:
    """The same model, with passes in which a column has the same bits whatever else they compute: of layers in C, or else of a
    fixed width. Tried once for each form of a model.

    prepared: of `fused` with `bits`. Raises ValueError if that is not possible.
    """
    layers: Any = getattr(getattr(prepared.module, "model", None), "layers", ())
    known = prepared.through_parts and all(isinstance(own, FusedLayer) and own.whole_mlp is None for own in layers)
    reason = (
        fixed_width.why_not(prepared.module.device)
        if known
        else "the model is not of the Llama family, or its layers are not as transformers has them"
    )
    if reason is not None:
        raise ValueError(f"exact: 'bits' is not possible here, see the page \"Numbers in half precision\"; {reason}")
    if not all(own.native is not None for own in layers):
        prepared = fixed_width.of_fixed_width(prepared)
    if layers not in _SAME_BITS:
        _SAME_BITS[layers] = _has_same_bits(prepared)
    if not _SAME_BITS[layers]:
        raise ValueError(
            "exact: 'bits' is not possible here, because the logits of several columns differ from those of each"
        )
    return prepared


@torch.no_grad()
def is_sum_of_parts(model: PreTrainedModel) -> bool:
    """Whether a model consists only of its embedding, layers, norm and head, tested on a few tokens."""
    base, masks = model.base_model, Traits.of(model).masks
    parts = all(hasattr(base, name) for name in ("embed_tokens", "rotary_emb", "layers", "norm"))
    if not parts or not hasattr(model, "lm_head") or not masks.trees or len(masks.windows) > 1:
        return False
    ids = few_ids(model, 8)
    logits = []
    for through_parts in (False, True):
        runner = CachedModel(PreparedModule(model, through_parts), SlotCache(1, ids.shape[1]), masks)
        runner.prefill(ids[:, :4], None)
        try:
            logits.append(runner(ids[:, 4:]))
        except (TypeError, AttributeError, ValueError):  # submodules that need other arguments
            return False
    return torch.equal(*logits)


def copy_bytes(model: PreTrainedModel, dtype: torch.dtype, memory: int | None = None) -> int:
    """Bytes of the copies that `fused` keeps of a model on this CPU, from its shapes; it may be on the meta device.

    dtype: of its weights. memory: free bytes; None for those of this machine. 0 if the copies would take too much.
    """
    kind = copied_in(dtype)
    if kind is None:
        return 0
    numbers = sum({id(weight): weight.numel() for weight in model.parameters()}.values())
    if not may_take(numbers * kind.itemsize, memory):
        return 0
    layers: Any = _layers(model)
    if layers is None:
        wide: list[Any] = [module for module in model.modules() if PackedLinear.gains(module)]
        return sum(size_of_copies([module.weight.shape], dtype) for module in wide)
    products: list[Any] = [modules for layer in layers for modules in (*_of_mixer(layer), *_of_mlp(layer))]
    joined = {id(module) for modules in products for module in modules}
    products += [[m] for m in layers.modules() if PackedLinear.gains(m) and id(m) not in joined]
    products.append([model.get_output_embeddings()])
    return sum(size_of_copies([module.weight.shape for module in modules], dtype) for modules in products)


def fused_product(module: nn.Linear, in_8_bits: bool = False) -> nn.Module:
    """The fastest form of a product over a few columns, with the current weight: repacked if that is faster on this CPU,
    otherwise the module itself. in_8_bits: see `Product`."""
    may = may_copy(module.parameters()) and not is_touched(module)
    return Called(Product([module], True, in_8_bits)) if may else module


# by the model or the list of layers
_TOGETHER: weakref.WeakKeyDictionary[nn.Module, _Together] = weakref.WeakKeyDictionary()
_SAME_BITS: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()  # by the layers
# by the layers and the number of threads
TAKEOVERS: weakref.WeakKeyDictionary[nn.Module, dict[int, Takeover]] = weakref.WeakKeyDictionary()
_Children = dict[tuple[str, ...], nn.Module]


@dataclass(frozen=True)
class _Fusion:
    """How a model can be run faster.

    Args:
        key: a module of the model that stays the same between calls.
        source: the current state of what it is built from.
        make: builds the modules that replace the model's.
        is_family: its layers are fused. If all of them are, it runs `through_parts` and supports `last_only`.
    """

    key: nn.Module
    source: Source
    make: Callable[[], _Children]
    is_family: bool

    def prepared(self, model: PreTrainedModel, children: _Children) -> PreparedModule:
        """The model with its modules replaced by these."""
        weights = self.source.weights
        copied = () if weights.checksums is None else weights.tensors
        made = with_children(model, children)
        layers: Any = next((child for path, child in children.items() if path[-1] == "layers"), ())
        # those of a text model inside another one run through the forward of both
        whole = ("model", "layers") in children and all(isinstance(layer, FusedMLP) for layer in layers)
        in_c = bool(layers) and all(isinstance(layer, FusedLayer) and layer.native is not None for layer in layers)
        in_floats = bool(layers) and all(isinstance(layer, FusedMLP) and layer.floats is not None for layer in layers)
        return PreparedModule(
            made,
            whole,
            whole,
            copied,
            sum(low.nbytes for low in self.source.kept.tensors),
            runs=("layers in C" if in_c else "fused layers") if self.is_family else "packed products",
            run_layers=_at_once if in_c or in_floats else one_by_one,
            run_columns=_through_all if in_c else through_all,
            move=native.move if in_c else None,
        )


# By `_Fusion.key`: what was read, and the modules that replace the model's; None if their output differed.
_MADE: weakref.WeakKeyDictionary[nn.Module, tuple[Source, _Children | None]] = weakref.WeakKeyDictionary()


def _fusion(model: PreTrainedModel, trusted: Trust, read: Weights | None, bits: bool = False) -> _Fusion | None:
    """How this model can be run faster; None if it can't, or if other code has changed its modules. bits: see `fused`."""
    if (
        Traits.of(model).crosses
        or not trusted.is_own
        or model.training
        or not is_untouched(model)
        or torch.is_autocast_enabled(model.device.type)
    ):
        return None
    # on a CPU, products of half precision round differently, as other widths do; accepted only where they are faster
    kind = model.device.type
    is_fast = kind == "cuda" or (kind == "cpu" and model.dtype == torch.bfloat16 and packs(model.dtype))
    if not (bits or model.dtype == torch.float32 or is_fast):
        return None
    layers = _layers(model)
    if layers is not None and kind == "cuda" and model.dtype != torch.float32 and _is_hybrid(layers):
        return None
    if layers is not None:
        base: Any = model.get_submodule(".".join(_path(model)))
        norms = [] if is_touched(base.norm) else [base.norm]
        modules, parameters = looked_over(layers, *norms, model.lm_head, *filter(None, [base.rotary_emb]))
        if any_touched(modules):
            return None
        copied = may_copy(parameters)
        return _Fusion(
            layers,
            _source([*modules, base], parameters, copied, trusted, read),
            lambda: _fused_children(model, layers, copied),
            True,
        )
    if any_touched(looked_over(model)[0]):
        return None
    wide = {name: module for name, module in model.named_modules() if PackedLinear.gains(module)}
    weights = [module.weight for module in wide.values()]
    if not wide or not may_copy(weights):
        return None
    return _Fusion(
        next(iter(wide.values())),
        _source(list(wide.values()), weights, True, trusted, read),
        lambda: {tuple(name.split(".")): PackedLinear.of(module) for name, module in wide.items()},
        False,
    )


def _source(
    modules: list[nn.Module], parameters: list[torch.Tensor], copied: bool, trusted: Trust, read: Weights | None
) -> Source:
    """The source of a faster model: these modules, and the code of the whole model."""
    low = [module for module in modules if isinstance(module, LowBitLinear)]  # joined, but not copied
    others = (module for module in modules if not isinstance(module, LowBitLinear))
    held = Modules.of(modules, trusted.code)
    found = [buffer for module in others for buffer in module._buffers.values() if buffer is not None]
    found += [value for own in held.attributes for value in own.values() if isinstance(value, torch.Tensor)]
    # wrapper subclasses belong to modules that are called
    buffers = [buffer for buffer in found if not is_wrapper_subclass(buffer)]
    return Source(
        held,
        Weights.of(parameters, copied, read),
        # angles are tabulated on a CPU only
        Weights.of(buffers, all(buffer.device.type == "cpu" for buffer in buffers)),
        _low_bit_weights(low),
    )


def _low_bit_weights(modules: list[LowBitLinear]) -> Weights:
    """Their tensors, with addresses of packed weights, which joined ones share, and checksums of scales and biases, which these
    copy."""
    addresses = torch.tensor([module.packed.data_ptr() for module in modules], dtype=torch.int64)
    # of rows as long as they can be, which are summed faster
    scales = [module.scales.flatten(1) if module.scales.dim() == 3 else module.scales for module in modules]
    biases = [module.bias for module in modules if module.bias is not None]
    copied = Weights.of((part for part in (*scales, *biases) if part.is_cpu), True).checksums or ()
    return Weights(tuple(tensor for m in modules for tensor in (m.packed, m.scales)), (addresses, *copied))


def _is_hybrid(layers: Iterable[nn.Module]) -> bool:
    return any("linear_attn" in layer._modules for layer in layers)


def _fused_children(model: Any, layers: nn.ModuleList, copied: bool) -> _Children:
    is_hybrid = _is_hybrid(layers)
    if is_hybrid and copied and is_float(model.lm_head) and delta.loaded()[0] is not None:
        head = Called(delta.FloatProduct([model.lm_head]))
    else:
        of_head = Product(
            [model.lm_head], copied
        )  # first: converting it takes as much again, which the layers use later
        of_head.most = sys.maxsize  # it computes no prompts
        head = Called(of_head)
    path, angles = _path(model), None
    norm = model.get_submodule(".".join((*path, "norm")))
    children: _Children = {("lm_head",): head, (*path, "norm"): norm if is_touched(norm) else Called(norm_of(norm))}
    if any("self_attn" in layer._modules and _is_fusible(layer) for layer in layers):
        base = model.get_submodule(".".join(path))
        angles = Angles(base.rotary_emb, base.config, model.dtype)
        children |= {(*path, "rotary_emb"): angles}
    shared = Shared(angles)
    own = [fused_layer(layer, shared, copied, is_hybrid) for layer in layers]
    if isinstance(own[-1], FusedLayer):
        own[-1].is_last = True
    return {(*path, "layers"): nn.ModuleList(own), **children}


def fused_layer(layer: Any, shared: Shared, copied: bool, in_floats: bool = False) -> nn.Module:
    """The faster form of a layer of a known family. copied: weights may be copied. in_floats: in C if it is of float32."""
    if not _is_fusible(layer):
        return _packed_inside(layer, copied)
    # what runs in C has copies of its own
    in_floats = in_floats and copied and _fits_floats(layer)
    made: Any = (FusedLayer if "self_attn" in layer._modules else DeltaLayer)(layer, shared, copied and not in_floats)
    if in_floats:
        products = [*_of_mixer(layer), *_of_mlp(layer)]
        made.floats = made.of_floats(products, [norm.factor() for norm in (made.before_attention, made.before_mlp)])
    return made


def _fits_floats(layer: Any) -> bool:
    """Whether a layer runs in C in float32, by its parts alone."""
    products = [*_of_mixer(layer), *_of_mlp(layer)]
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
        if parts := _of_mlp(layer):
            self.activation = layer.mlp.act_fn.forward
            self.gate_up, self.down = [Product(modules, copied, in_8_bits) for modules in parts]
        else:
            self.whole_mlp = _packed_inside(layer.mlp, copied).forward

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
        (inputs, out), norm = _of_mixer(layer), outputs_of(own)[0]
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
        self.key_heads = attention.k_proj.out_features // self.head_size
        self.query_heads = self.key_heads * attention.num_key_value_groups
        self.shared = shared
        self.query_norm = norm_of(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.key_norm = norm_of(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.heads, self.output = [Product(modules, copied, in_8_bits) for modules in _of_mixer(layer)]
        if attention.q_proj.out_features > self.query_heads * self.head_size:  # each query head has a gate after it
            ends = torch.arange(2 * self.query_heads, 2 * self.query_heads + self.key_heads)
            self.ungated = torch.cat([torch.arange(0, 2 * self.query_heads, 2), ends]).to(
                layer.input_layernorm.weight.device
            )
        is_plain = self.ungated is None and self.shared.turn is None and type(self.before_attention) is Norm
        is_known = is_plain and self.whole_mlp is None and isinstance(mlp.act_fn, nn.SiLU | SiLUActivation)
        self.native = self._native([self.heads, self.output, self.gate_up, self.down]) if is_known else None
        self.compiled: CompiledLayer | None = None
        self.is_compilable = is_known and copied

    def of_floats(self, products: list[list[Any]], norms: list[tuple[torch.Tensor, float]]) -> delta.FloatLayer:
        """The layer in C. products, norms: see `FloatLayer`."""
        of_heads = [norm.factor() for norm in (self.query_norm, self.key_norm) if norm is not None]
        turn, size = self.shared.turn, self.head_size
        turned = size if turn is None else int((turn != torch.arange(size)).sum())
        sizes = self.query_heads, self.key_heads, size
        return delta.attention_layer(products, norms, of_heads, sizes, turned, self.ungated is not None, self.scaling)

    def stores(self, cache: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values for a pass over columns; None for others."""
        return _slots(cache, self.index)

    @classmethod
    def of_form(cls, form: Form, products: list[Any], norms: list[torch.Tensor]) -> FusedLayer:
        """A layer of other products than those of modules, for compiling. norms: their weights."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.index, layer.is_last, layer.native, layer.compiled, layer.is_compilable = 0, False, None, None, False
        layer.head_size, layer.scaling, layer.activation = form.head_size, form.scaling, F.silu
        layer.key_heads, layer.query_heads = form.key_heads, form.query_heads
        made = [Norm(SimpleNamespace(weight=weight, variance_epsilon=form.epsilon)) for weight in norms]
        layer.before_attention, layer.before_mlp = made[:2]
        layer.query_norm, layer.key_norm = made[2:] if form.norms else (None, None)
        layer.heads, layer.output, layer.gate_up, layer.down = products
        layer.shared = _Given(None)
        return layer

    @property
    def form(self) -> Form | None:
        """What its compiled code depends on; None if it can't be compiled by itself."""
        products = self.heads, self.output, self.gate_up, self.down
        linear: list[Any] = [module for product in products for module in product.modules]
        norms = self.norms
        if not self.is_compilable or any(type(module) is not nn.Linear for module in linear):
            return None
        kinds = {
            (weight.dtype, weight.device.type) for weight in (*(m.weight for m in linear), *(n.weight for n in norms))
        }
        if kinds != {(torch.float32, "cpu")} or len({norm.epsilon for norm in norms}) > 1:
            return None
        return Form(
            linear[3].weight.shape[0],
            linear[-1].weight.shape[1],
            self.query_heads,
            self.key_heads,
            self.head_size,
            self.before_attention.epsilon,
            self.scaling,
            len(norms) == 4,
            tuple(product.bias is not None for product in products),
            torch.get_num_threads(),
        )

    @property
    def norms(self) -> list[Norm]:
        """In the order of the compiled code's arguments."""
        found = (self.before_attention, self.before_mlp, self.query_norm, self.key_norm)
        return [norm for norm in found if norm is not None]

    def weights_of_form(self) -> list[torch.Tensor]:
        """The weights as arguments of compiled code."""
        products = self.heads, self.output, self.gate_up, self.down
        parts: list[list[Any]] = [list(product.modules) for product in products]
        weights = [regional.blocked(torch.cat([module.weight for module in part])) for part in parts]
        biases = [torch.empty(0) if product.bias is None else product.bias.detach() for product in products]
        return [*weights, *biases, *(norm.weight.detach() for norm in self.norms)]

    def compiled_as(self, code: CompiledLayer) -> FusedLayer:
        """The same layer as another object, run by this code."""
        other = self.__class__.__new__(self.__class__)
        other.__dict__ = {**self.__dict__, "compiled": code}
        return other

    def trial(self, columns: int, top: int) -> Callable[[], list[torch.Tensor]]:
        """A forward pass over some numbers, with its output, keys and values."""
        generator = torch.Generator().manual_seed(columns)
        form = self.form
        assert form is not None

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        cache = SlotCache(1, top)
        cache.reserve(top)
        cache.layers = [SlotLayer(cache) for _ in range(self.index + 1)]
        cache.lengths = [top - columns]
        cache.place(columns, torch.device("cpu"))
        slots = cache.layers[self.index]
        slots.keys, slots.values = (numbers(1, form.key_heads, top, form.head_size) for _ in range(2))
        slots.is_initialized = True
        hidden = numbers(1, columns, form.hidden)
        angles = numbers(1, columns, 1, form.head_size), numbers(1, columns, 1, form.head_size)
        mask = torch.ones(columns, top, dtype=torch.bool).tril(top - columns)[None, None] if columns > 1 else None
        return lambda: [self(hidden, mask, angles, **{CACHE: cache}), slots.keys, slots.values]

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
        epsilon = self.before_attention.epsilon
        return native.NativeLayer(found, weights, self.key_heads, self.head_size, epsilon, self.scaling)

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
        cache, code = kwargs.get(CACHE), self.compiled
        if code is not None and (slots := _slots(cache, self.index)) is not None and code.takes(hidden_states):
            beside = self.query_heads // self.key_heads
            compiled = self.shared.compiled(hidden_states, attention_mask, position_embeddings, kwargs[CACHE], beside)
            return code(hidden_states, *slots, compiled)
        if torch.compiler.is_compiling() or not self.is_compilable or not regional.is_few(hidden_states):
            return self.run(hidden_states, attention_mask, position_embeddings, cache, last_only)
        if self.index == 0:
            self.shared.began = time.perf_counter()
        made = self.run(hidden_states, attention_mask, position_embeddings, cache, last_only)
        if self.is_last:
            self.shared.seconds += time.perf_counter() - self.shared.began
        return made

    def run(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        cache: Any,
        last_only: bool = False,
    ) -> torch.Tensor:
        """The layer by operations of torch; see `forward`."""
        normed = self.before_attention(hidden_states)
        given = {CACHE: cache}
        attended = self.attend(hidden_states, normed, attention_mask, position_embeddings, last_only, **given)
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
        slots = _slots(cache, self.index) or self.slots_to_read(hidden_states, attention_mask, cache)
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
            or (hidden_states.dtype == torch.float32 and rows * width > native.FLOAT32_COLUMNS and not cache.alike)
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
            query, key = self.query_norm.weight, self.key_norm.weight
            weight = torch.cat([query.expand(self.query_heads, -1), key.expand(self.key_heads, -1)])
            turning = self.query_norm(turning, weight)
        cos, sin = position_embeddings
        turn = self.shared.turn
        beside = turning.roll(self.head_size // 2, -1) if turn is None else turning.index_select(-1, turn)
        turned = _plus_product(turning * cos, beside, sin).transpose(1, 2)
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


def _of_mixer(layer: Any) -> list[list[Any]]:
    """The linear modules of a layer's attention or delta rule: those for its input together, and the one at its end."""
    if "linear_attn" in layer._modules:
        return [inputs_of(layer.linear_attn), [outputs_of(layer.linear_attn)[1]]]
    attention = layer.self_attn
    return [[attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj]]


def _at_once(
    layers: Iterable[nn.Module],
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **given: Any,
) -> torch.Tensor:
    """`one_by_one` of layers in C in one call, of the Llama family or of a hybrid in float32, where they can run this pass.
    Taps keep their layer's output."""
    known: _Together = _together(layers)
    cache: Any = given[CACHE]
    stores = known.stores(cache)
    if (
        stores is None
        or known.dtype != hidden_states.dtype
        or (known.natives is None and not delta.fits(hidden_states, stores))
    ):
        given |= {"attention_mask": attention_mask, "position_embeddings": position_embeddings}
        return one_by_one(layers, hidden_states, **given)
    around = known.around(hidden_states, attention_mask, position_embeddings, cache)
    if known.natives is None:
        made, read = delta.run([own.floats for own in known.each], hidden_states, stores, around, cache.columns)
        cache.note_together(read)
    else:
        made = hidden_states.new_empty(len(known.each), *hidden_states.shape)
        known.natives.run(hidden_states.contiguous(), stores, around, made=made)
    return known.kept(made)


def _through_all(
    prepared: PreparedModule, hidden: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, cache: Any
) -> torch.Tensor:
    """`through_all` of a whole model in C in one call, where it can run this pass."""
    module = prepared.module
    base = module.base_model
    known: _Together = _together(base.layers, module)
    whole = known.natives
    stores = known.stores(cache)
    if whole is None or whole.output is None or stores is None or known.dtype != hidden.dtype:
        return through_all(prepared, hidden, positions, mask, cache)
    around = known.around(hidden, mask, rotary_angles(base.rotary_emb, hidden, positions), cache)
    made = hidden.new_empty(len(known.each), *hidden.shape)
    logits = hidden.new_empty(*hidden.shape[:-1], whole.output.outputs)
    whole.run(hidden.contiguous(), stores, around, made=made, logits=logits)
    known.kept(made)
    return logits[..., : known.vocabulary]


@dataclass(frozen=True)
class _Together:
    """Layers, as they can run together.

    Args:
        each: without taps; none if they cannot.
        attend: which of them have attention.
        taps: by index.
        dtype: that they compute in; None if they cannot.
        natives: the layers of the Llama family in C; None of others.
        vocabulary: of a whole model in C.
    """

    each: Sequence[Any]
    attend: Sequence[bool]
    taps: Sequence[tuple[int, Tap]]
    dtype: torch.dtype | None = None
    natives: native.NativeLayers | None = None
    vocabulary: int = 0

    @staticmethod
    def of(layers: Iterable[nn.Module], model: Any) -> _Together:
        """Layers, some of them inside taps. model: a fused one that ends with them, a norm and a product; None for others."""
        taps = [(index, layer) for index, layer in enumerate(layers) if type(layer) is Tap]
        each: list[Any] = [layer.layer if type(layer) is Tap else layer for layer in layers]
        attend = [type(own) is FusedLayer for own in each]
        natives = [own.native for own in each if type(own) is FusedLayer and own.native is not None]
        if all(type(own) in (FusedLayer, DeltaLayer) and own.floats is not None for own in each):
            return _Together(each, attend, taps, torch.float32)
        if len(natives) < len(each) or len({(own.sizes, own.dtype) for own in natives}) > 1:
            return _Together((), (), taps)
        made = functools.partial(_Together, each, attend, taps, natives[0].dtype)
        # a norm that is tapped has to keep what it returns
        parts = () if model is None else (model.base_model.norm, model.lm_head)
        norm, head = (part.run for part in parts) if {*map(type, parts)} == {Called} else (None, None)
        if type(norm) is Norm and isinstance(head, Product) and (output := head.native) is not None:
            epsilons = {norm.epsilon, *(own.before_attention.epsilon for own in each)}
            dtypes = {norm.weight.dtype, output.dtype, natives[0].dtype}
            if len(epsilons) == len(dtypes) == 1 and output.inputs == len(norm.weight):
                return made(native.NativeLayers(natives, norm.weight.detach(), output), head.outputs)
        return made(native.NativeLayers(natives))

    def stores(self, cache: Any) -> list[torch.Tensor] | None:
        """Keys and values, or states, of all layers for a pass over columns; None for other passes."""
        if self.natives is not None:
            return _slots_of(cache, [own.index for own in self.each])
        found: list[torch.Tensor] = []
        capacity = None
        for own, attends in zip(self.each, self.attend, strict=True):
            part = own.stores(cache)
            if part is None or (attends and part[0].shape[2] != (capacity or part[0].shape[2])):
                return None
            capacity = part[0].shape[2] if attends else capacity
            found += part
        return found

    def around(
        self, hidden: torch.Tensor, mask: torch.Tensor | None, angles: tuple[torch.Tensor, torch.Tensor], cache: Any
    ) -> Any:
        """What their attention shares in a pass; None if none has any."""
        if True not in self.attend:
            return None
        own, columns = self.each[self.attend.index(True)], getattr(cache, "columns", None)
        if columns is not None and columns.parents is None and cache.visible is None:
            mask = None  # each column sees all slots up to its own
        return own.shared.around(hidden, mask, angles, cache, own.index)

    def kept(self, made: torch.Tensor) -> torch.Tensor:
        """Give taps their layers' outputs, and return the last one. made: [layers, R, n, D]."""
        for index, tap in self.taps:
            tap.hidden = made[index]
        return made[-1]


def _together(layers: Any, model: Any = None) -> _Together:
    """`_Together.of` the layers, computed once."""
    key = layers if model is None else model  # which may share its layers with one that also taps the norm
    known = _TOGETHER.get(key)
    if known is None:
        known = _TOGETHER[key] = _Together.of(layers, model)
    return known


def _of_mlp(layer: Any) -> list[list[Any]]:
    """The same of its MLP; none if that has experts."""
    mlp = layer.mlp
    return [[mlp.gate_proj, mlp.up_proj], [mlp.down_proj]] if hasattr(mlp, "down_proj") else []


def _packed_inside(module: nn.Module, copied: bool) -> nn.Module:
    """The same module with faster products in it."""
    wide = {
        tuple(name.split(".")): m for name, m in module.named_modules() if copied and name and PackedLinear.gains(m)
    }
    return with_children(module, {path: PackedLinear.of(own) for path, own in wide.items()})  # type: ignore[arg-type]


class Called(nn.Module):
    """A function in the place of a module: a part of a fused layer, or the product of a head."""

    def __init__(self, run: Callable[..., torch.Tensor]):
        super().__init__()
        self.run = run

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.run(hidden_states, **kwargs)


class Angles(nn.Module):
    """The rotary embedding in the layout of heads: cosines and signed sines. On a CPU they come from a table if they depend on
    the position alone.

    Attributes:
        turn: [D] int64, for each number of a head the one that it turns with; None if they are half a head apart.
    """

    def __init__(self, rotary: nn.Module, config: Any, dtype: torch.dtype):
        super().__init__()
        self.rotary = [rotary]  # in a list, because it is the model's submodule
        self.rope_type = kind = getattr(rotary, "rope_type", "default")
        self.original_max_seq_len = getattr(rotary, "original_max_seq_len", config.max_position_embeddings)
        self.config = getattr(rotary, "config", config)
        # the angles of other types may depend on more than the position
        fixed = kind in ("default", "linear", "llama3") and type(rotary).__module__.startswith(_KNOWN)
        device = next((buffer.device for buffer in rotary.buffers()), torch.device("cpu"))
        known = min(config.max_position_embeddings, _TABLE) if fixed and device.type == "cpu" else 0
        place = torch.zeros(1, 1, dtype=torch.int64, device=device)
        turned = rotary_angles(rotary, torch.zeros(1, dtype=dtype, device=device), place)
        turned = turned[0].shape[-1]
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.rest, self.turn = size - turned, None  # numbers of a head that do not turn
        if self.rest:
            self.turn = torch.arange(size, device=device)
            self.turn[:turned] = self.turn[:turned].roll(turned // 2)
        self.whole = known == config.max_position_embeddings  # every position of the context is in the table
        self.table = None if known == 0 else self._angles(torch.zeros(1, dtype=dtype), torch.arange(known)[None])

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden: gives dtype and device. position_ids: [B or 1, n] int64. Returns two tensors, [B or 1, n, 1, D]."""
        table, is_compiling = self.table if hidden.device.type == "cpu" else None, torch.compiler.is_compiling()
        # no values are read from a GPU, nor by a compiler; compiled passes stay within the context
        last = 0 if is_compiling or table is None else int(position_ids.max())
        if (
            table is None
            or position_ids.dim() > 2  # three rows of positions are those of text and of images
            or last >= table[0].shape[1]
            or (is_compiling and not self.whole)
        ):
            return self._angles(hidden, position_ids)
        cos, sin = table
        if not is_compiling and position_ids.numel() == 1:  # views take less time
            return cos[:, last : last + 1], sin[:, last : last + 1]
        return cos[0, position_ids], sin[0, position_ids]

    def _angles(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = (part[:, :, None] for part in rotary_angles(self.rotary[0], hidden, position_ids))
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        return (F.pad(cos, (0, self.rest), value=1.0), F.pad(sin, (0, self.rest))) if self.rest else (cos, sin)


class Shared:
    """Values that all layers of a model would compute from the same inputs, computed once per forward pass.

    Args:
        angles: what computes the layers' angles; None if no layer has any.

    Attributes:
        turn: see `Angles`.
        seconds: spent so far in forward passes over few columns.
        began: when the last forward pass began.
    """

    def __init__(self, angles: Angles | None) -> None:
        self.turn = None if angles is None else angles.turn
        self.mask: tuple[Any, torch.Tensor] | None = None
        self.passed: tuple[Any, Any, native.NativePass] | None = None
        self.given: tuple[Any, Any, CompiledPass] | None = None
        self.seconds = self.began = 0.0

    def around(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: SlotCache,
        index: int,
    ) -> native.NativePass:
        """What the native layers of this forward pass share. index: of one of them."""
        known = self.passed
        if known is None or known[0] is not mask or known[1] is not angles[0]:
            rows, width, _ = hidden.shape
            if cache.start is None:  # a prompt, of which `width` columns have been counted
                first, end = cache.first, cache.layers[index].filled + cache.first
                places = torch.arange(end - width, end)[None]
            else:
                first, end, places = 0, cache.top, _places(cache, width)
            seen = None if mask is None else mask[:, 0]
            known = self.passed = mask, angles[0], native.NativePass(*angles, places, seen, rows, first, end)
        return known[2]

    def compiled(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: SlotCache,
        beside: int,
    ) -> CompiledPass:
        """What the compiled layers of this forward pass share. beside: heads that attention joins."""
        known = self.given
        if known is None or known[0] is not mask or known[1] is not angles[0]:
            width = hidden.shape[1]
            seen = (
                torch.ones(1, 1, width, cache.top, dtype=torch.bool).tril(cache.top - width) if mask is None else mask
            )
            given = _additive(seen, hidden.dtype, beside), *angles, _places(cache, width)
            known = self.given = mask, angles[0], CompiledPass(*given)
        return known[2]

    def additive(self, mask: torch.Tensor | None, dtype: torch.dtype, beside: int) -> torch.Tensor | None:
        """The additive mask that sdpa would compute in every layer, repeated for `beside` joined heads, [.., beside * n, m]."""
        if mask is None:
            return None
        if torch.compiler.is_compiling():  # it shares the computation by itself
            return _additive(mask, dtype, beside)
        known = self.mask
        if known is None or known[0] is not mask:
            known = self.mask = mask, _additive(mask, dtype, beside)
        return known[1]


class _Given(Shared):
    """What compiled code is given: the mask as attention takes it."""

    def additive(self, mask: torch.Tensor | None, dtype: torch.dtype, beside: int) -> torch.Tensor | None:
        return mask


def _places(cache: SlotCache, width: int) -> torch.Tensor:
    """The slot that each column is written to, [R or 1, n]."""
    places = cache.start + torch.arange(width)[None] if isinstance(cache.start, int) else cache.start
    assert places is not None
    return places


def _slots(cache: Any, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`_slots_of` a single layer."""
    found = _slots_of(cache, (index,))
    return None if found is None else (found[0], found[1])


def _slots_of(cache: Any, indices: Sequence[int]) -> list[torch.Tensor] | None:
    """Keys and values of layers that write to their slots themselves; None if this forward pass needs others."""
    # `start` is None while a prompt is read
    if torch.compiler.is_compiling() or not isinstance(cache, SlotCache) or cache.start is None:
        return None
    found: list[torch.Tensor] = []
    layers, top, count = cache.layers, cache.top, len(cache.layers)
    for index in indices:
        layer: Any = layers[index] if index < count else None
        if type(layer) is not SlotLayer or not layer.is_initialized or not layer.keys.is_cpu:
            return None
        if not top <= cache.capacity == layer.keys.shape[2]:
            layer.make_room(top, layer.keys, layer.values)
            if len(indices) > 1 and layer.keys.shape[2] != cache.capacity:
                return None  # layers that run together have as many
        found += (layer.keys, layer.values)
    return found


def _additive(mask: torch.Tensor, dtype: torch.dtype, beside: int) -> torch.Tensor:
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    return mask.repeat(1, 1, beside, 1) if beside > 1 else mask


def _plus_product(one: torch.Tensor, two: torch.Tensor, three: torch.Tensor) -> torch.Tensor:
    """one + two * three, with the same rounding as in the family's models."""
    return torch.addcmul(one, two, three) if one.dtype == torch.float32 else one.add_(two * three)


class Norm:
    """RMSNorm, with the same rounding as in the family's models."""

    def __init__(self, norm: Any):
        self.weight = norm.weight
        self.epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        size = self.weight.shape[0]
        # as tensors: an operation with a number takes twice as long as one with a tensor
        self.least = torch.tensor((self.epsilon * size) ** 0.5, device=self.weight.device)
        self.share = torch.tensor(size**-0.5, device=self.weight.device)
        weight = self.weight
        self.in_c = weight.is_cpu and not size % 16 and native.is_available(weight.dtype)

    def factor(self) -> tuple[torch.Tensor, float]:
        """A copy of what it multiplies by, [D] float32, and its epsilon."""
        return self.weight.detach().float().clone(), self.epsilon

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """[..., D] -> [..., D]. weight: instead of its own."""
        if weight is None and self.in_c and hidden.dtype == self.weight.dtype and not torch.compiler.is_compiling():
            return native.norm(hidden, self.weight, self.epsilon)
        weight = self.weight if weight is None else weight
        if hidden.dtype == torch.float32 and hidden.device.type != "cpu" and weight.dim() == 1:
            return F.rms_norm(hidden, weight.shape, weight, self.epsilon)
        return self.alone(hidden).to(hidden.dtype).mul_(weight)

    def alone(self, hidden: torch.Tensor) -> torch.Tensor:
        """The norm without a weight, in float32."""
        wide = hidden if hidden.dtype == torch.float32 else hidden.float()
        if hidden.device.type != "cpu":
            return F.rms_norm(wide, wide.shape[-1:], None, self.epsilon)
        # on a CPU, rms_norm is seven operations; these are five cheaper ones: the root of a sum of squares and of epsilon
        return wide / torch.linalg.vector_norm(wide, dim=-1, keepdim=True).hypot_(self.least).mul_(self.share)


class WideNorm(Norm):
    """The norm of families that round after the weight; Qwen's add 1 to it."""

    def __init__(self, norm: Any):
        super().__init__(norm)
        self.adds_one = not hasattr(norm, "variance_epsilon")

    def factor(self) -> tuple[torch.Tensor, float]:
        factor, epsilon = super().factor()
        return factor.add_(1.0) if self.adds_one else factor, epsilon

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        weight, normed = (self.weight if weight is None else weight).float(), self.alone(hidden)
        if self.adds_one and hidden.dtype == torch.float32:
            return torch.addcmul(normed, normed, weight)
        return (normed * (1.0 + weight if self.adds_one else weight)).to(hidden.dtype)


class GatedNorm(Norm):
    """RMSNorm, then the product with a gate after SiLU."""

    def __call__(self, hidden: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (super().__call__(hidden) * F.silu(gate.float())).to(hidden.dtype)


def norm_of(norm: Any) -> Norm:
    """The faster form of a family's RMSNorm."""
    wide = not hasattr(norm, "variance_epsilon") or type(norm).__name__.startswith("Olmo")
    return WideNorm(norm) if wide else Norm(norm)


def _layers(model: Any) -> nn.ModuleList | None:
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


def _path(model: Any) -> tuple[str, ...]:
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
        and any(map(_is_fusible, layers))
        and all(map(family.has, layers))
    )


def is_known(layer: nn.Module) -> bool:
    """Whether `fused_layer` has a faster form of a layer, which need not be a model's."""
    family = _Family.of(layer)
    return family is not None and _is_fusible(layer) and family.has(layer)


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
        if not self.are(layer, *_LAYERS) or not _is_fusible(layer):
            return self.are(layer, *_LAYERS)
        parts: Any = layer._modules
        mixer: Any = parts.get("self_attn", parts.get("linear_attn"))
        norms = [parts["input_layernorm"], parts.get("post_attention_layernorm")]
        if "self_attn" in parts:
            mixes = self.are(mixer, "Attention")
            norms += [mixer._modules[part] for part in ("q_norm", "k_norm") if part in mixer._modules]
        else:
            mixes = self.are(mixer, "GatedDeltaNet") and self.are(outputs_of(mixer)[0], "RMSNormGated")
            mixes = mixes and type(mixer.conv1d) is nn.Conv1d
        whole = self.are(parts.get("mlp"), "SparseMoeBlock")
        known = whole or (self.are(parts.get("mlp"), "MLP") and isinstance(parts["mlp"].act_fn, nn.Module))
        return mixes and known and all(self.are(norm, "RMSNorm") for norm in norms)


_LAYERS = ("DecoderLayer", "LinearAttentionDecoderLayer", "AttentionDecoderLayer")


def _is_fusible(layer: nn.Module) -> bool:
    """Whether a layer of a known family has a faster form. Some have their norms at other places."""
    return "input_layernorm" in layer._modules


def _low_bit_bytes(model: nn.Module) -> int:
    """Bytes of a model's low-bit weights."""
    return sum(
        module.packed.nbytes + module.scales.nbytes for module in model.modules() if isinstance(module, LowBitLinear)
    )


@torch.no_grad()
def _has_same_bits(prepared: PreparedModule) -> bool:
    """Whether the columns of a pass over a batch equal those of passes over single ones, wherever they lie in it."""
    ids, masks = few_ids(prepared.module, 12), Traits.of(prepared.module).masks
    texts = [ids[:, 5:], ids[:, 5:].flip(1)] * 2

    def started(rows: int) -> CachedModel:
        run = CachedModel(prepared, SlotCache(rows, 16), masks)
        run.settings = CallSettings(bits=True)
        run.prefill(ids[:, :5].repeat(rows, 1), None)
        return run

    def alone(text: torch.Tensor) -> torch.Tensor:
        run, made = started(1), []
        for column in text.split(1, 1):
            made.append(run(column))
            run.commit([1])
        return torch.cat(made, 1)

    return torch.equal(started(4)(torch.cat(texts)), torch.cat([*map(alone, texts[:2])] * 2))


@torch.no_grad()
def _agree_in_rounds(model: PreTrainedModel, other: PreparedModule) -> bool:
    """Compare them on a prompt and the forward pass after it."""
    ids, traits = few_ids(model, 8), Traits.of(model)
    masks, made = traits.column_masks or traits.masks, []
    for module in (model, other):
        run = target_runner(module, slots_for(model, None, 1, 16, masks), masks)
        logits = [run.prefill(ids[:, :4], None), run(ids[:, 4:])]
        if traits.is_recurrent:
            run.commit([2])
            logits.append(run(ids[:, 6:7]))
        made.append(torch.cat(logits, 1))
    return _near(model, made[1], made[0])


@torch.no_grad()
def _agree_at_once(model: PreTrainedModel, other: PreparedModule) -> bool:
    """Compare them on a text."""
    ids = few_ids(model, 8)
    expected, found = (m(input_ids=ids, use_cache=False, return_dict=True).logits for m in (model, other.module))
    return _near(model, found, expected)


def _near(model: PreTrainedModel, found: torch.Tensor, expected: torch.Tensor) -> bool:
    return agree(found, expected, LOW_BIT_DTYPE if _low_bit_bytes(model) else expected.dtype)
