"""More of somebody's code than test_trust.py has: in objects and closures, hooks, wrappers, processors, criteria, arguments.

Uses the cases and comparisons of test_trust.py, and makes all of them in bfloat16, too.
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
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, RECURRENT, build, half_right, random_ids
from covering import in_turns, one_in, over
from pairs import BY_NAME, CALL, tokenizer
from test_trust import (
    CASES,
    FORWARD,
    LONG,
    OWN,
    PLAIN,
    Case,
    OddCache,
    batch,
    check_change,
    clamped,
    clamped_attention,
    compared,
    made,
    method,
    mlps,
    of_class,
    own_mlp,
    patched,
    swapped,
    together,
)
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import DynamicCache, GenerationConfig, GenerationMixin, LlamaForCausalLM, LogitsProcessorList
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as of_cohere
from transformers.models.llama import modeling_llama as home

from assisted import AssistedModelForCausalLM
from assisted.engine.trust import blamed, trust
from assisted.fast.fused import fused

NEAR = 0.15  # of the scores' spread: two tokens so close in bfloat16 are a near-tie
FUSED = {"llama", "mistral", "mistral-window", "qwen2", "qwen3", "qwen3_next", "qwen3_5"}  # whole


@pytest.fixture(scope="module")
def weights() -> tuple[Any, Any]:
    target = build(BY_NAME["llama"])
    return target, half_right(target)


# --- objects and closures that own code uses ---


class Instead:
    """An object in place of a module."""

    def __init__(self, inner: types.ModuleType, **others: Any):
        self.__dict__.update(inner=inner, **others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


def module_of_somebodys(inner: types.ModuleType, **others: Any) -> types.ModuleType:
    made = types.ModuleType(inner.__name__)
    made.__dict__.update({name: value for name, value in vars(inner).items() if name != "__file__"}, **others)
    return made


class Trebles(float):
    def __rmul__(self, other: Any) -> Any:
        return other * 3.0

    __mul__ = __rmul__


class Rolled(home.CausalLMOutputWithPast):
    def __post_init__(self) -> None:
        if self.logits is not None:
            self.logits = self.logits.roll(1, -1)
        super().__post_init__()


class RolledStates(home.BaseModelOutputWithPast):
    def __post_init__(self) -> None:
        if self.last_hidden_state is not None:
            self.last_hidden_state = self.last_hidden_state.roll(1, -1)
        super().__post_init__()


def clamping(self: Any, x: torch.Tensor) -> torch.Tensor:
    return home.LlamaMLP.forward(self, x).clamp(-0.2, 0.2)


def limited(self: Any, limit: float, x: torch.Tensor) -> torch.Tensor:
    return home.LlamaMLP.forward(self, x).clamp(-limit, limit)


class Dispatched(home.LlamaMLP):
    forward = functools.singledispatchmethod(clamping)


class Partial(home.LlamaMLP):
    forward = functools.partialmethod(limited, 0.2)


class LooksUp(home.LlamaMLP):
    def __getattr__(self, name: str) -> Any:
        return functional.relu if name == "act_fn" else super().__getattr__(name)


class WeightAsProperty(nn.Linear):
    @property
    def weight(self) -> Any:
        return self._parameters["weight"] / 3

    @weight.setter
    def weight(self, value: Any) -> None:
        self._parameters["weight"] = value


class FirstOnly(nn.ModuleList):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(slice(0, 1) if isinstance(index, slice) else index)


class Callable_:
    def __init__(self, inner: Callable[..., Any]):
        self.inner = inner

    def __call__(self, *args: Any) -> Any:
        return self.inner(*args).clamp(-0.2, 0.2)


class OneLayer(transformers.LlamaConfig):
    def __getattribute__(self, name: str) -> Any:
        return 1 if name == "num_hidden_layers" else super().__getattribute__(name)


def rolled_logits(forward: Callable[..., Any]) -> Callable[..., Any]:
    def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = output.logits.roll(1, -1)
        return output

    return inner


@contextmanager
def in_its_closure(function: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    """What a decorator of transformers wraps, replaced inside of the decorated function."""
    cell = next(cell for cell in function.__closure__ if callable(cell.cell_contents))
    before, cell.cell_contents = cell.cell_contents, change(cell.cell_contents)
    try:
        yield
    finally:
        cell.cell_contents = before


def relu_for_silu(graph: Any, example: Any) -> Any:
    """A compiler of somebody's."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "silu":
            node.target, node.kwargs = torch.relu, {}
    graph.recompile()
    return graph.forward


