"""Somebody's code in a target, around it, in its cache or in its arguments: the text is that of plain `generate`.

Each change is one that a run of plain `generate` follows. It is made after a first call, so that whatever was built for
transformers' own code is there already, and undone afterwards.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, RECURRENT, build, half_right, random_ids
from covering import in_turns
from pairs import BY_NAME, CALL
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, GenerationMixin, LlamaForCausalLM
from transformers.activations import ACT2CLS
from transformers.cache_utils import DynamicLayer
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama as home

from assisted import AssistedModelForCausalLM
from assisted.drafts import DraftingStopped
from assisted.engine.libraries import RESETS_ANGLES

OWN, FORWARD, PLAIN = "shortcuts", "own forward", "plain"
SWITCH = False
LONG = CALL | {"max_new_tokens": 24}


class Switches:
    on = False


# --- changes of a target: each a context manager ---


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of an object, a class or a module set to another value."""
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def of_class(kind: type, *modules: nn.Module) -> Iterator[None]:
    before = [module.__class__ for module in modules]
    for module in modules:
        module.__class__ = kind
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            module.__class__ = own


@contextmanager
def submodules(target: Any, name: str, made: Callable[[Any], nn.Module]) -> Iterator[None]:
    """One submodule of every layer replaced."""
    before = [getattr(layer, name) for layer in target.model.layers]
    for layer, module in zip(target.model.layers, before, strict=True):
        setattr(layer, name, made(module))
    try:
        yield
    finally:
        for layer, module in zip(target.model.layers, before, strict=True):
            setattr(layer, name, module)


def mlps(target: Any) -> list[nn.Module]:
    return [layer.mlp for layer in target.model.layers]


def steered(hidden: torch.Tensor, positions: torch.Tensor | None, start: int = 24) -> torch.Tensor:
    """Something that the first `start` positions don't show."""
    late = (positions >= start)[..., None] if positions is not None else torch.ones(())
    return hidden + late * (hidden.roll(1, -1) * 0.7)


