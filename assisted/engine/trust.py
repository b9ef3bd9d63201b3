"""Whose code a model runs: transformers' own, or somebody's.

Every shortcut (a fused layer, a packed product, compiled code, slots in place of a cache, a loop in place of generate's own)
stands for code of transformers and is right for that code only. Code is own if it was compiled from a file of a package named
here; names prove nothing. Code is examined once and compared by identity in later calls. Knows nothing of drafting.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
import sysconfig
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import transformers
from torch import nn
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedConfig, cache_utils
from transformers.generation import stopping_criteria
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .hooks import alters, hooks_of, looked_over, name_of, names_in
from .libraries import LOOP, LOOP_METHOD, NOT_IN_FORWARD, active_modes, attention_of, global_hooks
from .parts import unwrapped

_NAMES = (  # of libraries, quantizers, and kernels that transformers imports itself
    "transformers torch accelerate peft huggingface_hub auto_round auto_round_extension awq bitsandbytes compressed_tensors "
    "eetq gptqmodel hqq optimum.quanto quark sinq torchao vptq causal_conv1d fla flash_attn flash_attn_interface kernels "
    "mamba_ssm"
)
_HOME = os.path.join(os.path.dirname(transformers.__file__), "")
_FILES = ("activations", "cache_utils", "masking_utils", "modeling_layers", "modeling_rope_utils", "pytorch_utils")
_COMPUTING = (  # files of forward passes: what their functions call matters
    *(os.path.join(_HOME, name, "") for name in ("models", "integrations")),
    *(f"{_HOME}{name}.py" for name in _FILES),
    os.path.join(os.path.dirname(nn.__file__), "modules", ""),
)
# methods that no forward pass runs, and `generate`, which is called as it is
_NEVER_RUN = {"__init__", "__init_subclass__", "__repr__", "extra_repr", "generate", *NOT_IN_FORWARD}
# the methods that `generate` runs between forward passes
_STEPS = {LOOP_METHOD, *vars(GenerationMixin).keys() & frozenset().union(*(names_in(one.__code__) for one in LOOP))}
_BOOKKEEPING = frozenset(vars(nn.Module()))
_CALLED = (FunctionType, MethodType, BuiltinFunctionType, classmethod, staticmethod, property, functools.partial)
_IMPLIED = {"__call__", "__init__", "__new__", "__post_init__", "__getattr__", "__getattribute__", "__getitem__"}
# what all operations run is the cache's, the criteria's and this package's, too
_AROUND = (cache_utils.Cache, cache_utils.CacheLayerMixin, stopping_criteria.StoppingCriteria, list)
_ALWAYS = (  # what slots stand for, what the loop does itself, and what all tensors do
    *(torch.Tensor, cache_utils.StaticCache, cache_utils.DynamicCache, cache_utils.DynamicSlidingWindowLayer),
    *(stopping_criteria.EosTokenCriteria, stopping_criteria.MaxLengthCriteria, stopping_criteria.StopStringCriteria),
    *(stopping_criteria.StoppingCriteriaList, LogitsProcessorList, cache_utils.DynamicLayer),
)
_WRITTEN = {"__init__", "__new__", "__eq__", "__repr__", "__hash__"}  # by Python, for dataclasses and named tuples
_EMPTY = CellType()
_HEAP = 1 << 9  # the flag of a class made in Python
_code = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_EXAMINED: weakref.WeakKeyDictionary[type | FunctionType, Code] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Trust:
    """Whose code a call of `generate` would run besides transformers' own."""

    # what a forward pass runs that is somebody's; None if all of it is own. If it is not, the model runs through its
    # own forward, and nothing stands in for any of its modules.
    forward: str | None = None
    # the same for what runs between forward passes, in the cache, or around every operation. Only the model's own
    # `generate` runs it where it should.
    between: str | None = None
    code: tuple[Code, ...] = ()  # the records of all code examined. Other code, own or not, has other records.
    # somebody's hooks that may change what a module gets or returns: their records and switches. They run with the
    # modules that they are attached to, but only a trial shows whether they treat several tokens as they treat one.
    hooks: tuple[Any, ...] = ()
    holders: tuple[Any, ...] = ()  # the objects whose methods these hooks are

    @property
    def is_own(self) -> bool:
        """Whether shortcuts may be taken."""
        return self.forward is None and self.between is None


