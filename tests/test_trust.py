"""Somebody's code in a target, around it, in its cache or in its arguments: the text is that of plain `generate`.

Each case is a change that a run of plain `generate` follows, and the way that a call with it takes. It is made after a first
call, so that whatever was built for transformers' own code is there already, and undone afterwards.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import json
import runpy
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, RECURRENT, build, half_right, random_ids
from covering import in_turns, only, over
from pairs import BY_NAME, CALL, padded, tokenizer
from test_fused import FAMILY
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, GenerationMixin, LlamaForCausalLM
from transformers.activations import ACT2CLS
from transformers.cache_utils import DynamicLayer
from transformers.generation import LogitsProcessorList
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama as home

from assisted import AssistedModelForCausalLM
from assisted.core.drafts import DraftingStopped
from assisted.engine.libraries import RESETS_ANGLES
from assisted.engine.trust import blamed, trust
from assisted.fast.fused import fused

OWN, FORWARD, PLAIN = "shortcuts", "own forward", "plain"
LONG = CALL | {"max_new_tokens": 24}
FUSED = {*FAMILY, "qwen3_next", "qwen3_5"}  # whole
HERE = sys.modules[__name__]
SWITCH = False
Change = Callable[[Any], Any]
"""Makes, of a target, what to change: an (object, attribute, value), a context manager, or a list of these."""


@dataclass(frozen=True)
class Case:
    """A change and the way that a call with it takes. kind: a class that the target has from the beginning. call: makes
    arguments of the changed call, of the target and the ids. shows: the text is another one."""

    name: str
    change: Change
    way: str
    kind: type | None = None
    call: Callable[[Any, torch.Tensor], dict[str, Any]] | None = None
    shows: bool = True


def given(name: str, call: Callable[[Any, torch.Tensor], dict[str, Any]], way: str, **about: Any) -> Case:
    """A case in which nothing but arguments changes."""
    return Case(name, lambda target: [], way, call=call, **about)


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of an object, a class or a module set to another value."""
    own = getattr(owner, "__dict__", {})
    parts = own.get("_modules", {}).keys() | own.get("_parameters", {}).keys() if isinstance(owner, nn.Module) else ()
    stays = name in own or name in parts or name in ("__class__", "__code__")
    before = own[name] if name in own else getattr(owner, name) if stays else None
    setattr(owner, name, value)
    try:
        yield
    finally:
        if stays:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def changed(what: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for one in what if isinstance(what, list) else [what]:
            stack.enter_context(swapped(*one) if isinstance(one, tuple) else one)
        yield


def on(path: str, name: str, made: Callable[[Any], Any]) -> Change:
    """An attribute of some modules replaced by something made of it. path: of the modules, with a star for every layer."""
    return lambda t: [(module, name, made(getattr(module, name))) for module in under(t, path)]


def under(target: Any, path: str) -> list[Any]:
    every = [path.replace("*", str(layer)) for layer in range(len(target.model.layers))] if "*" in path else [path]
    return [target.get_submodule(one) for one in every]


def mlps(target: Any) -> list[Any]:
    return under(target, "model.layers.*.mlp")


def of_class(kind: type, path: str = "") -> Change:
    return lambda t: [(module, "__class__", kind) for module in under(t, path)]


def patched(owner: Any, name: str, made: Any) -> Change:
    return lambda t: (owner, name, made)


def method(name: str, function: Callable[..., Any]) -> Change:
    return lambda t: (t, name, types.MethodType(function, t))


def hooked(path: str, hook: Any, before: bool = False, **kwargs: Any) -> Change:
    kind = "register_forward_pre_hook" if before else "register_forward_hook"
    return lambda t: [getattr(module, kind)(hook, **kwargs) for module in under(t, path)]


# --- what somebody's code does ---


def on_output(change: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
    """Makes a wrapper that changes the tensor, or the logits or states, that a function returns."""

    def wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            if isinstance(made, torch.Tensor):
                return change(made, args, kwargs)
            if isinstance(made, tuple):
                return (change(made[0], args, kwargs), *made[1:])
            name = "logits" if "logits" in made else "last_hidden_state"
            setattr(made, name, change(made[name], args, kwargs))
            return made

        return inner

    return wrapper


def clamped(function: Callable[..., Any], limit: float = 0.2) -> Callable[..., Any]:
    """As patches of long-context and steering packages do."""
    return on_output(lambda made, args, kwargs: made.clamp(-limit, limit))(function)


def steered(made: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    """Something that the first 24 positions don't show."""
    positions = kwargs["position_ids"][:, -made.shape[1] :]
    return made + (positions >= 24)[..., None] * (made.roll(1, -1) * 0.7)


def after_token(made: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    """Steering that begins behind a token: looks at the input of the pass only."""
    return made + (kwargs["input_ids"][:, -made.shape[1] :, None] % 5 == 0) * made.roll(1, -1)


def nearsighted(made: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    """Treats passes over one token differently: its drafts can't be verified."""
    return made.roll(1, -1) if kwargs["input_ids"].shape[1] == 1 else made


def unplaced(forward: Callable[..., Any]) -> Callable[..., Any]:
    def inner(self: Any, *args: Any, **kwargs: Any) -> Any:  # whose signature has no positions
        output = forward(self, *args, **kwargs)
        if kwargs.get("position_ids") is None:
            output.logits = output.logits.roll(1, -1)
        return output

    return inner


def subclass(kind: type, **members: Any) -> type:
    return type("Derived", (kind,), members)


def derived(kind: type, change: Callable[..., Any] = clamped, name: str = "forward") -> type:
    return subclass(kind, **{name: change(getattr(kind, name))})


ROLLED = on_output(lambda made, args, kwargs: made.roll(1, -1))
SteeredCausal = derived(LlamaForCausalLM, on_output(steered))
SteeredAfterToken = derived(LlamaForCausalLM, on_output(after_token))
Nearsighted = derived(LlamaForCausalLM, on_output(nearsighted))


class Switches:
    on = False


class Switched(LlamaForCausalLM):
    """Its switches are off at first. Takes an argument of its own, which `generate` hands to every pass."""

    def forward(self, input_ids=None, steer=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        if SWITCH or Switches.on:
            output.logits = output.logits.roll(1, -1)
        if steer is not None and steer is not False:
            by = len(steer) if isinstance(steer, (str, list)) else float(torch.as_tensor(steer).float().mean())
            output.logits = output.logits + by * output.logits.roll(1, -1)
        return output


class Counts(LlamaForCausalLM):
    """Remembers between forward passes: right for one token in a pass only."""

    def forward(self, input_ids=None, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        output = super().forward(input_ids=input_ids, **kwargs)
        if self.calls > 20:
            output.logits = output.logits.roll(1, -1)
        return output


class Trains(LlamaForCausalLM):
    """Remembers in training only."""

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        if self.training:
            self.last = output.logits
        output.logits = output.logits.roll(1, -1)
        return output


Third = subclass(nn.Module, forward=lambda self, weight: weight / 3, right_inverse=lambda self, weight: weight)
OneLayer = subclass(
    transformers.LlamaConfig,
    __getattribute__=lambda self, name: 1 if name == "num_hidden_layers" else object.__getattribute__(self, name),
)


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made.clamp(-0.6, 0.6) if func is functional.silu else made


class Weight(nn.Parameter):
    """Multiplies in its own way."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        return made.clamp(-0.5, 0.5) if func is functional.linear else made


class Ids(torch.Tensor):
    """Tokens of a kind of their own, which are embedded otherwise."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        made = super().__torch_function__(func, types, args, kwargs or {})
        return made.roll(1, -1) if func is functional.embedding else made


class Rolled(home.CausalLMOutputWithPast):
    def __post_init__(self):
        self.logits = self.logits.roll(1, -1)
        super().__post_init__()


class Doubling(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


class NoEpsilon(nn.Module):
    """A norm of somebody's, with none of the attributes that a norm of transformers has."""

    def __init__(self, norm: Any):
        super().__init__()
        self.gain = nn.Parameter(norm.weight.detach().clone())

    def forward(self, x):
        return x / x.abs().mean(-1, keepdim=True) * self.gain


class Clamped:
    """Callable, and no function."""

    def __init__(self, inner: Callable[..., Any]):
        self.inner = inner

    def __call__(self, *args, **kwargs):
        return self.inner(*args, **kwargs).clamp(-0.2, 0.2)


class Dynamic(nn.Module):
    """A rotary embedding whose base is another one, and grows beyond a position, as NTK-aware scaling does."""

    def __init__(self, limit: int, dim: int = 8):
        super().__init__()
        self.dim, self.limit = dim, limit

    def forward(self, x, position_ids):
        length = position_ids.max() + 1
        base = 500.0 * (length / self.limit if length > self.limit else 1.0)
        inverse = 1.0 / base ** (torch.arange(0, self.dim, 2) / self.dim)
        angles = position_ids[..., None].float() * inverse
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def dynamic_of_transformers(rotary: Any) -> nn.Module:
    config = type(rotary.config)(**rotary.config.to_dict())
    config.max_position_embeddings = 48
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    return home.LlamaRotaryEmbedding(config)


def gemma_norm(module: Any) -> nn.Module:
    """Adds one to its weight."""
    made = GemmaRMSNorm(module.weight.shape[0], module.variance_epsilon)
    made.weight.data.copy_(module.weight)
    return made


def halved(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) / 2


def clamped_output(function: Callable[..., Any]) -> Callable[..., Any]:
    def inner(self, *args, **kwargs):
        made = function(self, *args, **kwargs)
        return made.clamp(-0.2, 0.2) if isinstance(self, nn.Linear) and made.shape[-1] == 32 else made

    return inner


def clamped_attention(module, query, key, value, attention_mask, **kwargs):
    output, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return output.clamp(-0.2, 0.2), weights


def registered(target: Any, masks: bool = False) -> list[Any]:
    return [
        mock.patch.dict(AttentionInterface._global_mapping, {"clamped": clamped_attention}),
        *([mock.patch.dict(AttentionMaskInterface._global_mapping, {"clamped": sdpa_mask})] if masks else []),
        (target.config, "_attn_implementation_internal", "clamped"),
    ]


def half_keys(update: Callable[..., Any]) -> Callable[..., Any]:
    """A cache that rounds its keys, coarsely."""

    def inner(self, key_states, value_states, *args, **kwargs):
        return update(self, (key_states * 2).round() / 2, value_states, *args, **kwargs)

    return inner


OddCache = derived(DynamicCache, half_keys, "update")
OddLayer = derived(DynamicLayer, half_keys, "update")


class Lengthy(DynamicCache):
    """Tells of one token more."""

    def get_seq_length(self, layer_idx=0):
        found = super().get_seq_length(layer_idx)
        return found + 1 if found > 25 else found


def cached(kind: type = DynamicCache, change: Callable[[Any], Any] = lambda cache: None) -> Callable[..., Any]:
    def call(target: Any, ids: torch.Tensor) -> dict[str, Any]:
        cache = kind(config=target.config)
        change(cache)
        return {"past_key_values": cache}

    return call


def with_method(one: Any) -> None:
    one.update = types.MethodType(half_keys(type(one).update), one)


def more_positions(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    def inner(self, *args, **kwargs):
        made = getattr(LlamaForCausalLM, name)(self, *args, **kwargs)
        return made | {"position_ids": change(made["position_ids"])}

    return inner


def flipped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(self, *args, **kwargs):
        return function(self, *args, **kwargs).flip(-1)

    return inner


def stops_early(self, input_ids, scores, **kwargs):
    return torch.full(input_ids.shape[:1], input_ids.shape[1] >= self.max_length - 5)


def by_all_rows(self, ids, scores):
    """A patch may look at the whole batch: here, a row's scores depend on the last tokens of all rows."""
    return scores.roll(int(ids[:, -1].sum()) % 7, -1)


Endless = subclass(MaxLengthCriteria, __call__=lambda self, ids, scores, **_: torch.zeros(len(ids), dtype=torch.bool))
EndsTwice = subclass(  # at the second end token in turn
    EosTokenCriteria, __call__=lambda self, ids, scores, **_: torch.isin(ids[:, -2:], self.eos_token_id).all(-1)
)
StopsLater = subclass(
    StopStringCriteria,
    __call__=lambda self, ids, scores: StopStringCriteria.__call__(self, ids, scores) & (ids.shape[1] > 40),
)
ByLength = subclass(
    processors.TemperatureLogitsWarper, __call__=lambda self, ids, scores: scores.roll(ids.shape[1], -1)
)


class Remembers(processors.TopKLogitsWarper):
    """Keeps the best token of each step from the next one."""

    last: Any = None

    def __call__(self, input_ids, scores):
        made = scores if self.last is None else scores.scatter(1, self.last, -torch.inf)
        self.last = made.argmax(-1, keepdim=True)
        return made


def relu_for_silu(graph: Any, example: Any) -> Any:
    """A compiler of somebody's."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "silu":
            node.target, node.kwargs = torch.relu, {}
    graph.recompile()
    return graph.forward


def compiled(path: str) -> Change:
    compiles = functools.partial(torch.compile, backend=relu_for_silu)
    return lambda t: [(one, "_compiled_call_impl", compiles(one._call_impl)) for one in under(t, path)]


def parametrized(change: Callable[[Any], Any]) -> Change:
    @contextmanager
    def manager(target: Any) -> Iterator[None]:
        modules = under(target, "model.layers.*.mlp.down_proj")
        before = [nn.Parameter(module.weight.detach().clone()) for module in modules]
        for module in modules:
            change(module)
        try:
            yield
        finally:
            for module, weight in zip(modules, before, strict=True):
                parametrize.remove_parametrizations(module, "weight")
                module.weight = weight

    return manager


def halved_norm(module: Any) -> None:
    parametrizations.weight_norm(module).parametrizations.weight.original0.data.mul_(0.5)


def less(module: nn.Module, args: Any, output: Any) -> Any:
    return tuple(part * 0.5 for part in output) if isinstance(output, tuple) else output.clamp(-0.3, 0.3)


def only_generated(module: nn.Module, args: Any, output: Any) -> Any:
    """Steers what is generated, not the prompt, as steering packages do: passes over one token."""
    states = output[0] if isinstance(output, tuple) else output
    if states.shape[1] == 1:
        states = states + 0.9 * states.roll(1, -1)
    return (states, *output[1:]) if isinstance(output, tuple) else states


def in_place(module: nn.Module, args: Any, output: Any) -> None:
    if output.shape[1] == 1:
        output.mul_(-1)


def assigns(module: nn.Module, args: Any, output: Any) -> None:
    if output.shape[1] == 1:
        output[..., :9] = 0


def only_mlps(module: nn.Module, args: Any, output: Any) -> Any:
    return only_generated(module, args, output) if isinstance(module, home.LlamaMLP) else None


def positions_doubled(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return args, kwargs | {"position_ids": kwargs["position_ids"] * 2}


class Later:
    """A hook that changes the text from the twentieth pass on, and counts in an object of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def hook(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.calls += 1
        return output.clamp(-0.1, 0.1) if self.calls > 20 else output


def in_its_closure() -> Any:
    calls = 0

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        nonlocal calls
        calls += 1
        return output.clamp(-0.1, 0.1) if calls > 20 else output

    return hook


def in_the_module(module: Any, args: Any, output: Any) -> Any:
    module.calls = getattr(module, "calls", 0) + 1
    return output.clamp(-0.1, 0.1) if module.calls > 20 else output


MLP, NORM, SDPA = home.LlamaMLP, home.LlamaRMSNorm, "scaled_dot_product_attention"
EVERY, DOWN, FIRST = "model.layers.*", "model.layers.*.mlp.down_proj", "model.layers.0.mlp"
ARGMAX, MEAN = torch.argmax, torch.Tensor.mean


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


CASES = [
    # classes of its modules
    Case("causal class", of_class(SteeredCausal), FORWARD),
    Case("model class", of_class(derived(home.LlamaModel, on_output(steered)), "model"), FORWARD),
    Case("mlp class of one layer", of_class(derived(MLP), "model.layers.1.mlp"), FORWARD),
    Case("a config's attributes", lambda t: (t.config, "__class__", OneLayer), FORWARD),
    # patches of classes
    *(
        Case(f"{kind.__name__} patched", patched(kind, "forward", clamped(kind.forward, limit)), FORWARD)
        for kind, limit in ((MLP, 0.2), (nn.Linear, 2.0), (ACT2CLS["silu"], 0.2))
    ),
    Case("all calls patched", patched(nn.Module, "__call__", clamped_output(nn.Module.__call__)), FORWARD),
    Case("mlp with other code", patched(MLP.forward, "__code__", halved.__code__), FORWARD),
    Case(
        "the norm of another class",
        lambda t: [(NORM, "eps", 1e-6), *((NORM, name, getattr(GemmaRMSNorm, name)) for name in ("_norm", "forward"))],
        FORWARD,
    ),
    # what forwards call and make
    Case("sdpa patched", patched(functional, SDPA, clamped(getattr(functional, SDPA))), FORWARD),
    Case("silu patched", patched(functional, "silu", clamped(functional.silu)), FORWARD),
    Case("rotation patched", patched(home, "apply_rotary_pos_emb", clamped(home.apply_rotary_pos_emb, 0.8)), FORWARD),
    Case("an output class", patched(home, "CausalLMOutputWithPast", Rolled), FORWARD),
    Case("attention registered", registered, PLAIN),  # gets no masks
    Case("attention registered with masks", lambda t: registered(t, masks=True), FORWARD),
    # instances
    Case("a function of its own", on(FIRST, "forward", clamped), FORWARD),
    Case("an object for a function", on(FIRST, "forward", Clamped), FORWARD),
    Case("another module's method", lambda t: (mlps(t)[0], "forward", mlps(t)[1].forward), FORWARD),
    Case("wrapped mlp", on(EVERY, "mlp", Doubling), FORWARD),
    Case("a norm without its attributes", on(EVERY, "input_layernorm", NoEpsilon), FORWARD),
    Case(
        "a traced mlp",
        on(EVERY, "mlp", lambda m: torch.jit.trace(Doubling(m), torch.randn(1, 3, 32), check_trace=False)),
        FORWARD,
    ),
    Case("a weight of another kind", on(DOWN, "weight", lambda w: Weight(w.detach(), requires_grad=False)), FORWARD),
    Case(
        "a parametrization", parametrized(lambda m: parametrize.register_parametrization(m, "weight", Third())), FORWARD
    ),
    Case("somebody's rotary module", on("model", "rotary_emb", lambda own: Dynamic(300)), FORWARD),
    Case("a rotary module that changes early", on("model", "rotary_emb", lambda own: Dynamic(30)), PLAIN),
    # other code of transformers and torch
    Case("another norm of transformers", on(EVERY, "input_layernorm", gemma_norm), OWN),
    Case("another function of torch", patched(functional, "silu", functional.relu6), OWN),
    # without it, not even two calls of plain generate agree
    *(
        [Case("another rotary module", on("model", "rotary_emb", dynamic_of_transformers), OWN)]
        if RESETS_ANGLES
        else []
    ),
    Case("fewer layers", lambda t: (t.config, "num_hidden_layers", 1), OWN),
    Case("a weight norm", parametrized(halved_norm), OWN),
    # switches that are off in the first call
    Case("a global", patched(HERE, "SWITCH", True), FORWARD, Switched),
    Case("another class's attribute", patched(Switches, "on", True), FORWARD, Switched),
    # between passes, around them, or in the cache
    *(
        Case(name, method(name, more_positions(name, change)), PLAIN)
        for name, change in (
            ("prepare_inputs_for_generation", lambda positions: positions * 2),
            ("_update_model_kwargs_for_generation", lambda positions: positions + 1),
        )
    ),
    Case("sampling patched", patched(GenerationMixin, "_sample", flipped(GenerationMixin._sample)), PLAIN),
    Case("stopping patched", patched(MaxLengthCriteria, "__call__", stops_early), PLAIN),
    Case("processors patched", patched(LogitsProcessorList, "__call__", ROLLED(LogitsProcessorList.__call__)), PLAIN),
    Case("argmax patched", patched(torch, "argmax", lambda *args, **kwargs: ARGMAX(*args, **kwargs) // 2), PLAIN),
    Case(
        "tensors patched",
        patched(torch.Tensor, "mean", lambda self, *args, **kwargs: MEAN(self, -1, keepdim=True) + 0.5),
        PLAIN,
    ),
    Case("function mode", lambda t: Mode(), PLAIN),
    Case("cache layers patched", patched(DynamicLayer, "update", half_keys(DynamicLayer.update)), PLAIN),
    Case("remembers", of_class(Counts), PLAIN),
    Case("remembers in training", of_class(Trains), FORWARD),
    Case("can't be verified", of_class(Nearsighted), PLAIN),
    Case("a compiler of somebody's", compiled(FIRST), PLAIN),
    # hooks, and generate, which is called as it is
    *(Case(f"a hook on {path}", hooked(path, less), OWN) for path in ("model.embed_tokens", "model.rotary_emb")),
    Case("a hook with positions", hooked("model", positions_doubled, True, with_kwargs=True), OWN),
    Case("a hook of generated tokens", hooked("model.norm", only_generated), PLAIN),
    Case("a hook that writes", hooked("model.layers.1.mlp", in_place), PLAIN),
    Case("a hook that assigns", hooked("model.layers.1.mlp", assigns), PLAIN),
    Case("a hook on all modules", lambda t: register_module_forward_hook(only_mlps), PLAIN),
    Case("a hook that counts", hooked(FIRST, in_the_module), PLAIN),
    Case("generate patched", patched(GenerationMixin, "generate", flipped(GenerationMixin.generate)), OWN),
    Case("its own generate, one instance", method("generate", flipped(GenerationMixin.generate)), OWN),
    # settings of torch around a call, which are no code
    Case("default dtype float64", lambda t: default_dtype(torch.float64), OWN, shows=False),
    Case("default dtype bfloat16", lambda t: default_dtype(torch.bfloat16), OWN, shows=False),
    Case("default device", lambda t: torch.device("cpu"), OWN, shows=False),  # a mode that changes no operation
    Case("gradients", lambda t: torch.enable_grad(), OWN, shows=False),
    Case("inference mode", lambda t: torch.inference_mode(), OWN, shows=False),
    Case("anomalies", lambda t: torch.autograd.set_detect_anomaly(True), OWN, shows=False),
    Case("autocast", lambda t: torch.autocast("cpu", torch.bfloat16), OWN, shows=False),
    # arguments: of the forward, caches, criteria, processors
    *(
        given(f"steer={steer}", lambda t, ids, steer=steer: {"steer": steer}, way, kind=Switched)
        for steer, way in ((True, FORWARD), (0.7, FORWARD), ("ab", FORWARD), ([1, 2], PLAIN), (torch.ones(3), PLAIN))
    ),
    given("steer=None", lambda t, ids: {"steer": None}, FORWARD, kind=Switched, shows=False),
    given("a cache class", cached(OddCache), PLAIN),
    given("a cache's length", cached(Lengthy), PLAIN, shows=False),
    given("a cache's method", cached(change=with_method), PLAIN),
    given("cache layers", cached(change=lambda c: setattr(c, "layers", [OddLayer() for _ in c.layers])), PLAIN),
    given("methods of cache layers", cached(change=lambda c: [with_method(layer) for layer in c.layers]), PLAIN),
    given("tokens of a tensor of somebody's", lambda t, ids: {"inputs": ids.as_subclass(Ids)}, PLAIN),
    given(
        "positions below zero",
        lambda t, ids: {"position_ids": torch.arange(20).expand(len(ids), -1) - 5},
        PLAIN,
        shows=False,
    ),
    given("a length", lambda t, ids: {"stopping_criteria": [Endless(30)]}, OWN, shows=False),
    given("an end token", lambda t, ids: {"stopping_criteria": [EndsTwice([*range(5, 30)])]}, OWN, shows=False),
    given(
        "strings", lambda t, ids: {"stopping_criteria": [StopsLater(tokenizer(), ["a", "b", "c"])]}, OWN, shows=False
    ),
    given("a processor that remembers", lambda t, ids: {"logits_processor": [Remembers(4)]}, OWN),
    given("a processor of the length", lambda t, ids: {"logits_processor": [ByLength(1.5)]}, OWN),
    # a patched processor of transformers runs like one of somebody's
    *(
        Case(kind.__name__, patched(kind, "__call__", by_all_rows), OWN, call=lambda t, ids, call=call: call)
        for kind, call in (
            (processors.MinLengthLogitsProcessor, {"min_length": 40, "eos_token_id": [2, 5, 6]}),
            (processors.NoRepeatNGramLogitsProcessor, {"no_repeat_ngram_size": 2}),
        )
    ),
]


IN_TEXTS = {case.name for case in CASES if case.way == OWN or case.call is not None} | {
    "causal class", "mlp class of one layer", "all calls patched", "an output class", "attention registered with masks",
    "a norm without its attributes", "a weight of another kind", "somebody's rotary module", "remembers in training",
    "prepare_inputs_for_generation", "sampling patched", "processors patched", "argmax patched", "function mode", "remembers",
    "cache layers patched", "can't be verified", "a hook of generated tokens", "a hook on all modules", "a global",
    "a rotary module that changes early", "attention registered", "a hook that counts",
}  # fmt: skip
"""Where a target runs its own forward, or plainly, it matters little why: that is asserted of every case before anything
runs, and the texts of the other cases are slow."""


@pytest.fixture(scope="module")
def weights() -> tuple[Any, Any]:
    target = build(BY_NAME["llama"])
    return target, half_right(target)


def made(weights: tuple[Any, Any], kind: type | None = None, **kwargs: Any) -> tuple[Any, AssistedModelForCausalLM]:
    target, draft = copy.deepcopy(weights)
    if kind is not None:
        target.__class__ = kind
    return target, AssistedModelForCausalLM.from_models(target, **{"draft": draft, "draft_length": 4} | kwargs)


def batch(target: Any, rows: int) -> dict[str, Any]:
    ids, mask = padded(target, rows, 20, seed=0, step=3)
    enough = 36 if rows == 1 else 24  # for every change to show
    return {"inputs": ids, "attention_mask": mask, "max_new_tokens": enough}


def compared(
    target: Any, model: AssistedModelForCausalLM, plain: list[list[int]] | None = None, again: Any = dict, **call: Any
) -> tuple[list[list[int]], str]:
    """The text, which is that of plain `generate`, and the way it took. plain: the text, where it is known already. again:
    makes further arguments anew for each of the two."""

    def fresh() -> dict[str, Any]:
        for module in target.modules():
            vars(module).pop("calls", None)
        return call | again()

    if plain is None:
        plain = target.generate(**fresh()).tolist()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert model.generate(**fresh()).tolist() == plain
    assert model.report is not None
    told = [warning for warning in caught if issubclass(warning.category, DraftingStopped)]
    assert len(told) == (model.report.way == PLAIN), [str(warning.message) for warning in told]
    if model.report.way == PLAIN:
        assert model.report.because is not None
        assert model.report.because in str(told[0].message)
    assert (model.report.drafted > 0) == (model.report.way != PLAIN)
    return plain, model.report.way


@pytest.mark.parametrize("case", [case for case in CASES if case.call is None], ids=lambda case: case.name)
def test_what_is_found(case: Case, weights: tuple[Any, Any]) -> None:
    """Before anything runs: nothing of somebody's, or what. Only a trial shows some obstacles."""
    target = weights[0]
    with changed((target, "__class__", case.kind or type(target))):
        before = trust(target)
        with changed(case.change(target)):
            found = trust(target)
        assert trust(target).is_own == before.is_own == (case.kind is None)
    if case.way == PLAIN:
        assert found.hooks or not found.is_own
    else:
        assert (found.forward is not None, found.between) == (case.way == FORWARD, None)
    if case.name == "a traced mlp":
        assert "traced or scripted" in str(found.forward)


@pytest.mark.parametrize("hook", [in_its_closure, lambda: Later().hook])
def test_a_hook_that_counts_in_itself(hook: Callable[[], Any], weights: tuple[Any, Any]) -> None:
    target, model = made(weights)
    with changed(hooked(FIRST, hook())(target)), pytest.warns(DraftingStopped, match="remembers something"):
        model.generate(**LONG | batch(target, 1))


@pytest.mark.parametrize("kind", [Nearsighted, Counts])
def test_a_target_that_fails_its_trial_is_refused_when_the_pair_is_made(kind: type, weights: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match=f"target: {kind.__name__} cannot take back rejected tokens"):
        made(weights, kind, draft="suffix")


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("case,rows", only(in_turns(CASES, [1, 3]), IN_TEXTS))
def test_the_text_is_that_of_plain_generate(case: Case, rows: int, weights: tuple[Any, Any]) -> None:
    """It follows a change that is made, undone and made again."""
    target, model = made(weights, case.kind)
    own, call = OWN if case.kind is None else FORWARD, LONG | batch(target, rows)
    if case.name == "another rotary module":
        call["max_new_tokens"] = 36  # it differs in long texts only
    again = functools.partial(case.call, target, call["inputs"]) if case.call is not None else dict
    before, way = compared(target, model, **call)
    assert way == own
    with changed(case.change(target)):
        text, way = compared(target, model, again=again, **call)
        found = trust(target)
    assert text != before or not case.shows
    assert way == case.way
    assert found.is_own or way != OWN
    assert compared(target, model, before, **call)[1] == own
    with changed(case.change(target)):
        assert compared(target, model, text, again, **call)[1] == case.way


@pytest.mark.parametrize("name", ["llama", "gpt2", "lfm2"])
def test_a_forward_that_looks_for_positions(name: str) -> None:
    """`generate` gives it none, so that its text must not come from forward passes with positions."""
    target = build({about.name: about for about in ARCHITECTURES + RECURRENT}[name])
    model = AssistedModelForCausalLM.from_models(target, draft="recycle")
    before, _ = compared(target, model, **LONG | batch(target, 2))
    target.__class__ = derived(type(target), unplaced)
    text, way = compared(target, model, **LONG | batch(target, 2))
    assert (text != before, way) == (True, PLAIN)


def test_an_argument_that_the_forward_does_not_know(weights: tuple[Any, Any]) -> None:
    for run in made(weights):
        with pytest.raises(ValueError, match="steer"):
            run.generate(**LONG | batch(weights[0], 1), steer=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_embeddings_of_another_dtype(dtype: torch.dtype, weights: tuple[Any, Any]) -> None:
    """Right, or the error of plain `generate`."""
    target, model = made(weights)
    call = LONG | {"inputs_embeds": target.get_input_embeddings()(batch(target, 1)["inputs"]).detach().to(dtype)}
    try:
        target.generate(**call)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=str(error).split("\n")[0][:40].replace("(", ".").replace(")", ".")):
            model.generate(**call)
    else:
        compared(target, model, **call)


# --- kinds of drafts, wrappers, files, changes ---


@pytest.mark.parametrize(
    "draft,kind",
    in_turns(["suffix", "ngram", "recycle", "early-exit:1", "layer-skip"], [SteeredAfterToken, SteeredCausal]),
)
def test_every_kind_of_draft(draft: str, kind: type, weights: tuple[Any, Any]) -> None:
    """Also sampled: with one token to choose from, the text is the greedy one of the changed model."""
    target, model = made(weights, draft=draft)
    call = LONG | batch(target, 2)
    for own in (type(target), kind, type(target)):
        target.__class__ = own
        plain = target.generate(**call).tolist()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            assert model.generate(**call).tolist() == plain
            assert model.generate(**call | {"do_sample": True, "top_k": 1}).tolist() == plain


def test_a_forward_at_the_address_of_another(weights: tuple[Any, Any]) -> None:
    """Python gives a new function the address of one that is gone: what was found of that one does not hold for it."""
    target, model = made(weights)
    for _ in range(4):
        for change, way in ((lambda made, args, kwargs: made, FORWARD), (nearsighted, PLAIN)):
            with changed((target, "__class__", derived(LlamaForCausalLM, on_output(change)))):
                assert compared(target, model, **LONG | batch(target, 1))[1] == way


def test_adapters_with_code_of_somebodys(weights: tuple[Any, Any]) -> None:
    """The text of an adapter's wrapper is that of the wrapper's own `generate`; some adapters work outside the layers."""
    peft = pytest.importorskip("peft")
    about = {"task_type": "CAUSAL_LM", "r": 2, "init_lora_weights": False, "target_modules": ["q_proj"]}
    adapted = peft.get_peft_model(copy.deepcopy(weights[0]), peft.LoraConfig(**about)).eval()
    model = AssistedModelForCausalLM.from_models(adapted, draft=copy.deepcopy(weights[1]), draft_length=4)
    call = LONG | batch(weights[0], 3)
    call["input_ids"] = call.pop("inputs")
    before, way = compared(adapted, model, **call)
    assert way == OWN
    for change in (
        (adapted, "__class__", derived(peft.PeftModelForCausalLM, flipped, "generate")),
        (adapted, "generate", types.MethodType(flipped(peft.PeftModelForCausalLM.generate), adapted)),
    ):
        with changed(change):
            text, way = compared(adapted, model, **call)
        assert (text != before, way) == (True, PLAIN)
        assert compared(adapted, model, before, **call)[1] == OWN
    adapted.add_adapter(
        "activated", peft.LoraConfig(**about, alora_invocation_tokens=call["input_ids"][0, 8:10].tolist())
    )
    adapted.set_adapter("activated")
    assert compared(adapted, model, **call)[1] == PLAIN
    assert "works outside the model's layers" in str(model.report)


CLASS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM


class HouseConfig(LlamaConfig):
    model_type = "house"


class HouseForCausalLM(LlamaForCausalLM):
    config_class = HouseConfig

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
        late = position_ids[:, -output.logits.shape[1] :, None] >= 30
        output.logits = output.logits + late * output.logits.roll(1, -1)
        return output
"""


def test_classes_of_files(weights: tuple[Any, Any], tmp_path: Path) -> None:
    """A checkpoint that brings its code, and a class of the main program, copied, pickled and read again."""
    weights[0].save_pretrained(tmp_path)
    (tmp_path / "house.py").write_text(CLASS)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text()) | {"model_type": "house", "architectures": ["HouseForCausalLM"]}
    fields["auto_map"] = {"AutoConfig": "house.HouseConfig", "AutoModelForCausalLM": "house.HouseForCausalLM"}
    file.write_text(json.dumps(fields))
    model = AssistedModelForCausalLM.from_pretrained(
        tmp_path, draft="suffix", draft_length=4, trust_remote_code=True, dtype=torch.float32
    )
    assert type(model.target).__name__ == "HouseForCausalLM"
    target = type(weights[0])(
        weights[0].config
    ).eval()  # a copy would have hooks of earlier cases, which cannot be pickled
    target.load_state_dict(weights[0].state_dict())
    target.__class__ = runpy.run_path(str(tmp_path / "house.py"), run_name="__main__")["HouseForCausalLM"]
    with changed((sys.modules["__main__"], "HouseForCausalLM", target.__class__)):
        torch.save(target, tmp_path / "model.pt")
        again = torch.load(tmp_path / "model.pt", weights_only=False)
    for one in (model.target, copy.deepcopy(target), again):
        model = AssistedModelForCausalLM.from_models(one, draft=copy.deepcopy(weights[1]), draft_length=4)
        assert compared(one, model, **LONG | batch(weights[0], 3))[1] == FORWARD


@pytest.mark.parametrize("rows", [1, 3])
def test_a_weight_that_is_no_parameter_changes_in_place(rows: int, weights: tuple[Any, Any]) -> None:
    """As hypernetworks and `torch.func` put weights into modules."""
    target, model = made(weights)
    for mlp in mlps(target):
        mlp.down_proj.weight = mlp.down_proj._parameters.pop("weight").detach().clone()
    before, _ = compared(target, model, **LONG | batch(target, rows))
    for mlp in mlps(target):
        mlp.down_proj.weight.mul_(0.3)
    assert compared(target, model, **LONG | batch(target, rows))[0] != before


class Changes:
    """A streamer that changes the model in the middle of a call, as another thread might."""

    def __init__(self, change: Callable[[], Any]):
        self.change, self.values = change, 0

    def put(self, value):
        self.values += value.numel()
        if self.values > 30:
            self.change()

    def end(self):
        pass


def test_a_model_that_changes_in_the_middle_of_a_call(weights: tuple[Any, Any]) -> None:
    """The next call is that of the changed model."""
    target, model = made(weights)
    call, handles = LONG | batch(target, 1), list[Any]()
    for change in (
        lambda: handles or handles.append(mlps(target)[0].register_forward_hook(less)),
        lambda: setattr(mlps(target)[1], "act_fn", nn.ReLU()),
        lambda: setattr(mlps(target)[0], "forward", types.MethodType(clamped(MLP.forward), mlps(target)[0])),
    ):
        before, _ = compared(target, model, **call)
        model.generate(**call, streamer=Changes(change))
        assert compared(target, model, **call)[0] != before


# --- transformers as it is ---


def test_every_class_of_transformers_is_own() -> None:
    """No model loses a shortcut: every causal LM, and every module and config in its file."""
    foreign = {}
    for name in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())):
        kind = getattr(transformers, name)
        here = vars(importlib.import_module(kind.__module__)).values()
        modules = {one for one in here if inspect.isclass(one) and issubclass(one, nn.Module)}
        if (blame := blamed({kind, *modules, *filter(None, [kind.config_class])})) is not None:
            foreign[name] = blame
    assert not foreign
    assert len(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())) > 150


@pytest.mark.parametrize("name", ["from_pretrained", "push_to_hub", "save_pretrained"])
def test_a_library_that_adds_its_own_files(name: str, weights: tuple[Any, Any], monkeypatch: Any) -> None:
    """As sinq 0.2 does from the moment it is imported, for every model: what loads and saves is in no forward pass."""
    target = weights[0]
    before = vars(transformers.PreTrainedModel).get(name, getattr(transformers.PreTrainedModel, name))
    inner = getattr(before, "__func__", before)

    def added(self: Any, *args: Any, **kwargs: Any) -> Any:
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(transformers.PreTrainedModel, name, classmethod(added) if name == "from_pretrained" else added)
    assert trust(target).is_own


@over("architecture", [*ARCHITECTURES, *RECURRENT], also=lambda one: [one.name] if one.name in FUSED else [])
def test_what_is_fused(architecture: Any) -> None:
    target = build(architecture)
    found = trust(target)
    assert found.is_own
    assert all(map(lambda one, other: one is other, found.code, trust(target).code))
    # before 5.17, Nemotron's attention has a class for each implementation
    known = architecture.name in FUSED and not hasattr(sys.modules[type(target).__module__], "NemotronSdpaAttention")
    assert fused(target).through_parts == known


def test_layers_of_sinq_are_a_quantizers(package: Any) -> None:
    """They choose one of their methods once, and keep it as an attribute."""
    kind = package(
        "sinq",
        "import torch\n\n\nclass SINQLinear(torch.nn.Linear):\n    def choose(self):\n"
        "        self._forward_impl = self.forward_pytorch\n\n"
        "    def forward(self, x):\n        return self._forward_impl(x)\n\n"
        "    def forward_pytorch(self, x):\n        return x @ self.weight.t()\n",
    ).SINQLinear
    target = build(BY_NAME["llama"])
    for linear in target.model.modules():
        if type(linear) is torch.nn.Linear:
            linear.__class__ = kind
            linear.choose()
    model, ids = AssistedModelForCausalLM.from_models(target, "suffix"), random_ids(target, 2, 12)
    assert model.generate(ids, **CALL).tolist() == target.generate(ids, **CALL).tolist()
    assert (model.report.because, model.report.warnings) == (None, ()) and model.report.drafted > 0


def test_layers_of_auto_round_are_a_quantizers(package: Any) -> None:
    """They come from a package beside it, packing a layer stores what forward passes only read, and sizes have other names."""
    kind = package(
        "auto_round_extension",
        "import torch\n\n\nclass QuantLinear(torch.nn.Module):\n    def pack(self, linear):\n"
        "        self.infeatures, self.outfeatures = linear.in_features, linear.out_features\n"
        "        self.qweight = linear.weight.T\n        return self\n\n"
        "    def forward(self, x):\n        return x @ self.qweight\n",
    ).QuantLinear
    assert blamed([kind]) is None
    for name in ("llama", "qwen3", "gpt_neox"):
        target = build(BY_NAME[name])
        for layer in target.base_model.layers:
            for path, linear in list(layer.named_modules()):
                if type(linear) is torch.nn.Linear and linear.bias is None:
                    layer.set_submodule(path, kind().pack(linear))
        model, ids = AssistedModelForCausalLM.from_models(target, "suffix"), random_ids(target, 2, 12)
        assert model.generate(ids, **CALL).tolist() == target.generate(ids, **CALL).tolist()
        assert (model.report.because, model.report.warnings) == (None, ()) and model.report.drafted > 0
