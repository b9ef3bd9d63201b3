"""Whose code a model runs: transformers' own, or somebody's.

Every shortcut (a fused layer, a packed product, compiled code, slots in place of a cache, a loop in place of generate's own)
stands for code of transformers and is right for that code only. Code is own if it was compiled from a file of a package named
here; names prove nothing. Code is examined once and compared by identity in later calls. Knows nothing of drafting.
"""

from __future__ import annotations

import dis
import functools
import operator
import os
import sys
import sysconfig
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import transformers
from torch import nn
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedConfig, cache_utils
from transformers.generation import stopping_criteria
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .hooks import looked_over, name_of
from .libraries import CACHE_NAMES, LOOP, LOOP_METHOD, NOT_IN_FORWARD, active_modes, attention_of, global_hooks, hook_of
from .parts import unwrapped

_LIBRARIES = ("transformers", "torch", "accelerate", "peft", "huggingface_hub")
_QUANTIZERS = (
    "auto_round auto_round_extension awq bitsandbytes compressed_tensors eetq gptqmodel hqq "
    "optimum.quanto quark torchao vptq"
)
_KERNELS = "causal_conv1d fla flash_attn flash_attn_interface kernels mamba_ssm"  # transformers imports them itself
_PACKAGES = (*_LIBRARIES, *_QUANTIZERS.split(), *_KERNELS.split())
_MODELS = os.path.join(os.path.dirname(transformers.__file__), "models", "")
# methods that no forward pass runs, and `generate`, which is called as it is
_NEVER_RUN = {"__init__", "__init_subclass__", "__repr__", "extra_repr", "generate", *NOT_IN_FORWARD}
_BOOKKEEPING = frozenset(vars(nn.Module()))
_OUTPUTS = {"logits", "last_hidden_state", "hidden_states", *CACHE_NAMES}  # set in what a forward returns
_VALUES = (bool, bytes, dict, float, int, list, str, tuple, torch.Tensor)
_INERT = frozenset({*_VALUES, torch.dtype, torch.device, type(None)})


@dataclass(frozen=True)
class Trust:
    """Whose code a call of `generate` would run besides transformers' own.

    Args:
        forward: what a forward pass runs that is somebody's; None if all of it is own. If it is not, the model runs through its
            own forward, and nothing stands in for any of its modules.
        between: the same for what runs between forward passes, in the cache, or around every operation. Only the model's own
            `generate` runs it where it should.
        code: the records of all code examined. Other code, own or not, has other records.
        hooks: somebody's hooks that may change what a module gets or returns, with their switches. They run with the modules
            that they are attached to, but only a trial shows whether they treat several tokens as they treat one.
    """

    forward: str | None = None
    between: str | None = None
    code: tuple[Code, ...] = ()
    hooks: tuple[Any, ...] = ()

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
    kinds = {*_ALWAYS, *map(type, modules), *map(type, parameters)}
    forward: list[str] = []
    between = [f"{name} is active" for name in active_modes()]
    between += [blame for blame in map(_blame_of, code_of(map(type, wrappers))) if blame]
    for wrapper in wrappers:  # whose own `generate` runs that of the model
        called = _functions(getattr(wrapper, "generate", None))
        between += [f"{type(wrapper).__name__}.generate is {_where(one)}" for one in called if not _is_own(one)]
    records: list[Code] = []
    configs: dict[int, Any] = {}
    hooks: list[tuple[str, Any]] = [("all modules", hook) for hook in global_hooks()]
    seen: set[tuple[type, str]] = set()
    for module in (*wrappers, *modules):
        if module._buffers:
            kinds.update(map(type, module._buffers.values()))
        if module._forward_hooks or module._forward_pre_hooks or hook_of(module) is not None:
            hooks += [(name_of(model, module), hook) for hook in _hooks(module)]
        for child in module._modules.keys():  # noqa: SIM118, a scripted module's cannot be iterated over
            if (type(module), child) not in seen:
                seen.add((type(module), child))
                if hasattr(type(module), child):
                    forward.append(f"{type(module).__name__}.{child} hides a submodule")
        for name in module.__dict__.keys() - _BOOKKEEPING - _NEVER_RUN:
            value = module.__dict__[name]
            if type(value) in _INERT:
                continue
            if isinstance(value, PreTrainedConfig):
                configs[id(value)] = value
            elif isinstance(value, _VALUES):  # a number, a text, a tensor of a kind of its own
                kinds.add(type(value))
            elif callable(value):
                for function in _functions(value):
                    if not _is_own(function):
                        records.append(record := _examined(function))
                        what = f"the {name} of {name_of(model, module)} was replaced: {_blame_of(record)}"
                        is_between = name in _steps() or record.between or module in wrappers
                        (between if is_between else forward).append(what)
                if module not in wrappers and _is_of_another(value, name, module):
                    forward.append(f"the {name} of {name_of(model, module)} was replaced by that of another module")
        if isinstance(module, torch.jit.ScriptModule):
            forward.append(f"{name_of(model, module)} is traced or scripted")
    for config in configs.values():
        kinds.add(type(config))
        used = attention_of(config)
        for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            for function in _functions(table[used]) if used in table else ():
                records.append(record := _examined(function))
                if record.forward or record.between:
                    what = f"the attention {used!r} was registered: {_blame_of(record)}"
                    (between if record.between else forward).append(what)
    tried: list[Any] = []
    for name, hook in hooks:
        for function in _functions(hook):
            if not _is_own(function) and (record := _examined(function)).alters:
                records.append(record)
                tried += [record, *_switches(hook)]
                if _counts(function.__code__):
                    between.append(f"a hook of {name} is {_where(function)}, which remembers something")
    of_kinds = code_of(kinds, checked)
    forward += [record.forward for record in of_kinds if record.forward]
    between += [record.between for record in of_kinds if record.between]
    return Trust(next(iter(forward), None), next(iter(between), None), (*of_kinds, *records), tuple(tried))


