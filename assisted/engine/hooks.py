"""Who hangs on to the modules of a model: hooks, replaced forwards, compiled modules, adapters.

Such a module has to be called as it is: nothing may run in its place. Knows torch's, accelerate's and PEFT's ways to do so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

__all__ = ["has_hooks", "is_touched", "is_untouched", "looked_over", "obstacle"]

_RECORDS = "transformers.utils.output_capturing"  # whose hooks hand out hidden states to the calls that ask for them
# whose hooks collect outputs that nobody asks for here, or keep backends quiet
_OWN = ("transformers.", "assisted.loading.quantization")


def looked_over(*modules: nn.Module) -> tuple[list[nn.Module], list[torch.Tensor]]:
    """All modules of these and all their parameters, each once: in one walk, since every call takes it."""
    found: dict[int, nn.Module] = {}  # by id, which takes half as long as what torch hashes a tensor by
    parameters: dict[int, torch.Tensor] = {}
    left = list(reversed(modules))
    while left:
        module = left.pop()
        if id(module) not in found:
            found[id(module)] = module
            parameters.update((id(p), p) for p in module._parameters.values() if p is not None)
            left += [child for child in module._modules.values() if child is not None]
    return list(found.values()), list(parameters.values())


def is_touched(module: nn.Module) -> bool:
    """Whether somebody has changed what a call of this module does: hooks, a forward of its own, a compiled one, a weight that
    is more than numbers (torchao's)."""
    replaced = "forward" in module.__dict__ or module._compiled_call_impl is not None
    return has_hooks(module) or replaced or (type(module) is nn.Linear and is_traceable_wrapper_subclass(module.weight))


def has_hooks(module: nn.Module) -> bool:
    """Whether other code is called along with this module.

    Not transformers itself: a call that asked for hidden states or attentions leaves its hooks on a model for good, and they do
    nothing in any other call.
    """
    if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
        return True
    if not module._forward_hooks and not module._forward_pre_hooks:
        return False
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(getattr(hook, "__module__", None) != _RECORDS for hook in hooks)


def is_untouched(model: PreTrainedModel) -> bool:
    """Whether calling a model's forward does nothing but run it: no hooks (offloading, counting), no replaced forward."""
    outer = (model, model.base_model)
    return not any(has_hooks(m) or "forward" in m.__dict__ for m in outer)


def obstacle(model: nn.Module, device: torch.device) -> str | None:
    """Why the passes of a model can't be captured, as far as it shows without trying; None where nothing does."""
    for name, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if not all((getattr(hook, "__module__", None) or "").startswith(_OWN) for hook in hooks):
            return f"{name or 'the model'} has hooks, which want to be called"
        values = module.__dict__
        if "forward" in values and not _only_aligns(values.get("_hf_hook")):
            return f"the forward of {name or 'the model'} was replaced"
        if values.get("_compiled_call_impl") is not None:
            return f"{name or 'the model'} is compiled"
        if type(module).__module__.startswith("peft."):
            return f"{name} is an adapter, which may be switched"
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.device != device:
                return f"parts of {name or 'the model'} lie on {tensor.device}"
    return None


def _only_aligns(hook: Any) -> bool:
    """Whether a hook of accelerate moves inputs to the device where they are, and nothing else."""
    return type(hook).__name__ == "AlignDevicesHook" and not hook.offload