class SteeredCausal(LlamaForCausalLM):
    def forward(self, input_ids=None, position_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
        keep = output.logits.shape[1]
        output.logits = steered(output.logits, position_ids[:, -keep:])
        return output


class SteeredAfterToken(LlamaForCausalLM):
    """Steering that begins behind a token: looks at the input of the pass only."""

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        keep = output.logits.shape[1]
        output.logits = output.logits + (input_ids[:, -keep:, None] % 5 == 0) * output.logits.roll(1, -1)
        return output


class SteeredModel(home.LlamaModel):
    def forward(self, input_ids=None, position_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
        output.last_hidden_state = steered(output.last_hidden_state, position_ids)
        return output


class SteeredLayer(home.LlamaDecoderLayer):
    def forward(self, hidden_states, position_ids=None, **kwargs):
        return steered(super().forward(hidden_states, position_ids=position_ids, **kwargs), position_ids)


class ClampedMLP(home.LlamaMLP):
    def forward(self, x):
        return super().forward(x).clamp(-0.2, 0.2)


class ClampedNorm(home.LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states).clamp(-1.0, 1.0)


class ScaledAttention(home.LlamaAttention):
    def forward(self, hidden_states, **kwargs):
        output, weights = super().forward(hidden_states, **kwargs)
        return output.clamp(-0.1, 0.1), weights


class SteeredByProperty(home.LlamaMLP):
    @property
    def act_fn(self):
        return functional.relu


class Switched(LlamaForCausalLM):
    """Its switches are off at first."""

    steer = False

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        if self.steer or SWITCH or Switches.on or getattr(self, "own_switch", False):
            output.logits = output.logits.roll(1, -1)
        return output


class Counts(LlamaForCausalLM):
    """Remembers between forward passes: right for one token in a pass only."""

    def forward(self, input_ids=None, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        output = super().forward(input_ids=input_ids, **kwargs)
        if self.calls > 20:
            output.logits = output.logits.roll(1, -1)
        return output


class Box:
    def __init__(self, value, length=0):
        self.value, self.length = value, length


class Boxes(LlamaForCausalLM):
    """Makes an object in each forward pass, which forgets it."""

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        output.logits = Box(output.logits, 1).value.roll(1, -1)
        return output


class Mark:
    def __init__(self, model):
        self.model = model
        model.calls = getattr(model, "calls", 0) + 1


class Marks(LlamaForCausalLM):
    """What it makes in each forward pass counts them."""

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        if Mark(self).model.calls > 20:
            output.logits = output.logits.roll(1, -1)
        return output


class Nearsighted(LlamaForCausalLM):
    """Treats passes over one token differently: its drafts can't be verified."""

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        if input_ids.shape[1] == 1:
            output.logits = output.logits.roll(1, -1)
        return output


def unplaced(forward: Callable[..., Any]) -> Callable[..., Any]:
    def inner(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        if kwargs.get("position_ids") is None:
            output.logits = output.logits.roll(1, -1)
        return output

    return inner


class Prepares(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        made = super().prepare_inputs_for_generation(input_ids, **kwargs)
        made["position_ids"] = made["position_ids"] * 2
        return made


class Updates(LlamaForCausalLM):
    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, **kwargs):
        made = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)
        made["position_ids"] = made["position_ids"] + 1
        return made


class Samples(LlamaForCausalLM):
    def _sample(self, input_ids, *args, **kwargs):
        found = super()._sample(input_ids, *args, **kwargs)
        return found.flip(-1)


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made.clamp(-0.6, 0.6) if func is functional.silu else made


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made * 0.5 if func is torch.ops.aten.silu.default else made


class Weight(nn.Parameter):
    """Multiplies in its own way."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        return made.clamp(-0.5, 0.5) if func is functional.linear else made


@contextmanager
def with_weights(target: Any) -> Iterator[None]:
    modules = [layer.mlp.down_proj for layer in target.model.layers]
    before = [module.weight for module in modules]
    for module in modules:
        module.weight = Weight(module.weight.detach(), requires_grad=False)
    try:
        yield
    finally:
        for module, weight in zip(modules, before, strict=True):
            module.weight = weight


def clamped(function: Callable[..., Any], limit: float = 0.2) -> Callable[..., Any]:
    """As patches of long-context and steering packages do."""

    @functools.wraps(function)
    def inner(*args, **kwargs):
        made = function(*args, **kwargs)
        return (made[0].clamp(-limit, limit), *made[1:]) if isinstance(made, tuple) else made.clamp(-limit, limit)

    return inner


def clamped_output(function: Callable[..., Any]) -> Callable[..., Any]:
    def inner(self, *args, **kwargs):
        made = function(self, *args, **kwargs)
        return made.clamp(-0.2, 0.2) if isinstance(self, nn.Linear) and made.shape[-1] == 32 else made

    return inner


def clamped_attention(module, query, key, value, attention_mask, **kwargs):
    output, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return output.clamp(-0.2, 0.2), weights


@contextmanager
def registered(target: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    before = AttentionInterface._global_mapping.get(name)
    AttentionInterface.register(name, function)
    used = target.config._attn_implementation
    target.config._attn_implementation_internal = name
    try:
        yield
    finally:
        target.config._attn_implementation_internal = used
        if before is None:
            del AttentionInterface._global_mapping[name]
        else:
            AttentionInterface._global_mapping[name] = before


@contextmanager
def with_masks(target: Any) -> Iterator[None]:
    AttentionMaskInterface.register("clamped", sdpa_mask)
    try:
        with registered(target, "clamped", clamped_attention):
            yield
    finally:
        del AttentionMaskInterface._global_mapping["clamped"]


def half_keys(update: Callable[..., Any]) -> Callable[..., Any]:
    """A cache that rounds its keys, coarsely."""

    def inner(self, key_states, value_states, *args, **kwargs):
        return update(self, (key_states * 2).round() / 2, value_states, *args, **kwargs)

    return inner


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
    """A rotary embedding of somebody's whose base is another one, and grows beyond a position, as NTK-aware scaling does."""

    def __init__(self, dim: int, limit: int):
        super().__init__()
        self.dim, self.limit = dim, limit

    def forward(self, x, position_ids):
        length = position_ids.max() + 1
        base = 500.0 * (length / self.limit if length > self.limit else 1.0)
        inverse = 1.0 / base ** (torch.arange(0, self.dim, 2) / self.dim)
        angles = position_ids[..., None].float() * inverse
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


@contextmanager
def together(*managers: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield


def gemma_norm(module: Any) -> nn.Module:
    made = GemmaRMSNorm(module.weight.shape[0], module.variance_epsilon)
    made.weight.data.copy_(module.weight)
    return made


def traced(module: nn.Module) -> nn.Module:
    return torch.jit.trace(Doubling(module), torch.randn(1, 3, 32), check_trace=False)


def scripted(module: nn.Module) -> nn.Module:
    return nn.Sequential(module, torch.jit.script(nn.Hardtanh(-0.2, 0.2)))


def bound(function: Callable[..., Any], module: nn.Module) -> types.MethodType:
    return types.MethodType(function, module)


def method(target: Any, name: str, function: Callable[..., Any]) -> AbstractContextManager[Any]:
    return swapped(target, name, bound(function, target))


def own_mlp(target: Any, layer: int = 0) -> Callable[..., Any]:
    return target.model.layers[layer].mlp.forward


def clamped_mlp(target: Any) -> Callable[..., Any]:
    own = own_mlp(target)
    return lambda x: own(x).clamp(-0.2, 0.2)


@contextmanager
def fewer_layers(target: Any) -> Iterator[None]:
    before = target.config.num_hidden_layers
    target.config.num_hidden_layers = 1
    try:
        yield
    finally:
        target.config.num_hidden_layers = before


@contextmanager
def rotary(target: Any, made: nn.Module) -> Iterator[None]:
    before = target.model.rotary_emb
    target.model.rotary_emb = made
    try:
        yield
    finally:
        target.model.rotary_emb = before


def dynamic_of_transformers(target: Any) -> nn.Module:
    config = type(target.config)(**target.config.to_dict())
    config.max_position_embeddings = 48
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    return home.LlamaRotaryEmbedding(config)


@dataclass(frozen=True)
class Case:
    """A change and the way that a call with it takes. kind: a class that the target has from the beginning."""

    name: str
    change: Callable[[Any], AbstractContextManager[Any]]
    way: str
    kind: type | None = None


def patched(owner: Any, name: str, made: Any) -> Callable[[Any], AbstractContextManager[Any]]:
    return lambda target: swapped(owner, name, made)


def patched_in_place(function: Any, other: Any) -> Callable[[Any], AbstractContextManager[Any]]:
    return lambda target: swapped_code(function, other.__code__)


@contextmanager
def swapped_code(function: Any, code: Any) -> Iterator[None]:
    """The same function object, with other code."""
    before, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = before


def halved(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) / 2


def gemma_forward(target: Any) -> AbstractContextManager[Any]:
    """A method of another class of transformers; Gemma's norm adds one to its weight."""
    norm = target.model.layers[0].input_layernorm
    norm.eps, norm._norm = norm.variance_epsilon, bound(GemmaRMSNorm._norm, norm)
    return swapped(norm, "forward", bound(GemmaRMSNorm.forward, norm))


def gemma_patch(target: Any) -> AbstractContextManager[Any]:
    kind = home.LlamaRMSNorm
    values = {"eps": 1e-6, "_norm": GemmaRMSNorm._norm, "forward": GemmaRMSNorm.forward}
    return together(*(swapped(kind, name, value) for name, value in values.items()))


def prepares(self, input_ids, **kwargs):
    made = type(self).prepare_inputs_for_generation(self, input_ids, **kwargs)
    made["position_ids"] = made["position_ids"] * 2
    return made


def updates(self, outputs, model_kwargs, **kwargs):
    made = type(self)._update_model_kwargs_for_generation(self, outputs, model_kwargs, **kwargs)
    made["position_ids"] = made["position_ids"] + 1
    return made


def flipped(self, input_ids, *args, **kwargs):
    return SAMPLE(self, input_ids, *args, **kwargs).flip(-1)


def stops_early(self, input_ids, scores, **kwargs):
    return torch.full(input_ids.shape[:1], input_ids.shape[1] >= self.max_length - 5)


SAMPLE = GenerationMixin._sample
HERE = sys.modules[__name__]
ATTENTION = [home.LlamaAttention.forward, functional.scaled_dot_product_attention, home.apply_rotary_pos_emb]

CASES = [
    # other math in a forward pass: classes
    Case("causal class", lambda t: of_class(SteeredCausal, t), FORWARD),
    Case("causal class, after a token", lambda t: of_class(SteeredAfterToken, t), FORWARD),
    Case("model class", lambda t: of_class(SteeredModel, t.model), FORWARD),
    Case("layer class", lambda t: of_class(SteeredLayer, *t.model.layers), FORWARD),
    Case("mlp class", lambda t: of_class(ClampedMLP, *mlps(t)), FORWARD),
    Case("mlp class of one layer", lambda t: of_class(ClampedMLP, t.model.layers[1].mlp), FORWARD),
    Case("norm class", lambda t: of_class(ClampedNorm, t.model.norm), FORWARD),
    Case("attention class", lambda t: of_class(ScaledAttention, *(x.self_attn for x in t.model.layers)), FORWARD),
    Case("a property hides a submodule", lambda t: of_class(SteeredByProperty, *mlps(t)), FORWARD),
    # patches of classes
    Case("mlp patched", patched(home.LlamaMLP, "forward", clamped(home.LlamaMLP.forward)), FORWARD),
    Case("attention patched", patched(home.LlamaAttention, "forward", clamped(ATTENTION[0])), FORWARD),
    Case("norm patched", patched(home.LlamaRMSNorm, "forward", clamped(home.LlamaRMSNorm.forward, 1.0)), FORWARD),
    Case("layer patched", patched(home.LlamaDecoderLayer, "forward", clamped(home.LlamaDecoderLayer.forward)), FORWARD),
    Case("linear patched", patched(nn.Linear, "forward", clamped(nn.Linear.forward, 2.0)), FORWARD),
    Case("all calls patched", patched(nn.Module, "__call__", clamped_output(nn.Module.__call__)), FORWARD),
    Case("activation patched", patched(ACT2CLS["silu"], "forward", clamped(ACT2CLS["silu"].forward)), FORWARD),
    Case("embedding patched", patched(nn.Embedding, "forward", clamped(nn.Embedding.forward)), FORWARD),
    Case("mlp with other code", patched_in_place(home.LlamaMLP.forward, halved), FORWARD),
    Case("the norm of another class", gemma_patch, FORWARD),
    # functions that forwards call
    Case("sdpa patched", patched(functional, "scaled_dot_product_attention", clamped(ATTENTION[1])), FORWARD),
    Case("silu patched", patched(functional, "silu", clamped(functional.silu)), FORWARD),
    Case("rotation patched", patched(home, "apply_rotary_pos_emb", clamped(ATTENTION[2], 0.8)), FORWARD),
    Case("rsqrt patched", patched(torch, "rsqrt", clamped(torch.rsqrt, 1.0)), FORWARD),
    Case("attention registered", lambda t: registered(t, "clamped", clamped_attention), PLAIN),  # gets no masks
    Case("attention registered with masks", with_masks, FORWARD),
    Case("attention registered anew", lambda t: registered(t, "sdpa", clamped_attention), FORWARD),
    # instances
    Case("a function of its own", lambda t: swapped(t.model.layers[0].mlp, "forward", clamped_mlp(t)), FORWARD),
    Case("an object for a function", lambda t: swapped(t.model.layers[0].mlp, "forward", Clamped(own_mlp(t))), FORWARD),
    Case("another module's method", lambda t: swapped(t.model.layers[0].mlp, "forward", own_mlp(t, 1)), FORWARD),
    Case("another class's method", gemma_forward, FORWARD),
    Case("wrapped mlp", lambda t: submodules(t, "mlp", Doubling), FORWARD),
    Case("a norm without its attributes", lambda t: submodules(t, "input_layernorm", NoEpsilon), FORWARD),
    Case("a traced mlp", lambda t: submodules(t, "mlp", traced), FORWARD),
    Case("a scripted part", lambda t: submodules(t, "mlp", scripted), FORWARD),
    Case("a weight of another kind", with_weights, FORWARD),
    Case("somebody's rotary module", lambda t: rotary(t, Dynamic(8, 300)), FORWARD),
    Case("a rotary module that changes early", lambda t: rotary(t, Dynamic(8, 30)), PLAIN),
    # other code of transformers
    Case("another norm of transformers", lambda t: submodules(t, "input_layernorm", gemma_norm), OWN),
    # without it, not even two calls of plain generate agree
    *([Case("another rotary module", lambda t: rotary(t, dynamic_of_transformers(t)), OWN)] if RESETS_ANGLES else []),
    Case("fewer layers", fewer_layers, OWN),
    # switches that are off in the first call
    Case("a global", lambda t: swapped(HERE, "SWITCH", True), FORWARD, Switched),
    Case("a class attribute", lambda t: swapped(Switched, "steer", True), FORWARD, Switched),
    Case("another class's attribute", lambda t: swapped(Switches, "on", True), FORWARD, Switched),
    Case("its own attribute", lambda t: swapped(t, "own_switch", True), FORWARD, Switched),
    # between passes, around them, or in the cache
    Case("prepares inputs", lambda t: of_class(Prepares, t), PLAIN),
    Case("prepares inputs, one instance", lambda t: method(t, "prepare_inputs_for_generation", prepares), PLAIN),
    Case("updates arguments", lambda t: of_class(Updates, t), PLAIN),
    Case("updates arguments, one instance", lambda t: method(t, "_update_model_kwargs_for_generation", updates), PLAIN),
    Case("its own sampling", lambda t: of_class(Samples, t), PLAIN),
    Case("sampling patched", patched(GenerationMixin, "_sample", flipped), PLAIN),
    Case("stopping patched", patched(MaxLengthCriteria, "__call__", stops_early), PLAIN),
    Case("function mode", lambda t: Mode(), PLAIN),
    Case("dispatch mode", lambda t: Dispatch(), PLAIN),
    Case("cache layers patched", patched(DynamicLayer, "update", half_keys(DynamicLayer.update)), PLAIN),
    Case("remembers", lambda t: of_class(Counts, t), PLAIN),
    Case("remembers by a constructor", lambda t: of_class(Marks, t), PLAIN),
    Case("makes objects", lambda t: of_class(Boxes, t), FORWARD),
    Case("can't be verified", lambda t: of_class(Nearsighted, t), PLAIN),
]


@pytest.fixture(scope="module")
def weights() -> tuple[Any, Any]:
    target = build(BY_NAME["llama"])
    return target, half_right(target)


def made(weights: tuple[Any, Any], kind: type | None = None, **kwargs: Any) -> tuple[Any, AssistedModelForCausalLM]:
    target, draft = copy.deepcopy(weights)
    if kind is not None:
        target.__class__ = kind
    return target, AssistedModelForCausalLM.from_models(target, **{"draft": draft, "draft_length": 4} | kwargs)


def batch(target: Any, rows: int) -> dict[str, torch.Tensor]:
    ids = random_ids(target, rows, 20)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 3 * row] = 0
    enough = 36 if rows == 1 else 24  # for every change to show
    return {"inputs": ids.where(mask.bool(), 0), "attention_mask": mask, "max_new_tokens": enough}


def compared(
    target: Any, model: AssistedModelForCausalLM, plain: list[list[int]] | None = None, **call: Any
) -> tuple[list[list[int]], str]:
    """The text, which is that of plain `generate`, and the way it took. plain: the text, where it is known already."""
    if plain is None:
        if hasattr(target, "calls"):
            del target.calls
        plain = target.generate(**call).tolist()
    if hasattr(target, "calls"):
        del target.calls
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert model.generate(**call).tolist() == plain
    assert model.report is not None
    told = [warning for warning in caught if issubclass(warning.category, DraftingStopped)]
    assert len(told) == (model.report.way == PLAIN), [str(warning.message) for warning in told]
    if model.report.way == PLAIN:
        assert model.report.because is not None
        assert model.report.because in str(told[0].message)
        assert model.report.drafted == 0
    else:
        assert model.report.drafted > 0
    return plain, model.report.way


def check_change(case: Case, target: Any, model: AssistedModelForCausalLM, own: str, call: dict[str, Any]) -> None:
    """The text follows a change that is made, undone and made again. own: the way without it."""
    before, way = compared(target, model, **call)
    assert way == own
    torch.manual_seed(0)  # some changes draw numbers
    with case.change(target):
        text, way = compared(target, model, **call)
    assert text != before  # the change shows
    assert way == case.way
    assert compared(target, model, before, **call)[1] == own
    torch.manual_seed(0)
    with case.change(target):
        assert compared(target, model, text, **call)[1] == case.way


@pytest.mark.parametrize("case,rows", in_turns(CASES, [1, 3]))
def test_the_text_is_that_of_plain_generate(case: Case, rows: int, weights: tuple[Any, Any]) -> None:
    target, model = made(weights, case.kind)
    call = LONG | batch(target, rows)
    if case.name == "another rotary module":
        call["max_new_tokens"] = 36  # it differs in long texts only
    check_change(case, target, model, OWN if case.kind is None else FORWARD, call)


@pytest.mark.parametrize("name", ["llama", "gpt2", "lfm2"])
def test_a_forward_that_looks_for_positions(name: str) -> None:
    """`generate` gives it none, so that its text must not come from forward passes with positions."""
    target = build({about.name: about for about in ARCHITECTURES + RECURRENT}[name])
    model = AssistedModelForCausalLM.from_models(target, draft="recycle")
    kind = type(target)
    before, _ = compared(target, model, **LONG | batch(target, 2))
    with of_class(type("Unplaced", (kind,), {"forward": unplaced(kind.forward)}), target):
        text, way = compared(target, model, **LONG | batch(target, 2))
    assert text != before
    assert way == PLAIN


# --- arguments and caches ---


class Steerable(LlamaForCausalLM):
    """Takes an argument of its own, which `generate` hands to every pass."""

    def forward(self, input_ids=None, steer=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        if steer is not None and steer is not False:
            by = len(steer) if isinstance(steer, (str, list)) else float(torch.as_tensor(steer).float().mean())
            output.logits = output.logits + by * output.logits.roll(1, -1)
        return output


ARGUMENTS = [(True, FORWARD), (1, FORWARD), (0.7, FORWARD), ("ab", FORWARD), ([1, 2], PLAIN), (torch.ones(3), PLAIN)]


@pytest.mark.parametrize("argument,rows", in_turns(ARGUMENTS, [1, 3]))
def test_an_argument_of_the_forward(argument: tuple[Any, str], rows: int, weights: tuple[Any, Any]) -> None:
    value, way = argument
    target, model = made(weights, Steerable)
    call = LONG | batch(target, rows)
    before, _ = compared(target, model, **call)
    text, taken = compared(target, model, steer=value, **call)
    assert text != before
    assert taken == way
    assert compared(target, model, before, steer=None, **call)[1] == FORWARD
    compared(target, model, before, steer=False, **call)


def test_arguments_that_own_forwards_do_not_know(weights: tuple[Any, Any]) -> None:
    """Refused as plain `generate` refuses them."""
    target, model = made(weights)
    for run in (target, model):
        with pytest.raises(ValueError, match="steer"):
            run.generate(**LONG | batch(target, 1), steer=True)


class OddLayer(DynamicLayer):
    """A layer of a cache that rounds what it stores."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update((key_states * 2).round() / 2, value_states, *args, **kwargs)


class OddCache(DynamicCache):
    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return super().update((key_states * 2).round() / 2, value_states, layer_idx, *args, **kwargs)


def odd_layers(config: Any) -> DynamicCache:
    cache = DynamicCache(config=config)
    cache.layers = [OddLayer() for _ in cache.layers]
    return cache


def odd_instance(config: Any) -> DynamicCache:
    cache = DynamicCache(config=config)
    for layer in cache.layers:
        layer.update = bound(half_keys(DynamicLayer.update), layer)
    return cache


def odd_update(config: Any) -> DynamicCache:
    cache = DynamicCache(config=config)
    cache.update = bound(cache_update, cache)
    return cache


def cache_update(self, key_states, value_states, layer_idx, *args, **kwargs):
    return DynamicCache.update(self, (key_states * 2).round() / 2, value_states, layer_idx, *args, **kwargs)


@pytest.mark.parametrize(
    "cache",
    [odd_layers, odd_instance, odd_update, lambda config: OddCache(config=config)],
    ids=["layers", "a layer's method", "the cache's method", "class"],
)
def test_a_cache_of_somebodys(cache: Callable[[Any], DynamicCache], weights: tuple[Any, Any]) -> None:
    target, model = made(weights)
    call = LONG | batch(target, 1)
    before, _ = compared(target, model, **call)
    plain = target.generate(**call, past_key_values=cache(target.config))
    given = cache(target.config)
    kinds = [type(layer) for layer in given.layers]
    with pytest.warns(DraftingStopped, match="slots cannot stand for|cannot be rewound"):
        text = model.generate(**call, past_key_values=given)
    assert text.tolist() == plain.tolist() != before
    assert [type(layer) for layer in given.layers] == kinds
    assert given.get_seq_length() == text.shape[1] - 1
    assert compared(target, model, before, **call)[1] == OWN


def test_positions_below_zero(weights: tuple[Any, Any]) -> None:
    target, model = made(weights)
    call = LONG | batch(target, 1)
    compared(target, model, **call)
    positions = torch.arange(20)[None] - 5
    assert compared(target, model, **call, position_ids=positions)[1] == PLAIN
    assert compared(target, model, **call, position_ids=positions + 5)[1] == OWN


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_embeddings_of_another_dtype(dtype: torch.dtype, weights: tuple[Any, Any]) -> None:
    """Right, or the error of plain `generate`."""
    target, model = made(weights)
    ids = batch(target, 1)["inputs"]
    call = LONG | {"inputs_embeds": target.get_input_embeddings()(ids).detach().to(dtype)}
    try:
        target.generate(**call)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=str(error).split("\n")[0][:40].replace("(", ".").replace(")", ".")):
            model.generate(**call)
    else:
        compared(target, model, **call)


def test_an_adapter_outside_the_layers_that_is_added_later(weights: tuple[Any, Any]) -> None:
    peft = pytest.importorskip("peft")
    target = copy.deepcopy(weights[0])
    adapted = peft.get_peft_model(
        target, peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"])
    ).eval()
    model = AssistedModelForCausalLM.from_models(adapted, draft=copy.deepcopy(weights[1]), draft_length=4)
    call = LONG | batch(target, 1)
    call["input_ids"] = call.pop("inputs")
    first = adapted.generate(**call)
    assert model.generate(**call).tolist() == first.tolist()
    invocation = call["input_ids"][0, 8:10].tolist()
    activated = peft.LoraConfig(
        r=2, init_lora_weights=False, target_modules=["q_proj"], alora_invocation_tokens=invocation
    )
    adapted.add_adapter("activated", activated)
    adapted.set_adapter("activated")
    plain = adapted.generate(**call)
    with pytest.warns(DraftingStopped, match="works outside the model's layers"):
        assert model.generate(**call).tolist() == plain.tolist()
    assert model.report is not None
    assert model.report.way == PLAIN


def test_a_forward_at_the_address_of_another(weights: tuple[Any, Any]) -> None:
    """Python gives a new function the address of one that is gone: what was found of that one does not hold for it."""
    target, model = made(weights)
    call = LONG | batch(target, 1)
    own = LlamaForCausalLM.forward

    def sound(self, input_ids=None, **kwargs):
        return own(self, input_ids=input_ids, **kwargs)

    def nearsighted(self, input_ids=None, **kwargs):
        output = own(self, input_ids=input_ids, **kwargs)
        output.logits = output.logits.roll(1, -1) if input_ids.shape[1] == 1 else output.logits
        return output

    for _ in range(4):
        for code, way in ((sound, FORWARD), (nearsighted, PLAIN)):
            again = types.FunctionType(code.__code__, globals(), "forward", code.__defaults__, code.__closure__)
            with of_class(type("Made", (LlamaForCausalLM,), {"forward": again}), target):
                assert compared(target, model, **call)[1] == way
            del again


def test_the_dtype_of_the_default_device_is_no_code(weights: tuple[Any, Any]) -> None:
    """`with torch.device(...)` is a mode, too, and changes no operation of a call."""
    target, model = made(weights)
    with torch.device("cpu"):
        assert compared(target, model, **LONG | batch(target, 1))[1] == OWN


def test_hooks_are_followed_and_lose_nothing_else(weights: tuple[Any, Any]) -> None:
    target, model = made(weights)
    call = LONG | batch(target, 1)
    before, _ = compared(target, model, **call)
    handle = target.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output.clamp(-0.2, 0.2))
    assert compared(target, model, **call)[0] != before
    handle.remove()
    assert compared(target, model, before, **call)[1] == OWN


def test_code_between_passes_is_named_when_the_pair_is_made(weights: tuple[Any, Any]) -> None:
    """A target that can't be verified is refused at once; one that decodes plainly is told of in the call."""
    target = copy.deepcopy(weights[0])
    target.__class__ = Nearsighted
    with pytest.raises(ValueError, match="target: Nearsighted cannot take back rejected tokens"):
        AssistedModelForCausalLM.from_models(target, draft="suffix")


@pytest.mark.parametrize("draft", ["suffix", "ngram", "recycle", "early-exit:1", "layer-skip"])
@pytest.mark.parametrize("kind", [SteeredCausal, SteeredAfterToken])
def test_every_kind_of_draft(draft: str, kind: type, weights: tuple[Any, Any]) -> None:
    target, model = made(weights, draft=draft)
    call = LONG | batch(target, 2)
    compared_or_undrafted(target, model, **call)
    with of_class(kind, target):
        compared_or_undrafted(target, model, **call)
    compared_or_undrafted(target, model, **call)


def compared_or_undrafted(target: Any, model: AssistedModelForCausalLM, **call: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert model.generate(**call).tolist() == target.generate(**call).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_sampled_text_is_that_of_the_changed_target(seed: int, weights: tuple[Any, Any]) -> None:
    """With one token to choose from, sampling must give the greedy text of the changed model."""
    target, model = made(weights)
    call = LONG | batch(target, 2)
    with of_class(SteeredCausal, target):
        plain = target.generate(**call)
        torch.manual_seed(seed)
        assert model.generate(**call | {"do_sample": True, "top_k": 1}).tolist() == plain.tolist()
