"""Somebody's code in a target, around it, in its cache or in its arguments, put there between two calls and taken away again.

A case with a change makes the same call before, during and after it. `Effect` counts how often the change altered the text
of the target alone: a change that alters nothing tests nothing. Classes are found by what a model is made of, whatever its
architecture.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, TopPLogitsWarper
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.pytorch_utils import Conv1D

from assisted.fast.low_bit import LowBitLinear, low_bit

from .edits import EDITS, Undo

__all__ = ["ARGUMENTS", "NAMES", "PREPARED", "Effect", "cache_of_coarse_layers", "outside_kept"]

Alter = Callable[[torch.Tensor], torch.Tensor]
SWITCH = False


class Switches:
    on = False


def nothing() -> None:
    pass


def _set(owner: Any, name: str, value: Any) -> Undo:
    """Set an attribute of an object, a class or a module."""
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before) if had else delattr(owner, name)


def _of_class(module: Any, kind: type) -> Undo:
    before, module.__class__ = module.__class__, kind
    return lambda: setattr(module, "__class__", before)


def _all(undos: list[Undo]) -> Undo:
    return lambda: [undo() for undo in reversed(undos)] and None


def _shared(change: Callable[[Any, Any], Undo]) -> Callable[[Any, Any], Undo]:
    """A change of what all models share, made once for both copies."""
    active: list[bool] = []

    @functools.wraps(change)
    def made(model: Any, chance: Any) -> Undo:
        if active:
            return nothing
        undo = change(model, chance)
        active.append(True)
        return _all([active.clear, undo])

    return made


# --- what a model is made of


def _layers(model: Any) -> list[nn.Module]:
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    return list(next(lists, []))


def _named(model: Any, pattern: str) -> list[nn.Module]:
    """Modules whose class has such a name, in the layers or beside them."""
    return [m for m in model.modules() if re.search(pattern, type(m).__name__) and not isinstance(m, nn.ModuleList)]


PARTS: dict[str, Callable[[Any], list[nn.Module]]] = {
    "layer": _layers,
    "mlp": lambda model: _named(model, "MLP$|Mlp$|FeedForward|MoE$|MoeBlock$|MOE$"),
    "norm": lambda model: _named(model, "Norm"),
    "attention": lambda model: _named(model, "Attention$"),
}


def _each(value: Any, alter: Alter) -> Any:
    """What a forward returns, with its tensor, the first of its tensors, or its logits or last states altered."""
    if isinstance(value, torch.Tensor):
        return alter(value) if value.is_floating_point() else value
    for name in ("logits", "last_hidden_state"):
        if getattr(value, name, None) is not None:
            setattr(value, name, alter(getattr(value, name)))
            return value
    return (_each(value[0], alter), *value[1:]) if isinstance(value, tuple) and value else value


def _clamp(chance: Any) -> Callable[..., Alter]:
    limit = chance.choice((0.1, 0.3))
    return lambda *args, **kwargs: lambda value: value.clamp(-limit, limit)


def _steer(chance: Any) -> Callable[..., Alter]:
    """From some position on, for a forward that is told positions; everywhere otherwise."""
    start, strength = chance.choice((0, 10, 24, 45)), chance.choice((0.4, 0.9))

    def of(*args: Any, position_ids: Any = None, **kwargs: Any) -> Alter:
        def alter(value: torch.Tensor) -> torch.Tensor:
            late: Any = 1.0
            if position_ids is not None and position_ids.ndim == 2:
                late = (position_ids[:, -value.shape[-2] :, None] >= start).to(value.dtype)
            return value + late * strength * value.roll(1, -1)

        return alter

    return of


def _after_token(chance: Any) -> Callable[..., Alter]:
    """After some tokens of the pass."""
    modulus = chance.choice((3, 5))

    def of(input_ids: Any = None, *args: Any, **kwargs: Any) -> Alter:
        def alter(value: torch.Tensor) -> torch.Tensor:
            if input_ids is None:
                return value
            return value + (input_ids[:, -value.shape[1] :, None] % modulus == 0) * value.roll(1, -1)

        return alter

    return of


def _altered(forward: Any, of: Callable[..., Alter], named: bool) -> Any:
    """A forward whose result is altered. named: its signature is the original's."""

    def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _each(forward(self, *args, **kwargs), of(*args, **kwargs))

    return functools.wraps(forward)(inner) if named else inner


def _subclass(module: Any, **methods: Any) -> Undo:
    kind = type(module)
    return _of_class(module, type(f"Foreign{kind.__name__}", (kind,), methods))


# --- subclasses


def causal_class(model: Any, chance: Any) -> Undo:
    of = chance.choice((_steer, _after_token))(chance)
    return _subclass(model, forward=_altered(type(model).forward, of, chance.random() < 0.5))


