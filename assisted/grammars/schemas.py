"""What grammar libraries make of a JSON schema where that is not what the schema says. Knows schemas, not the libraries.

Measured by `benchmarks/run.py schemas` with xgrammar 0.2.8, llguidance 1.9.1 and outlines-core 0.2.14.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_Schema = Mapping[str, Any]
_COMBINED = frozenset({"anyOf", "oneOf", "allOf"})
_NO_RULES = frozenset(
    {"$id", "$schema", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "deprecated"}
)
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"const", "default", "enum", "examples", "required", "dependentRequired"})
_IGNORED = {
    "xgrammar": "contains dependentRequired dependentSchemas if not uniqueItems",
    "outlines-core": "contains dependentRequired dependentSchemas exclusiveMaximum exclusiveMinimum if maximum maxProperties "
    "minimum multipleOf not propertyNames uniqueItems",
}
_OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_NO_ESCAPES = "forbids every escape, so that the text has no quotes, backslashes or line breaks"


def _bounds(schema: _Schema) -> list[str]:
    return [name for name in ("minLength", "maxLength") if schema.get(name)]


def _alternatives(pattern: str) -> list[str]:
    """The parts of a pattern between the bars outside parentheses and brackets."""
    parts, depth, in_class = [""], 0, False
    for piece in re.findall(r"\\.|.", pattern, re.DOTALL):
        in_class = piece == "[" or (in_class and piece != "]")
        depth += 0 if in_class else (piece == "(") - (piece == ")")
        if piece == "|" and not depth and not in_class:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _is_whole(pattern: str) -> bool:
    return all(part.startswith("^") and part.endswith("$") for part in _alternatives(pattern))


def _may_need_escapes(pattern: str) -> bool:
    """Whether a pattern may match characters that JSON escapes. Says yes too often, and never no by mistake."""
    return re.search(r'\.|\[\^|"|\\[\\\sDSWnrtsx]|\\u', pattern) is not None


def _beside(schema: _Schema, names: frozenset[str]) -> bool:
    """Whether one of these keywords stands beside others that also say what is valid."""
    return bool(names & schema.keys()) and bool(schema.keys() - names - _NO_RULES)


def _lacking(schema: _Schema) -> list[str]:
    return sorted(set(schema.get("required", ())) - set(schema.get("properties", ())))


def _unescaped(schema: _Schema) -> list[str]:
    return [name for name in schema.get("properties", ()) if json.dumps(name, ensure_ascii=False)[1:-1] != name]


_Rule = Callable[[_Schema], Any]
_RULES: dict[str, list[tuple[_Rule, str]]] = {
    "xgrammar": [
        (lambda s: _bounds(s) and "pattern" not in s and "type" in s, f"a bound of a string's length {_NO_ESCAPES}"),
        (lambda s: _bounds(s) and "pattern" in s, "minLength and maxLength are ignored beside a pattern"),
        (lambda s: (_bounds(s) or "pattern" in s) and "type" not in s, "rules for strings are ignored without a type"),
        (lambda s: _OF_NUMBERS & s.keys() and "type" not in s, "rules for numbers are ignored without a type"),
        (lambda s: not _is_whole(s.get("pattern", "^$")), "the pattern must match the whole text"),
        (lambda s: _may_need_escapes(s.get("pattern", "")), f"a pattern {_NO_ESCAPES}"),
        (
            lambda s: "maxItems" in s and not {"items", "prefixItems"} & s.keys(),
            "maxItems without items allows [] only",
        ),
        (lambda s: "prefixItems" in s and "items" not in s, "nothing may follow the prefixItems"),
        (_lacking, "required names that properties lacks are forbidden"),
        (
            lambda s: "patternProperties" in s and ("properties" in s or s.get("additionalProperties") is False),
            "patternProperties are forbidden",
        ),
        (lambda s: _beside(s, _COMBINED), "the keywords beside anyOf, oneOf or allOf are ignored"),
        (lambda s: len(s.get("allOf", ())) > 1, "allOf of several parts allows any value"),
        (lambda s: _beside(s, frozenset({"$ref"})), "the keywords beside $ref are ignored"),
        (lambda s: "oneOf" in s, "oneOf is read as anyOf where its parts may overlap"),
        (
            lambda s: "multipleOf" in s and s.get("type") == "number",
            "multipleOf is ignored for numbers that are no integers",
        ),
        (
            lambda s: any(isinstance(value, list | dict) for value in (*s.get("enum", ()), s.get("const"))),
            "objects and arrays in enum or const are written without spaces",
        ),
    ],
    "llguidance": [],
    "outlines-core": [
        (lambda s: not _is_whole(s.get("pattern", "^$")), "the pattern must match the whole text"),
        (
            lambda s: _may_need_escapes(s.get("pattern", "")),
            "the pattern is matched against the JSON text, not the value: a quote in it makes invalid JSON",
        ),
        (
            lambda s: len(_alternatives(s.get("pattern", ""))) > 1,
            "alternatives of a pattern outside parentheses lose a quote, so that the text is not JSON",
        ),
        (
            lambda s: s.get("format") == "date-time",
            "a time has no offset but Z, and three digits or none after its second",
        ),
        (lambda s: s.get("format") == "uuid", "a UUID is in lower case"),
        (lambda s: "minProperties" in s and "properties" in s, "minProperties is ignored beside properties"),
        (
            lambda s: "properties" in s and ("patternProperties" in s or s.get("additionalProperties")),
            "names that properties lacks are forbidden",
        ),
        (lambda s: "prefixItems" in s, "all prefixItems must come, and nothing may follow them"),
        (_lacking, "required names that properties lacks are forbidden"),
        (_unescaped, "property names are not escaped, so that the text is not JSON or has another name"),
        (lambda s: _beside(s, _COMBINED), "anyOf, oneOf or allOf beside other keywords is not combined with them"),
        (lambda s: len(s.get("allOf", ())) > 1, "the parts of allOf are written one after the other"),
        (lambda s: _beside(s, frozenset({"$ref"})), "the keywords beside $ref are ignored"),
        (lambda s: "oneOf" in s, "oneOf is read as anyOf"),
    ],
}
_AT_THE_TOP: dict[str, list[tuple[_Rule, str]]] = {
    "outlines-core": [
        (
            lambda s: s.get("type") == "number",
            "a token that makes a complete text incomplete is forbidden, so that the number stops before a decimal point; put "
            "it into an object",
        )
    ]
}


def check_schema(schema: _Schema | str, library: str) -> list[str]:
    """Where a grammar library reads a JSON schema as something else, without an error: one sentence each, and where it is.

    What a library rejects with an error is not among them.

    Args:
        schema: a dictionary, or its JSON.
        library: "xgrammar", "llguidance" or "outlines-core".

    Raises ValueError for another library, or text that is not a JSON object.
    """
    if library not in _RULES:
        raise ValueError(f"library: {library!r} is not known here; give one of {', '.join(_RULES)}")
    root = json.loads(schema) if isinstance(schema, str) else schema
    if not isinstance(root, Mapping):
        raise ValueError(f"schema: a JSON object was expected, and this is {json.dumps(root)[:60]}")
    found = [f"#: {sentence}" for finds, sentence in _AT_THE_TOP.get(library, ()) if finds(root)]
    for place, part in _parts(root, "#"):
        found += [f"{place}: {sentence}" for finds, sentence in _RULES[library] if finds(part)]
        found += [f"{place}: {name} is ignored" for name in _IGNORED.get(library, "").split() if name in part]
    return found


def _parts(schema: Any, place: str) -> Iterator[tuple[str, _Schema]]:
    """A schema and all those in it, each with the keywords and names that lead there."""
    if isinstance(schema, list):
        for number, part in enumerate(schema):
            yield from _parts(part, f"{place}/{number}")
    elif isinstance(schema, Mapping):
        yield place, schema
        for name, part in schema.items():
            if name in _BY_NAME and isinstance(part, Mapping):
                for own, inner in part.items():
                    yield from _parts(inner, f"{place}/{name}/{own}")
            elif name == "propertyNames" and isinstance(part, Mapping):
                yield from _parts({"type": "string", **part}, f"{place}/{name}")
            elif name not in _VALUES:
                yield from _parts(part, f"{place}/{name}")
