"""What the API pages show of defaults: those of `setting(default, help)` with the help as docstring, and constants by value."""

from __future__ import annotations

import ast
from typing import Any

from griffe import (
    Alias,
    AliasResolutionError,
    Attribute,
    Class,
    Docstring,
    Expr,
    ExprCall,
    ExprName,
    Extension,
    Function,
    Module,
    NameResolutionError,
)


class Settings(Extension):
    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        if isinstance(attr.value, ExprCall) and attr.value.canonical_name == "setting":
            default, text, *_ = attr.value.arguments
            attr.value = default
            attr.docstring = Docstring(ast.literal_eval(str(text)), parent=attr)

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        self._show_values(pkg, pkg)

    def _show_values(self, found: Module | Class, package: Module) -> None:
        """A reader of `beam: int = BEAM` wants the number."""
        for member in found.members.values():
            if isinstance(member, Alias):
                continue
            if isinstance(member, (Module, Class)):
                self._show_values(member, package)
            elif isinstance(member, Attribute) and isinstance(found, Class):
                member.value = _value(member.value, package)
            elif isinstance(member, Function):
                for parameter in member.parameters:
                    parameter.default = _value(parameter.default, package)


def _value(default: Any, package: Module) -> Any:
    """What a constant of the package stands for; everything else as it is."""
    if not (isinstance(default, ExprName) and default.name.strip("_").isupper()):
        return default
    try:
        path = default.canonical_path.removeprefix(f"{package.path}.")
        constant = package[path]
        constant = constant.final_target if isinstance(constant, Alias) else constant
    except (AliasResolutionError, KeyError, NameResolutionError):
        return default
    value = getattr(constant, "value", None)
    return default if value is None or isinstance(value, Expr) else value