def model_class(model: Any, chance: Any) -> Undo:
    base = model.base_model
    return _subclass(base, forward=_altered(type(base).forward, _steer(chance), chance.random() < 0.8))


def _class_of(part: str) -> Callable[[Any, Any], Undo]:
    def change(model: Any, chance: Any) -> Undo:
        modules = PARTS[part](model)
        if modules and chance.random() < 0.3:
            modules = [chance.choice(modules)]
        of, named = (chance.choice((_clamp, _steer)) if part == "layer" else _clamp)(chance), chance.random() < 0.5
        return _all([_subclass(module, forward=_altered(type(module).forward, of, named)) for module in modules])

    return change


# --- patches


@_shared
def patched_class(model: Any, chance: Any) -> Undo:
    """The forward of a class of layers, attentions, norms, MLPs or linear modules."""
    modules = [m for found in PARTS.values() for m in found(model)] + _named(model, "^Linear$|^Conv1D$|^Embedding$")
    kind = chance.choice(sorted({type(module) for module in modules}, key=lambda kind: kind.__name__))
    return _set(kind, "forward", _altered(kind.forward, _clamp(chance), chance.random() < 0.5))


class Clamped:
    """Callable, and no function."""

    def __init__(self, inner: Any):
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _each(self.inner(*args, **kwargs), lambda value: value.clamp(-0.2, 0.2))


def patched_instance(model: Any, chance: Any) -> Undo:
    modules = [module for find in PARTS.values() for module in find(model)]
    if not modules:
        return nothing
    module = chance.choice(modules)
    if chance.random() < 0.5:
        return _set(module, "forward", Clamped(module.forward))
    patched = _altered(type(module).forward, _clamp(chance), True)
    return _set(module, "forward", types.MethodType(patched, module))


@_shared
def patched_function(model: Any, chance: Any) -> Undo:
    """A function that forwards call by a global name: of torch, or of the module that the layers are written in."""
    found: list[tuple[Any, str]] = [
        (functional, name) for name in ("silu", "gelu", "scaled_dot_product_attention", "linear")
    ]
    for module in {type(layer).__module__ for layer in _layers(model)}:
        home = sys.modules[module]
        found += [(home, name) for name in ("apply_rotary_pos_emb", "rotate_half", "eager_attention_forward")] * 2
    owner, name = chance.choice(sorted((pair for pair in found if hasattr(*pair)), key=lambda pair: pair[1]))
    function, limit = getattr(owner, name), chance.choice((0.2, 0.5))

    @functools.wraps(function)
    def clamped(*args: Any, **kwargs: Any) -> Any:
        return _each(function(*args, **kwargs), lambda value: value.clamp(-limit, limit))

    return _set(owner, name, clamped)


# --- attention


def clamped_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    output, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return output.clamp(-0.2, 0.2), weights


AttentionInterface.register("clamped", clamped_attention)  # gets no masks
AttentionInterface.register("clamped with masks", clamped_attention)
AttentionMaskInterface.register("clamped with masks", sdpa_mask)


def registered_attention(model: Any, chance: Any) -> Undo:
    name = chance.choice(("clamped", "clamped with masks", "clamped with masks"))
    configs = {id(m.config): m.config for m in model.modules() if getattr(m, "config", None) is not None}
    used = [config for config in configs.values() if getattr(config, "_attn_implementation", None) == "sdpa"]
    return _all([_set(config, "_attn_implementation_internal", name) for config in used])


@_shared
def attention_anew(model: Any, chance: Any) -> Undo:
    mapping = AttentionInterface._global_mapping
    before, mapping["sdpa"] = mapping["sdpa"], clamped_attention
    return lambda: mapping.__setitem__("sdpa", before)


# --- rotary embeddings, settings


class Turned(nn.Module):
    """A rotary embedding of somebody's, whose factor grows with a pass that ends beyond a limit."""

    def __init__(self, inner: nn.Module, limit: int):
        super().__init__()
        self.inner, self.limit = inner, limit

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        factor = max(1.0, (int(position_ids.max()) + 1) / self.limit)
        return self.inner(x, position_ids * 2 * factor, *args, **kwargs)


def rotary(model: Any, chance: Any) -> Undo:
    limit, foreign, undos = chance.choice((30, 500, 500)), chance.random() < 0.7, []
    for parent in list(model.modules()):
        inner = parent._modules.get("rotary_emb")
        if inner is None:
            continue
        made: nn.Module = Turned(inner, limit)
        if not foreign and "rope_type" in (getattr(model.config, "rope_parameters", None) or {}):
            config = copy.deepcopy(model.config)
            config.rope_parameters = {"rope_type": "linear", "factor": 0.4, "rope_theta": 500.0}
            made = type(inner)(config)
        parent.rotary_emb = made
        undos.append(functools.partial(setattr, parent, "rotary_emb", inner))
    return _all(undos)


