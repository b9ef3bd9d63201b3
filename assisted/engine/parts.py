"""Runs part of a model: its first layers, or its last ones. Also tells which arguments a model's forward takes, if a wrapper's
signature does not name them, too: `*args, **kwargs` stand for whatever the wrapped forward takes.

A part is another object of the model's class that shares its weights and buffers and has a different list of layers. The
model is not changed and can run at the same time. Deals with modules only, not with drafts or caches.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from .libraries import CACHE, CACHE_NAMES, COMPILED, hook_of, source_of, uncompiled

Form = int | None
"""What a module returns: None for a tensor, or the length of a tuple whose first entry is the tensor."""
_Module = TypeVar("_Module", bound=nn.Module)
_SEEN: weakref.WeakKeyDictionary[Callable[..., Any], tuple[frozenset[str], bool]] = weakref.WeakKeyDictionary()


def unwrapped(model: Any) -> Any:
    """The model inside an adapter's wrapper; the model itself without one."""
    model = uncompiled(model)
    return uncompiled(model.get_base_model()) if hasattr(model, "get_base_model") else model


@dataclass(frozen=True)
class Layers:
    """Where a model keeps its decoder layers."""

    path: tuple[str, ...]  # attribute names from the model to the list
    forms: tuple[Form, ...]  # what each layer returns

    def __len__(self) -> int:
        return len(self.forms)

    def of(self, model: nn.Module) -> list[nn.Module]:
        """The layers of a model of this kind."""
        return list(model.get_submodule(".".join(self.path)).children())

    def replaced(self, model: PreTrainedModel, layers: Sequence[nn.Module]) -> PreTrainedModel:
        """The same model with other layers, the same number of them. Its own list is not changed."""
        return with_children(model, {self.path: nn.ModuleList(layers)})


def front(model: PreTrainedModel, layers: Layers, end: int) -> PreTrainedModel:
    """Layers [0, end), the final norm and the head."""
    own = layers.of(model)
    return layers.replaced(model, [*own[:end], *map(Pass, layers.forms[end:], own[end:])])


def back(model: PreTrainedModel, layers: Layers, start: int) -> tuple[PreTrainedModel, Inject]:
    """Layers [start, L), the final norm and the head; and the module whose `hidden` holds their input states.

    The embedding still runs, because positions, masks and layer inputs are computed from its output. start: in [1, L].
    """
    own = layers.of(model)
    *passed, last = zip(layers.forms[:start], own[:start], strict=True)
    inject = Inject(*last)
    return layers.replaced(model, [*(Pass(*one) for one in passed), inject, *own[start:]]), inject


def tapped(
    model: PreTrainedModel,
    layers: Layers,
    ends: Sequence[int],
    final_norm: tuple[str, ...] = (),
    own: Sequence[nn.Module] | None = None,
) -> tuple[PreTrainedModel, dict[int, Tap]]:
    """The whole model; and for each of `ends` the tap that keeps the output states of layer end - 1.

    final_norm: path of the norm after the last layer; if it is given, end L stands for its output, and L + 1 for the last
    layer's. own: the layers to run, by default the model's own.
    """
    own = layers.of(model) if own is None else own
    last = len(own)
    taps = {end: Tap(own[min(end, last) - 1]) for end in ends if not final_norm or end != last}
    placed = {min(end, last): tap for end, tap in taps.items()}
    children: dict[tuple[str, ...], nn.Module] = {
        layers.path: nn.ModuleList([placed.get(end, layer) for end, layer in enumerate(own, 1)])
    }
    if final_norm and last in ends:
        taps[last] = children[final_norm] = Tap(model.get_submodule(".".join(final_norm)))
    return with_children(model, children), taps


class Pass(nn.Module):
    """Replaces a skipped layer: returns its input states, [..., n, D].

    form: of its output. layer: the skipped one, whose attributes models read, such as its kind.
    """

    def __init__(self, form: Form, layer: nn.Module | None = None):
        super().__init__()
        self.form = form
        self.__dict__["skipped"] = layer  # not a submodule: it does not run

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__.get("skipped"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return dressed(hidden_of(args, kwargs), self.form)


class Inject(Pass):
    """Replaces all layers so far: returns the states in `hidden` and ignores its input."""

    hidden: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return dressed(self.hidden.to(hidden_of(args, kwargs).device), self.form)


class Around(nn.Module):
    """A module with something around it, whose attributes it has, since models read those of their layers, such as the kind."""

    _inside = "layer"  # the name of that module here

    def __init__(self, layer: nn.Module):
        super().__init__()
        setattr(self, self._inside, layer)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(self._inside), name)


class Tap(Around):
    """A layer that keeps its last output states in `hidden`."""

    hidden: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.layer(*args, **kwargs)
        self.hidden = output[0] if isinstance(output, tuple) else output
        return output


class Recorder(Around):
    """A module that records the form of its output."""

    def __init__(self, module: nn.Module, name: Any, seen: list[tuple[Any, Form]]):
        super().__init__(module)
        self.name = name
        self.seen = seen

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.layer(*args, **kwargs)
        self.seen.append((self.name, len(output) if isinstance(output, tuple) else None))
        return output


