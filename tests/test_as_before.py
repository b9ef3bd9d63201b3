"""What known libraries do to a target is no code of somebody's: its text is right, and no shortcut is lost.

Adapters of PEFT, accelerate's hooks, quantizers, and torch.compile. Hooks of one's own are in test_trust.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from architectures import build, half_right
from covering import in_turns, one_in
from pairs import BY_NAME
from test_trust import LONG, OWN, PLAIN, batch, compared, made, mlps, only_generated
from torch import nn

from assisted import AssistedModelForCausalLM

peft = pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def weights() -> tuple[Any, Any]:
    target = build(BY_NAME["llama"])
    return target, half_right(target)


PARTS = {"target_modules": ["q_proj", "v_proj"]}
ADAPTERS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: peft.LoraConfig(r=2, init_lora_weights=False, **PARTS),
    "DoRA": lambda: peft.LoraConfig(r=2, init_lora_weights=False, use_dora=True, **PARTS),
    "IA3": lambda: peft.IA3Config(
        init_ia3_weights=False, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "VeRA": lambda: peft.VeraConfig(r=4, init_weights=False, target_modules=["q_proj"]),
    "OFT": lambda: peft.OFTConfig(oft_block_size=4, init_weights=False, **PARTS),
    "LoHa": lambda: peft.LoHaConfig(r=2, init_weights=False, **PARTS),
    "LoKr": lambda: peft.LoKrConfig(r=2, init_weights=False, **PARTS),
}


def strengthened(adapted: Any) -> None:
    """Adapters start close to nothing."""
    for name, weight in adapted.named_parameters():
        if any(mark in name for mark in ("lora_", "ia3_", "vera_lambda", "oft_", "hada_", "lokr_")):
            weight.data.add_(0.4 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))))


@pytest.mark.parametrize("kind", one_in(3, list(ADAPTERS)))
def test_adapters(kind: str, weights: tuple[Any, Any]) -> None:
    """At work, switched, disabled, enabled again, merged, unmerged, and merged for good."""
    adapted = peft.get_peft_model(copy.deepcopy(weights[0]), ADAPTERS[kind]()).eval()
    adapted.add_adapter("other", ADAPTERS[kind]())
    strengthened(adapted)
    model = AssistedModelForCausalLM.from_models(adapted, draft=copy.deepcopy(weights[1]), draft_length=4)
    call = LONG | batch(weights[0], 3)
    call["input_ids"] = call.pop("inputs")

    def text(known: list[list[int]] | None = None) -> list[list[int]]:
        found, way = compared(adapted, model, known, **call)
        assert way == OWN
        return found

    first = text()
    adapted.set_adapter("other")
    other = text()
    assert other != first
    with adapted.disable_adapter():
        bare = text()
        assert bare not in (first, other)
    text(other)
    adapted.set_adapter("default")
    text(first)
    adapted.merge_adapter()
    text()
    adapted.unmerge_adapter()
    text()
    merged = adapted.merge_and_unload()
    model = AssistedModelForCausalLM.from_models(merged, draft=copy.deepcopy(weights[1]), draft_length=4)
    assert compared(merged, model, **call)[1] == OWN


class Steers(accelerate.hooks.ModelHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output.clamp(-0.2, 0.2)


class SteersGenerated(accelerate.hooks.ModelHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return only_generated(module, (), output)


def moves() -> Any:
    return accelerate.hooks.AlignDevicesHook(execution_device=torch.device("cpu"))


def moves_and_steers() -> Any:
    return accelerate.hooks.SequentialHook(moves(), Steers())


def steers_twice() -> Any:
    return accelerate.hooks.SequentialHook(Steers(), SteersGenerated())


HOOKS = [(moves, OWN), (moves_and_steers, OWN), (Steers, OWN), (SteersGenerated, PLAIN), (steers_twice, PLAIN)]


@pytest.mark.parametrize("given,rows", in_turns(HOOKS, [1, 3]))
def test_hooks_of_accelerate(given: tuple[Any, str], rows: int, weights: tuple[Any, Any]) -> None:
    hook, way = given
    target, model = made(weights)
    call = LONG | batch(target, rows)
    before, _ = compared(target, model, **call)
    for mlp in mlps(target):
        accelerate.hooks.add_hook_to_module(mlp, hook())
    assert compared(target, model, **call)[1] == way
    accelerate.hooks.remove_hook_from_module(target, recurse=True)
    assert compared(target, model, before, **call)[1] == OWN


@pytest.mark.parametrize("moved", [accelerate.cpu_offload, accelerate.dispatch_model])
def test_models_that_accelerate_moves(moved: Any, weights: tuple[Any, Any]) -> None:
    where = {"device_map": {"": "cpu"}} if moved is accelerate.dispatch_model else {"execution_device": "cpu"}
    target = moved(copy.deepcopy(weights[0]), **where)
    model = AssistedModelForCausalLM.from_models(target, draft=copy.deepcopy(weights[1]), draft_length=4)
    for rows in (1, 3):
        assert compared(target, model, **LONG | batch(weights[0], rows))[1] == OWN


COMPILED: dict[str, Callable[[Any], Any]] = {
    "whole": lambda target: torch.compile(target, backend="eager"),
    "in place": lambda target: target.compile(backend="eager"),
    "layers": lambda target: [layer.compile(backend="eager") for layer in target.model.layers],
    "a submodule": lambda target: setattr(
        target.model.layers[0], "mlp", torch.compile(target.model.layers[0].mlp, backend="eager")
    ),
    "a forward": lambda target: setattr(target, "forward", torch.compile(target.forward, backend="eager")),
}


@pytest.mark.parametrize("name,rows", in_turns(list(COMPILED), [3, 1]))
def test_compiled_models(name: str, rows: int) -> None:
    target = build(BY_NAME["llama"], num_hidden_layers=1)  # torch takes seconds to read two layers
    given = COMPILED[name](target)
    given = given if isinstance(given, nn.Module) else target
    own = half_right(build(BY_NAME["llama"]))
    draft = torch.compile(own, backend="eager") if name == "whole" else own
    said = {
        "in place": "compiled in place",
        "layers": r"part model\.layers\.0 was",
        "a submodule": r"part model\.layers\.0\.mlp was",
    }
    with pytest.warns(UserWarning, match=said[name]) if name in said else nullcontext():
        model = AssistedModelForCausalLM.from_models(given, draft=draft, draft_length=4)
    assert model.target is target and model.drafter.model is own
    with torch.compiler.set_stance(
        "default" if name == "a submodule" else "force_eager"
    ):  # torch takes seconds to compile
        assert compared(given, model, **LONG | batch(target, rows) | {"max_new_tokens": 8})[1] == OWN
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:target. its part")
def test_drafts_of_the_layers_of_a_compiled_part() -> None:
    """Drafts that run some of its layers are refused, and so is a quantized copy, which would get random weights."""
    target = build(BY_NAME["llama"])
    target.model = torch.compile(target.model, backend="eager")
    for draft, said in (
        ("early-exit:1", r"draft: early exit .*model\._orig_mod\.layers\) are in a result of torch\.compile"),
        ("self:int8", r"quantization: a part of the model is a result of torch\.compile.*_orig_mod"),
    ):
        with torch.compiler.set_stance("force_eager"), pytest.raises(ValueError, match=said):
            AssistedModelForCausalLM.from_models(target, draft=draft)
    torch._dynamo.reset()
