#!/bin/sh
# xgrammar 0.2.8: valid JSON that a schema's grammar forbids, and a schema that turns into no rule at all.
#
# - A bound of a string's length forbids every escape: under maxLength 8 there is no quote, no backslash and no line break.
# - maxItems without items allows [] only, in the default strict mode; with items it is right.
# - A name in "required" that "properties" lacks is forbidden, and the object is complete without it.
# - allOf of two parts allows any JSON value, as does an object's schema with "properties" and an allOf beside them.
#   (xgrammar writes to standard error that support for allOf with several options is ongoing.)
#
# Output seen on 2026-11-28, where "valid" is what the schema says and "allowed" what the grammar does:
#   maxLength 8             "a\"b"            valid True   allowed False
#   maxLength 8             "ab"              valid True   allowed True
#   maxItems 2, no items    [1]               valid True   allowed False
#   required, no property   {"a": 2}          valid True   allowed False
#   required, no property   {"b": 1}          valid False  allowed True
#   allOf of two objects    [1, "x"]          valid False  allowed True
#   properties and allOf    "text"            valid False  allowed True
# Exits with another status than 0 if that has changed. torch is only imported by xgrammar.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet xgrammar==0.2.8 torch==2.13.0 jsonschema==4.26.0
"$folder/env/bin/python" - <<'EOF'
import json

import jsonschema
import xgrammar

INTEGER = {"type": "integer"}
A, B = ({"type": "object", "properties": {name: INTEGER}, "required": [name]} for name in "ab")
CASES = [
    ("maxLength 8", {"type": "string", "maxLength": 8}, r'"a\"b"', True, False),
    ("maxLength 8", {"type": "string", "maxLength": 8}, '"ab"', True, True),
    ("maxItems 2, no items", {"type": "array", "maxItems": 2}, "[1]", True, False),
    ("required, no property", {**B, "required": ["a"]}, '{"a": 2}', True, False),
    ("required, no property", {**B, "required": ["a"]}, '{"b": 1}', False, True),
    ("allOf of two objects", {"allOf": [A, B]}, '[1, "x"]', False, True),
    ("properties and allOf", {**A, "allOf": [{"required": ["a"]}]}, '"text"', False, True),
]
END = 256
vocabulary = [*(bytes([number]) for number in range(END)), b"</s>"]
compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[END]))
for name, schema, text, *expected in CASES:
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    allowed = all(map(matcher.accept_token, [*text.encode(), END]))
    print(f"{name:<23} {text:<17} valid {valid!s:<6} allowed {allowed}")
    assert [valid, allowed] == expected
EOF
