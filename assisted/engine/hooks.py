"""Detects modules that other code has changed: hooks, replaced forwards, compiled modules, adapters.

Such a module must be called as it is; nothing may run in its place. Covers the mechanisms of torch, accelerate and PEFT.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable
from types import CodeType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .libraries import global_hooks, hook_of, is_wrapper_subclass, reads_inputs

_RECORDS = "transformers.utils.output_capturing"  # its hooks return hidden states to calls that ask for them
# hooks of these collect outputs that are not requested here, or silence backends
_OWN = ("transformers.", "assisted.loading.quantization")
_COLLECT = {"append", "extend", "insert"}  # of a list, which return nothing


def looked_over(*modules: nn.Module) -> tuple[list[nn.Module], list[torch.Tensor]]:
    """All submodules and parameters of these modules, each once, in torch's order. One traversal: every call makes it."""
    found: dict[int, nn.Module] = {}  # by id, which takes half as long as hashing tensors
    parameters: dict[int, torch.Tensor] = {}
    left = list(reversed(modules))
    while left:
        module = left.pop()
        if id(module) not in found:
            found[id(module)] = module
            parameters.update((id(p), p) for p in module._parameters.values() if p is not None)
            left += [child for child in reversed(module._modules.values()) if child is not None]
    return list(found.values()), list(parameters.values())


def name_of(model: nn.Module, module: nn.Module) -> str:
    """The name of a module of a model, for a message."""
    name = next((name for name, one in model.named_modules() if one is module), "")
    return name or f"the {type(model).__name__}"


def is_touched(module: nn.Module) -> bool:
    """Whether a call of this module does more than its class: hooks, a replaced or compiled forward, or a weight of a tensor
    subclass (torchao's)."""
    return any_touched([module])


def any_touched(modules: Iterable[nn.Module]) -> bool:
    """Whether `is_touched` is true of one of these modules. Hooks of all modules are looked up once."""
    return bool(global_hooks()) or any(
        _has_own_hooks(module)
        or "forward" in module.__dict__
        or module._compiled_call_impl is not None
        or (type(module) is nn.Linear and is_wrapper_subclass(module.weight))
        for module in modules
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether other code runs when this module is called.

    Hooks of transformers itself don't count. A call that asked for hidden states or attentions leaves its hooks on the model,
    and they do nothing in other calls.
    """
    return bool(global_hooks()) or _has_own_hooks(module)


def _has_own_hooks(module: nn.Module) -> bool:
    if not module._forward_hooks and not module._forward_pre_hooks:
        return False
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(getattr(hook, "__module__", None) != _RECORDS for hook in hooks)


def is_untouched(model: PreTrainedModel) -> bool:
    """Whether calling a model runs its forward and nothing else: no hooks (offloading, counting), no replaced forward."""
    outer = (model, model.base_model)
    return not any(has_hooks(m) or "forward" in m.__dict__ for m in outer)


def offloading_hooks(model: nn.Module) -> list[Any]:
    """accelerate's hooks that fetch a module's weights from a disk or from main memory, in the order of the modules."""
    found = []
    for module in looked_over(model)[0]:
        hook = hook_of(module)
        for part in (hook, *getattr(hook, "hooks", ())):  # a SequentialHook holds several
            if getattr(part, "offload", False) and getattr(part, "weights_map", None) is not None:
                found.append(part)
    return found


def is_offloaded(model: nn.Module) -> bool:
    """Whether a forward pass fetches weights from a disk or from main memory, so that it costs about as much for many
    positions as for one."""
    return bool(offloading_hooks(model))


def obstacle(model: nn.Module, device: torch.device) -> str | None:
    """Why a model's forward passes can't be captured, as far as inspection shows; None if no reason is found."""
    for name, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if not all((getattr(hook, "__module__", None) or "").startswith(_OWN) for hook in hooks):
            return f"{name or 'the model'} has hooks, which must run in every call"
        values = module.__dict__
        hook = hook_of(module)
        moves_inputs = type(hook).__name__ == "AlignDevicesHook" and not hook.offload  # accelerate's
        if "forward" in values and not moves_inputs:
            return f"the forward of {name or 'the model'} was replaced"
        if values.get("_compiled_call_impl") is not None:
            return f"{name or 'the model'} is compiled"
        if reads_inputs(module):
            return f"{name} looks for outliers in its inputs; llm_int8_threshold=0.0 of BitsAndBytesConfig avoids that"
        if type(module).__module__.startswith("peft."):
            return f"{name} is an adapter, which may be changed between calls"
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.device != device:
                return f"parts of {name or 'the model'} are on {tensor.device}"
    return None


def hooks_of(module: nn.Module) -> list[Any]:
    """The hooks of torch on a module, and what those of accelerate run."""
    found = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if (hook := hook_of(module)) is not None:
        for part in (hook, *getattr(hook, "hooks", ())):  # a SequentialHook holds several
            found += [part.pre_forward, part.post_forward]
    return found


@functools.cache
def names_in(code: CodeType) -> frozenset[str]:
    """The names that a function uses, inner functions included."""
    return frozenset(code.co_names).union(*(names_in(part) for part in code.co_consts if isinstance(part, CodeType)))


@functools.cache
def alters(code: CodeType) -> bool:
    """Whether a hook may return something, or write into what it is given. One that collects and counts does neither."""
    last: Any = None
    method, is_local = None, False  # what a line calls first, and whether it looks at what the hook is given
    for step in dis.get_instructions(code):
        if step.starts_line:
            method, is_local = None, False
        if step.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            method = method or step.argval
        is_local = is_local or step.opname.startswith("LOAD_FAST")
        is_none = last is not None and last.opname == "LOAD_CONST" and last.argval is None and not step.is_jump_target
        if step.opname == "RETURN_CONST":
            is_none = step.argval is None
        if (
            step.opname.startswith("RETURN_")
            and step.opname != "RETURN_GENERATOR"
            and not (is_none or method in _COLLECT)
        ):
            return True
        is_in_place = (
            last is not None
            and last.opname.startswith(("BINARY_OP", "INPLACE_"))
            and (last.opname != "BINARY_OP" or last.argrepr.endswith("="))
        )
        if is_local and (step.opname == "STORE_SUBSCR" or (step.opname == "STORE_FAST" and is_in_place)):
            return True
        last = step
    return any(name.endswith("_") and not name.endswith("__") for name in names_in(code))
