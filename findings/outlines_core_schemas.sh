#!/bin/sh
# outlines-core 0.2.14: schemas whose regular expression allows texts that are not JSON, or forbids valid ones.
#
# - A pattern with alternatives outside parentheses is put between quotes as it is: "a|b". So each alternative lacks one quote, and
#   every text that the grammar allows is not JSON. In JSON Schema, ^a|b$ means that the value begins with a or ends with b.
# - A property's name is not escaped as JSON: one with a quote in it cannot be written, only a text that is not JSON.
# - minProperties, which the documentation lists as supported, has no effect beside properties.
# - additionalProperties with a schema, which it lists as well, has no effect beside properties: further names are forbidden.
# - A date-time may have no offset but Z, and three digits after the second or none. RFC 3339 has offsets and any number of digits.
# None of these raises an error or a warning. (minimum, multipleOf and others are ignored, too, but are not listed as supported:
# https://docs.rs/outlines-core/0.2.14/outlines_core/json_schema/)
#
# Output seen on 2026-11-28, where "valid" is what the schema says and "allowed" what the grammar does:
#   pattern ^a|b$              "a                           valid False  allowed True
#   pattern ^a|b$              "ax"                         valid True   allowed False
#   name with quotes           {"a\"b": 1}                  valid True   allowed False
#   name with quotes           {"a"b": 1}                   valid False  allowed True
#   minProperties 1            {}                           valid False  allowed True
#   additionalProperties       {"a": 1, "x": 2}             valid True   allowed False
#   date-time                  "2024-02-29T12:00:00+01:00"  valid True   allowed False
#   date-time                  "2024-02-29T12:00:00.5Z"     valid True   allowed False
#   date-time                  "2024-02-29T12:00:00Z"       valid True   allowed True
# Exits with another status than 0 if that has changed.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet outlines-core==0.2.14 jsonschema==4.26.0 rfc3339-validator==0.1.4
"$folder/env/bin/python" - <<'EOF'
import json

import jsonschema
from outlines_core import Guide, Index, Vocabulary
from outlines_core.json_schema import build_regex_from_schema

INTEGER = {"type": "integer"}
A = {"type": "object", "properties": {"a": INTEGER}}
CASES = [
    ("pattern ^a|b$", {"type": "string", "pattern": "^a|b$"}, '"a', False, True),
    ("pattern ^a|b$", {"type": "string", "pattern": "^a|b$"}, '"ax"', True, False),
    ("name with quotes", {"type": "object", "properties": {'a"b': INTEGER}, "required": ['a"b']}, '{"a\\"b": 1}', True, False),
    ("name with quotes", {"type": "object", "properties": {'a"b': INTEGER}, "required": ['a"b']}, '{"a"b": 1}', False, True),
    ("minProperties 1", {**A, "minProperties": 1}, "{}", False, True),
    ("additionalProperties", {**A, "additionalProperties": INTEGER}, '{"a": 1, "x": 2}', True, False),
    ("date-time", {"type": "string", "format": "date-time"}, '"2024-02-29T12:00:00+01:00"', True, False),
    ("date-time", {"type": "string", "format": "date-time"}, '"2024-02-29T12:00:00.5Z"', True, False),
    ("date-time", {"type": "string", "format": "date-time"}, '"2024-02-29T12:00:00Z"', True, True),
]
END = 256
vocabulary = Vocabulary(END, {bytes([number]): [number] for number in range(END)})


def allows(schema, text):
    guide = Guide(Index(build_regex_from_schema(json.dumps(schema)), vocabulary))
    for token in text.encode():
        if token not in guide.get_tokens():
            return False
        guide.advance(token)
    return END in guide.get_tokens()


def fits(schema, text):
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return False
    return jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).is_valid(value)


for name, schema, text, *expected in CASES:
    found = [fits(schema, text), allows(schema, text)]
    print(f"{name:<26} {text:<28} valid {found[0]!s:<6} allowed {found[1]}")
    assert found == expected
EOF