def blamed(kinds: Iterable[type]) -> str | None:
    """What is somebody's in these classes; None if nothing is."""
    return next((blame for blame in map(_blame_of, code_of(kinds)) if blame), None)


def _blame_of(record: Code) -> str | None:
    return record.forward or record.between


def code_of(kinds: Iterable[type], checked: set[Code] | None = None) -> tuple[Code, ...]:
    """The records of these classes and of what they call, as they are now; the same objects while nothing has changed.

    checked: as for `trust`.
    """
    checked = set() if checked is None else checked
    bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__)
    found = [_examined(base, checked) for base in bases]
    checked.update(found)
    return tuple(sorted(found, key=id))


def _examined(source: type | FunctionType, checked: Collection[Code] = ()) -> Code:
    record = _EXAMINED.get(source)
    if record is None or not (record in checked or record.is_current()):
        record = _EXAMINED[source] = Code(source)
    return record


class Code:
    """A class, or a function, as it was when it was examined: the functions, and what these call by a global name.

    Attributes:
        forward, between: as in `Trust`.
    """

    def __init__(self, source: type | FunctionType):
        self.forward: str | None = None
        self.between: str | None = None
        self._source = weakref.ref(source)
        self._codes: dict[FunctionType, tuple[Any, ...]] = {}
        self._cells: list[tuple[CellType, Any]] = []
        self._places: dict[tuple[int, str], tuple[Mapping[str, Any], str, Any]] = {}  # by owner
        # what all operations run is the cache's, the criteria's and this package's, too
        self._is_around = source is torch.Tensor or (isinstance(source, type) and issubclass(source, _AROUND))
        self._values = _values_of(source)
        if not isinstance(source, type):
            self._examine("", source, source.__qualname__, False)
            return
        for name, value in vars(source).items():
            functions = [] if name in _NEVER_RUN or isinstance(value, type) else _functions(value)
            what = f"{source.__name__}.{name}"
            if name == "forward" and not functions:
                self._blame(name, f"{what} is {value!r}")
            for function in functions:
                if not _is_generated(function, name, vars(source)):
                    self._examine(name, function, what, _is_from_elsewhere(function, source))

    @property
    def alters(self) -> bool:
        """Whether a hook with this code may change what a module gets or returns."""
        return any(_alters(function.__code__) for function in self._codes if not _is_own(function))

    def _examine(self, name: str, function: FunctionType, what: str, is_foreign: bool) -> None:
        self._note(function)
        if is_foreign or not _is_own(function):
            self._blame(name, f"{what} is {_where(function)}", function)
        if name in _steps() or _computes(function) or not _is_own(function):
            self._follow(function, what, name)

    def _note(self, function: FunctionType) -> None:
        self._codes[function] = _code(function)
        cells = [cell for cell in function.__closure__ or () if cell != _EMPTY]
        self._cells += [(cell, cell.cell_contents) for cell in cells if _may_differ(cell.cell_contents, function)]

    def is_current(self) -> bool:
        """Whether all of it is still the same."""
        source = self._source()
        values = () if source is None else _values_of(source)
        return (
            len(values) == len(self._values)
            and _same(values, self._values)
            and all([_same(_code(function), code) for function, code in self._codes.items()])
            and all([names.get(name) is value for names, name, value in self._places.values()])
            and all([cell.cell_contents is value for cell, value in self._cells])
        )

    def _blame(self, name: str, what: str, function: FunctionType | None = None) -> None:
        if function is not None and _remembers(function.__code__):
            what, name = f"{what}, which remembers something between forward passes", LOOP_METHOD
        if name in _steps() or self._is_around:
            self.between = self.between or what
        else:
            self.forward = self.forward or what

    def _follow(self, function: FunctionType, root: str, name: str) -> None:
        """Follow the global names that a function uses, through transformers' own functions. root, name: for the message."""
        left, seen = [function], {function}
        while left:
            one = left.pop()
            used = _names_in(one.__code__)
            # what a global name stands for, and the attributes used of it: of nn, of functional, of a class, of an object
            spaces: list[tuple[Any, Mapping[str, Any], frozenset[str], Mapping[str, Any]]]
            spaces = [(one, one.__globals__, used, {})]
            known = {id(one)}
            for owner, space, names, first in spaces:
                for used_name in names & space.keys():
                    value = space[used_name]
                    self._places[id(owner), used_name] = space, used_name, value
                    if first and used_name not in first:  # an object's own attribute would hide this one of its class
                        self._places[id(first), used_name] = first, used_name, None
                    if type(value) in _INERT:
                        continue
                    if isinstance(value, ModuleType) and _is_fake(value):
                        self._blame(name, f"{root} uses {used_name}, which is a module of somebody's")
                    for inner, its, before in _spaces(value):
                        if id(inner) not in known:
                            known.add(id(inner))
                            spaces.append((inner, its, used | _IMPLIED if isinstance(inner, type) else used, before))
                    for called in [] if isinstance(value, (type, ModuleType)) else _functions(value):
                        if called in seen or _is_generated(called, used_name, space):
                            continue
                        seen.add(called)
                        self._note(called)
                        if not _is_own(called):
                            self._blame(name, f"{root} calls {used_name}, which is {_where(called)}", called)
                        if _computes(called) or not _is_own(called):
                            left.append(called)