@contextmanager
def compiled(module: nn.Module) -> Iterator[None]:
    module.compile(backend=relu_for_silu)
    try:
        yield
    finally:
        module._compiled_call_impl = None
        torch._dynamo.reset()


class Third(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 3

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


@contextmanager
def parametrized(target: Any, change: Callable[[nn.Module], Any]) -> Iterator[None]:
    modules = [layer.mlp.down_proj for layer in target.model.layers]
    before = [nn.Parameter(module.weight.detach().clone()) for module in modules]
    for module in modules:
        change(module)
    try:
        yield
    finally:
        for module, weight in zip(modules, before, strict=True):
            parametrize.remove_parametrizations(module, "weight")
            module.weight = weight


def halved_norm(module: nn.Module) -> None:
    parametrizations.weight_norm(module)
    module.parametrizations.weight.original0.data.mul_(0.5)  # type: ignore[union-attr, operator]


@contextmanager
def pruned(target: Any) -> Iterator[None]:
    modules = [layer.mlp.down_proj for layer in target.model.layers]
    before = [module.weight.detach().clone() for module in modules]
    for module in modules:
        prune.l1_unstructured(module, "weight", 0.7)
    try:
        yield
    finally:
        for module, weight in zip(modules, before, strict=True):
            prune.remove(module, "weight")
            module.weight.data.copy_(weight)


# --- hooks ---


@contextmanager
def hooked(module: nn.Module, hook: Any, before: bool = False, **kwargs: Any) -> Iterator[None]:
    handle = (module.register_forward_pre_hook if before else module.register_forward_hook)(hook, **kwargs)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def hooked_everywhere(hook: Any) -> Iterator[None]:
    handle = register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def less(module: nn.Module, args: Any, output: Any) -> Any:
    return tuple(part * 0.5 for part in output) if isinstance(output, tuple) else output.clamp(-0.3, 0.3)


def only_generated(module: nn.Module, args: Any, output: Any) -> Any:
    """Steers what is generated, not the prompt, as steering packages do: passes over one token."""
    states = first(output)
    if states.shape[1] == 1:
        states = states + 0.9 * states.roll(1, -1)
    return (states, *output[1:]) if isinstance(output, tuple) else states


def only_generated_in_place(module: nn.Module, args: Any, output: Any) -> None:
    if first(output).shape[1] == 1:
        first(output).mul_(-1)


def only_generated_mlp(module: nn.Module, args: Any, output: Any) -> Any:
    return only_generated(module, args, output) if isinstance(module, home.LlamaMLP) else None


def positions_doubled(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return args, kwargs | {"position_ids": kwargs["position_ids"] * 2}


def without_positions(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return args, kwargs | {"position_ids": None}


def later(target: Any) -> AbstractContextManager[Any]:
    """Changes the text from the twentieth pass on. `compared` takes the number away before each run."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        target.calls = getattr(target, "calls", 0) + 1
        return output.clamp(-0.1, 0.1) if target.calls > 20 else output

    return hooked(target.model.layers[0].mlp, hook)


def on(name: str, hook: Any = less) -> Callable[[Any], AbstractContextManager[Any]]:
    return lambda target: hooked(target.get_submodule(name), hook)


# --- generate itself ---


class Reverses(LlamaForCausalLM):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return super().generate(*args, **kwargs).flip(-1)


def reversing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs).flip(-1)

    return generate


def rolling(call: Callable[..., Any]) -> Callable[..., Any]:
    def inner(self: Any, ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return call(self, ids, scores, **kwargs).roll(1, -1)

    return inner


ARGMAX, MEAN = torch.argmax, torch.Tensor.mean
ATTENTIONS = home.ALL_ATTENTION_FUNCTIONS

FURTHER = [
    Case("an object for torch", patched(home, "torch", Instead(torch, rsqrt=clamped(torch.rsqrt, 1.0))), FORWARD),
    Case(
        "a module for torch",
        patched(home, "torch", module_of_somebodys(torch, rsqrt=clamped(torch.rsqrt, 1.0))),
        FORWARD,
    ),
    Case("an output class", patched(home, "CausalLMOutputWithPast", Rolled), FORWARD),
    Case("an output class inside", patched(home, "BaseModelOutputWithPast", RolledStates), FORWARD),
    Case(
        "a number of its own kind",
        lambda t: together(*(swapped(layer.self_attn, "scaling", Trebles(0.3)) for layer in t.model.layers)),
        FORWARD,
    ),
    Case(
        "attention chosen by a class",
        patched(type(ATTENTIONS), "get_interface", lambda self, name, default: clamped_attention),
        FORWARD,
    ),
    Case(
        "attention chosen by an object",
        patched(ATTENTIONS, "get_interface", lambda name, default: clamped_attention),
        FORWARD,
    ),
    Case("a method behind a descriptor", lambda t: of_class(Dispatched, *mlps(t)), FORWARD),
    Case("a method with an argument", lambda t: of_class(Partial, *mlps(t)), FORWARD),
    Case("attributes looked up", lambda t: of_class(LooksUp, *mlps(t)), FORWARD),
    Case("a weight as a property", lambda t: of_class(WeightAsProperty, *(m.down_proj for m in mlps(t))), FORWARD),
    Case("a list of modules", lambda t: of_class(FirstOnly, t.model.layers), FORWARD),
    Case(
        "an object in a decorator of torch",
        lambda t: swapped(t.model.layers[0].mlp, "forward", torch.no_grad()(Callable_(own_mlp(t)))),
        FORWARD,
    ),
    Case("a config's attributes", lambda t: of_class(OneLayer, t.config), FORWARD),
    Case("inside a decorated forward", lambda t: in_its_closure(LlamaForCausalLM.forward, rolled_logits), FORWARD),
    Case("another rotation of transformers", patched(home, "apply_rotary_pos_emb", of_cohere), OWN),
    Case("another function of torch", patched(functional, "silu", functional.relu6), OWN),
    Case("a compiler of somebody's, mlp", lambda t: compiled(t.model.layers[0].mlp), PLAIN),
    Case("a compiler of somebody's, base model", lambda t: compiled(t.model), PLAIN),
    Case("a compiler of somebody's, whole", compiled, PLAIN),
    Case(
        "a parametrization",
        lambda t: parametrized(t, lambda m: parametrize.register_parametrization(m, "weight", Third())),
        FORWARD,
    ),
    Case("a weight norm", lambda t: parametrized(t, halved_norm), OWN),
    Case("a spectral norm", lambda t: parametrized(t, parametrizations.spectral_norm), OWN),
    Case("pruned", pruned, OWN),
    # hooks
    *(
        Case(f"a hook on {name}", on(name), OWN)
        for name in (
            *("model.embed_tokens", "model.norm", "lm_head", "model.rotary_emb", "model.layers.1"),
            *("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.act_fn"),
        )
    ),
    Case("a hook with positions", lambda t: hooked(t.model, positions_doubled, True, with_kwargs=True), OWN),
    *(
        Case(f"a hook of generated tokens on {name}", on(name, only_generated), PLAIN)
        for name in ("model.embed_tokens", "model.norm", "lm_head", "model.layers.0", "model.layers.1.mlp")
    ),
    Case("a hook that writes", on("model.layers.1.mlp", only_generated_in_place), PLAIN),
    Case("a hook on all modules", lambda t: hooked_everywhere(only_generated_mlp), PLAIN),
    Case("a hook that counts", later, PLAIN),
    # generate, and what it runs between passes
    Case("generate patched", patched(GenerationMixin, "generate", reversing(GenerationMixin.generate)), OWN),
    Case("its own generate", lambda t: of_class(Reverses, t), OWN),
    Case("its own generate, one instance", lambda t: method(t, "generate", reversing(GenerationMixin.generate)), OWN),
    Case("processors patched", patched(LogitsProcessorList, "__call__", rolling(LogitsProcessorList.__call__)), PLAIN),
    Case("argmax patched", patched(torch, "argmax", lambda *args, **kwargs: ARGMAX(*args, **kwargs) // 2), PLAIN),
    Case(
        "tensors patched",
        patched(torch.Tensor, "mean", lambda self, *args, **kwargs: MEAN(self, -1, keepdim=True) + 0.5),
        PLAIN,
    ),
]


IN_PART = [case for case in FURTHER if case.name == "a compiler of somebody's, base model"]  # seconds each


@pytest.mark.parametrize(
    "case,rows",
    [
        *in_turns([case for case in FURTHER if case not in IN_PART], [3, 1]),
        *(pytest.param(case, 3, marks=pytest.mark.slow, id=case.name) for case in IN_PART),
    ],
)
def test_the_text_is_that_of_plain_generate(case: Case, rows: int, weights: tuple[Any, Any]) -> None:
    target, model = made(weights)
    check_change(case, target, model, OWN, LONG | batch(target, rows))


@pytest.mark.parametrize("case", one_in(3, [case for case in (*CASES, *FURTHER) if "traced" not in case.name]))
def test_half_precision(case: Case, weights: tuple[Any, Any]) -> None:
    """In bfloat16 texts part where the target's two best tokens nearly tie, or where its own pass over the text parts, too."""
    target, model = made(weights, case.kind)
    target.to(torch.bfloat16)
    model.drafter.models[0].to(torch.bfloat16)
    call = LONG | batch(target, 3)
    told = {"output_scores": True, "return_dict_in_generate": True}
    with case.change(target):
        _forget(target)
        try:
            plain = target.generate(**call, **told)
        except (AttributeError, RuntimeError):  # a change that is made for float32, or for calls without scores
            return
        _forget(target)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            text = model.generate(**call)
        assert model.report is not None
        assert model.report.way in (case.way, PLAIN)
        for row, (theirs, ours) in enumerate(zip(plain.sequences.tolist(), text.tolist(), strict=True)):
            at = next((at for at, pair in enumerate(zip(theirs, ours, strict=True)) if pair[0] != pair[1]), None)
            if at is not None:
                scores = plain.scores[at - call["inputs"].shape[1]][row]
                gap = (scores[theirs[at]] - scores[ours[at]]).abs() / scores[scores.isfinite()].std()
                assert gap <= NEAR or in_one_pass(target, text, call["attention_mask"], row, at) == ours[at]


@torch.no_grad()
def in_one_pass(target: Any, text: torch.Tensor, mask: torch.Tensor, row: int, end: int) -> int:
    """The top-1 token after the first `end` tokens of a row."""
    shown = torch.cat([mask[row], mask.new_ones(end - mask.shape[1])])[None]
    positions = (shown.cumsum(-1) - 1).clamp(min=0)
    logits = target(input_ids=text[row : row + 1, :end], attention_mask=shown, position_ids=positions).logits
    return int(logits[0, -1].argmax())


def _forget(target: Any) -> None:
    vars(target).pop("calls", None)


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "gradients": torch.enable_grad,
    "inference mode": torch.inference_mode,
    "deterministic": lambda: deterministic(),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", AROUND)
def test_settings_of_torch_around_a_call(name: str, weights: tuple[Any, Any]) -> None:
    target, model = made(weights)
    for rows in (1, 3):
        call = LONG | batch(target, rows)
        before = compared(target, model, **call)
        with AROUND[name]():
            assert compared(target, model, **call)[1] == OWN
        assert compared(target, model, before[0], **call) == before


# --- arguments of generate ---


class Ids(torch.Tensor):
    """Tokens of a kind of their own, which are embedded otherwise."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})
        return made.roll(1, -1) if func is functional.embedding else made


def test_tokens_of_a_tensor_of_somebodys(weights: tuple[Any, Any]) -> None:
    target, model = made(weights)
    call = LONG | batch(target, 3)
    before, _ = compared(target, model, **call)
    text, way = compared(target, model, **call | {"inputs": call["inputs"].as_subclass(Ids)})
    assert way == PLAIN
    assert text != before


class Endless(MaxLengthCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


class EndsTwice(EosTokenCriteria):
    """Ends a text at the second end token in turn."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.isin(input_ids[:, -2:], self.eos_token_id).all(-1)


class StopsLater(StopStringCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return super().__call__(input_ids, scores, **kwargs) & (input_ids.shape[1] > 40)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "criterion",
    [lambda: Endless(30), lambda: EndsTwice([*range(5, 30)]), lambda: StopsLater(tokenizer(), ["a", "b", "c"])],
    ids=["length", "end token", "strings"],
)
def test_criteria_derived_from_known_ones(criterion: Any, rows: int, weights: tuple[Any, Any]) -> None:
    target, model = made(weights)
    call = LONG | batch(target, rows) | {"stopping_criteria": [criterion()]}
    assert compared(target, model, **call)[1] == OWN


class Remembers(processors.TopKLogitsWarper):
    """Keeps the best token of each step from the next one."""

    last: Any = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        made = scores if self.last is None else scores.scatter(1, self.last, -torch.inf)
        self.last = made.argmax(-1, keepdim=True)
        return made


class Penalty(processors.RepetitionPenaltyLogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return super().__call__(input_ids, scores).roll(input_ids.shape[1], -1)


class TemperatureByLength(processors.TemperatureLogitsWarper):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.roll(input_ids.shape[1], -1)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "make",
    [lambda: Remembers(4), lambda: Penalty(1.3), lambda: TemperatureByLength(1.5)],
    ids=["top-k", "penalty", "t"],
)
def test_processors_derived_from_known_ones(make: Any, rows: int, weights: tuple[Any, Any]) -> None:
    target, model = made(weights)
    call = LONG | batch(target, rows)
    plain = target.generate(**call, logits_processor=[make()])
    assert model.generate(**call, logits_processor=[make()]).tolist() == plain.tolist()
    assert plain.tolist() != target.generate(**call).tolist()
    assert model.report is not None
    assert model.report.drafted > 0


PROCESSORS = [
    (processors.MinLengthLogitsProcessor, {"min_length": 90, "eos_token_id": [2, 5, 6]}),
    (processors.RepetitionPenaltyLogitsProcessor, {"repetition_penalty": 1.3}),
    (processors.NoRepeatNGramLogitsProcessor, {"no_repeat_ngram_size": 2}),
    (processors.SuppressTokensLogitsProcessor, {"suppress_tokens": [7]}),
]


@pytest.mark.parametrize("processor,rows", in_turns(PROCESSORS, [3, 1]))
def test_patched_processors(processor: tuple[Any, dict[str, Any]], rows: int, weights: tuple[Any, Any]) -> None:
    """A patch may look at the whole batch: here, a row's scores depend on the last tokens of all rows."""
    kind, settings = processor
    target, model = made(weights)
    call = LONG | batch(target, rows) | settings

    def patch(self: Any, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.roll(int(ids[:, -1].sum()) % 7, -1)

    before, _ = compared(target, model, **call)
    with swapped(kind, "__call__", patch):
        text, _ = compared(target, model, **call)
    assert text != before
    compared(target, model, before, **call)


class Lengthy(DynamicCache):
    """A cache that tells of one token more."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        found = super().get_seq_length(layer_idx)
        return found + 1 if found > 25 else found

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("kind", [Lengthy, OddCache])
def test_a_cache_that_tells_of_another_length(kind: type, weights: tuple[Any, Any]) -> None:
    target, model = made(weights)
    call = LONG | batch(target, 1)
    plain = target.generate(**call, past_key_values=kind(config=target.config))
    with pytest.warns(UserWarning, match="cannot be rewound"):
        text = model.generate(**call, past_key_values=kind(config=target.config))
    assert text.tolist() == plain.tolist()


class OwnSettings(GenerationConfig):
    """Has an end token of its own, and no more than ten new tokens."""

    @property
    def max_new_tokens(self) -> int:
        return 10

    @max_new_tokens.setter
    def max_new_tokens(self, value: Any) -> None:
        pass


def test_settings_of_a_class_of_somebodys(weights: tuple[Any, Any]) -> None:
    target, model = made(weights)
    settings = OwnSettings(**{name: value for name, value in LONG.items() if name != "max_new_tokens"})
    inputs = batch(target, 3)
    plain = target.generate(**inputs, generation_config=settings)
    assert model.generate(**inputs, generation_config=settings).tolist() == plain.tolist()
    assert plain.shape[1] == 30


def test_a_tokenizer_with_methods_of_its_own(weights: tuple[Any, Any]) -> None:
    class Backwards(type(tokenizer())):  # type: ignore[misc]
        def get_vocab(self) -> dict[str, int]:
            found = sorted(super().get_vocab())
            return {word: number for number, word in enumerate(reversed(found))}

    words = tokenizer()
    words.__class__ = Backwards
    target, model = made(weights)
    for rows in (1, 3):
        call = LONG | batch(target, rows) | {"stop_strings": ["a", "5"], "tokenizer": words}
        assert compared(target, model, **call)[1] == OWN


# --- wrappers, files, threads ---


def test_a_wrapper_of_somebodys(weights: tuple[Any, Any]) -> None:
    """The text of an adapter's wrapper is that of the wrapper's own `generate`."""
    peft = pytest.importorskip("peft")

    class Wrapper(peft.PeftModelForCausalLM):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return super().generate(*args, **kwargs).flip(-1)

    adapted = peft.get_peft_model(
        copy.deepcopy(weights[0]),
        peft.LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False, target_modules=["q_proj"]),
    ).eval()
    model = AssistedModelForCausalLM.from_models(adapted, draft=copy.deepcopy(weights[1]), draft_length=4)
    call = LONG | batch(weights[0], 3)
    call["input_ids"] = call.pop("inputs")
    before, way = compared(adapted, model, **call)
    assert way == OWN
    with of_class(Wrapper, adapted):
        text, way = compared(adapted, model, **call)
    assert text != before
    assert way == PLAIN
    with method(adapted, "generate", lambda self, *args, **kwargs: type(self).generate(self, *args, **kwargs).flip(-1)):
        assert compared(adapted, model, **call)[1] == PLAIN
    assert compared(adapted, model, before, **call)[1] == OWN


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


def test_a_checkpoint_that_brings_its_code(weights: tuple[Any, Any], tmp_path: Path) -> None:
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
    for rows in (1, 3):
        assert compared(model.target, model, **LONG | batch(weights[0], rows))[1] == FORWARD


def test_a_class_of_the_main_program(weights: tuple[Any, Any], tmp_path: Path) -> None:
    """Copied, pickled and read again."""
    (tmp_path / "program.py").write_text(CLASS)
    found = runpy.run_path(str(tmp_path / "program.py"), run_name="__main__")
    target = copy.deepcopy(weights[0])
    target.__class__ = found["HouseForCausalLM"]
    with swapped(sys.modules["__main__"], "HouseForCausalLM", target.__class__):
        torch.save(target, tmp_path / "model.pt")
        again = torch.load(tmp_path / "model.pt", weights_only=False)
    for one in (copy.deepcopy(target), again):
        model = AssistedModelForCausalLM.from_models(one, draft=copy.deepcopy(weights[1]), draft_length=4)
        assert compared(one, model, **LONG | batch(one, 3))[1] == FORWARD


@pytest.mark.parametrize("rows", [1, 3])
def test_a_weight_that_is_no_parameter_changes_in_place(rows: int, weights: tuple[Any, Any]) -> None:
    """As hypernetworks and `torch.func` put weights into modules."""
    target, model = made(weights)
    for mlp in mlps(target):
        weight: Any = mlp.down_proj._parameters.pop("weight")
        mlp.down_proj.weight = weight.detach().clone()
    call = LONG | batch(target, rows)
    before, _ = compared(target, model, **call)
    for mlp in mlps(target):
        mlp.down_proj.weight.mul_(0.3)
    assert compared(target, model, **call)[0] != before


class Changes:
    """A streamer that changes the model in the middle of a call, as another thread might."""

    def __init__(self, change: Callable[[], Any]):
        self.change, self.values = change, 0

    def put(self, value: torch.Tensor) -> None:
        self.values += value.numel()
        if self.values > 30:
            self.change()

    def end(self) -> None:
        pass


def test_a_model_that_changes_in_the_middle_of_a_call(weights: tuple[Any, Any]) -> None:
    """The next call is that of the changed model."""
    target, model = made(weights)
    call = LONG | batch(target, 1)
    handles: list[Any] = []
    for change in (
        lambda: handles or handles.append(mlps(target)[0].register_forward_hook(less)),
        lambda: setattr(mlps(target)[1], "act_fn", nn.ReLU()),
        lambda: setattr(mlps(target)[0], "forward", types.MethodType(clamping, mlps(target)[0])),
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


@over("architecture", [*ARCHITECTURES, *RECURRENT], also=lambda one: [one.name] if one.name in FUSED else [])
def test_what_is_fused(architecture: Any) -> None:
    target = build(architecture)
    found = trust(target)
    assert found.is_own
    assert all(map(lambda one, other: one is other, found.code, trust(target).code))
    assert fused(target).through_parts == (architecture.name in FUSED)


def test_layers_of_auto_round_are_a_quantizers(tmp_path: Any, monkeypatch: Any) -> None:
    """They come from a package beside it, packing a layer stores what forward passes only read, and sizes have other names."""
    (tmp_path / "auto_round_extension").mkdir()
    (tmp_path / "auto_round_extension" / "__init__.py").write_text(
        "import torch\n\n\nclass QuantLinear(torch.nn.Module):\n    def pack(self, linear):\n"
        "        self.infeatures, self.outfeatures = linear.in_features, linear.out_features\n"
        "        self.qweight = linear.weight.T\n        return self\n\n"
        "    def forward(self, x):\n        return x @ self.qweight\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        kind = importlib.import_module("auto_round_extension").QuantLinear
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
    finally:
        sys.modules.pop("auto_round_extension", None)
