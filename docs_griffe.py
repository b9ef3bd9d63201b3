"""What the API pages show for a field made by `setting(default, help)`: its default, and its help as its docstring."""

from __future__ import annotations

import ast
from typing import Any

from griffe import Attribute, Docstring, ExprCall, Extension


class Settings(Extension):
    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        if isinstance(attr.value, ExprCall) and attr.value.canonical_name == "setting":
            default, text, *_ = attr.value.arguments
            attr.value = default
            attr.docstring = Docstring(ast.literal_eval(str(text)), parent=attr)