_AROUND = (cache_utils.Cache, cache_utils.CacheLayerMixin, stopping_criteria.StoppingCriteria, list)
_EXAMINED: weakref.WeakKeyDictionary[type | FunctionType, Code] = weakref.WeakKeyDictionary()
_ALWAYS = (  # what slots stand for, what the loop does itself, and what all tensors do
    torch.Tensor,
    cache_utils.DynamicCache,
    cache_utils.DynamicLayer,
    cache_utils.DynamicSlidingWindowLayer,
    cache_utils.StaticCache,
    stopping_criteria.EosTokenCriteria,
    stopping_criteria.MaxLengthCriteria,
    stopping_criteria.StopStringCriteria,
    stopping_criteria.StoppingCriteriaList,
    LogitsProcessorList,
)


@functools.cache
def _steps() -> frozenset[str]:
    """The methods that `generate` runs between forward passes."""
    used = frozenset().union(*(_names_in(function.__code__) for function in LOOP))
    return frozenset(
        {
            LOOP_METHOD,
            *(name for name in used - {"__call__"} if isinstance(getattr(GenerationMixin, name, None), FunctionType)),
        }
    )


def _functions(value: Any) -> list[FunctionType]:
    """The Python functions that run when a value is called or looked up, inside decorators and other wrappers, too."""
    found: dict[FunctionType, None] = {}
    left, seen = [value], set()
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, (type, ModuleType, BuiltinFunctionType)):
            continue
        seen.add(id(one))
        wrapped = getattr(one, "__wrapped__", None) if callable(one) else None
        left += [] if wrapped is None else [wrapped]
        if isinstance(one, FunctionType):
            found[one] = None
            cells = [cell.cell_contents for cell in one.__closure__ or () if cell != _EMPTY]
            left += [held for held in cells if callable(held)]
        elif isinstance(one, (MethodType, classmethod, staticmethod)):
            left.append(one.__func__)
        elif isinstance(one, property):
            left += [part for part in (one.fget, one.fset, one.fdel) if part is not None]
        elif isinstance(one, (functools.partial, functools.partialmethod)):
            left += [one.func, *(held for held in (*one.args, *one.keywords.values()) if callable(held))]
        else:  # an object of some class, a descriptor perhaps, and what it holds
            left += [
                method for name in ("__call__", "__get__") if (method := getattr(type(one), name, None)) is not None
            ]
            left += [] if isinstance(one, nn.Module) else filter(callable, getattr(one, "__dict__", {}).values())
    return list(found)