def dressed(hidden: torch.Tensor, form: Form) -> Any:
    """Hidden states in the form that a module returns."""
    return hidden if form is None else (hidden, *[None] * (form - 1))


def with_children(module: _Module, children: Mapping[tuple[str, ...], nn.Module]) -> _Module:
    """The same module as another object in which some submodules are replaced; everything else is shared.

    children: by path from the module. Hooks of the module and of the modules on these paths are shared, too.

    Raises ValueError if a forward on these paths was replaced by something that cannot run for another object.
    """
    names = {path[0] for path in children}
    inner: dict[str, nn.Module | None] = {}
    for name in names:
        deeper = {path[1:]: child for path, child in children.items() if path[0] == name and len(path) > 1}
        inner[name] = with_children(module.get_submodule(name), deeper) if deeper else children[(name,)]
    other = object.__new__(type(module))
    other.__dict__ = {**module.__dict__, "_modules": {**module._modules, **inner}}
    other.__dict__.update(_own_forward(module, other))
    return other


def _own_forward(module: nn.Module, other: nn.Module) -> dict[str, Any]:
    """The attributes `other` needs to run its own submodules if the forward of the object `module` was replaced.

    accelerate moves inputs and weights in its own forward and keeps the original one; a compiled forward refers to its
    source. Both are bound to `module`.
    """
    values = module.__dict__
    found: dict[str, Any] = {}
    if values.get("_compiled_call_impl") is not None:
        found["_compiled_call_impl"] = None
    if "forward" in values:
        hook, forward = hook_of(module), source_of(module)
        if not isinstance(forward, MethodType):
            raise ValueError(f"the forward of {type(module).__name__} was replaced by {forward!r}")
        own: Any = MethodType(forward.__func__, other)
        if hook is not None:  # callers read its signature to see which arguments it takes
            own = functools.update_wrapper(functools.partial(_hooked, hook, other, own), own)
        found["forward"] = own
    return found


def _hooked(hook: Any, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A forward with the two halves of accelerate's hook around it."""
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    return hook.post_forward(module, forward(*args, **kwargs))


@torch.no_grad()
def find_layers(model: PreTrainedModel) -> Layers:
    """Find the decoder layers by running a few tokens.

    Raises ValueError if no list with as many modules as the config has layers is called once each, in order.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    for name in sorted(lists, key=lambda name: name.count(".")):
        if COMPILED in name.split("."):
            raise ValueError(f"its layers ({name}) are in a result of torch.compile; leave that out")
        seen: list[tuple[Any, Form]] = []
        path = tuple(name.split("."))
        own = list(model.get_submodule(name).children())
        other = with_children(model, {path: nn.ModuleList(Recorder(m, n, seen) for n, m in enumerate(own))})
        try_out(other)
        if [number for number, _ in seen] == list(range(count)):
            return Layers(path, tuple(form for _, form in seen))
    raise ValueError(f"{type(model).__name__} does not run through a list of {count} layers, one after the other")


def device_of(module: nn.Module) -> torch.device:
    """The device a model, or a part of one, computes on; a model on several devices starts there. accelerate keeps offloaded
    weights on the meta device; its hooks have the real one."""
    device: torch.device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    if device.type != "meta":
        return device
    hooks = (hook_of(part) for part in module.modules())
    found = (getattr(hook, "execution_device", None) for hook in hooks)
    return next((torch.device(place) for place in found if place is not None), device)


def few_ids(model: PreTrainedModel, count: int = 4) -> torch.Tensor:
    """A few tokens for a trial run of a model, [1, count] int64."""
    size = model.config.get_text_config(decoder=True).vocab_size
    return (size // 2 + torch.arange(count, device=device_of(model)))[None] % size


@torch.no_grad()
def try_out(model: Any, ids: torch.Tensor | None = None) -> Any:
    """The output of a model or its base model over these tokens, by default a few. Errors of its forward are raised."""
    ids = few_ids(model) if ids is None else ids
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, return_dict=True)


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden states that a module is called with."""
    return args[0] if args else kwargs["hidden_states"]


def takes(model: Any, name: str) -> bool:
    """Whether a model's forward takes an argument of this name. A forward with `**kwargs` is assumed to pass it on to the
    next one: from the object's own to those of its base classes, in order."""
    for forward in (model.forward, *(vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind))):
        names, passes_on = _arguments(forward)
        if name in names:
            return True
        if not passes_on:
            return False
    return False


def cache_argument(model: Any) -> str:
    """The argument in which a model's forward takes its cache."""
    return next((name for name in CACHE_NAMES if takes(model, name)), CACHE)


def generate_passes(model: Any, name: str) -> bool:
    """Whether `generate` gives a model an argument of this name. It checks only the outermost signature."""
    return name in _arguments(model.forward)[0]


def _arguments(forward: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """The names of a forward's arguments, and whether it takes others, too. Read once, because every call asks."""
    forward = getattr(forward, "__func__", forward)
    found = _SEEN.get(forward)
    if found is None:
        parameters = inspect.signature(forward).parameters
        passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        found = _SEEN[forward] = frozenset(parameters), passes_on
    return found