def fewer_layers(model: Any, chance: Any) -> Undo:
    """Of a model whose forward looks at their number; others find no place in their cache for the last layers."""
    if "num_hidden_layers]" not in inspect.getsource(type(model.base_model).forward):
        return nothing
    config = model.config.get_text_config(decoder=True)
    before, config.num_hidden_layers = config.num_hidden_layers, 1  # for some configs the name of another attribute
    return functools.partial(setattr, config, "num_hidden_layers", before)


# --- between passes, and around them


def _doubled(prepare: Any) -> Any:
    def prepare_inputs_for_generation(self: Any, input_ids: Any, **kwargs: Any) -> Any:
        made = prepare(self, input_ids, **kwargs)
        if made.get("position_ids") is not None:
            made["position_ids"] = made["position_ids"] * 2
        return made

    return prepare_inputs_for_generation


def _later(update: Any) -> Any:
    def _update_model_kwargs_for_generation(self: Any, outputs: Any, model_kwargs: Any, **kwargs: Any) -> Any:
        made = update(self, outputs, model_kwargs, **kwargs)
        if made.get("position_ids") is not None:
            made["position_ids"] = made["position_ids"] + 1
        return made

    return _update_model_kwargs_for_generation


def _step(name: str, of: Callable[[Any], Any]) -> Callable[[Any, Any], Undo]:
    def change(model: Any, chance: Any) -> Undo:
        method = of(getattr(type(model), name))
        if chance.random() < 0.5:
            return _subclass(model, **{name: method})
        return _set(model, name, types.MethodType(method, model))

    return change


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.clamp(-0.6, 0.6) if func in (functional.linear, functional.gelu) else made


class DispatchMode(TorchDispatchMode):
    HALVED = ("aten.silu.default", "aten.gelu.default", "aten.relu.default", "aten.tanh.default", "aten.rsqrt.default")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * 0.5 if str(func) in self.HALVED else made


@_shared
def mode(model: Any, chance: Any) -> Undo:
    entered = chance.choice((FunctionMode, DispatchMode))()
    entered.__enter__()
    return lambda: entered.__exit__(None, None, None)


# --- arguments: the call during the change has one more


def cache_layers(model: Any, chance: Any) -> Undo:
    return nothing