_EMPTY = CellType()


@functools.cache
def _names_in(code: CodeType) -> frozenset[str]:
    """The names that a function uses, inner functions included."""
    inner = (_names_in(part) for part in code.co_consts if isinstance(part, CodeType))
    return frozenset(code.co_names).union(*inner)


@functools.cache
def _remembers(code: CodeType) -> bool:
    """Whether a function stores to attributes or global names, which later forward passes may read. Drafts that are taken back
    would stay in there."""
    return bool(_stored(code)) or any(_remembers(part) for part in code.co_consts if isinstance(part, CodeType))


def _stored(code: CodeType) -> Counter[str]:
    """The attributes and the names of outer scopes that a function stores to, and how often. What a constructor stores to its
    object does not count: the object is new."""
    steps = list(dis.get_instructions(code))
    own = code.co_varnames[:1] if code.co_name == "__init__" else ()
    return Counter(
        step.argval
        for before, step in pairwise([*steps[:1], *steps])
        if (step.opname == "STORE_ATTR" and step.argval not in _OUTPUTS and not _loads(before, own))
        or (step.opname == "STORE_GLOBAL" and step.argval not in _OUTPUTS)
        or (step.opname == "STORE_DEREF" and step.argval in code.co_freevars)
    )


def _loads(step: dis.Instruction, names: tuple[str, ...]) -> bool:
    """Whether an instruction ends with one of these local names, which it may load together with another one."""
    loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return step.opname.startswith("LOAD_FAST") and loaded[-1:] == names


@functools.cache
def _counts(code: CodeType) -> bool:
    """Whether a function reads again what it stores. One that counts its calls and does nothing with the number does not."""
    read, added, last = Counter[str](code.co_consts), Counter[str](), None
    for step in dis.get_instructions(code):
        if step.opname.startswith("LOAD") and isinstance(step.argval, str) and step.opname != "LOAD_CONST":
            read[step.argval] += 1
        elif step.opname.startswith(("BINARY", "INPLACE")):
            last = step
        elif step.opname.startswith("STORE") and last is not None and _is_in_place(last):
            added[step.argval], last = added[step.argval] + 1, None
    return any(read[name] > added[name] for name in _stored(code))


@functools.cache
def _alters(code: CodeType) -> bool:
    """Whether a hook may return something, or write into what it is given. One that collects and counts does neither."""
    last: Any = None
    method, is_local = None, False  # what a line calls first, and whether it looks at what the hook is given
    for step in dis.get_instructions(code):
        if step.starts_line:
            method, is_local = None, False
        if step.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            method = method or step.argval
        is_local = is_local or step.opname.startswith("LOAD_FAST")
        is_none = step.argval is None if step.opname == "RETURN_CONST" else _is_none(last) and not step.is_jump_target
        if step.opname in ("RETURN_VALUE", "RETURN_CONST") and not is_none and method not in _COLLECT:
            return True
        is_written = step.opname == "STORE_FAST" and last is not None and _is_in_place(last)
        if is_local and (step.opname == "STORE_SUBSCR" or is_written):
            return True
        last = step
    return any(name.endswith("_") and not name.endswith("__") for name in _names_in(code))


_COLLECT = {"append", "extend", "insert"}  # of a list, which return nothing


def _is_none(step: Any) -> bool:
    return step is not None and step.opname == "LOAD_CONST" and step.argval is None


def _is_in_place(step: Any) -> bool:
    return step.opname.startswith("INPLACE_") or (step.opname == "BINARY_OP" and step.argrepr.endswith("="))


def _values_of(source: type | FunctionType) -> tuple[Any, ...]:
    return tuple(vars(source).values()) if isinstance(source, type) else ()


def _code(function: FunctionType) -> tuple[Any, ...]:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _may_differ(held: Any, function: FunctionType) -> bool:
    """Whether another object in a function's closure would be other code, or another switch of somebody's."""
    return not _is_own(function) or isinstance(held, (FunctionType, MethodType, functools.partial))


