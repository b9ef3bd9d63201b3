"""JSON schemas in three grammar libraries: which texts each allows, compared with what the schema says.

Needs xgrammar, llguidance and outlines-core. Every text is read with a vocabulary of single bytes. Nothing is timed.
"""

import json
from importlib.metadata import version

from shared import Section, below

S, I, N = {"type": "string"}, {"type": "integer"}, {"type": "number"}
END = 256  # the stop token, after the 256 bytes
SECTIONS = (Section("howto/tool-calls-and-json", "schemas"),)


def record(**properties):
    """A schema for an object with these fields and no other."""
    required = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **required}


NODE = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
TREE = {"$ref": "#/$defs/node", "$defs": {"node": record(value=I, next=NODE)}}
EITHER = [{"properties": {"a": I}, "required": ["a"]}, {"properties": {"b": I}, "required": ["b"]}]
CASES = [
    ("a string", S, [r'"a\"b"', r'"a\nb"', r'"a\\b"', '"é"'], ['"a']),
    ("`maxLength`", {**S, "maxLength": 4}, ['"éééé"', r'"a\"b"', r'"a\nb"', r'"\n\n\n\n"'], ['"ééééé"']),
    ("`minLength`", {**S, "minLength": 2}, ['"ab"', '"éé"', r'"a\nb"', r'"\n\n"'], ['"é"']),
    ("`maxLength` without a type", {"maxLength": 2}, ['"ab"', "3"], ['"abc"']),
    ("`pattern`", {**S, "pattern": "^[a-z]{2}$"}, ['"ab"'], ['"abc"', '"aB"']),
    ("`pattern` without `^` and `$`", {**S, "pattern": "b"}, ['"b"', '"abc"'], ['"ac"']),
    ("`pattern` that fits quotes", {**S, "pattern": "^[^x]*$"}, ['"ab"', r'"a\"b"', r'"a\nb"'], ['"ax"', '"a"b"']),
    ("`pattern` and `maxLength`", {**S, "pattern": "^[a-z]+$", "maxLength": 3}, ['"abc"'], ['"abcd"']),
    ("`format` of a date", {**S, "format": "date"}, ['"2024-02-29"'], ['"x"']),
    ("a number in an array", {"type": "array", "items": N}, ["[-1.5, 2, 1e+5]"], ["[1.]"]),
    ("a number alone", N, ["2", "-1.5"], ["1."]),
    ("`minimum`, `maximum`", record(a={**I, "minimum": 5, "maximum": 12}), ['{"a": 5}', '{"a": 12}'], ['{"a": 13}']),
    ("`multipleOf`, integers", record(a={**I, "multipleOf": 5}), ['{"a": 10}'], ['{"a": 7}']),
    ("`multipleOf`, numbers", record(a={**N, "multipleOf": 0.5}), ['{"a": 1.5}'], ['{"a": 1.3}']),
    ("`maxItems` with `items`", {"type": "array", "items": I, "maxItems": 2}, ["[]", "[1, 2]"], ["[1, 2, 3]"]),
    ("`maxItems` without `items`", {"type": "array", "maxItems": 2}, ["[]", "[1]", '["a", 2]'], ["[1, 2, 3]"]),
    ("`minItems` without `items`", {"type": "array", "minItems": 1}, ["[1]", '["a", 2]'], ["[]"]),
    ("`uniqueItems`", {"type": "array", "items": I, "uniqueItems": True}, ["[1, 2]"], ["[1, 1]"]),
    ("`contains`", {"type": "array", "items": I, "contains": {"const": 1}}, ["[2, 1]"], ["[2, 2]"]),
    ("`prefixItems`", {"type": "array", "prefixItems": [I, S]}, ['[1, "a"]', "[1]", '[1, "a", 3]'], ['["a", 1]']),
    ("a required name without its property", {"type": "object", "properties": {"b": I}, "required": ["a"]},
     ['{"a": 2}', '{"b": 1, "a": 2}'], ['{"b": 1}']),
    ("`maxProperties`", {"type": "object", "additionalProperties": I, "maxProperties": 1}, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
    ("`patternProperties`", {"type": "object", "patternProperties": {"^x": I}, "additionalProperties": False},
     ['{"xa": 1}'], ['{"a": 1}']),
    ("`propertyNames`", {"type": "object", "additionalProperties": I, "propertyNames": {"pattern": "^[a-z]+$"}},
     ['{"a": 1}'], ['{"A": 1}']),
    ("`dependentRequired`", {"type": "object", "properties": {"a": I, "b": I}, "dependentRequired": {"a": ["b"]}},
     ['{"a": 1, "b": 2}', "{}"], ['{"a": 1}']),
    ("a property name with a quote", record(**{'a"b': I}), [r'{"a\"b": 1}'], ['{"a"b": 1}']),
    ("`enum` with escapes", {"enum": ['a"b', "a\nb", "é"]}, [r'"a\"b"', r'"a\nb"', '"é"'], ['"a"']),
    ("`enum` of objects", {"enum": [{"a": 1}, [1, 2]]}, ['{"a":1}', '{"a": 1}', "[1, 2]"], ["[1]"]),
    ("`anyOf`", {"anyOf": [I, S]}, ["1", '"a"'], ["null"]),
    ("`anyOf` beside other keywords", {"type": "object", "properties": {"k": I}, "required": ["k"], "anyOf": EITHER},
     ['{"k": 1, "a": 1}'], ['{"k": 1}', '{"a": 1}']),
    ("`oneOf`", {"oneOf": [{**I, "minimum": 0}, {**I, "maximum": 5}]}, ["7", "-3"], ["3"]),
    ("`allOf`", {"allOf": [{"type": "object", **part} for part in EITHER]}, ['{"a": 1, "b": 2}'], ['{"a": 1}', '{"b": 2}']),
    ("`not`", {**S, "not": {"const": "a"}}, ['"b"'], ['"a"']),
    ("`if`", {**record(a=I, b=I), "required": ["a"], "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}},
     ['{"a": 1, "b": 1}', '{"a": 2}'], ['{"a": 1}']),
    ("`$ref`, recursive", TREE, ['{"value": 1, "next": {"value": 2, "next": null}}'], ['{"value": 1, "next": 3}']),
    ("`$ref` beside other keywords", {"$defs": {"s": S}, "$ref": "#/$defs/s", "maxLength": 2}, ['"ab"'], ['"abc"']),
]  # fmt: skip
"""What is tested, the schema, texts that fit it, and texts that do not."""


def readers():
    """What makes, from a schema, the function that says whether a library allows a text; by library."""
    import llguidance
    import outlines_core
    import xgrammar
    from outlines_core import json_schema

    pieces = [bytes([number]) for number in range(END)]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([*pieces, b"</s>"], stop_token_ids=[END]))
    tokens = llguidance.LLTokenizer("byte")
    vocabulary = outlines_core.Vocabulary(END, {piece: [number] for number, piece in enumerate(pieces)})

    def of_xgrammar(schema):
        grammar = compiler.compile_json_schema(json.dumps(schema))

        def reads(text):
            matcher = xgrammar.GrammarMatcher(grammar)
            return all(map(matcher.accept_token, [*text.encode(), END]))

        return reads

    def of_llguidance(schema):
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        if (first := llguidance.LLMatcher(tokens, grammar)).is_error():
            raise ValueError(first.get_error())

        def reads(text):
            matcher, given = llguidance.LLMatcher(tokens, grammar), list(text.encode())
            return matcher.try_consume_tokens(given) == len(given) and matcher.is_accepting()

        return reads

    def of_outlines_core(schema):
        expression = json_schema.build_regex_from_schema(json.dumps(schema))
        index = outlines_core.Index(expression, vocabulary)

        def reads(text):
            guide = outlines_core.Guide(index)
            for byte in text.encode():
                if not guide.accepts_tokens([byte]):
                    return False
                guide.advance(byte, False)
            return guide.is_finished()

        return reads

    return {"xgrammar": of_xgrammar, "llguidance": of_llguidance, "outlines-core": of_outlines_core}


def measure(args):
    rows, made = [], readers()
    for name, schema, fitting, others in CASES:
        row = {"case": name, "schema": schema}
        for library, make in made.items():
            try:
                reads = make(schema)
            except (RuntimeError, ValueError):
                row[library] = {"error": True}
                continue
            forbids = [text for text in fitting if not reads(text)]
            row[library] = {"forbids": forbids, "allows": [text for text in others if reads(text)]}
        rows.append(row)
    return {"about": {library: version(library) for library in made}, "rows": rows}


def cell(found):
    if "error" in found:
        return "error"
    said = [f"{verb} {', '.join(f'`{text}`' for text in found[verb])}" for verb in ("forbids", "allows") if found[verb]]
    return "; ".join(said) or "as written"


def markdown(found):
    versions = ", ".join(f"{name} {number}" for name, number in found["about"].items())
    head = f"`python benchmarks/run.py schemas`, with {versions}; each text was read with a vocabulary of single bytes."
    cells = [[row["case"], *(cell(row[name]) for name in found["about"])] for row in found["rows"]]
    return below(head, ["in the schema", *found["about"]], cells)
