"""Runs models with fewer operations or faster matrix products, as another object of the model's class with its parameters.

In small models, or over few tokens, launching operations takes most of the time of a forward pass. A layer whose form is known
(families.py) takes about twenty operations here instead of fifty, and so do layers with the gated delta rule. Other models
keep their layers, and their wide products use a layout that is fast over few tokens. The output is compared with the original
model's before use.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..core.host import once
from ..engine.agreement import agree
from ..engine.cache import SlotCache
from ..engine.hooks import any_touched, is_touched, is_untouched, looked_over
from ..engine.libraries import is_wrapper_subclass
from ..engine.parts import few_ids, with_children
from ..engine.prepared import CallSettings, PreparedModule, one_by_one, through_all
from ..engine.recurrent import slots_for, target_runner
from ..engine.runner import CachedModel
from ..engine.traits import Traits
from ..engine.trust import Trust, trust
from . import fixed_width, native
from .families import form_of, is_fusible, layers_of, path_of
from .layers import FusedLayer, FusedMLP, fused_layer, of_mixer, of_mlp
from .low_bit import LOW_BIT_DTYPE, LowBitLinear
from .norms import Called
from .products import (
    PackedLinear,
    Product,
    copied_in,
    may_copy,
    may_take,
    packs,
    reads_in_place,
    size_of_copies,
    suffice_in_place,
)
from .shared import Angles, Shared
from .sources import Modules, Source, Weights
from .together import layers_at_once, model_at_once


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
    with once(settings):
        trusted = settings.trust_in(model)
        if settings.fuses and trusted.is_own:
            fuse = fuse or functools.partial(fused, read=settings.read, bits=settings.bits)
            made = fuse(model, trusted)
        else:
            made = PreparedModule(model, is_own=trusted.is_own)
        could = settings.mode == "auto" and (made.module is not model or made.low_bit_bytes)
        told = native.lacking(why_not_in_c(model, made.low_bit_bytes > 0)) if could else None
        for one in filter(None, (told, made.warning)):
            settings.note(one)
        settings.read = None  # whatever runs from here on may change weights
    return made


def why_not_in_c(model: PreTrainedModel, in_low_bits: bool) -> str:
    """Why a model whose weights may be copied does not run in C; empty if it does, or could not anywhere.

    in_low_bits: it has weights of 8 or 4 bits.
    """
    dtype = LOW_BIT_DTYPE if in_low_bits else model.dtype
    if model.device.type != "cpu" or dtype not in native.DTYPES:
        return ""
    reason: str = native.loaded(dtype)[1]
    if not reason or in_low_bits:
        return reason
    fits = (type(module) is nn.Linear and module.in_features % native.GROUP == 0 for module in model.modules())
    return reason if any(fits) else ""


def with_same_bits(prepared: PreparedModule) -> PreparedModule:
    """The same model, with passes in which a column has the same bits whatever else they compute: of layers in C, or else of a
    fixed width. Tried once for each form of a model.

    prepared: of `fused` with `bits`. Raises ValueError if that is not possible.
    """
    layers: Any = getattr(getattr(prepared.module, "model", None), "layers", ())
    known = prepared.through_parts and all(isinstance(own, FusedLayer) and own.whole_mlp is None for own in layers)
    in_c = known and all(own.native is not None for own in layers)
    reason: str | None
    if not known:
        reason = "the layers of the model have no faster form, or are not as transformers has them"
    elif not in_c and any(own.is_eager or own.kind is not None for own in layers):
        reason = (
            "without kernels in C, the layers must have the same mask, and attention other than transformers' eager one"
        )
    else:
        reason = fixed_width.why_not(prepared.module.device)
    if reason is not None:
        raise ValueError(f"exact: 'bits' is not possible here, see the page \"Numbers in half precision\"; {reason}")
    if not in_c:
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
    if not packs(dtype):
        return 0
    kind = copied_in(dtype) or dtype
    numbers = sum({id(weight): weight.numel() for weight in model.parameters()}.values())
    if not may_take(numbers * kind.itemsize, memory):
        return 0
    layers: Any = layers_of(model)
    wide: list[Any] = [module for module in model.modules() if PackedLinear.gains(module)]
    linear = wide if layers is None else [m for m in (*layers.modules(), model.lm_head) if type(m) is nn.Linear]
    fits = bool(linear) and all(module.in_features % native.GROUP == 0 for module in linear)
    if fits and native.suffices_in_place(dtype):
        return 0
    if layers is None:
        return sum(size_of_copies([module.weight.shape], dtype) for module in wide)
    products: list[Any] = [modules for layer in layers for modules in (*of_mixer(layer), *of_mlp(layer))]
    joined = {id(module) for modules in products for module in modules}
    products += [[m] for m in layers.modules() if PackedLinear.gains(m) and id(m) not in joined]
    products.append([model.get_output_embeddings()])
    return sum(size_of_copies([module.weight.shape for module in modules], dtype) for modules in products)


def fused_product(module: nn.Linear, in_8_bits: bool = False) -> nn.Module:
    """The fastest form of a product over a few columns, with the current weight: repacked if that is faster on this CPU,
    otherwise the module itself. in_8_bits: see `Product`."""
    may = may_copy(module.parameters()) and not is_touched(module)
    return Called(Product([module], True, in_8_bits)) if may else module


_SAME_BITS: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()  # by the layers
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
        own: list[Any] = [layer for layer in layers if isinstance(layer, FusedMLP) and layer.native is not None]
        in_c = bool(layers) and len(own) == len(layers) and all(layer.native.is_whole for layer in own)
        return PreparedModule(
            made,
            whole,
            whole,
            copied,
            sum(low.nbytes for low in self.source.kept.tensors),
            runs=("layers in C" if in_c else "fused layers") if self.is_family else "packed products",
            run_layers=layers_at_once if in_c else one_by_one,
            run_columns=model_at_once if in_c else through_all,
            enter=layers[0].form.enter if whole else None,
            finish=layers[0].form.finish if whole else None,
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
    layers = layers_of(model)
    if layers is not None and kind == "cuda" and model.dtype != torch.float32 and _is_hybrid(layers):
        return None
    if layers is not None:
        base: Any = model.get_submodule(".".join(path_of(model)))
        norms = [] if is_touched(base.norm) else [base.norm]
        modules, parameters = looked_over(layers, *norms, model.lm_head, *filter(None, [base.rotary_emb]))
        if any_touched(modules):
            return None
        copied = may_copy(parameters) and not suffice_in_place(modules)
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
    copied = may_copy(weights) and not suffice_in_place(wide.values())
    if not wide or not (copied or reads_in_place(wide.values())):
        return None
    return _Fusion(
        next(iter(wide.values())),
        _source(list(wide.values()), weights, copied, trusted, read),
        lambda: {tuple(name.split(".")): PackedLinear.of(module, copied) for name, module in wide.items()},
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
    of_head = Product([model.lm_head], copied)  # first: converting it takes as much again, which the layers use later
    of_head.most = sys.maxsize  # it computes no prompts
    path, angles, form = path_of(model), None, form_of(layers[0])
    norm = model.get_submodule(".".join((*path, "norm")))
    children: _Children = {
        ("lm_head",): Called(of_head),
        (*path, "norm"): norm if is_touched(norm) else Called(form.norm_of(norm)),
    }
    if any("self_attn" in layer._modules and is_fusible(layer) for layer in layers):
        base = model.get_submodule(".".join(path))
        angles = Angles(base.rotary_emb, base.config, model.dtype, form)
        children |= {(*path, "rotary_emb"): angles}
    shared = Shared(angles)
    own = [fused_layer(layer, shared, copied) for layer in layers]
    if isinstance(own[-1], FusedLayer):
        own[-1].is_last = True
    return {(*path, "layers"): nn.ModuleList(own), **children}


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
