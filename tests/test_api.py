"""docs/api/: every public name has its place there and a docstring that says what its arguments are."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import assisted

pytestmark = pytest.mark.documents

PAGES = Path(__file__).parent.parent / "docs" / "api"
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md")))
DIRECTIVES = re.findall(r"^::: ([\w.]+)$", TEXT, re.M)
# modules that a user imports from; all of their `__all__` is public
MODULES = [
    "assisted",
    "assisted.core.acceptance",
    "assisted.lab.bench",
    "assisted.chat",
    "assisted.lengths",
    "assisted.methods.shared.base",
    "assisted.methods.shared.lookup",
    "assisted.core.drafts",
    "assisted.methods.eagle.formats",
    "assisted.lengths",
    "assisted.loading.quantization",
    "assisted.serving",
    "assisted.lab.training.trainer",
    "assisted.zoo",
]
SAYS_ITSELF = {"generator"}  # wherever something is drawn


def resolved(path: str) -> Any:
    """What a directive names."""
    parts = path.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path)


def names(module: Any) -> list[str]:
    """The public names of a module."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return list(getattr(module, "__all__", [name for name in own if not name.startswith("_")]))


def objects() -> Iterator[tuple[str, Any]]:
    """Everything that a directive stands for, by name: modules are what they export."""
    for path in DIRECTIVES:
        found = resolved(path)
        if not inspect.ismodule(found):
            yield path, found
            continue
        for name in names(found):
            value = getattr(found, name)
            if callable(value) and str(getattr(value, "__module__", "")).startswith("assisted"):
                yield f"{path}.{name}", value


def parameters(function: Any) -> list[str]:
    """Those that a caller names."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in found if p.name not in ("self", "cls") and p.kind not in kinds]


def unnamed(function: Any, *docs: str) -> list[str]:
    """The parameters of a function of several that its documentation does not name."""
    found = [name for name in parameters(function) if name not in SAYS_ITSELF]
    if len(found) < 2:
        return []  # the first sentence is about it
    return [name for name in found if not any(re.search(rf"\b{name}\b", doc) for doc in docs)]


def test_directives_name_what_is_there() -> None:
    for path in DIRECTIVES:
        assert resolved(path) is not None
    assert len(set(DIRECTIVES)) == len(DIRECTIVES)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_its_place(module: str) -> None:
    found = importlib.import_module(module)
    shown = {id(value) for _, value in objects()} | {id(resolved(path)) for path in DIRECTIVES}
    for name in names(found):
        value = getattr(found, name)
        if inspect.ismodule(value):
            assert any(path.startswith(value.__name__) for path in DIRECTIVES), f"nothing of {value.__name__} is shown"
            continue
        of_a_shown_module = module in DIRECTIVES and not _hidden(found, name)
        assert of_a_shown_module or id(value) in shown, f"{module}.{name} is on no page in docs/api"


def _hidden(module: Any, name: str) -> bool:
    """A name that is a module of the package as well is taken for that by mkdocstrings: it needs a directive of its own."""
    try:
        importlib.import_module(f"{module.__name__}.{name}")
    except ModuleNotFoundError:
        return False
    return f"{module.__name__}.{name}.{name}" not in DIRECTIVES


def test_the_package_names_what_it_has() -> None:
    assert sorted(assisted.__all__, key=lambda name: (not name.isupper(), name)) == assisted.__all__
    for name in assisted.__all__:
        assert getattr(assisted, name) is not None
    assert {*assisted.__all__, "__version__"} <= {*dir(assisted)}
    assert not hasattr(assisted, "nothing")


@pytest.mark.parametrize(("name", "value"), [pytest.param(*pair, id=pair[0]) for pair in objects()])
def test_docstrings_say_what_arguments_are(name: str, value: Any) -> None:
    doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert doc, f"{name} has no docstring"
    if dataclasses.is_dataclass(value):
        assert doc != f"{value.__name__}{inspect.signature(value)}".replace(" -> None", ""), f"{name} has no docstring"
    of_module = inspect.getdoc(inspect.getmodule(value)) or ""
    source = inspect.getsource(value)  # fields may be documented below themselves, or by their metadata
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    helped = {field.name for field in fields if "help" in field.metadata}
    if not inspect.isclass(value):
        assert not unnamed(value, doc, of_module), f"{name}: says nothing of {unnamed(value, doc, of_module)}"
        return
    if not getattr(value, "_is_protocol", False):
        named = [
            kind.__doc__ or "" for kind in value.__mro__[1:] if f"`{kind.__name__}`" in doc
        ]  # its arguments are there
        made = [] if name == "assisted.AssistedModelForCausalLM" else unnamed(value, doc, of_module, *named)
        undocumented = [f for f in made if f not in helped and not re.search(rf'^    {f}: .*\n    """', source, re.M)]
        assert not undocumented, f"{name}: says nothing of {undocumented}"
    for method_name, method in vars(value).items():
        function = method.__func__ if isinstance(method, (classmethod, staticmethod)) else method
        if method_name.startswith("_") or not inspect.isfunction(function):
            continue
        # what it overrides says the same
        docs = [inspect.getdoc(getattr(kind, method_name)) for kind in value.__mro__ if hasattr(kind, method_name)]
        assert any(docs), f"{name}.{method_name} has no docstring"
        missing = unnamed(function, *filter(None, docs), doc, of_module)
        assert not missing, f"{name}.{method_name}: says nothing of {missing}"


SHAPE, DTYPE = re.compile(r"\[[^\]\n]*\]"), re.compile(r"\b(int64|float\w*|bool|dtype)\b")


def on_tensors() -> Iterator[tuple[str, Any, str]]:
    """Public functions and methods that take or return tensors, by name, with their documentation: their own, and that of what
    they override, their class and their module."""
    for name, value in objects():
        of_module = inspect.getdoc(inspect.getmodule(value)) or ""
        methods = vars(value) if inspect.isclass(value) else {"": value}
        for method_name, method in methods.items():
            function = getattr(method, "__func__", method)
            if (method_name.startswith("_") and method_name != "__call__") or not inspect.isfunction(function):
                continue
            if not any("Tensor" in str(kind) for kind in function.__annotations__.values()):
                continue
            kinds = value.__mro__ if inspect.isclass(value) else ()
            docs = [getattr(kind, method_name) for kind in kinds if hasattr(kind, method_name)]
            docs = [inspect.getdoc(found) or "" for found in (function, value, *docs)]
            yield f"{name}.{method_name}".rstrip("."), function, "\n".join([*docs, of_module])


@pytest.mark.parametrize(("name", "function", "doc"), [pytest.param(*found, id=found[0]) for found in on_tensors()])
def test_functions_on_tensors_say_shapes_dtypes_and_errors(name: str, function: Any, doc: str) -> None:
    assert SHAPE.search(doc), f"{name} says nothing of shapes"
    assert DTYPE.search(doc), f"{name} says nothing of dtypes"
    raises = re.search(r"^\s+raise \w+Error", inspect.getsource(function), re.M)
    assert not raises or "Raises" in doc, f"{name} raises errors that it says nothing of"