@functools.cache
def _coarse(kind: Any) -> type:
    def update(self: Any, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return kind.update(self, (key_states * 2).round() / 2, value_states, *args, **kwargs)

    return type(f"Coarse{kind.__name__}", (kind,), {"update": update})


def cache_of_coarse_layers(model: Any) -> DynamicCache:
    """A cache whose layers are of a subclass, and round their keys."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):
            layer.__class__ = _coarse(type(layer))  # type: ignore[assignment]
    return cache


def takes_constant(model: Any, chance: Any) -> Undo:
    """A forward with one more argument, which does nothing by default."""
    own = type(model).forward

    def forward(self: Any, *args: Any, strength: Any = None, **kwargs: Any) -> Any:
        made = own(self, *args, **kwargs)
        return _each(made, lambda value: value + 0.8 * value.roll(1, -1)) if strength else made

    return _subclass(model, forward=forward)


def constant(model: Any, chance: Any) -> Undo:
    return nothing


# --- switches, off at first


def switchable(model: Any, chance: Any) -> Undo:
    own = type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = own(self, *args, **kwargs)
        on = SWITCH or Switches.on or getattr(self, "own_switch", False)
        return _each(made, lambda value: value.roll(1, -1)) if on else made

    return _subclass(model, forward=forward)


def switch(model: Any, chance: Any) -> Undo:
    owner, name = chance.choice(((sys.modules[__name__], "SWITCH"), (Switches, "on"), (model, "own_switch")))
    return _set(owner, name, True)


# --- this package's own weights of 8 and 4 bits, changed in place


def low_bits(model: Any, chance: Any) -> Undo:
    bits, undos = chance.choice((8, 4)), []
    for parent in [part for layer in _layers(model) for part in layer.modules()]:
        for name, child in list(parent._modules.items()):
            if type(child) in (nn.Linear, Conv1D):
                setattr(parent, name, low_bit(child, bits))
                undos.append(functools.partial(setattr, parent, name, child))
    return _all(undos)


def low_bits_in_place(model: Any, chance: Any) -> Undo:
    modules = [module for module in model.modules() if isinstance(module, LowBitLinear)]
    if not modules:
        return nothing
    module, name = chance.choice(modules), chance.choice(("scales", "packed"))
    tensor = getattr(module, name)
    before = tensor.clone()
    tensor.data.copy_(tensor.flip(0) if name == "packed" else tensor * 0.3)
    return lambda: (tensor.data.copy_(before), None)[1]


# --- logits that are sampled


def tied_logits(model: Any, chance: Any) -> Undo:
    """Logits of half precision that depend on the last token only, so that no rounding does, and that tie by the dozen."""
    dtype = chance.choice((torch.bfloat16, torch.float16))
    table = torch.randint(0, 9, (16, 128), generator=torch.Generator().manual_seed(chance.randrange(99))) / 4.0

    def of(input_ids: Any = None, *args: Any, **kwargs: Any) -> Alter:
        return lambda value: table[input_ids[:, -value.shape[1] :] % 16][..., : value.shape[-1]].to(dtype)

    return _subclass(model, forward=_altered(type(model).forward, of, True))


def outside_kept(model: Any, text: torch.Tensor, prompt: int, top_p: float) -> list[str]:
    """Tokens of a sampled text that nucleus sampling of the target alone would never have chosen."""
    found = []
    for end in range(prompt, text.shape[1]):
        logits = model(input_ids=text[:, :end], use_cache=False).logits[:, -1].float()
        scores = TopPLogitsWarper(top_p)(text[:, :end], logits)
        chosen = scores.gather(1, text[:, end : end + 1])[:, 0]
        found += [f"row {row}, new token {end - prompt}" for row in chosen.isinf().nonzero()[:, 0].tolist()]
    return found


def nan_logits(model: Any, chance: Any) -> Undo:
    modulus = chance.choice((2, 7))

    def of(input_ids: Any = None, *args: Any, **kwargs: Any) -> Alter:
        def alter(value: torch.Tensor) -> torch.Tensor:
            bad = input_ids[:, -value.shape[1] :, None] % modulus == 0
            return value.masked_fill(bad, float("nan"))

        return alter

    return _subclass(model, forward=_altered(type(model).forward, of, True))


CHANGES: dict[str, Callable[[Any, Any], Undo]] = {
    **{
        function.__name__: function
        for function in (
            *(causal_class, model_class, patched_class, patched_instance, patched_function, registered_attention),
            *(attention_anew, rotary, fewer_layers, mode, cache_layers, constant, switch, low_bits_in_place),
            *(tied_logits, nan_logits),
        )
    },
    **{f"{part}_class": _class_of(part) for part in PARTS},
    "prepares": _step("prepare_inputs_for_generation", _doubled),
    "updates": _step("_update_model_kwargs_for_generation", _later),
}
NAMES = tuple(CHANGES)
PREPARED = {"constant": "takes_constant", "switch": "switchable", "low_bits_in_place": "low_bits"}
"""What is done to a model before the first call, for changes that need it."""
ARGUMENTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "constant": lambda chance: {"strength": chance.choice((True, 3, 0.7, "much"))},
    "cache_layers": lambda chance: {"cache_layers": "coarse"},
    "tied_logits": lambda chance: {
        "do_sample": True,
        "top_k": 0,
        "top_p": chance.choice((0.2, 0.5, 0.9)),
        "kept": True,
    },
    "nan_logits": lambda chance: {"do_sample": True, "top_k": 1},  # with more, it is by chance that a call meets them
}
"""Arguments of the call during a change."""
EDITS.update(CHANGES, takes_constant=takes_constant, switchable=switchable, low_bits=low_bits)


@dataclass
class Effect:
    """How often each change altered the text of the target alone, and how the pair ran.

    Args:
        counts: name of a change -> calls during it, calls whose text it altered, and calls by the report's way.
    """

    counts: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, name: str, *columns: str) -> None:
        counts = self.counts.setdefault(name, dict.fromkeys(COLUMNS, 0))
        for column in columns:
            counts[column] = counts.get(column, 0) + 1

    def merge(self, other: Effect) -> None:
        for name, counts in other.counts.items():
            for column, count in counts.items():
                mine = self.counts.setdefault(name, dict.fromkeys(COLUMNS, 0))
                mine[column] = mine.get(column, 0) + count

    def __bool__(self) -> bool:
        return bool(self.counts)

    def rows(self) -> Iterator[str]:
        """A table."""
        yield f"{'change':<22}" + "".join(f"{column:>13}" for column in COLUMNS)
        for name, counts in sorted(self.counts.items()):
            yield f"{name:<22}" + "".join(f"{counts[column]:>13,}" for column in COLUMNS)


COLUMNS = ("calls", "altered", "shortcuts", "own forward", "plain")