def _spaces(value: Any) -> Iterator[tuple[Any, Mapping[str, Any], Mapping[str, Any]]]:
    """Where the attributes of a value are looked up: owners, their names, and the names that come before."""
    if isinstance(value, ModuleType):
        if _is_fake(value) or _is_own_file(getattr(value, "__file__", None) or ""):
            yield value, vars(value), {}
        return
    kind = value if isinstance(value, type) else type(value)
    if issubclass(kind, (nn.Module, *_CALLED)):
        return
    own: Any = {} if kind is value else getattr(value, "__dict__", {})
    if own:
        yield value, own, {}
    for base in kind.__mro__:
        if base.__flags__ & _HEAP:
            yield base, vars(base), own


_CALLED = (FunctionType, MethodType, BuiltinFunctionType, classmethod, staticmethod, property, functools.partial)
_HEAP = 1 << 9  # a class made in Python
_IMPLIED = frozenset(
    {"__call__", "__init__", "__new__", "__post_init__", "__getattr__", "__getattribute__", "__getitem__"}
)


def _is_fake(module: ModuleType) -> bool:
    """Whether Python imported nothing of this kind."""
    return type(module) is ModuleType and sys.modules.get(module.__name__) is not module


def _is_generated(function: FunctionType, name: str, space: Mapping[str, Any]) -> bool:
    """Whether it is a method that Python wrote for a dataclass or a named tuple."""
    is_written = function.__code__.co_filename == "<string>" and name.startswith("__")
    return is_written and ("__dataclass_fields__" in space or "_field_defaults" in space)


def _hooks(module: nn.Module) -> list[Any]:
    """Those of torch, and what accelerate's run."""
    hook = hook_of(module)
    parts = () if hook is None else (hook, *getattr(hook, "hooks", ()))  # a SequentialHook holds several
    of_accelerate = [function for part in parts for function in (part.pre_forward, part.post_forward)]
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values(), *of_accelerate]


def _switches(hook: Any) -> Iterator[Any]:
    """The settings of a hook that is an object or a method of one."""
    found = (
        vars(getattr(hook, "__self__", hook)).values() if hasattr(getattr(hook, "__self__", hook), "__dict__") else ()
    )
    return (value for value in found if type(value) in (bool, float, str))


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(map(operator.is_, one, other))


def _is_own(function: FunctionType) -> bool:
    return _is_own_file(function.__code__.co_filename)


@functools.cache
def _is_own_file(file: str) -> bool:
    """Whether it belongs to one of `_PACKAGES`, to this package or to Python."""
    names = [__name__.partition(".")[0], *_PACKAGES]
    folders = [folder for name in names if name in sys.modules for folder in sys.modules[name].__path__]
    if file.startswith(tuple(os.path.join(folder, "") for folder in folders)):
        return True
    library = os.path.join(sysconfig.get_path("stdlib"), "")
    return file.startswith(("<frozen ", library)) and "-packages" not in file


def _computes(function: FunctionType) -> bool:
    """Whether a function is part of a forward pass, so that what it calls matters."""
    file = function.__code__.co_filename
    return file.startswith(_computing()) and _is_own_file(file)


@functools.cache
def _computing() -> tuple[str, ...]:
    names = ["models/", "integrations/", "activations.py", "cache_utils.py", "masking_utils.py", "modeling_layers.py"]
    names += ["modeling_rope_utils.py", "pytorch_utils.py"]
    folder, of_torch = os.path.dirname(transformers.__file__), os.path.dirname(nn.__file__)
    return (*(os.path.join(folder, *name.split("/")) for name in names), os.path.join(of_torch, "modules", ""))


def _is_from_elsewhere(function: FunctionType, kind: type) -> bool:
    """Whether a class of transformers' models has a method that was written for another class."""
    code, module = function.__code__, sys.modules.get(kind.__module__)
    if not code.co_filename.startswith(_MODELS):
        return False
    written_for = getattr(code, "co_qualname", function.__qualname__).partition(".")[0]
    return written_for != kind.__name__ or code.co_filename != getattr(module, "__file__", None)


def _is_of_another(value: Any, name: str, owner: nn.Module) -> bool:
    """Whether an attribute of a module is a method of another module, or a method of another class of transformers."""
    bound = value.__self__ if isinstance(value, MethodType) else owner
    if isinstance(bound, nn.Module) and bound is not owner and (name == "forward" or bound not in owner.children()):
        return True
    hidden = getattr(type(owner), name, None)
    models = [function for function in _functions(value) if function.__code__.co_filename.startswith(_MODELS)]
    return hidden is not None and not set(models).issubset(_functions(hidden))


def _where(function: FunctionType) -> str:
    code = function.__code__
    return f"{function.__qualname__} of {code.co_filename}, line {code.co_firstlineno}"