def trust(model: Any, checked: set[Code] | None = None) -> Trust:
    """Whose code this model runs at present. Takes about a microsecond for each of its modules.

    checked: records that this call has compared already, because models have most classes in common; further ones are added.
    """
    outer, model = model, unwrapped(model)
    wrappers = [] if outer is model else list(dict.fromkeys((outer, getattr(outer, "base_model", outer))))
    modules, parameters = looked_over(model)
    between = [f"{name} is active" for name in active_modes()]
    between += filter(None, [blamed(map(type, wrappers))])
    for wrapper in wrappers:  # whose own `generate` runs that of the model
        called = _functions(getattr(wrapper, "generate", None))
        between += [f"{type(wrapper).__name__}.generate is {_where(one)}" for one in called if not _is_own(one)]
    forward: list[str] = []
    sources: set[Any] = {*_ALWAYS, *map(type, modules), *map(type, parameters)}
    configs: dict[int, Any] = {}
    hooks = global_hooks()
    for module in (*wrappers, *modules):
        if module._buffers:
            sources.update(map(type, module._buffers.values()))
        hooks += hooks_of(module)
        for name in module.__dict__.keys() - _BOOKKEEPING - _NEVER_RUN:
            value = module.__dict__[name]
            if isinstance(value, PreTrainedConfig):
                configs[id(value)] = value
            elif callable(value):
                sources.update(called := _functions(value))
                hides, bound = hasattr(type(module), name) and module not in wrappers, getattr(value, "__self__", None)
                if hides and isinstance(bound, nn.Module) and bound is not module:
                    forward.append(f"the {name} of {name_of(model, module)} was replaced by that of another module")
                for function in called:
                    if not _is_own(function) or (hides and _is_of_another(function, type(module).__mro__)):
                        what = f"the {name} of {name_of(model, module)} was replaced: {_where(function)}"
                        (between if name in _STEPS or module in wrappers else forward).append(what)
        if isinstance(module, torch.jit.ScriptModule):
            forward.append(f"{name_of(model, module)} is traced or scripted")
    for config in configs.values():
        used, tables = attention_of(config), (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
        sources.update([type(config)], *(_functions(table[used]) for table in tables if used in table))
    tried: list[Any] = []
    holders: list[Any] = []
    for hook in hooks:
        of_hook = code_of(function for function in _functions(hook) if not _is_own(function))
        if any(record.alters for record in of_hook):
            holders.append(getattr(hook, "__self__", hook))
            switches = getattr(holders[-1], "__dict__", {}).values()
            tried += [*of_hook, *(value for value in switches if type(value) in (bool, float, str))]
    records = code_of(sources, checked)
    forward += [record.forward for record in records if record.forward]
    between += [record.between for record in records if record.between]
    return Trust(next(iter(forward), None), next(iter(between), None), records, tuple(tried), tuple(holders))


def blamed(kinds: Iterable[type]) -> str | None:
    """What is somebody's in these classes; None if nothing is."""
    return next((blame for record in code_of(kinds) if (blame := record.forward or record.between)), None)


def code_of(sources: Iterable[type | FunctionType], checked: set[Code] | None = None) -> tuple[Code, ...]:
    """The records of these classes and functions and of what they call, as they are now; the same while nothing has changed.

    checked: as for `trust`.
    """
    checked = set() if checked is None else checked
    found = []
    for one in dict.fromkeys(one for source in sources for one in getattr(source, "__mro__", (source,))):
        record = _EXAMINED.get(one)
        if record is None or not (record in checked or record.is_current()):
            record = _EXAMINED[one] = Code(one)
        found.append(record)
    checked.update(found)
    return tuple(sorted(found, key=id))


class Code:
    """A class, or a function, as it was when it was examined: the functions, and what these call by a global name.

    Attributes:
        forward, between: as in `Trust`.
        alters: a hook with this code may change what a module gets or returns.
    """

    def __init__(self, source: type | FunctionType):
        self.forward: str | None = None
        self.between: str | None = None
        self.alters = False
        self._source, self._values = weakref.ref(source), tuple(vars(source).values())
        self._codes: dict[FunctionType, tuple[Any, ...]] = {}
        self._cells: list[tuple[CellType, Any]] = []
        self._places: dict[tuple[int, str], tuple[Mapping[str, Any], str, Any]] = {}  # by owner
        if not isinstance(source, type):
            self._examine(source, source.__qualname__, False, False)
            return
        is_around = source is torch.Tensor or issubclass(source, _AROUND)
        for name, value in vars(source).items():
            functions = [] if name in _NEVER_RUN or isinstance(value, type) else _functions(value)
            if name == "forward" and not functions:
                self.forward = f"{source.__name__}.forward is {value!r}"
            for one in functions:
                is_step, is_foreign = name in _STEPS, _is_of_another(one, [source])
                self._examine(one, f"{source.__name__}.{name}", is_step, is_foreign, is_around or is_step)

    def is_current(self) -> bool:
        """Whether all of it is still the same."""
        values = tuple(getattr(self._source(), "__dict__", {}).values())
        return (
            len(values) == len(self._values)
            and all(map(operator.is_, values, self._values))
            and all([all(map(operator.is_, _code(function), code)) for function, code in self._codes.items()])
            and all([names.get(name) is value for names, name, value in self._places.values()])
            and all([cell.cell_contents is value for cell, value in self._cells])
        )

    def _examine(
        self, root: FunctionType, what: str, is_step: bool, is_foreign: bool, is_between: bool = False
    ) -> None:
        """Note a function and what it calls, through functions of forward passes and of somebody's. what: for the message."""
        left, seen = [(root, f"{what} is")], {root}
        while left:
            one, how = left.pop()
            is_own, code = _is_own(one), one.__code__
            self._codes[one] = _code(one)
            if not is_own:  # which may hold other code, or another switch, later
                self._cells += [(cell, cell.cell_contents) for cell in one.__closure__ or () if cell != _EMPTY]
            if not is_own or (is_foreign and one is root):
                what_is = f"{how} {_where(one)}"
                if is_between:
                    self.between = self.between or what_is
                else:
                    self.forward = self.forward or what_is
                self.alters = self.alters or alters(code)
            if not is_own or code.co_filename.startswith(_COMPUTING) or (is_step and one is root):
                for name, value in self._used(one):
                    new = [function for function in _functions(value) if function not in seen]
                    seen.update(new)
                    left += [(called, f"{what} calls {name}, which is") for called in new]

    def _used(self, function: FunctionType) -> Iterator[tuple[str, Any]]:
        """What a function's global names stand for, and the attributes it uses of that: of nn, of a class, of an object."""
        names = names_in(function.__code__)
        left: list[tuple[Any, Mapping[str, Any]]] = [(function, function.__globals__)]
        known = {id(function)}
        for owner, space in left:
            for name in (names if space is function.__globals__ else names | _IMPLIED) & space.keys():
                value = space[name]
                self._places[id(owner), name] = space, name, value
                left += [(inner, vars(inner)) for inner in _spaces(value) if id(inner) not in known]
                known.update(map(id, _spaces(value)))
                yield name, value


def _spaces(value: Any) -> list[Any]:
    """The objects and classes among whose attributes a global name's attributes are found."""
    if isinstance(value, type):
        return [] if issubclass(value, nn.Module) else [base for base in value.__mro__ if base.__flags__ & _HEAP]
    is_foreign = isinstance(value, ModuleType) and not _is_own_file(getattr(value, "__file__", None) or "")
    return [] if is_foreign or isinstance(value, (nn.Module, *_CALLED)) or not hasattr(value, "__dict__") else [value]


def _functions(value: Any) -> list[FunctionType]:
    """The Python functions that run when a value is called or looked up, inside decorators and other wrappers, too."""
    found: dict[FunctionType, None] = {}
    left, seen = [value], set()
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, (type, ModuleType, BuiltinFunctionType)):
            continue
        seen.add(id(one))
        held: list[Any] = [getattr(one, "__wrapped__", None)] if callable(one) else []
        if isinstance(one, FunctionType):
            found[one] = None
            held += [cell.cell_contents for cell in one.__closure__ or () if cell != _EMPTY]
        elif isinstance(one, (MethodType, classmethod, staticmethod)):
            held.append(one.__func__)
        elif isinstance(one, property):
            held += [one.fget, one.fset, one.fdel]
        elif isinstance(one, functools.partial):
            held += [one.func, *one.args, *one.keywords.values()]
        else:  # an object of some class, a descriptor perhaps, and what it holds
            held += [getattr(type(one), name, None) for name in ("__call__", "__get__")]
            held += [] if isinstance(one, nn.Module) else getattr(one, "__dict__", {}).values()
        left += filter(callable, held)
    return list(found)


def _is_own(function: FunctionType) -> bool:
    file = function.__code__.co_filename
    return _is_own_file(file) or (file == "<string>" and function.__name__ in _WRITTEN)


@functools.cache
def _is_own_file(file: str) -> bool:
    """Whether it belongs to a package of `_NAMES`, to this package or to Python."""
    names = [__name__.partition(".")[0], *_NAMES.split()]
    folders = [folder for name in names if name in sys.modules for folder in sys.modules[name].__path__]
    if file.startswith(tuple(os.path.join(folder, "") for folder in folders)):
        return True
    library = os.path.join(sysconfig.get_path("stdlib"), "")
    return file.startswith(("<frozen ", library)) and "-packages" not in file


def _is_of_another(function: FunctionType, kinds: Iterable[type]) -> bool:
    """Whether a method of transformers' models was written for another class than these."""
    written_for = function.__module__, function.__qualname__.partition(".")[0]
    is_of_models = function.__code__.co_filename.startswith(_COMPUTING[0])
    return is_of_models and written_for not in [(kind.__module__, kind.__name__) for kind in kinds]


def _where(function: FunctionType) -> str:
    code = function.__code__
    return f"{function.__qualname__} of {code.co_filename}, line {code.co_firstlineno}"
