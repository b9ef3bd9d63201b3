"""A PreTrainedModel whose attributes and methods are those of the target.

Drafts and `generate` belong to the derived class. A Trainer, PEFT or accelerate sees the target's own modules under their own
names, and every change reaches the target.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import MethodType
from typing import Any

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from .engine.libraries import CACHE, MODEL_METHODS

OWN = frozenset(  # names of transformers that the pair implements itself; all others are the target's
    {
        # class attributes and loading
        *MODEL_METHODS,
        "config_class",
        "from_pretrained",
        "generation_config_class",
        "get_init_context",
        "is_custom_code",
        "is_remote_code",
        "register_for_auto_class",
        # files: a folder holds the draft as well
        "push_to_hub",
        "save_pretrained",
        # moves: the draft goes along
        "cuda",
        "float",
        "half",
        "to",
        # the purpose of the pair
        "continuous_batching_context_manager",
        "generate",
        "generate_batch",
        "init_continuous_batching",
        "get_memory_footprint",
    }
)
_SHARED = tuple(
    name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set))
)  # submodules, tensors, hooks
_COMPILED = ("_compiled_call_impl", "compile")  # of a module: calls go to the target


def surface() -> frozenset[str]:
    """The names that PreTrainedModel and GenerationMixin add to nn.Module."""
    classes = [*PreTrainedModel.__mro__, *GenerationMixin.__mro__]
    added = (found for found in classes if found not in nn.Module.__mro__)
    return frozenset(name for found in added for name in vars(found) if not name.startswith("__"))


class _OfTarget:
    """An attribute that a pair reads from its target and writes to it. On the class it is PreTrainedModel's."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, pair: Any, owner: type) -> Any:
        if pair is None:
            return getattr(super(ForwardsToTarget, owner), self.name)
        return _seen_from(pair, getattr(pair.target, self.name))

    def __set__(self, pair: Any, value: Any) -> None:
        setattr(pair.target, self.name, value)

    def __delete__(self, pair: Any) -> None:
        delattr(pair.target, self.name)


def _seen_from(pair: Any, value: Any) -> Any:
    """A value of the target, with the pair in place of the target itself, also where a method returns it."""
    if value is pair.target:
        return pair
    if not isinstance(value, MethodType) or value.__self__ is not pair.target:
        return value

    @functools.wraps(value)
    def method(*args: Any, **kwargs: Any) -> Any:
        result = value(*args, **kwargs)
        return pair if result is pair.target else result

    return method


class _Forward(_OfTarget):
    """The target's forward. A Trainer reads its signature to find the inputs and labels."""

    def __init__(self) -> None:
        super().__init__("forward")

    def __get__(self, pair: Any, owner: type) -> Any:
        return _forward if pair is None else pair.target.forward


def _forward(
    self: Any,
    input_ids: Any = None,
    attention_mask: Any = None,
    position_ids: Any = None,
    past_key_values: Any = None,
    inputs_embeds: Any = None,
    labels: Any = None,
    use_cache: bool | None = None,
    logits_to_keep: Any = 0,
    **kwargs: Any,
) -> Any:
    """The target's forward, as the class shows it: with no target yet, it has the signature of most causal LMs."""
    named = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        CACHE: past_key_values,
        "inputs_embeds": inputs_embeds,
        "labels": labels,
        "use_cache": use_cache,
    }
    given = {name: value for name, value in named.items() if value is not None}
    if not isinstance(logits_to_keep, int) or logits_to_keep:
        given["logits_to_keep"] = logits_to_keep
    return self.target(**given, **kwargs)


_forward.__name__ = "forward"
_forward.__qualname__ = "AssistedModelForCausalLM.forward"


class ForwardsToTarget(PreTrainedModel, GenerationMixin):
    """A PreTrainedModel that shares the modules, tensors, hooks and methods of a target.

    Attributes are read from the object first, then from the target. Attributes that were set before `made()` or that the class
    defines are written to the object, all others to the target.

    Args:
        target: the model.
    """

    forward: Any = _Forward()

    def __init__(self, target: Any):
        self.__dict__.update({name: target.__dict__[name] for name in _SHARED}, _target=target, _made=False)

    def made(self) -> None:
        """End the construction: from now on new attributes are set on the target."""
        self.__dict__["_made"] = True

    @property
    def target(self) -> Any:
        """The model to which everything is forwarded."""
        return self.__dict__["_target"]

    @property
    def training(self) -> bool:  # type: ignore[override]
        return self.target.training

    @training.setter
    def training(self, value: bool) -> None:
        self.target.training = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.target(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        target = self.__dict__.get("_target")
        if target is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return _seen_from(self, getattr(target, name))

    def __setattr__(self, name: str, value: Any) -> None:
        if not self.__dict__.get("_made") or name in self.__dict__ or hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.target, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or hasattr(type(self), name):
            object.__delattr__(self, name)
        else:
            delattr(self.target, name)

    def _get_name(self) -> str:
        """The target's class name: a Trainer that smooths labels checks whether it is a causal LM."""
        return self.target._get_name()

    def __repr__(self) -> str:
        return super().__repr__().replace(self._get_name(), type(self).__name__, 1)

    def __dir__(self) -> Iterable[str]:
        return sorted({*object.__dir__(self), *dir(self.target)})


for _name in (surface() - OWN) | set(_COMPILED):
    setattr(ForwardsToTarget, _name, _OfTarget(_name))
